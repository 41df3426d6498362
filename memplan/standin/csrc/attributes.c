/* The attributes of the card: enum cudaDeviceAttr, whose numbers the driver's CUdevice_attribute shares (driver_types.h of CUDA 13.0, cuda.h of
 * 13.1). They are those of a real card of that capability, alone in an x86 machine with Linux, without a display. What is not known of it is an
 * error, as for a number that does not exist: a program that asks takes the way that needs nothing.
 *
 * Sources: the CUDA C++ programming guide's tables of features and technical specifications for each capability; attributes that CuPy and PyCUDA
 * printed on a Tesla P100 (6.0) and an NVIDIA GB10 (12.1), and properties printed on V100, A100, H200, L40S and RTX 4090, all public. */
#include "attributes.h"
#include "card.h"

#include <limits.h>
#include <string.h>

enum { UNKNOWN = INT_MIN, INVALID_VALUE = 1, INVALID_DEVICE = 101 };

static int version(void) { return card()->major * 10 + card()->minor; }
static int named(const char *begin) { return !strncmp(card()->name, begin, strlen(begin)); }
static int has(const char *part) { return strstr(card()->name, part) != NULL; }

/* Clocks, bus and L2 cache decide how long work takes (clock.c), and how large the buffer is with which Inductor's benchmarks write over the L2
 * cache. Triton starts no kernel without the first three, so that they are never unknown: other cards of a capability get those of its best
 * known card. */
static const Chip chips[] = {
    {"", 60, 1328500, 715000, 4096, 4 << 20},           /* Tesla P100 */
    {"Tesla P40", 61, 1531000, 3615000, 384, 3 << 20},
    {"", 61, 1582000, 5505000, 352, 2883584},           /* GeForce GTX 1080 Ti */
    {"", 70, 1530000, 877000, 4096, 6 << 20},           /* Tesla V100-SXM2 */
    {"Tesla T4", 75, 1590000, 5001000, 256, 4 << 20},
    {"NVIDIA GeForce RTX 2080 Ti", 75, 1545000, 7000000, 352, 5767168},
    {"", 75, 1770000, 7001000, 384, 6 << 20},           /* Quadro RTX 6000 */
    {"NVIDIA A30", 80, 1440000, 1215000, 3072, 24 << 20},
    {"NVIDIA A100-SXM4-40GB", 80, 1410000, 1215000, 5120, 40 << 20},
    {"NVIDIA A100-PCIE-40GB", 80, 1410000, 1215000, 5120, 40 << 20},
    {"NVIDIA A100 80GB PCIe", 80, 1410000, 1512000, 5120, 40 << 20},
    {"", 80, 1410000, 1593000, 5120, 40 << 20},         /* A100-SXM4-80GB */
    {"NVIDIA A10", 86, 1695000, 6251000, 384, 6 << 20},
    {"", 86, 1695000, 9751000, 384, 6 << 20},           /* GeForce RTX 3090 */
    {"NVIDIA L40", 89, 2520000, 9001000, 384, 96 << 20},
    {"NVIDIA L4", 89, 2040000, 6251000, 192, 48 << 20},
    {"", 89, 2520000, 10501000, 384, 72 << 20},         /* GeForce RTX 4090 */
    {"NVIDIA H100 PCIe", 90, 1755000, 1593000, 5120, 50 << 20},
    {"NVIDIA H200", 90, 1980000, 3201000, 6144, 60 << 20},
    {"NVIDIA GH200", 90, 1980000, 2619000, 6144, 60 << 20},
    {"", 90, 1980000, 2619000, 5120, 50 << 20},         /* H100 80GB HBM3 */
    {"", 121, 2418000, 8533000, 256, 24 << 20},         /* GB10 */
    {"", 120, 2407000, 14001000, 512, 96 << 20},        /* GeForce RTX 5090 */
    {"", 100, 1965000, 3996000, 7680, 253 << 19},       /* B200 */
};
const Chip *chip(void) {
    const Chip *found = chips; /* what is older than all of them */
    for (size_t i = 0; i < sizeof chips / sizeof *chips; i++) {
        if (chips[i].version == version() && named(chips[i].name)) return &chips[i];
        if (!*chips[i].name && chips[i].version <= version() && chips[i].version >= found->version) found = &chips[i];
    }
    return found;
}

int shared_kib_of_multiprocessor(void) {
    switch (version()) {
    case 60: return 64;
    case 61: case 70: return 96;
    case 75: return 64;
    case 80: case 87: return 164;
    case 86: case 89: return 100;
    default: return card()->major >= 12 ? 100 : 228;
    }
}
int shared_bytes_of_block(void) { /* a block may have all but one KiB of it; all of it before 8.0 */
    return (shared_kib_of_multiprocessor() - (card()->major >= 8 ? 1 : 0)) * 1024;
}
int blocks_of_multiprocessor(void) {
    int v = version();
    return v == 75 || v == 86 ? 16 : v == 89 || v >= 120 ? 24 : 32;
}

