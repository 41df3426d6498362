/* cudaMalloc and its kin: addresses that nothing backs, until the card would be full; and copies between them and the host. */
#define _GNU_SOURCE
#include "card.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define HOST_BYTES 24.0 /* that go between host and device in a nanosecond: PCIe 4.0 with 16 lanes, less its protocol */

enum { OUT_OF_MEMORY = 2, INVALID_PITCH = 12 }; /* cudaErrorMemoryAllocation, cudaErrorInvalidPitchValue */

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
static Table device, pinned, managed;
static size_t managed_bytes, most_managed;
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
    start_recorder();
    if (!card_take(current_device(), paged)) return last_error = OUT_OF_MEMORY;
    uintptr_t address = addresses_take(current_device(), paged);
    *out = (void *)(address ? address : card_reserve(paged)); /* on a device without end they can be used up */
    add(&device, (uintptr_t)*out, paged);
    return 0;
}
int cudaFree(void *pointer) {
    if (!pointer) return 0;
    size_t bytes = take_out(&device, (uintptr_t)pointer);
    card_memory_lost((uintptr_t)pointer, bytes);
    if (bytes) {
        card_give(device_of(pointer), bytes);
        addresses_give(device_of(pointer), (uintptr_t)pointer, bytes);
    } else if ((bytes = take_out(&managed, (uintptr_t)pointer))) {
        __atomic_sub_fetch(&managed_bytes, bytes, __ATOMIC_SEQ_CST);
        free(pointer);
    }
    return 0;
}
int cudaMallocAsync(void **out, size_t bytes, void *stream) { return cudaMalloc(out, bytes); }
int cudaFreeAsync(void *pointer, void *stream) { return cudaFree(pointer); }
int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = room_for_trials(card_free_bytes(visible_card(current_device())));
    *total_bytes = card()->total_bytes;
    return 0;
}

/* Managed memory: pages that move between host and card as either asks for them, and leave a card that is full. They are the host's here,
   and the parent is told how many there were: no cudaMalloc fails for them. */
int cudaMallocManaged(void **out, size_t bytes, unsigned flags) {
    *out = calloc(1, bytes ? bytes : 1);
    if (!*out) return last_error = OUT_OF_MEMORY;
    add(&managed, (uintptr_t)*out, bytes ? bytes : 1);
    size_t now = __atomic_add_fetch(&managed_bytes, bytes ? bytes : 1, __ATOMIC_SEQ_CST);
    if (now > most_managed) tell_parent("managed", "memory", most_managed = now);
    return 0;
}
/* The arguments behind the size are those of CUDA 12 or of 13. */
int cudaMemPrefetchAsync(const void *pointer, size_t bytes) { return 0; }
int cudaMemAdvise(const void *pointer, size_t bytes) { return 0; }

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
    int type; /* 0 unregistered, 1 host, 2 device, 3 managed */
    int device;
    void *device_pointer, *host_pointer;
};
int cudaPointerGetAttributes(struct pointer_attributes *out, const void *pointer) {
    int device = device_of(pointer), type = device >= 0 ? 2 : holds(&pinned, pointer) ? 1 : holds(&managed, pointer) ? 3 : 0;
    out->type = type;
    out->device = device >= 0 ? device : current_device();
    out->device_pointer = type ? (void *)pointer : NULL;
    out->host_pointer = type & 1 ? (void *)pointer : NULL;
    return 0;
}
int cudaGetSymbolAddress(void **out, const void *symbol) {
    *out = (void *)card_reserve(PAGE);
    return 0;
}

int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream) {
    if (height && (width > to_pitch || width > from_pitch)) return last_error = INVALID_PITCH;
    memory_copy((Copy){to, to_pitch, from, from_pitch, width, height});
    device_works(card_owns(to) && card_owns(from) ? bytes_take(2.0 * width * height) : width * height / HOST_BYTES);
    return 0;
}
int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind) {
    return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, NULL);
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { return cudaMemcpyAsync(to, from, bytes, kind, NULL); }
int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, void *stream) {
    return cudaMemcpyAsync(to, from, bytes, 4, stream); /* the addresses say which */
}
int cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes) {
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, NULL);
}
int cudaMemsetAsync(void *pointer, int value, size_t bytes, void *stream) {
    if (card_owns(pointer)) {
        card_memory_set((uintptr_t)pointer, (unsigned char)value, 1, bytes);
        device_works(bytes_take(bytes));
    } else memset(pointer, value, bytes); /* page-locked */
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
    case INVALID_PITCH: return "invalid pitch argument";
    case 1: return "invalid argument";
    case 101: return "invalid device ordinal";
    case 801: return "operation not supported";
    case 900: return "operation not permitted when stream is capturing";
    default: return "error of the simulated GPU";
    }
}
const char *cudaGetErrorName(int error) {
    switch (error) {
    case 0: return "cudaSuccess";
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case INVALID_PITCH: return "cudaErrorInvalidPitchValue";
    case 1: return "cudaErrorInvalidValue";
    case 101: return "cudaErrorInvalidDevice";
    case 801: return "cudaErrorNotSupported";
    case 900: return "cudaErrorStreamCaptureUnsupported";
    default: return "cudaErrorUnknown";
    }
}
