/* What the card says of itself. */
#include "card.h"

#include <stdio.h>
#include <string.h>

/* Facts that follow from the compute capability (CUDA C++ programming guide, technical specifications for each capability). */
static int threads_of_multiprocessor(void) {
    int version = card()->major * 10 + card()->minor;
    return version == 75 ? 1024 : version == 86 || version == 87 || version == 89 || version >= 120 ? 1536 : 2048;
}
static int shared_kib_of_multiprocessor(void) {
    switch (card()->major * 10 + card()->minor) {
    case 60: return 64;
    case 61: case 70: return 96;
    case 75: return 64;
    case 80: case 87: return 164;
    case 86: case 89: return 100;
    default: return card()->major >= 12 ? 100 : 228;
    }
}
static int shared_bytes_of_block(void) { /* a block may have all but one KiB of it; all of it before 8.0 */
    return (shared_kib_of_multiprocessor() - (card()->major >= 8 ? 1 : 0)) * 1024;
}
static int blocks_of_multiprocessor(void) {
    int version = card()->major * 10 + card()->minor;
    return version == 75 || version == 86 ? 16 : version == 89 || version >= 120 ? 24 : 32;
}

/* Where the fields of struct cudaDeviceProp lie (driver_types.h of CUDA 12.4 and 13.0): 13 dropped clockRate and others. */
#if CUDA_MAJOR >= 13
enum { SIZE = 1008, MULTIPROCESSORS = 384, CONCURRENT = 560, PCI_BUS = 568, UNIFIED = 588, L2 = 596, THREADS = 604, SHARED_SM = 624,
       REGISTERS_SM = 632, SHARED_OPTIN = 672, BLOCKS = 688 };
#else
enum { SIZE = 1032, MULTIPROCESSORS = 388, CONCURRENT = 576, PCI_BUS = 584, UNIFIED = 604, L2 = 616, THREADS = 624, SHARED_SM = 640,
       REGISTERS_SM = 648, SHARED_OPTIN = 696, BLOCKS = 712 };
#endif
enum { TOTAL = 288, SHARED_BLOCK = 296, REGISTERS = 304, WARP = 308, PITCH = 312, THREADS_BLOCK = 320, BLOCK_DIM = 324, GRID_DIM = 336,
       CONSTANT = 352, MAJOR = 360, MINOR = 364, TEXTURE = 368 };

static void put_int(char *at, int offset, int value) { memcpy(at + offset, &value, sizeof value); }
static void put_size(char *at, int offset, size_t value) { memcpy(at + offset, &value, sizeof value); }

int cudaGetDeviceProperties(char *out, int device) {
    memset(out, 0, SIZE);
    memcpy(out, card()->name, strlen(card()->name) + 1);
    uuid_of(visible_card(0), (unsigned char *)out + 256);
    put_size(out, TOTAL, card()->total_bytes);
    put_size(out, SHARED_BLOCK, 49152);
    put_int(out, REGISTERS, 65536);
    put_int(out, WARP, 32);
    put_size(out, PITCH, 2147483647);
    put_int(out, THREADS_BLOCK, 1024);
    put_int(out, BLOCK_DIM, 1024), put_int(out, BLOCK_DIM + 4, 1024), put_int(out, BLOCK_DIM + 8, 64);
    put_int(out, GRID_DIM, 2147483647), put_int(out, GRID_DIM + 4, 65535), put_int(out, GRID_DIM + 8, 65535);
    put_size(out, CONSTANT, 65536);
    put_int(out, MAJOR, card()->major), put_int(out, MINOR, card()->minor);
    put_size(out, TEXTURE, 512);
    put_int(out, MULTIPROCESSORS, card()->multiprocessors);
    put_int(out, CONCURRENT, 1);
    put_int(out, PCI_BUS, 1);
    put_int(out, UNIFIED, 1);
    put_int(out, L2, 60 << 20);
    put_int(out, THREADS, threads_of_multiprocessor());
    put_size(out, SHARED_SM, (size_t)shared_kib_of_multiprocessor() << 10);
    put_int(out, REGISTERS_SM, 65536);
    put_size(out, SHARED_OPTIN, shared_bytes_of_block());
    put_int(out, BLOCKS, blocks_of_multiprocessor());
    return 0;
}
int cudaGetDeviceProperties_v2(char *out, int device) { return cudaGetDeviceProperties(out, device); } /* its name in CUDA 12 */

/* enum cudaDeviceAttr, whose numbers the driver's CUdevice_attribute shares */
int cudaDeviceGetAttribute(int *out, int attribute, int device) {
    switch (attribute) {
    case 1: *out = 1024; break;                             /* threads of a block */
    case 8: *out = 49152; break;                            /* shared memory of a block */
    case 10: *out = 32; break;                              /* warp */
    case 16: *out = card()->multiprocessors; break;
    case 38: *out = 60 << 20; break;                        /* L2 cache */
    case 39: *out = threads_of_multiprocessor(); break;
    case 75: *out = card()->major; break;
    case 76: *out = card()->minor; break;
    case 81: *out = shared_kib_of_multiprocessor() << 10; break;
    case 12: case 82: *out = 65536; break;                  /* registers of a block, of a multiprocessor */
    case 97: *out = shared_bytes_of_block(); break;
    case 106: *out = blocks_of_multiprocessor(); break;
    default: *out = 1;                                      /* what is left are features: present */
    }
    return 0;
}

/* Of several cards a program has the first that it can see. */
int cudaGetDeviceCount(int *out) {
    *out = num_visible_cards() > 0;
    return *out ? 0 : 100; /* cudaErrorNoDevice */
}
int cudaGetDevice(int *out) { *out = 0; return 0; }
int cudaSetDevice(int device) { return device == 0 ? 0 : 101; } /* cudaErrorInvalidDevice */
int cudaDriverGetVersion(int *out) { *out = CUDA_MAJOR * 1000; return 0; }
int cudaRuntimeGetVersion(int *out) { *out = CUDA_MAJOR * 1000; return 0; }
int cudaDeviceGetPCIBusId(char *out, int size, int device) { snprintf(out, size, "0000:01:00.0"); return 0; }
int cudaDeviceCanAccessPeer(int *out, int device, int peer) { *out = 0; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