/* Capabilities of boards for servers, with HBM. */
static int is_hbm(void) { int v = version(); return v == 60 || v == 70 || v == 80 || v == 90 || v == 100 || v == 103; }
/* Systems on a chip share their memory with the host's processor; Grace's GPUs and GB10 are coherent with it (NVLink-C2C). */
int is_integrated(void) { int v = version(); return v == 53 || v == 62 || v == 72 || v == 87 || v == 101 || v == 110 || v == 121; }
static int is_coherent(void) { return has("GH200") || has("GB200") || has("GB300") || has("GB10"); }
static int is_for_games(void) { return has("GeForce") || has("TITAN"); }
/* Boards of the data center are sold with ECC on, those of workstations with either. */
static int has_ecc(void) {
    int is_server = is_hbm() || named("Tesla ") || (named("NVIDIA A") && !has("RTX")) || (named("NVIDIA L") && !has("RTX"));
    return is_for_games() || is_integrated() ? 0 : is_server ? 1 : UNKNOWN;
}
/* How many times faster fp32 is than fp64, by their units in a multiprocessor. */
static int precision_ratio(void) {
    int v = version();
    return v == 103 ? UNKNOWN : is_hbm() ? 2 : v == 61 || v == 75 ? 32 : v == 86 || v == 89 || card()->major == 12 ? 64 : UNKNOWN;
}
static int copy_engines(void) {
    switch (version()) {
    case 60: case 86: case 89: return 2;
    case 75: case 80: case 90: return 3;
    case 121: return 1;
    default: return UNKNOWN;
    }
}
/* The share of the L2 cache that can be set aside: 30 of 40 MiB of an A100, 37.5 of 60 of an H200, 49.5 of 72 of an RTX 4090. */
static int persisting_bytes(void) {
    int sixteenth = chip()->l2_bytes / 16;
    switch (version()) {
    case 80: return sixteenth * 12;
    case 86: case 89: return sixteenth * 11;
    case 90: return sixteenth * 10;
    default: return card()->major < 8 ? 0 : UNKNOWN;
    }
}
/* GPUDirect RDMA is for boards of the data center and of workstations (GPUDirect RDMA documentation). */
static int has_rdma(void) { return !is_for_games() && !is_integrated(); }
/* NVLink's switches reduce and broadcast from Hopper on; boards on PCIe have none. */
static int has_multicast(void) { int v = version(); return (v == 90 || v == 100 || v == 103) && !has("PCIe") && !has("NVL"); }

double peak_bytes(void) { return 2e-6 * chip()->memory_clock_khz * chip()->bus_bits / 8; } /* two transfers in a clock */

/* Multiply-adds of a multiprocessor in a clock, dense. Of tensor cores with 16-bit factors and fp32 sums, by NVIDIA's architecture whitepapers
 * (V100, T4, A100, GA102, AD102, H100, GB202) and data sheets: 125 TFLOPS of a V100 are 80 multiprocessors x 512 x 2 x 1.53 GHz, and so on.
 * GeForce boards sum in fp32 at half the rate. */
static int tensor_rate(void) {
    int v = version(), full = v < 70 ? 0 : v < 80 ? 512 : v == 80 ? 1024 : v < 90 ? 512 : v == 90 ? 2048 : v >= 100 && v < 110 ? 4096 : 512;
    return v >= 80 && is_for_games() ? full / 2 : full;
}
static int fp32_rate(void) { int v = version(); return v == 60 || v == 70 || v == 75 || v == 80 ? 64 : 128; }

double peak_multiply_adds(int type, int on_tensor_cores) {
    int is_double = type == 1 || type == 5, is_single = type == 0 || type == 4; /* CUDA_R_64F, CUDA_C_64F, CUDA_R_32F, CUDA_C_32F */
    int is_byte = type == 3 || type == 8 || type == 28 || type == 29;           /* CUDA_R_8I, CUDA_R_8U, CUDA_R_8F_E4M3, CUDA_R_8F_E5M2 */
    double rate = fp32_rate();
    if (is_double) rate /= precision_ratio() == UNKNOWN ? 64 : precision_ratio();
    else if (on_tensor_cores && tensor_rate()) rate = tensor_rate() * (is_single ? 0.5 : is_byte ? 2 : 1); /* tf32: half of 16 bits */
    return rate * card()->multiprocessors * chip()->clock_khz * 1e-6;
}

