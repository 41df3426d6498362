/* libnvidia-ml.so.1: the calls that PyTorch's allocator makes, and those of nvidia-ml-py that tell a card and its memory. */
#include "card.h"

#include <stdio.h>
#include <string.h>

enum { INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error ? "not supported by the simulated GPU" : "success"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "memplan-standin"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = CUDA_MAJOR * 1000; return 0; }
/* a handle is the card's number on the bus, and one */
static int number_of(void *device) { return (int)(size_t)device - 1; }
static const Card *card_of(void *device) { return card_on_bus(number_of(device)); }

int nvmlDeviceGetCount_v2(unsigned *out) { *out = num_cards_on_bus(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    *out = (void *)(size_t)(index + 1);
    return index < (unsigned)num_cards_on_bus() ? 0 : INVALID_ARGUMENT;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out) { /* DOMAIN:BUS:DEVICE.FUNCTION */
    unsigned bus = 0;
    if (sscanf(id, "%*x:%x:", &bus) != 1 || !bus || bus > (unsigned)num_cards_on_bus()) return INVALID_ARGUMENT;
    *out = (void *)(size_t)bus;
    return 0;
}
int nvmlDeviceGetName(void *device, char *out, unsigned size) { snprintf(out, size, "%s", card_of(device)->name); return 0; }
int nvmlDeviceGetUUID(void *device, char *out, unsigned size) {
    unsigned char uuid[16];
    uuid_of(number_of(device), uuid);
    int at = snprintf(out, size, "GPU-");
    for (int i = 0; i < 16; i++) at += snprintf(out + at, size - at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = card_of(device)->major;
    *minor = card_of(device)->minor;
    return 0;
}
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) { return NOT_SUPPORTED; }

struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *device, struct memory *out) {
    size_t total = card_of(device)->total_bytes, left = card_free_bytes(number_of(device));
    *out = (struct memory){total, left, total - left};
    return 0;
}
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *out) {
    size_t total = card_of(device)->total_bytes, left = card_free_bytes(number_of(device));
    *out = (struct memory_v2){out->version, total, 0, left, total - left};
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
