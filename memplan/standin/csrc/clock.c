/* The device's clock, which events read: it goes on by what the work would take that is given to the device, one thing after the other.
 *
 * Programs decide by time: Inductor pads the matrices of a product where that is faster, and picks among kernels. So that such choices fall as
 * they mostly do on a card, work takes what its bytes take at the card's bandwidth, or its multiply-adds at its throughput (products.c). Of a
 * kernel only its threads are known: each is taken to read and write 32 bytes, as PyTorch's elementwise kernels do with four elements of fp32
 * (thread_work_size of ATen/native/cuda/thread_constants.h, 2.6). The same program finds the same times in every run. */
#include "attributes.h"
#include "card.h"
#include "clock.h"

#include <pthread.h>
#include <stdlib.h>

#define THREAD_BYTES 32.0
#define BANDWIDTH_SHARE 0.8 /* of the peak, that kernels reach */
#define RECORD_NS 1000.0    /* between two events there is never no time: programs divide by it */

typedef struct { double ns; } Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double now, captured;

void device_works(double ns) {
    pthread_mutex_lock(&lock);
    if (is_capture_on()) captured += ns;
    else now += ns;
    pthread_mutex_unlock(&lock);
}
double take_captured(void) {
    pthread_mutex_lock(&lock);
    double ns = captured;
    captured = 0;
    pthread_mutex_unlock(&lock);
    return ns;
}
double bytes_take(double bytes) { return bytes / (peak_bytes() * BANDWIDTH_SHARE); }
void kernel_launched(size_t threads) {
    kernel_ran();
    device_works(bytes_take(threads * THREAD_BYTES));
}

int cudaEventCreate(void **out) { return (*out = calloc(1, sizeof(Event))) ? 0 : 2; /* cudaErrorMemoryAllocation */ }
int cudaEventCreateWithFlags(void **out, unsigned flags) { return cudaEventCreate(out); }
int cudaEventDestroy(Event *event) { free(event); return 0; }
int cudaEventQuery(void *event) { return 0; }
int cudaEventRecord(Event *event, void *stream) {
    device_works(RECORD_NS);
    pthread_mutex_lock(&lock);
    event->ns = now;
    pthread_mutex_unlock(&lock);
    return 0;
}
int cudaEventRecordWithFlags(Event *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
int cudaEventElapsedTime(float *ms, const Event *start, const Event *end) {
    *ms = (end->ns - start->ns) / 1e6;
    return 0;
}
int cudaEventElapsedTime_v2(float *ms, const Event *start, const Event *end) { return cudaEventElapsedTime(ms, start, end); }
