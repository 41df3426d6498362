/* A libnvidia-ml.so.1 for a machine without a driver: the calls that nvidia-ml-py makes for memplan, answered from a text file.

   $NVML_MACHINE names the file; it is read by every nvmlInit. One statement a line, a device's after its `gpu` or `mig`:

     driver VERSION
     cuda NUMBER                    13000 is 13.0
     refuse CALL CODE [DEVICE]      the call answers CODE; DEVICE counts cards and instances in the file's order
     gpu NAME                       a card
     mig SLOT NAME                  an instance of the card before it, at that number of NVML's
     mig_mode 0|1                   a card that can be cut into instances, and whether it is
     uuid UUID
     memory TOTAL USED RESERVED     bytes; without it the driver tells no memory (unified memory)
     capability MAJOR MINOR
     process PID BYTES              BYTES `-`: the driver does not say
     utilization PERCENT
     clocks SM MAX_SM MEMORY MAX_MEMORY    MHz
     ecc 0|1                        a card that has it, and whether it is on
     nvlinks NUMBER                 links that are active
     peers CODE                     what the card answers for its access to others, 0 for OK; another card has to have one too

   Processes on the stand-in device are there too, with what they hold: $MEMPLAN_ACCOUNT names the file that they share (csrc/card.h).

   To leave a symbol out, as an older driver does: cc -DSYMBOL=absent. Structures and codes are nvml.h's (driver 580). */

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, VERSION_MISMATCH = 25, UNKNOWN = 999 };
enum { MEMORY_V2 = 0x02000028, MOST = 16, MOST_MIG = 7 };

