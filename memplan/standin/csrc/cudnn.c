/* cuDNN itself, asked which kernel it would take on the card.
 *
 * From 9.11 on cuDNN compiles ahead for a GPU that is elsewhere: a description of it stands in for a handle (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR;
 * NVIDIA's cudnn-frontend, samples/cpp/misc/deviceless_aot_compilation.cpp). So the descriptors of backend.c have twins in the real library, whose
 * heuristics rank the kernels and whose plans say what workspace they want. An H100, asked with its handle and with its description, named the same
 * kernel in 1,754 of 1,755 calls (2026-11-27, cuDNN 9.19). What only a GPU tells: how many blocks of a kernel run at once, which some kernels ask
 * before they split a sum (asked_workspace in backend.c), and the workspaces of products that cuDNN leaves to cuBLASLt, less than a MiB. */
#include "twins.h"

#include "attributes.h"
#include "card.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ENGINE = 2, HEURISTICS = 4, KNOB = 7, VARIANT_PACK = 16, CARD = 38 }; /* cudnnBackendDescriptorType_t */
enum { HANDLE = 0, KNOB_NAME = 9, DESCRIPTOR = 15, TEXT = 24 };               /* cudnnBackendAttributeType_t */
enum { HEURISTICS_CARD = 204, CONFIG_KNOBS = 302, PLAN_HANDLE = 400, PLAN_CARD = 407, KNOB_TYPE = 600, ENGINE_CARD = 1307, CARD_JSON = 2702 };
enum { CLUSTER_COLUMNS = 28, MOST_KNOBS = 44 };                               /* cudnnBackendKnobType_t: TILE_CGA_N, COUNTS */

#ifndef CUDNN_GRAPH /* where libcudnn_graph.so lies: build.py says so of a version that is asked */
#define CUDNN_GRAPH NULL
#endif

static int (*create)(int, void **), (*destroy)(void *), (*finalize)(void *);
static int (*set)(void *, int, int, int64_t, const void *), (*get)(void *, int, int, int64_t, int64_t *, void *);
static int is_loaded;

static void load(void) {
    const char *path = CUDNN_GRAPH, *wanted = getenv("MEMPLAN_ASK_CUDNN");
    void *library = !path || (wanted && *wanted == '0') ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    create = (int (*)(int, void **))dlsym(library, "cudnnBackendCreateDescriptor");
    destroy = (int (*)(void *))dlsym(library, "cudnnBackendDestroyDescriptor");
    finalize = (int (*)(void *))dlsym(library, "cudnnBackendFinalize");
    set = (int (*)(void *, int, int, int64_t, const void *))dlsym(library, "cudnnBackendSetAttribute");
    get = (int (*)(void *, int, int, int64_t, int64_t *, void *))dlsym(library, "cudnnBackendGetAttribute");
    is_loaded = create && destroy && finalize && set && get;
}

/* What cuDNN reads of a card (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, as an H100 told it). */
static void *described(void) {
    char text[1536];
    const Card *of = card();
    snprintf(text, sizeof text,
             "{\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,\"multiProcessorCount\":%d,"
             "\"warpSize\":32,\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":%d,\"reservedSharedMemoryPerBlock\":%d,"
             "\"maxRegistersPerSM\":65536,\"maxCtasPerSM\":%d,\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":%d,\"pciDeviceId\":0,"
             "\"isTccDriver\":0,\"supportCoopLaunch\":1,\"totalGlobalMem\":%zu,\"smClockRateKHz\":%d,\"memClockRateKHz\":%d,"
             "\"l2CacheSize\":%d,\"cudaDeviceId\":0,\"deviceVer\":%d,\"driverVer\":%d,\"deviceName\":\"%s\"}",
             of->multiprocessors, shared_bytes_of_block(), of->major >= 8 ? 1024 : 0, blocks_of_multiprocessor(), of->threads, of->total_bytes,
             chip()->clock_khz, chip()->memory_clock_khz, chip()->l2_bytes, of->major * 100 + of->minor * 10, CUDA_MAJOR * 1000, of->name);
    void *found = NULL;
    if (create(CARD, &found)) return NULL;
    if (!set(found, CARD_JSON, TEXT, (int64_t)strlen(text), text) && !finalize(found)) return found;
    destroy(found);
    return NULL;
}
/* That of the card which this thread has chosen; NULL where cuDNN does not know such a card. */
static void *current_card(void) {
    static void *found[MOST_CARDS];
    static int is_made[MOST_CARDS];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    int at = visible_card(current_device());
    pthread_mutex_lock(&lock);
    if (!is_made[at]) {
        found[at] = described();
        is_made[at] = 1;
    }
    pthread_mutex_unlock(&lock);
    return found[at];
}

void *twin_create(int type) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    void *twin = NULL;
    pthread_once(&once, load);
    if (!is_loaded || type == VARIANT_PACK || !current_card()) return NULL; /* addresses to run with: nothing runs */
    return create(type, &twin) ? NULL : twin;
}
void twin_destroy(void *twin) { destroy(twin); }
int twin_set(void *twin, int name, int type, int64_t count, const void *values) {
    if (type != HANDLE) return set(twin, name, type, count, values);
    void *of = current_card();
    return name == PLAN_HANDLE ? set(twin, PLAN_CARD, DESCRIPTOR, 1, &of) : 0; /* a graph has no card of its own */
}
int twin_get(void *twin, int name, int type, int64_t requested, int64_t *count, void *values) {
    return get(twin, name, type, requested, count, values);
}
int twin_finalize(void *twin, int type) {
    void *of = current_card();
    int told = type == HEURISTICS ? set(twin, HEURISTICS_CARD, DESCRIPTOR, 1, &of) : type == ENGINE ? set(twin, ENGINE_CARD, DESCRIPTOR, 1, &of) : 0;
    return told ? told : finalize(twin);
}
int twin_has_clusters(void *config) {
    void *knobs[MOST_KNOBS] = {NULL};
    int64_t num_knobs = 0, one;
    int found = 0, num_made = 0;
    while (num_made < MOST_KNOBS && !create(KNOB, &knobs[num_made])) num_made++;
    if (!get(config, CONFIG_KNOBS, DESCRIPTOR, num_made, &num_knobs, knobs))
        for (int i = 0, name; i < num_knobs && i < num_made; i++)
            found |= !get(knobs[i], KNOB_TYPE, KNOB_NAME, 1, &one, &name) && name == CLUSTER_COLUMNS;
    while (num_made) destroy(knobs[--num_made]);
    return found;
}
