/* libcuda.so.1: contexts, and the virtual memory that expandable segments are made of. The account is the runtime's. */
#define _GNU_SOURCE
#include "card.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

extern int cudaDeviceGetAttribute(int *, int, int); /* the attributes have the same numbers */

int cuInit(unsigned flags) { return num_visible_cards() ? 0 : 100; } /* CUDA_ERROR_NO_DEVICE */
int cuDriverGetVersion(int *out) { *out = CUDA_MAJOR * 1000; return 0; }
int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return ordinal >= 0 && ordinal < num_visible_cards() ? 0 : 101; }
int cuDeviceGetCount(int *out) { *out = num_visible_cards(); return 0; }
int cuDeviceGetUuid_v2(unsigned char *out, int device) { uuid_of(visible_card(device), out); return 0; }
int cuDeviceGetAttribute(int *out, int attribute, int device) { return cudaDeviceGetAttribute(out, attribute, device); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **out, int device) { *out = (void *)(size_t)(device + 1); return 0; }
/* a context is its device, and one */
int cuCtxGetCurrent(void **out) { *out = (void *)(size_t)(current_device() + 1); return 0; }
int cuCtxSetCurrent(void *context) { return !context || choose_device((int)(size_t)context - 1) ? 0 : 201; } /* CUDA_ERROR_INVALID_CONTEXT */
int cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
int cuCtxPopCurrent_v2(void **out) { return out ? cuCtxGetCurrent(out) : 0; }
int cuCtxGetDevice(int *out) { *out = current_device(); return 0; }
int cuLogsRegisterCallback(void *callback, void *data, void **out) { if (out) *out = new_handle(); return 0; }
int cuLogsUnregisterCallback(void *callback) { return 0; }
int cuGetErrorString(int error, const char **out) { *out = error ? "error of the simulated GPU" : "no error"; return 0; }

/* modules and kernels: loaded and launched, never run */
int cuModuleLoad(void **out, const char *path) { *out = new_handle(); return 0; }
int cuModuleLoadData(void **out, const void *image) { *out = new_handle(); return 0; }
int cuModuleLoadDataEx(void **out, const void *image, unsigned count, void *options, void *values) { *out = new_handle(); return 0; }
int cuModuleGetFunction(void **out, void *module, const char *name) { *out = new_handle(); return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuFuncGetAttribute(int *out, int attribute, void *function) { *out = attribute == 0 ? 1024 : 0; return 0; } /* 0: threads of a block */
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, void *function, int threads, size_t shared) { *out = 2; return 0; }
int cuOccupancyMaxActiveClusters(int *out, void *function, void *config) { *out = 1; return 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                   void **arguments, void **extra) {
    kernel_launched((size_t)gx * gy * gz * bx * by * bz);
    return 0;
}
int cuLaunchKernelEx(const unsigned *config, void *function, void **arguments, void **extra) { /* begins with the six numbers */
    return cuLaunchKernel(function, config[0], config[1], config[2], config[3], config[4], config[5], 0, 0, arguments, extra);
}
int cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                              void *stream, void **arguments) {
    return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, arguments, 0);
}
int cuTensorMapEncodeTiled(void) { return 0; }
int cuMemsetD32Async(unsigned long long address, unsigned value, size_t count, void *stream) {
    card_memory_set(address, value, 4, count);
    device_works(bytes_take(4.0 * count));
    return 0;
}
int cuPointerGetAttribute(void *out, int attribute, unsigned long long pointer) {
    if (attribute != 3) return not_served("cuPointerGetAttribute (of another attribute than the device's pointer)", 801);
    *(unsigned long long *)out = pointer; /* Triton asks it of pointers that are not a tensor's */
    return 0;
}

/* struct CUmemAllocationProp_st of cuda.h, as far as it says whose memory is wanted */
struct allocation_properties {
    int type, handle_types, location_type, device;
};

/* virtual memory: a handle is one of these */
typedef struct {
    size_t bytes;
    int device;
    int is_shared, is_others; /* handed on to other processes; of another, where it is counted */
} Memory;

