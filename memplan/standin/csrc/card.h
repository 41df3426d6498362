/* The card that is stood in for, and the one account of its memory that the runtime, the driver and NVML share.
 *
 * Nothing here needs a CUDA header: the few types and numbers that PyTorch's libraries exchange with CUDA are declared where they are used. */
#ifndef MEMPLAN_CARD_H
#define MEMPLAN_CARD_H

#include <stddef.h>
#include <stdint.h>

#define PAGE ((size_t)2 << 20)           /* the driver gives memory out in pages of 2 MiB */
#define FIRST_ADDRESS 0x700000000000ULL  /* nothing of the host lies from here on */
#define MALLOC_BYTES 0x80000000000ULL    /* of a device's addresses, its first: where cudaMalloc puts memory */
#define OTHERS_ADDRESS 0x100000000000ULL /* nor here, */
#define OTHERS_BYTES 0x400000000000ULL   /* up to where programs are loaded */

typedef struct {
    char name[256];
    int major, minor, multiprocessors, threads; /* of a multiprocessor */
    size_t total_bytes;   /* what programs can have */
    size_t context_bytes; /* taken before the first allocation */
} Card;

/* One process on one card, in the file MEMPLAN_ACCOUNT that processes share: memory that one has no other can have. */
typedef struct {
    int pid, card;
    size_t bytes; /* its context included */
} Slot;
#define SLOTS 64
#define MOST_CARDS 64

/* Cards are numbered as on the bus, as in MEMPLAN_CARD, which is read once in a program; devices are what CUDA_VISIBLE_DEVICES leaves of them. */
const Card *card(void);          /* of the device that this thread has chosen */
const Card *card_on_bus(int number);
int num_cards_on_bus(void);
int num_visible_cards(void);
int visible_card(int ordinal);   /* the card that CUDA's device *ordinal* is */
int current_device(void);
int choose_device(int ordinal);  /* 1 where there is one, else 0 */
void uuid_of(int card, unsigned char out[16]);
int card_take(int device, size_t bytes); /* 1 and counted when it fits, else 0 */
void card_give(int device, size_t bytes);
void card_shares(size_t bytes, int is_more); /* of what was taken, handed on to other processes; or no longer */
size_t card_free_bytes(int card);
uintptr_t card_reserve(size_t bytes); /* addresses of the chosen device that nothing backs, never handed out twice */
void addresses_begin(int device, uintptr_t first, uintptr_t end); /* of those for cudaMalloc */
uintptr_t addresses_take(int device, size_t bytes); /* where cudaMalloc puts memory, in whole pages; 0 where its addresses are used up */
void addresses_give(int device, uintptr_t address, size_t bytes);
int device_of(const void *pointer); /* -1: the host's */
int card_owns(const void *pointer);
void *new_handle(void);          /* for streams, events, library handles: never NULL, never twice */
void tell_parent(const char *kind, const char *name, size_t number); /* a line of MEMPLAN_LOG; no number where it is 0 */
int not_served(const char *call, int code); /* say the call's name, and return the library's own "not supported" */
size_t library_workspace(const char *kind, size_t allowance); /* what to answer where only the real library knows: 0, or an allowance */
size_t known_workspace(size_t bytes); /* what to answer where the real library said *bytes* */
size_t room_for_trials(size_t free_bytes); /* how much of what is free cuDNN's kernels are to be tried with */
void refused_workspace(size_t bytes); /* say that a plan which wants so many *bytes* is not to run; 0: another one is */
void unsure_workspace(size_t bytes, size_t by); /* say that one of so many *bytes*, as was answered, may be larger on the card */
void library_unknown(const char *kind); /* say that a library may take more than anybody can know */

/* What is known of the device's memory (contents.c). *memory_copy* copies *height* rows of *width* bytes that lie a pitch apart, whoever
 * owns the addresses. */
typedef struct {
    void *to;
    size_t to_pitch;
    const void *from;
    size_t from_pitch, width, height;
} Copy;
void kernel_ran(void);           /* any of the device's memory may be overwritten now */
void kernel_launched(size_t threads); /* the same, and the clock goes on by what so many threads take */
void card_memory_set(uintptr_t to, unsigned value, size_t width, size_t count); /* *count* values of *width* bytes */
void card_memory_lost(uintptr_t address, size_t bytes); /* given back: what comes there next is new */
#pragma GCC visibility push(hidden) /* a library of the program may have functions of these names */
void memory_copy(Copy copy);
int memory_known(const void *address, void *out, size_t bytes); /* 1 where every byte is known, which then are in *out* */
void unknown_read(void *to, size_t bytes); /* the host reads what only the real device would know */
int is_own_check(unsigned char *to, size_t bytes); /* PyTorch reads whether a call of its own went well: 1, and answered */
#pragma GCC visibility pop

/* The device's clock (clock.c), in nanoseconds. */
#define LAUNCH_NS 2000.0         /* from one kernel to the next */
void device_works(double ns);    /* the clock goes on; while a stream captures, that is noted in the graph */
double bytes_take(double bytes); /* to be read or written on the device */

int stream_captures(void *stream);
int is_capture_on(void);
void start_recorder(void);       /* where it has not been started yet (python.c) */

#endif