static int value_of(int attribute) {
    int major = card()->major, linear = version() == 60 ? 1 << 27 : major >= 8 ? 1 << 28 : UNKNOWN;
    switch (attribute) {
    /* threads, blocks, memory of a multiprocessor */
    case 1: case 2: case 3: return 1024;                    /* threads of a block; its x and y */
    case 4: return 64;                                      /* its z */
    case 5: return 2147483647;                              /* a grid's x */
    case 6: case 7: return 65535;                           /* its y and z */
    case 8: return 49152;                                   /* shared memory of a block */
    case 9: return 65536;                                   /* constant memory */
    case 10: return 32;                                     /* warp */
    case 12: case 82: return 65536;                         /* registers of a block, of a multiprocessor */
    case 16: return card()->multiprocessors;
    case 39: return card()->threads;
    case 75: return major;
    case 76: return card()->minor;
    case 81: return shared_kib_of_multiprocessor() << 10;
    case 97: return shared_bytes_of_block();
    case 106: return blocks_of_multiprocessor();
    case 111: return major >= 8 ? 1024 : 0;                 /* shared memory that the driver keeps of each block */
    /* the chip */
    case 13: return chip()->clock_khz;
    case 36: return chip()->memory_clock_khz;
    case 37: return chip()->bus_bits;
    case 38: return chip()->l2_bytes;
    case 40: return copy_engines();
    case 87: return precision_ratio();
    case 108: return persisting_bytes();
    case 109: return major < 8 ? 0 : major <= 9 ? 134213632 : UNKNOWN; /* the largest window of a cache's policy */
    /* textures and surfaces; 44 says whether four texels can be gathered */
    case 11: return 2147483647;                             /* pitch of a copy */
    case 14: case 30: return 512;                           /* alignment of textures, of surfaces */
    case 51: return 32;                                     /* of a texture's pitch */
    case 21: case 22: case 56: case 70: return 131072;
    case 23: case 57: return 65536;
    case 24: case 25: case 26: case 58: case 59: case 60: return 16384;
    case 27: case 28: case 42: case 45: case 46: case 49: case 52: case 53: case 55: case 61: case 63: case 64: case 66: case 67: case 73:
    case 74: return 32768;
    case 29: case 43: case 62: case 65: return 2048;
    case 47: case 48: return 8192;
    case 54: case 68: return 2046;
    case 69: return linear;
    case 71: return 65000;
    case 72: return 2097120;
    case 77: return version() == 60 ? 16384 : major >= 8 ? 32768 : UNKNOWN;
    case 44: return 1;
    /* features that every card has from 6.0 on */
    case 15: case 31: case 78: return 1;                    /* copies beside kernels, kernels side by side, priorities of streams */
    case 19: case 41: case 83: return 1;                    /* mapped host memory, unified addresses, managed memory */
    case 79: case 80: return 1;                             /* L1 for globals, for locals */
    case 89: case 90: case 91: return 1;                    /* managed memory for both at once, preemption, registered host pointers */
    case 95: case 96: return 1;                             /* cooperative kernels, also on several devices */
    case 99: case 102: case 103: return 1;                  /* registered host memory; virtual memory, by file descriptor too */
    case 114: case 115: case 119: case 122: case 125: return 1; /* semaphores, pools and their handles (POSIX), 64-bit stream operations, IPC */
    case 117: return 1;                                     /* remote writes are flushed by the host */
    /* features that some have */
    case 18: return is_integrated();
    case 32: return has_ecc();
    case 86: case 88: case 100: return is_coherent();       /* the host's atomics, its pageable memory, its page tables */
    case 98: case 147: return is_coherent() && version() != 121 ? UNKNOWN : 0; /* flushes of remote writes; only some of the host's atomics */
    case 101: return is_coherent() && version() != 121 ? UNKNOWN : 0; /* managed memory read by the host where it lies */
    case 107: return major < 8 ? 0 : is_hbm() ? 1 : UNKNOWN; /* compressible memory */
    case 110: case 116: return has_rdma();                  /* GPUDirect RDMA, also of virtual memory */
    case 112: return major >= 7 ? 1 : UNKNOWN;              /* sparse arrays */
    case 113: return version() == 121 ? 0 : UNKNOWN;        /* host memory registered for reading only */
    case 118: return version() == 121 ? 100 : UNKNOWN;      /* who sees remote writes in order (100: their owner) */
    case 120: case 127: return major >= 9;                  /* clusters of blocks, tensor maps */
    case 123: return major >= 7;                            /* a stream's wait for a NOR */
    case 126: return major < 9 ? 1 : major <= 10 ? 4 : UNKNOWN; /* domains of memory synchronization */
    case 130: return is_coherent() ? UNKNOWN : 0;           /* its memory as a node of the host's */
    case 132: return has_multicast();
    case 136: case 137: return major == 10 ? UNKNOWN : 0;   /* decompression by the copy engine */
    /* this machine: Linux without a display, one card behind no fabric, in the default mode */
    case 17: case 20: case 35: return 0;                    /* a limit of kernels' time, compute mode, the TCC driver of Windows */
    case 33: return visible_card(current_device()) + 1;     /* its bus: 0000:01:00.0 */
    case 34: case 50: return 0;
    case 84: case 85: return 0;                             /* a board of several, and its number */
    case 92: case 93: case 94: return 0;                    /* the first version of stream operations, which CUDA 12 gave up */
    case 104: case 105: case 135: return 0;                 /* handles of Windows, Direct3D */
    case 128: return 0;                                     /* handles for a fabric */
    case 133: return 0;                                     /* MPS */
    case 134: return -1;                                    /* the host's node: it has none */
    default: return UNKNOWN;
    }
}
int cudaDeviceGetAttribute(int *out, int attribute, int device) {
    int before = current_device();
    if (!choose_device(device)) return INVALID_DEVICE;
    int value = value_of(attribute);
    choose_device(before);
    if (value == UNKNOWN) return INVALID_VALUE;
    *out = value;
    return 0;
}
