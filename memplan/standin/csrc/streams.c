/* Streams and kernels: all work is done the moment it is asked for, and kernels do nothing. */
#define _GNU_SOURCE
#include "card.h"

#include <dlfcn.h>
#include <string.h>

int cudaStreamCreate(void **out) { *out = new_handle(); return 0; }
int cudaStreamCreateWithFlags(void **out, unsigned flags) { *out = new_handle(); return 0; }
int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) { *out = new_handle(); return 0; }
int cudaStreamGetPriority(void *stream, int *out) { *out = 0; return 0; }
int cudaStreamQuery(void *stream) { return 0; }
int cudaLaunchHostFunc(void *stream, void (*run)(void *), void *data) { run(data); return 0; }
int cudaStreamAddCallback(void *stream, void (*run)(void *, int, void *), void *data, unsigned flags) {
    if (stream_captures(stream)) return 900; /* cudaErrorStreamCaptureUnsupported */
    run(stream, 0, data);
    return 0;
}

typedef struct { unsigned x, y, z; } dim3;

/* struct cudaFuncAttributes: the fields that somebody reads */
struct function_attributes {
    size_t shared_bytes, constant_bytes, local_bytes;
    int threads_of_block, registers, ptx_version, binary_version;
    char rest[144 - 40];
};
int cudaFuncGetAttributes(struct function_attributes *out, const void *function) {
    int version = card()->major * 10 + card()->minor;
    memset(out, 0, sizeof *out);
    out->threads_of_block = 1024;
    out->registers = 32;
    out->ptx_version = out->binary_version = version == 89 ? 86 : version; /* PyTorch's builds carry no code for 8.9, which runs that for 8.6 */
    return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *function, int threads, size_t shared) { *out = 2; return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *function, int threads, size_t shared, unsigned flags) { *out = 2; return 0; }

static size_t threads_of(dim3 grid, dim3 block) {
    return (size_t)grid.x * grid.y * grid.z * block.x * block.y * block.z;
}
int cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    kernel_launched(threads_of(grid, block));
    return 0;
}
int cudaLaunchKernelExC(const dim3 *configuration, const void *kernel, void **arguments) { /* begins with its grid and its block */
    kernel_launched(threads_of(configuration[0], configuration[1]));
    return 0;
}
int __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    kernel_launched(threads_of(grid, block));
    return 0;
}
int __cudaGetKernel(void **out, const void *function) { *out = (void *)function; return 0; }

/* what compiled CUDA code calls when it is loaded */
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **a, const char *b, char *c, const char *d, int e, void *f, void *g, void *h, void *i, int *j) {}
void __cudaRegisterVar(void **a, char *b, char *c, const char *d, int e, size_t f, int g, int h) {}
char __cudaInitModule(void **handle) { return 0; }
/* `kernel<<<grid, block>>>()` leaves here how it is to be launched, and the kernel's own function takes it up. */
static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    if (grid) *grid = pushed.grid;
    if (block) *block = pushed.block;
    if (shared) *shared = pushed.shared;
    if (stream) *stream = pushed.stream;
    return 0;
}

/* the driver's functions, which PyTorch looks up by name */
int cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags, int *result) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    *out = driver ? dlsym(driver, name) : NULL;
    if (result) *result = *out ? 0 : 1;
    return *out ? 0 : 500; /* cudaErrorSymbolNotFound */
}
int cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags, int *result) {
    return cudaGetDriverEntryPointByVersion(name, out, 0, flags, result);
}