typedef unsigned long long bytes_t;
typedef struct { bytes_t total, free, used; } memory_t;
typedef struct { unsigned version; bytes_t total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; bytes_t used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct device {
  char name[96], uuid[96];
  bytes_t total, used, reserved;
  int major, minor, mig_mode, slot, utilization, ecc, nvlinks, peers;
  unsigned clocks[4];
  struct device *card; /* of an instance */
  unsigned num_processes;
  process_t processes[MOST];
} device_t;

static device_t devices[MOST];
static struct { char call[64]; int code, device; } refusals[MOST];
static unsigned num_devices, num_refusals, sessions;
static char driver_version[80];
static int cuda_version;
typedef struct { int pid, card; size_t bytes; } slot_t;

static void read_line(const char *line) {
  device_t *device = num_devices ? &devices[num_devices - 1] : devices;
  unsigned pid;
  char text[96], used[32];
  int slot;
  if (sscanf(line, "gpu %95[^\n]", text) == 1) {
    device = &devices[num_devices++];
    *device = (device_t){.mig_mode = -1, .ecc = -1, .peers = -1};
    strcpy(device->name, text);
  } else if (sscanf(line, "mig %d %95[^\n]", &slot, text) == 2) {
    device_t *card = device->card ? device->card : device;
    device = &devices[num_devices++];
    *device = (device_t){.mig_mode = -1, .ecc = -1, .peers = -1, .utilization = -1, .slot = slot, .card = card};
    strcpy(device->name, text);
  } else if (sscanf(line, "process %u %31s", &pid, used) == 2) {
    device->processes[device->num_processes++] = (process_t){pid, strcmp(used, "-") ? strtoull(used, NULL, 10) : (bytes_t)-1, -1, -1};
  } else if (sscanf(line, "refuse %63s %d", refusals[num_refusals].call, &refusals[num_refusals].code) == 2) {
    if (sscanf(line, "refuse %*s %*d %d", &refusals[num_refusals].device) != 1) refusals[num_refusals].device = -1;
    num_refusals++;
  } else if (sscanf(line, "driver %79s", driver_version) != 1 && sscanf(line, "uuid %95s", device->uuid) != 1 &&
             sscanf(line, "memory %llu %llu %llu", &device->total, &device->used, &device->reserved) != 3 &&
             sscanf(line, "capability %d %d", &device->major, &device->minor) != 2 &&
             sscanf(line, "mig_mode %d", &device->mig_mode) != 1 && sscanf(line, "utilization %d", &device->utilization) != 1 &&
             sscanf(line, "ecc %d", &device->ecc) != 1 && sscanf(line, "nvlinks %d", &device->nvlinks) != 1 &&
             sscanf(line, "peers %d", &device->peers) != 1 &&
             sscanf(line, "clocks %u %u %u %u", device->clocks, device->clocks + 1, device->clocks + 2, device->clocks + 3) != 4 &&
             sscanf(line, "cuda %d", &cuda_version) != 1 && line[0] != '\n') {
    fprintf(stderr, "nvml_library.c does not know this line: %s", line);
    abort();
  }
}

static int read_machine(void) {
  char line[256];
  const char *path = getenv("NVML_MACHINE");
  FILE *file = path ? fopen(path, "r") : NULL;
  if (!file) return UNKNOWN;
  num_devices = num_refusals = 0;
  while (fgets(line, sizeof line, file)) read_line(line);
  return fclose(file);
}

/* Put what processes on the stand-in device hold on top of what the machine's file says. */
static void add_account(device_t *device, int card) {
  const char *path = getenv("MEMPLAN_ACCOUNT");
  int file = path && *path ? open(path, O_RDONLY) : -1;
  slot_t slot;
  while (file >= 0 && read(file, &slot, sizeof slot) == sizeof slot)
    if (slot.pid && slot.card == card && (!kill(slot.pid, 0) || errno == EPERM) && device->num_processes < MOST) {
      device->used += slot.bytes;
      device->processes[device->num_processes++] = (process_t){slot.pid, slot.bytes, -1, -1};
    }
  if (file >= 0) close(file);
}

static int refusal(const char *call, const device_t *device) {
  for (unsigned i = 0; i < num_refusals; i++)
    if (!strcmp(refusals[i].call, call) && (refusals[i].device < 0 || device == &devices[refusals[i].device])) return refusals[i].code;
  return SUCCESS;
}

#define ANSWER_UNLESS_REFUSED(device)            \
  do {                                           \
    if (!sessions) return UNINITIALIZED;         \
    int code = refusal(__func__, device);        \
    if (code) return code;                       \
  } while (0)

static int give_text(const char *text, char *out, unsigned size) {
  if (!*text) return NOT_SUPPORTED;
  if (strlen(text) >= size) return INSUFFICIENT_SIZE;
  strcpy(out, text);
  return SUCCESS;
}

static device_t *find(const device_t *card, int number) {
  for (unsigned i = 0, cards = 0; i < num_devices; i++)
    if (devices[i].card == card && (card ? devices[i].slot : (int)cards++) == number) return &devices[i];
  return NULL;
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  int code = read_machine();
  if (!code) code = refusal(__func__, NULL);
  sessions += !code;
  return code;
}

int nvmlShutdown(void) {
  ANSWER_UNLESS_REFUSED(NULL);
  sessions--;
  return SUCCESS;
}

const char *nvmlErrorString(int code) {
  static char text[32];
  snprintf(text, sizeof text, "error number %d", code);
  return text;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
  ANSWER_UNLESS_REFUSED(NULL);
  return give_text(driver_version, version, size);
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  ANSWER_UNLESS_REFUSED(NULL);
  for (*count = 0; find(NULL, *count); ++*count) {}
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **device) {
  *device = find(NULL, index);
  ANSWER_UNLESS_REFUSED(*device);
  return *device ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t **device) {
  *device = NULL;
  for (unsigned i = 0; i < num_devices; i++)
    if (!strcmp(devices[i].uuid, uuid)) *device = &devices[i];
  ANSWER_UNLESS_REFUSED(*device);
  return *device ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetName(device_t *device, char *name, unsigned size) {
  ANSWER_UNLESS_REFUSED(device);
  return give_text(device->name, name, size);
}

int nvmlDeviceGetUUID(device_t *device, char *uuid, unsigned size) {
  ANSWER_UNLESS_REFUSED(device);
  return give_text(device->uuid, uuid, size);
}

/* What the device is like now. */
static device_t now(const device_t *device) {
  device_t copy = *device;
  int card = 0;
  for (device_t *before = devices; before < device; before++) card += !before->card;
  if (!device->card) add_account(&copy, card);
  return copy;
}

int nvmlDeviceGetMemoryInfo(device_t *device, memory_t *memory) {
  ANSWER_UNLESS_REFUSED(device);
  if (!device->total) return NOT_SUPPORTED;
  bytes_t used = now(device).used + device->reserved; /* the first version of the call does not tell them apart */
  *memory = (memory_t){device->total, device->total - used, used};
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(device_t *device, memory_v2_t *memory) {
  ANSWER_UNLESS_REFUSED(device);
  if (memory->version != MEMORY_V2) return VERSION_MISMATCH;
  if (!device->total) return NOT_SUPPORTED;
  bytes_t used = now(device).used;
  *memory = (memory_v2_t){MEMORY_V2, device->total, device->reserved, device->total - used - device->reserved, used};
  return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(device_t *device, int *major, int *minor) {
  ANSWER_UNLESS_REFUSED(device);
  if (device->card || !device->major) return INVALID_ARGUMENT; /* an instance has to be asked through its card */
  *major = device->major;
  *minor = device->minor;
  return SUCCESS;
}

static int give_processes(const device_t *device, unsigned *count, process_t *processes) {
  unsigned room = *count;
  device_t present = now(device);
  *count = present.num_processes;
  if (room < present.num_processes) return INSUFFICIENT_SIZE;
  if (processes) memcpy(processes, present.processes, present.num_processes * sizeof *processes);
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(device_t *device, unsigned *count, process_t *processes) {
  ANSWER_UNLESS_REFUSED(device);
  return give_processes(device, count, processes);
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned *count, process_t *processes) {
  ANSWER_UNLESS_REFUSED(device);
  return give_processes(device, count, processes);
}

int nvmlDeviceGetMigMode(device_t *device, unsigned *current, unsigned *pending) {
  ANSWER_UNLESS_REFUSED(device);
  if (device->mig_mode < 0) return NOT_SUPPORTED;
  *current = *pending = device->mig_mode;
  return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t *device, unsigned *count) {
  ANSWER_UNLESS_REFUSED(device);
  *count = device->mig_mode < 0 ? 0 : MOST_MIG;
  return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t *card, unsigned index, device_t **instance) {
  *instance = find(card, index);
  ANSWER_UNLESS_REFUSED(*instance);
  return *instance ? SUCCESS : NOT_FOUND;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  ANSWER_UNLESS_REFUSED(NULL);
  *version = cuda_version;
  return cuda_version ? SUCCESS : NOT_FOUND;
}

typedef struct { unsigned gpu, memory; } utilization_t;
int nvmlDeviceGetUtilizationRates(device_t *device, utilization_t *utilization) {
  ANSWER_UNLESS_REFUSED(device);
  if (device->utilization < 0) return NOT_SUPPORTED;
  *utilization = (utilization_t){device->utilization, 0};
  return SUCCESS;
}

static int give_clock(const device_t *device, int kind, int is_most, unsigned *mhz) {
  if (kind != 1 && kind != 2) return INVALID_ARGUMENT; /* NVML_CLOCK_SM, NVML_CLOCK_MEM */
  *mhz = device->clocks[2 * (kind - 1) + is_most];
  return *mhz ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetClockInfo(device_t *device, int kind, unsigned *mhz) {
  ANSWER_UNLESS_REFUSED(device);
  return give_clock(device, kind, 0, mhz);
}

int nvmlDeviceGetMaxClockInfo(device_t *device, int kind, unsigned *mhz) {
  ANSWER_UNLESS_REFUSED(device);
  return give_clock(device, kind, 1, mhz);
}

int nvmlDeviceGetEccMode(device_t *device, unsigned *current, unsigned *pending) {
  ANSWER_UNLESS_REFUSED(device);
  if (device->ecc < 0) return NOT_SUPPORTED;
  *current = *pending = device->ecc;
  return SUCCESS;
}

int nvmlDeviceGetNvLinkState(device_t *device, unsigned link, unsigned *is_active) {
  ANSWER_UNLESS_REFUSED(device);
  if (!device->nvlinks) return NOT_SUPPORTED;
  *is_active = (int)link < device->nvlinks;
  return SUCCESS;
}

int nvmlDeviceGetP2PStatus(device_t *device, device_t *other, int index, unsigned *status) {
  ANSWER_UNLESS_REFUSED(device);
  if (index != 0) return INVALID_ARGUMENT; /* NVML_P2P_CAPS_INDEX_READ */
  if (device->peers < 0 || other->peers < 0) return NOT_SUPPORTED;
  *status = device->peers;
  return SUCCESS;
}

/* What PyTorch asks besides, when memory runs out. */
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, device_t **device) { return (void)id, nvmlDeviceGetHandleByIndex_v2(0, device); }
int nvmlDeviceGetComputeRunningProcesses(device_t *device, unsigned *count, process_t *processes) {
  return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}
int nvmlDeviceGetGpuFabricInfoV(device_t *device, void *info) { return (void)device, (void)info, SUCCESS; }
int nvmlDeviceGetNvLinkRemoteDeviceType(device_t *device, unsigned link, void *out) { return (void)device, (void)link, (void)out, NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(device_t *device, unsigned link, void *out) { return (void)device, (void)link, (void)out, NOT_SUPPORTED; }
