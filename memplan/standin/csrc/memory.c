/* cudaMalloc and its kin: addresses that nothing backs, until the card would be full; and copies, of which a few are answered. */
#define _GNU_SOURCE
#include "card.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define OUT_OF_MEMORY 2 /* cudaErrorMemoryAllocation */

typedef struct {
    uintptr_t address;
    size_t bytes;
} Span;

/* A growing table of spans, searched from its end: what was allocated last is freed first, more often than not. */
typedef struct {
    Span *spans;
    size_t used, room;
} Table;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Table device, pinned;
static __thread int last_error; /* CUDA keeps it for each host thread */

static void add(Table *table, uintptr_t address, size_t bytes) {
    pthread_mutex_lock(&lock);
    if (table->used == table->room) {
        table->room = table->room ? table->room * 2 : 1024;
        table->spans = realloc(table->spans, table->room * sizeof(Span));
        if (!table->spans) abort();
    }
    table->spans[table->used++] = (Span){address, bytes};
    pthread_mutex_unlock(&lock);
}
/* Take out the span at *address* and return its size; 0 when there is none. */
static size_t take_out(Table *table, uintptr_t address) {
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = table->used; i-- > 0;)
        if (table->spans[i].address == address) {
            bytes = table->spans[i].bytes;
            table->spans[i] = table->spans[--table->used];
            break;
        }
    pthread_mutex_unlock(&lock);
    return bytes;
}
static int holds(Table *table, const void *pointer) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = table->used; i-- > 0 && !found;)
        found = (uintptr_t)pointer - table->spans[i].address < table->spans[i].bytes;
    pthread_mutex_unlock(&lock);
    return found;
}

int cudaMalloc(void **out, size_t bytes) {
    size_t paged = (bytes + PAGE - 1) / PAGE * PAGE;
    if (!card_take(paged)) return last_error = OUT_OF_MEMORY;
    *out = (void *)card_reserve(paged);
    add(&device, (uintptr_t)*out, paged);
    return 0;
}
int cudaFree(void *pointer) {
    if (pointer) card_give(take_out(&device, (uintptr_t)pointer));
    return 0;
}
int cudaMallocAsync(void **out, size_t bytes, void *stream) { return cudaMalloc(out, bytes); }
int cudaFreeAsync(void *pointer, void *stream) { return cudaFree(pointer); }
int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = card_free_bytes();
    *total_bytes = card()->total_bytes;
    return 0;
}

/* Page-locked memory: PyTorch asks whether a pointer is pinned, so where it lies must be known. */
int cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    *out = calloc(1, bytes ? bytes : 1);
    if (!*out) return last_error = OUT_OF_MEMORY;
    add(&pinned, (uintptr_t)*out, bytes ? bytes : 1);
    return 0;
}
int cudaFreeHost(void *pointer) {
    if (pointer && take_out(&pinned, (uintptr_t)pointer)) free(pointer);
    return 0;
}
int cudaMallocHost(void **out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
int cudaHostGetDevicePointer(void **out, void *pointer, unsigned flags) { *out = pointer; return 0; }
int cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    add(&pinned, (uintptr_t)pointer, bytes);
    return 0;
}
int cudaHostUnregister(void *pointer) {
    take_out(&pinned, (uintptr_t)pointer);
    return 0;
}

/* struct cudaPointerAttributes of CUDA 12; CUDA 13 appends reserved words, which the caller has zeroed or does not read. */
struct pointer_attributes {
    int type; /* 0 unregistered, 1 host, 2 device */
    int device;
    void *device_pointer, *host_pointer;
};
int cudaPointerGetAttributes(struct pointer_attributes *out, const void *pointer) {
    int type = card_owns(pointer) ? 2 : holds(&pinned, pointer) ? 1 : 0;
    out->type = type;
    out->device = 0;
    out->device_pointer = type ? (void *)pointer : NULL;
    out->host_pointer = type == 1 ? (void *)pointer : NULL;
    return 0;
}
int cudaGetSymbolAddress(void **out, const void *symbol) {
    *out = (void *)card_reserve(PAGE);
    return 0;
}

/* Small copies to the device are kept until the next kernel, so that what goes there and comes straight back is right. A kernel may write
 * anywhere: after one, everything reads zero. */
#define KEPT 64
#define KEPT_BYTES ((size_t)1 << 16)
static struct {
    uintptr_t address;
    size_t bytes;
    char *content;
} kept[KEPT];
static int num_kept;

static void forget(void) { while (num_kept) free(kept[--num_kept].content); } /* with the lock held */
void kernel_ran(void) {
    if (!num_kept) return;
    pthread_mutex_lock(&lock);
    forget();
    pthread_mutex_unlock(&lock);
}
static void keep(void *to, const void *from, size_t bytes) {
    pthread_mutex_lock(&lock);
    if (bytes > KEPT_BYTES || num_kept == KEPT) forget(); /* asked with the lock held: another thread may have kept the last one */
    if (bytes <= KEPT_BYTES) {
        char *content = malloc(bytes + 1);
        if (!content) abort();
        kept[num_kept].address = (uintptr_t)to;
        kept[num_kept].bytes = bytes;
        kept[num_kept++].content = memcpy(content, from, bytes);
    }
    pthread_mutex_unlock(&lock);
}
/* Who is asked what a read gets that nobody knows: a function of the recorder, which lives in the same process. */
typedef void (*Reader)(void *to, size_t bytes);
static Reader reader;
void memplan_on_read(Reader asked) { reader = asked; }

static void recall(void *to, const void *from, size_t bytes) {
    int known = 0;
    memset(to, 0, bytes);
    pthread_mutex_lock(&lock);
    for (int i = num_kept; i-- > 0 && !known;) {
        size_t offset = (uintptr_t)from - kept[i].address;
        known = (uintptr_t)from >= kept[i].address && offset + bytes <= kept[i].bytes;
        if (known) memcpy(to, kept[i].content + offset, bytes);
    }
    pthread_mutex_unlock(&lock);
    if (!known && bytes && reader) reader(to, bytes);
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    int to_device = card_owns(to), from_device = card_owns(from);
    if (to_device && from_device) kernel_ran();
    else if (to_device) keep(to, from, bytes);
    else if (from_device) recall(to, from, bytes);
    else memcpy(to, from, bytes);
    return 0;
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { return cudaMemcpyAsync(to, from, bytes, kind, NULL); }
int cudaMemsetAsync(void *pointer, int value, size_t bytes, void *stream) {
    kernel_ran();
    return 0;
}
int cudaMemset(void *pointer, int value, size_t bytes) { return cudaMemsetAsync(pointer, value, bytes, NULL); }

/* errors: the last one is that of an allocation */
int cudaGetLastError(void) {
    int error = last_error;
    last_error = 0;
    return error;
}
int cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(int error) {
    switch (error) {
    case 0: return "no error";
    case OUT_OF_MEMORY: return "out of memory";
    case 900: return "operation not permitted when stream is capturing";
    default: return "error of the stand-in device";
    }
}
const char *cudaGetErrorName(int error) {
    switch (error) {
    case 0: return "cudaSuccess";
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case 900: return "cudaErrorStreamCaptureUnsupported";
    default: return "cudaErrorUnknown";
    }
}
