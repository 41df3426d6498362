/* NCCL for one process: a communicator of one, whose collectives copy what they are given to where it goes.
 *
 * PyTorch's own process group stands on it, so that its streams, events and rules are the real ones. Several processes are refused: what the
 * others would send is not known. What NCCL itself takes of the GPU is outside PyTorch's allocator, and not counted. */
#include "card.h"

#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 }; /* ncclResult_t of nccl.h 2.27 */

typedef struct { char internal[128]; } UniqueId;
typedef struct { int rank, size; } Communicator;

/* ncclDataType_t: int8 uint8 int32 uint32 int64 uint64 half float double bfloat16 float8 float8 */
static size_t bytes_of(int type) {
    static const unsigned char bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < (int)sizeof bytes ? bytes[type] : 1;
}
static int hand_on(const void *send, void *receive, size_t count, int type) {
    size_t bytes = count * bytes_of(type);
    if (send != receive) memory_copy((Copy){receive, bytes, send, bytes, bytes, 1});
    return SUCCESS;
}

int ncclGetVersion(int *out) { *out = 22705; return SUCCESS; }
int ncclGetUniqueId(UniqueId *out) { memset(out, 1, sizeof *out); return SUCCESS; }
const char *ncclGetErrorString(int status) { return status ? "not served by the stand-in device" : "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }

int ncclCommInitRank(Communicator **out, int size, UniqueId id, int rank) {
    if (size != 1) return not_served("NCCL with several processes", INVALID_USAGE);
    *out = malloc(sizeof **out);
    if (!*out) return INTERNAL_ERROR;
    **out = (Communicator){rank, size};
    return SUCCESS;
}
int ncclCommInitRankConfig(Communicator **out, int size, UniqueId id, int rank, void *config) { return ncclCommInitRank(out, size, id, rank); }
int ncclCommInitRankScalable(Communicator **out, int size, int rank, int num_ids, UniqueId *ids, void *config) {
    return ncclCommInitRank(out, size, ids[0], rank);
}
int ncclCommInitAll(Communicator **out, int count, const int *devices) { return ncclCommInitRank(out, count, (UniqueId){{0}}, 0); }
int ncclCommSplit(Communicator *whole, int color, int key, Communicator **out, void *config) {
    *out = NULL;
    return color < 0 ? SUCCESS : ncclCommInitRank(out, whole->size, (UniqueId){{0}}, 0); /* NCCL_SPLIT_NOCOLOR */
}
int ncclCommCount(const Communicator *communicator, int *out) { *out = communicator->size; return SUCCESS; }
int ncclCommUserRank(const Communicator *communicator, int *out) { *out = communicator->rank; return SUCCESS; }
int ncclCommCuDevice(const Communicator *communicator, int *out) { *out = 0; return SUCCESS; }
int ncclCommGetAsyncError(Communicator *communicator, int *out) { *out = SUCCESS; return SUCCESS; }
int ncclCommFinalize(Communicator *communicator) { return SUCCESS; }
int ncclCommDestroy(Communicator *communicator) { free(communicator); return SUCCESS; }
int ncclCommAbort(Communicator *communicator) { free(communicator); return SUCCESS; }
int ncclCommRegister(Communicator *communicator, void *buffer, size_t bytes, void **out) { *out = new_handle(); return SUCCESS; }
int ncclCommDeregister(Communicator *communicator, void *handle) { return SUCCESS; }

int ncclGroupStart(void) { return SUCCESS; }
int ncclGroupEnd(void) { return SUCCESS; }
int ncclRedOpCreatePreMulSum(int *out, void *scalar, int type, int residence, Communicator *communicator) {
    *out = 5; /* the first behind ncclRedOp_t's own; what is known of a tensor that it scales is known no more */
    kernel_ran();
    return SUCCESS;
}
int ncclRedOpDestroy(int operation, Communicator *communicator) { return SUCCESS; }

int ncclAllReduce(const void *send, void *receive, size_t count, int type, int operation, Communicator *communicator, void *stream) {
    return hand_on(send, receive, count, type);
}
int ncclReduce(const void *send, void *receive, size_t count, int type, int operation, int root, Communicator *communicator, void *stream) {
    return hand_on(send, receive, count, type);
}
int ncclReduceScatter(const void *send, void *receive, size_t count, int type, int operation, Communicator *communicator, void *stream) {
    return hand_on(send, receive, count, type);
}
int ncclAllGather(const void *send, void *receive, size_t count, int type, Communicator *communicator, void *stream) {
    return hand_on(send, receive, count, type);
}
int ncclAlltoAll(const void *send, void *receive, size_t count, int type, Communicator *communicator, void *stream) {
    return hand_on(send, receive, count, type);
}
int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, Communicator *communicator, void *stream) {
    return hand_on(send, receive, count, type);
}
int ncclBcast(void *buffer, size_t count, int type, int root, Communicator *communicator, void *stream) {
    return hand_on(buffer, buffer, count, type);
}
/* To itself a process sends and receives in one group: what it sends waits for the receive. */
static __thread struct { const void *from; size_t bytes; } sent;
int ncclSend(const void *send, size_t count, int type, int peer, Communicator *communicator, void *stream) {
    sent.from = send;
    sent.bytes = count * bytes_of(type);
    return SUCCESS;
}
int ncclRecv(void *receive, size_t count, int type, int peer, Communicator *communicator, void *stream) {
    size_t bytes = count * bytes_of(type);
    if (sent.from && sent.bytes == bytes) memory_copy((Copy){receive, bytes, sent.from, bytes, bytes, 1});
    sent.from = NULL;
    return SUCCESS;
}
