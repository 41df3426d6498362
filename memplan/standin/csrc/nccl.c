/* NCCL with the other ranks missing: this process is one of a world of any size, and each absent rank behaves as a copy of it.
 *
 * PyTorch's own process group stands on it, so that its streams, events and rules are the real ones. What a copy of this rank would send is
 * known where this rank's own memory is; of all else nothing is known. What NCCL itself takes of the GPU is outside PyTorch's allocator: the
 * communicators are told, and counted by memory/nccl_buffers.py. */
#include "card.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INTERNAL_ERROR = 3, INVALID_USAGE = 5 }; /* ncclResult_t of nccl.h 2.27 */
enum { SUM = 0, PRODUCT = 1, FIRST_OWN = 5 }; /* ncclRedOp_t: max, min and the average of copies are what each has */
#define MOST_SCALED ((size_t)1 << 16) /* bytes; contents.c knows no more of a piece */

typedef struct { char internal[128]; } UniqueId;
typedef struct { int rank, size, number, most_peers; } Communicator; /* size 0: not known */

/* ncclDataType_t: int8 uint8 int32 uint32 int64 uint64 half float double bfloat16 float8 float8 */
static size_t bytes_of(int type) {
    static const unsigned char bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < (int)sizeof bytes ? bytes[type] : 1;
}
static void hand_on(const void *send, void *receive, size_t bytes) {
    if (send != receive && bytes) memory_copy((Copy){receive, bytes, send, bytes, bytes, 1});
}
static int is_scaled(void *values, size_t count, int type, int factor) { /* 1: each is *factor* times what it was; 0: of that type none is */
    for (size_t i = 0; i < count; i++) switch (type) {
        case 0: case 1: ((unsigned char *)values)[i] *= factor; break;
        case 2: case 3: ((uint32_t *)values)[i] *= factor; break;
        case 4: case 5: ((uint64_t *)values)[i] *= factor; break;
        case 7: ((float *)values)[i] *= factor; break;
        case 8: ((double *)values)[i] *= factor; break;
        default: return 0;
        }
    return 1;
}
/* What *count* values are, reduced over the ranks: where this rank's own are known, so are those of its copies. */
static int reduce(const void *send, void *receive, size_t count, int type, int operation, const Communicator *communicator) {
    size_t bytes = count * bytes_of(type);
    int factor = operation == SUM ? communicator->size : 1;
    _Alignas(8) unsigned char values[MOST_SCALED];
    device_works(bytes_take(2.0 * bytes));
    if (operation != PRODUCT && operation < FIRST_OWN && factor && bytes <= MOST_SCALED && memory_known(send, values, bytes) &&
        (factor == 1 || is_scaled(values, count, type, factor)))
        memory_copy((Copy){receive, bytes, values, bytes, bytes, 1});
    else if (communicator->size == 1) hand_on(send, receive, bytes);
    else card_memory_lost((uintptr_t)receive, bytes);
    return SUCCESS;
}

