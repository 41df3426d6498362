/* Where cudaMalloc puts memory, which decides how PyTorch up to 2.11 breaks ties: of two free blocks of a size it takes the lower one.
 *
 * Recorded on an H100 with driver 580 in 32 programs (tests/accuracy/recordings/README.md): the driver reserves addresses in chunks of whole
 * 32 MiB, each below the one before, as Linux lays mappings; it takes the lowest free range of its chunks that is large enough, and a new chunk
 * where there is none. What CUDA has left free of its own when it began is filled first: taken for 384 MiB, with which most of the programs and
 * all runs of the suite come out to the byte. What else the process has mapped decides the others.
 */
#include "card.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK ((size_t)32 << 20)
#define LEFT_FREE ((size_t)384 << 20)

typedef struct {
    uintptr_t begin, end;
} Range;
typedef struct {
    uintptr_t first, end; /* of all addresses */
    uintptr_t lowest;     /* of all chunks */
    size_t in_use;        /* bytes */
    Range *ranges;    /* free ones, the lowest first */
    size_t used, room;
} Addresses;

static Addresses of_devices[MOST_CARDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void insert(Addresses *of, size_t at, Range range) {
    if (of->used == of->room) {
        of->room = of->room ? of->room * 2 : 64;
        of->ranges = realloc(of->ranges, of->room * sizeof(Range));
        if (!of->ranges) abort();
    }
    memmove(of->ranges + at + 1, of->ranges + at, (of->used - at) * sizeof(Range));
    of->ranges[at] = range;
    of->used++;
}
static void take_out(Addresses *of, size_t at) {
    of->used--;
    memmove(of->ranges + at, of->ranges + at + 1, (of->used - at) * sizeof(Range));
}

/* Below all others, so that it comes first. */
static int add_chunk(Addresses *of, size_t bytes) {
    size_t chunk = (bytes + CHUNK - 1) / CHUNK * CHUNK;
    if (of->lowest - of->first < chunk) return 0;
    of->lowest -= chunk;
    insert(of, 0, (Range){of->lowest, of->lowest + chunk});
    return 1;
}
static void begin_again(Addresses *of) {
    of->lowest = of->end;
    of->used = of->in_use = 0;
    add_chunk(of, LEFT_FREE);
}
void addresses_begin(int device, uintptr_t first, uintptr_t end) {
    Addresses *of = &of_devices[device];
    of->first = first;
    of->end = end;
    begin_again(of);
}
uintptr_t addresses_take(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    Addresses *of = &of_devices[device];
    size_t at = 0;
    uintptr_t address = 0;
    while (at < of->used && of->ranges[at].end - of->ranges[at].begin < bytes) at++;
    if (at == of->used && add_chunk(of, bytes)) at = 0;
    if (at < of->used) {
        address = of->ranges[at].begin;
        of->in_use += bytes;
        of->ranges[at].begin += bytes;
        if (of->ranges[at].begin == of->ranges[at].end) take_out(of, at);
    }
    pthread_mutex_unlock(&lock);
    return address;
}
void addresses_give(int device, uintptr_t address, size_t bytes) {
    if (address < of_devices[device].first || address >= of_devices[device].end) return; /* they were used up */
    pthread_mutex_lock(&lock);
    Addresses *of = &of_devices[device];
    size_t at = 0;
    of->in_use -= bytes;
    if (!of->in_use) { /* as at the beginning: what the next program of this process finds does not hang on this one */
        begin_again(of);
        pthread_mutex_unlock(&lock);
        return;
    }
    while (at < of->used && of->ranges[at].begin < address) at++;
    insert(of, at, (Range){address, address + bytes});
    if (at + 1 < of->used && of->ranges[at].end == of->ranges[at + 1].begin) {
        of->ranges[at].end = of->ranges[at + 1].end;
        take_out(of, at + 1);
    }
    if (at && of->ranges[at - 1].end == of->ranges[at].begin) {
        of->ranges[at - 1].end = of->ranges[at].end;
        take_out(of, at);
    }
    pthread_mutex_unlock(&lock);
}
