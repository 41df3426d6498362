/* libnvidia-ml.so.1: the calls that PyTorch's allocator makes, and those of nvidia-ml-py that tell a card and its memory. */
#include "card.h"

#include <stdio.h>
#include <string.h>

enum { NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error ? "not supported by the stand-in device" : "success"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "memplan-standin"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = CUDA_MAJOR * 1000; return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { *out = (void *)1; return index ? 2 : 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out) { *out = (void *)1; return 0; }
int nvmlDeviceGetName(void *device, char *out, unsigned size) { snprintf(out, size, "%s", card()->name); return 0; }
int nvmlDeviceGetUUID(void *device, char *out, unsigned size) {
    unsigned char uuid[16];
    uuid_of(visible_card(0), uuid);
    int at = snprintf(out, size, "GPU-");
    for (int i = 0; i < 16; i++) at += snprintf(out + at, size - at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = card()->major; *minor = card()->minor; return 0; }
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) { return NOT_SUPPORTED; }

struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *device, struct memory *out) {
    *out = (struct memory){card()->total_bytes, card_free_bytes(), card()->total_bytes - card_free_bytes()};
    return 0;
}
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *out) {
    *out = (struct memory_v2){out->version, card()->total_bytes, 0, card_free_bytes(), card()->total_bytes - card_free_bytes()};
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) { *count = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *processes) { *count = 0; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 0; } /* the caller zeroed it: no fabric */
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *out) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *out) { return NOT_SUPPORTED; }

/* what loggers of a training ask: a card at rest */
struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(void *device, struct utilization *out) { *out = (struct utilization){0, 0}; return 0; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *out) { *out = 30; return 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *out) { *out = 0; return 0; }
int nvmlDeviceGetClockInfo(void *device, int clock, unsigned *out) { *out = 0; return 0; }
