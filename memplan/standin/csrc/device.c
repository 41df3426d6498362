/* What the card says of itself, as a structure; one by one in attributes.c. */
#include "attributes.h"
#include "card.h"

#include <stdio.h>
#include <string.h>

/* Where the fields of struct cudaDeviceProp lie (driver_types.h of CUDA 12.4 and 13.0): 13 dropped clockRate and others. */
#if CUDA_MAJOR >= 13
enum { SIZE = 1008, MULTIPROCESSORS = 384, INTEGRATED = 388, CONCURRENT = 560, PCI_BUS = 568, UNIFIED = 588, L2 = 596, THREADS = 604, SHARED_SM = 624,
       REGISTERS_SM = 632, SHARED_OPTIN = 672, BLOCKS = 688 };
#else
enum { SIZE = 1032, MULTIPROCESSORS = 388, INTEGRATED = 396, CONCURRENT = 576, PCI_BUS = 584, UNIFIED = 604, L2 = 616, THREADS = 624, SHARED_SM = 640,
       REGISTERS_SM = 648, SHARED_OPTIN = 696, BLOCKS = 712 };
#endif
enum { TOTAL = 288, SHARED_BLOCK = 296, REGISTERS = 304, WARP = 308, PITCH = 312, THREADS_BLOCK = 320, BLOCK_DIM = 324, GRID_DIM = 336,
       CONSTANT = 352, MAJOR = 360, MINOR = 364, TEXTURE = 368 };

enum { INVALID_DEVICE = 101 }; /* cudaErrorInvalidDevice */

static void put_int(char *at, int offset, int value) { memcpy(at + offset, &value, sizeof value); }
static void put_size(char *at, int offset, size_t value) { memcpy(at + offset, &value, sizeof value); }

static int properties_of_current(char *out) {
    memset(out, 0, SIZE);
    memcpy(out, card()->name, strlen(card()->name) + 1);
    uuid_of(visible_card(current_device()), (unsigned char *)out + 256);
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
    put_int(out, INTEGRATED, is_integrated());
    put_int(out, CONCURRENT, 1);
    put_int(out, PCI_BUS, visible_card(current_device()) + 1);
    put_int(out, UNIFIED, 1);
    put_int(out, L2, chip()->l2_bytes);
    put_int(out, THREADS, card()->threads);
    put_size(out, SHARED_SM, (size_t)shared_kib_of_multiprocessor() << 10);
    put_int(out, REGISTERS_SM, 65536);
    put_size(out, SHARED_OPTIN, shared_bytes_of_block());
    put_int(out, BLOCKS, blocks_of_multiprocessor());
    return 0;
}
int cudaGetDeviceProperties(char *out, int device) {
    int before = current_device();
    if (!choose_device(device)) return INVALID_DEVICE;
    properties_of_current(out);
    choose_device(before);
    return 0;
}
int cudaGetDeviceProperties_v2(char *out, int device) { return cudaGetDeviceProperties(out, device); } /* its name in CUDA 12 */

int cudaGetDeviceCount(int *out) {
    start_recorder();
    *out = num_visible_cards();
    return *out ? 0 : 100; /* cudaErrorNoDevice */
}
int cudaGetDevice(int *out) { *out = current_device(); return 0; }
int cudaSetDevice(int device) { return choose_device(device) ? 0 : INVALID_DEVICE; }
int cudaDriverGetVersion(int *out) { *out = CUDA_MAJOR * 1000; return 0; }
int cudaRuntimeGetVersion(int *out) { *out = CUDA_MAJOR * 1000; return 0; }
int cudaDeviceGetPCIBusId(char *out, int size, int device) {
    snprintf(out, size, "0000:%02x:00.0", visible_card(device) + 1);
    return 0;
}
int cudaDeviceCanAccessPeer(int *out, int device, int peer) { *out = 0; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