int ncclGetVersion(int *out) { /* that of the library that is stood in for */
    const char *known = getenv("MEMPLAN_NCCL");
    *out = known && *known ? atoi(known) : 22705;
    return SUCCESS;
}
int ncclGetUniqueId(UniqueId *out) { memset(out, 1, sizeof *out); return SUCCESS; }
const char *ncclGetErrorString(int status) { return status ? "not served by the simulated GPU" : "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }

int ncclCommInitRank(Communicator **out, int size, UniqueId id, int rank) {
    const char *world = getenv("MEMPLAN_WORLD");
    if (size != 1 && (!world || !*world)) return not_served("NCCL with several processes", INVALID_USAGE);
    static int num_communicators;
    char text[16];
    *out = malloc(sizeof **out);
    if (!*out) return INTERNAL_ERROR;
    **out = (Communicator){rank, size, __sync_fetch_and_add(&num_communicators, 1), 0};
    snprintf(text, sizeof text, "%d", size);
    tell_parent("communicator", text, 0);
    return SUCCESS;
}
int ncclCommInitRankConfig(Communicator **out, int size, UniqueId id, int rank, void *config) { return ncclCommInitRank(out, size, id, rank); }
int ncclCommInitRankScalable(Communicator **out, int size, int rank, int num_ids, UniqueId *ids, void *config) {
    return ncclCommInitRank(out, size, ids[0], rank);
}
int ncclCommInitAll(Communicator **out, int count, const int *devices) { return ncclCommInitRank(out, count, (UniqueId){{0}}, 0); }

/* How many ranks a communicator has that is split off, only the absent ones could tell: child/world.py says it before PyTorch splits. */
static __thread int next_size;
void memplan_next_group(int size) { next_size = size; }
int ncclCommSplit(Communicator *whole, int color, int key, Communicator **out, void *config) {
    int size = whole->size == 1 ? 1 : next_size;
    *out = NULL;
    next_size = 0;
    return color < 0 ? SUCCESS : ncclCommInitRank(out, size, (UniqueId){{0}}, size && key < size ? key : 0); /* NCCL_SPLIT_NOCOLOR */
}
int ncclCommCount(const Communicator *communicator, int *out) { *out = communicator->size; return SUCCESS; }
int ncclCommUserRank(const Communicator *communicator, int *out) { *out = communicator->rank; return SUCCESS; }
int ncclCommCuDevice(const Communicator *communicator, int *out) { *out = current_device(); return SUCCESS; }
int ncclCommGetAsyncError(Communicator *communicator, int *out) { *out = SUCCESS; return SUCCESS; }
int ncclCommFinalize(Communicator *communicator) { return SUCCESS; }
int ncclCommDestroy(Communicator *communicator) { free(communicator); return SUCCESS; }
int ncclCommAbort(Communicator *communicator) { free(communicator); return SUCCESS; }
int ncclCommRegister(Communicator *communicator, void *buffer, size_t bytes, void **out) { *out = new_handle(); return SUCCESS; }
int ncclCommDeregister(Communicator *communicator, void *handle) { return SUCCESS; }

int ncclRedOpCreatePreMulSum(int *out, void *scalar, int type, int residence, Communicator *communicator) {
    *out = FIRST_OWN;
    return SUCCESS;
}
int ncclRedOpDestroy(int operation, Communicator *communicator) { return SUCCESS; }

int ncclAllReduce(const void *send, void *receive, size_t count, int type, int operation, Communicator *communicator, void *stream) {
    return reduce(send, receive, count, type, operation, communicator);
}
int ncclReduce(const void *send, void *receive, size_t count, int type, int operation, int root, Communicator *communicator, void *stream) {
    return root == communicator->rank ? reduce(send, receive, count, type, operation, communicator) : SUCCESS;
}
int ncclReduceScatter(const void *send, void *receive, size_t count, int type, int operation, Communicator *communicator, void *stream) {
    const char *own = (const char *)send + communicator->rank * count * bytes_of(type);
    return reduce(own, receive, count, type, operation, communicator);
}
int ncclAllGather(const void *send, void *receive, size_t count, int type, Communicator *communicator, void *stream) {
    size_t bytes = count * bytes_of(type);
    device_works(bytes_take((communicator->size + 1.0) * bytes));
    if (!communicator->size) kernel_ran();
    for (int rank = 0; rank < communicator->size; rank++) hand_on(send, (char *)receive + rank * bytes, bytes);
    return SUCCESS;
}
int ncclAlltoAll(const void *send, void *receive, size_t count, int type, Communicator *communicator, void *stream) {
    return ncclAllGather((const char *)send + communicator->rank * count * bytes_of(type), receive, count, type, communicator, stream);
}
int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, Communicator *communicator, void *stream) {
    size_t bytes = count * bytes_of(type);
    device_works(bytes_take(2.0 * bytes));
    hand_on(root == communicator->rank ? send : receive, receive, bytes); /* a copy has sent what this rank has there */
    return SUCCESS;
}
int ncclBcast(void *buffer, size_t count, int type, int root, Communicator *communicator, void *stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}

/* Of what the ranks send each other in a group, a copy of this rank sends here what this rank sends to itself. */
typedef struct { const void *from; void *to; size_t bytes; } Transfer;
static __thread struct { int depth, num_peers; Communicator *of; Transfer own; Transfer *received; size_t num_received, room; } group;

static void receive_all(void) {
    for (size_t i = 0; i < group.num_received; i++) {
        Transfer *one = &group.received[i];
        if (group.own.from && group.own.bytes == one->bytes) hand_on(group.own.from, one->to, one->bytes);
        else card_memory_lost((uintptr_t)one->to, one->bytes);
    }
    if (group.of && group.num_peers > group.of->most_peers) {
        char number[16];
        snprintf(number, sizeof number, "%d", group.of->number);
        tell_parent("peers", number, group.of->most_peers = group.num_peers);
    }
    group.num_received = group.num_peers = 0;
    group.own = (Transfer){0};
}
int ncclGroupStart(void) { group.depth++; return SUCCESS; }
int ncclGroupEnd(void) {
    if (group.depth && !--group.depth) receive_all();
    return SUCCESS;
}
int ncclSend(const void *send, size_t count, int type, int peer, Communicator *communicator, void *stream) {
    size_t bytes = count * bytes_of(type);
    device_works(bytes_take(bytes));
    group.of = communicator;
    if (peer == communicator->rank) group.own = (Transfer){send, NULL, bytes};
    else group.num_peers++;
    if (!group.depth) receive_all();
    return SUCCESS;
}
int ncclRecv(void *receive, size_t count, int type, int peer, Communicator *communicator, void *stream) {
    size_t bytes = count * bytes_of(type);
    device_works(bytes_take(bytes));
    group.of = communicator;
    if (!group.num_peers && peer != communicator->rank) group.num_peers = 1;
    if (group.num_received == group.room) {
        group.room = group.room ? group.room * 2 : 64;
        group.received = realloc(group.received, group.room * sizeof(Transfer));
        if (!group.received) abort();
    }
    group.received[group.num_received++] = (Transfer){NULL, receive, bytes};
    if (!group.depth) receive_all();
    return SUCCESS;
}