static void share(Memory *memory, int is_shared) {
    if (memory->is_shared != is_shared) card_shares(memory->bytes, is_shared);
    memory->is_shared = is_shared;
}
static int make_memory(Memory **out, Memory memory) {
    if (!(*out = malloc(sizeof memory))) return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
    **out = memory;
    return 0;
}

int cuMemGetAllocationGranularity(size_t *out, const void *properties, int option) { *out = PAGE; return 0; }
int cuMemAddressReserve(unsigned long long *out, size_t bytes, size_t alignment, unsigned long long address, unsigned long long flags) {
    *out = card_reserve(bytes);
    return 0;
}
int cuMemAddressFree(unsigned long long address, size_t bytes) { return 0; }
int cuMemCreate(Memory **out, size_t bytes, const struct allocation_properties *wanted, unsigned long long flags) {
    start_recorder();
    if (wanted->device < 0 || wanted->device >= num_visible_cards()) return 101; /* CUDA_ERROR_INVALID_DEVICE */
    if (!card_take(wanted->device, bytes)) return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
    return make_memory(out, (Memory){bytes, wanted->device, 0, 0});
}
int cuMemRelease(Memory *memory) {
    if (!memory->is_others) card_give(memory->device, memory->bytes);
    share(memory, 0);
    free(memory);
    return 0;
}
int cuMemMap(unsigned long long address, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags) { return 0; }
int cuMemUnmap(unsigned long long address, size_t bytes) { card_memory_lost(address, bytes); return 0; }
int cuMemSetAccess(unsigned long long address, size_t bytes, const void *descriptor, size_t count) { return 0; }
/* Symmetric memory of PyTorch: a process hands its own on as a file descriptor, and maps that of the other ranks. Each of those that are missing
 * is a copy of this one, with a card of its own. */
#define POSIX_FILE 1 /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
int cuMemExportToShareableHandle(int *out, Memory *memory, int type, unsigned long long flags) {
    if (type != POSIX_FILE) return not_served("cuMemExportToShareableHandle (as anything but a file)", 801);
    int file = memfd_create("memory of the simulated GPU", MFD_CLOEXEC);
    if (file < 0 || pwrite(file, memory, sizeof *memory, 0) != sizeof *memory) return 304; /* CUDA_ERROR_OPERATING_SYSTEM */
    *out = file;
    share(memory, 1);
    return 0;
}
int cuMemImportFromShareableHandle(Memory **out, void *file, int type) {
    Memory memory;
    if (type != POSIX_FILE) return not_served("cuMemImportFromShareableHandle (of anything but a file)", 801);
    if (pread((int)(size_t)file, &memory, sizeof memory, 0) != sizeof memory) return 1; /* CUDA_ERROR_INVALID_VALUE */
    return make_memory(out, (Memory){memory.bytes, memory.device, 0, 1});
}
int cuStreamWriteValue32(void *stream, unsigned long long address, unsigned value, unsigned flags) {
    card_memory_set(address, value, sizeof value, 1);
    device_works(LAUNCH_NS);
    return 0;
}
int cuStreamWriteValue32_v2(void *stream, unsigned long long address, unsigned value, unsigned flags) {
    return cuStreamWriteValue32(stream, address, value, flags);
}
/* Kernels that cuDNN compiles at run time, and loads before it offers them. */
int cuLibraryLoadData(void **out) { *out = new_handle(); return 0; }
int cuLibraryLoadFromFile(void **out) { *out = new_handle(); return 0; }
int cuLibraryGetKernel(void **out) { *out = new_handle(); return 0; }
int cuLibraryUnload(void *library) { return 0; }
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) { return 0; }
int cuKernelGetAttribute(int *out, int attribute, void *kernel, int device) { return cuFuncGetAttribute(out, attribute, kernel); }
int cuGetExportTable(const void **out, const void *which) { return 801; } /* cuDNN 9.24 takes its absence for success; it keeps no cache so */
