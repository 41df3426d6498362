/* CUDA graphs as far as memory and time are concerned: a stream captures or does not; what is captured allocates when it is, and never again. */
#include "card.h"
#include "clock.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum { NONE = 0, ACTIVE = 1 };
static void *capturing;
static int is_capturing;
static unsigned long long capture_number;

/* A graph, and one that is ready to run: how long it takes. */
typedef struct { double ns; } Graph;
static Graph *new_graph(double ns) {
    Graph *graph = malloc(sizeof *graph);
    if (!graph) abort();
    graph->ns = ns;
    return graph;
}

int is_capture_on(void) { return is_capturing; }
int stream_captures(void *stream) { return is_capturing && stream == capturing; }

int cudaStreamBeginCapture(void *stream, int mode) {
    if (is_capturing) return 900; /* cudaErrorStreamCaptureUnsupported */
    capturing = stream;
    is_capturing = 1;
    capture_number++;
    return 0;
}
int cudaStreamBeginCaptureToGraph(void *stream, void *graph, const void *dependencies, const void *data, size_t count, int mode) {
    return cudaStreamBeginCapture(stream, mode);
}
/* While a stream captures, nothing it has been given runs, so that nobody can wait for it: a program that reads a value fails here. */
int cudaStreamSynchronize(void *stream) { return stream_captures(stream) ? 900 : 0; }
int cudaDeviceSynchronize(void) { return is_capturing ? 900 : 0; }
int cudaStreamEndCapture(void *stream, void **graph) {
    if (!stream_captures(stream)) return 904; /* cudaErrorStreamCaptureUnmatched */
    is_capturing = 0;
    *graph = new_graph(take_captured());
    return 0;
}
int cudaStreamIsCapturing(void *stream, int *out) { *out = stream_captures(stream) ? ACTIVE : NONE; return 0; }
int cudaThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int present; /* cudaStreamCaptureModeGlobal */
    int before = present;
    present = *mode;
    *mode = before;
    return 0;
}

/* What is asked for behind the number differs from CUDA 12 to 13: nothing depends on anything here. */
int cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *number, void **graph, const void **dependencies, size_t *count) {
    *status = stream_captures(stream) ? ACTIVE : NONE;
    if (number) *number = capture_number;
    if (graph) *graph = stream_captures(stream) ? (void *)1 : NULL;
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    return 0;
}
#if CUDA_MAJOR >= 13
int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *number, void **graph, const void **dependencies, const void **edges,
                             size_t *count) {
    if (edges) *edges = NULL;
    return cudaStreamGetCaptureInfo_v2(stream, status, number, graph, dependencies, count);
}
#else
int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *number) {
    return cudaStreamGetCaptureInfo_v2(stream, status, number, NULL, NULL, NULL);
}
#endif

int cudaGraphInstantiate(void **out, const Graph *graph, unsigned long long flags) { *out = new_graph(graph->ns); return 0; }
int cudaGraphInstantiateWithFlags(void **out, const Graph *graph, unsigned long long flags) { return cudaGraphInstantiate(out, graph, flags); }
int cudaGraphDestroy(Graph *graph) { free(graph); return 0; }
int cudaGraphExecDestroy(Graph *executable) { free(executable); return 0; }
int cudaGraphGetNodes(void *graph, void **nodes, size_t *count) { if (count) *count = 1; if (nodes) *nodes = new_handle(); return 0; }
int cudaGraphDebugDotPrint(void *graph, const char *path, unsigned flags) { /* a picture of a graph without nodes */
    FILE *file = fopen(path, "w");
    if (!file) return 304; /* cudaErrorOperatingSystem */
    fputs("digraph dot {\n}\n", file);
    return fclose(file) ? 304 : 0;
}
int cudaGraphLaunch(const Graph *executable, void *stream) {
    kernel_ran();
    device_works(executable->ns);
    return 0;
}
