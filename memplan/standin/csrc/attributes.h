/* Facts of a card that both its structure of properties and its attributes tell. */
#ifndef MEMPLAN_ATTRIBUTES_H
#define MEMPLAN_ATTRIBUTES_H

/* What differs among cards of one capability. */
typedef struct {
    const char *name;   /* how the card's name begins; "" is any other of that capability */
    int version;        /* 10 x major + minor */
    int clock_khz, memory_clock_khz, bus_bits, l2_bytes;
} Chip;

#pragma GCC visibility push(hidden) /* nothing of these names is for the program that is rehearsed */
const Chip *chip(void);
int is_integrated(void);
int shared_kib_of_multiprocessor(void);
int shared_bytes_of_block(void);
int blocks_of_multiprocessor(void);
/* What the card does in a nanosecond at its peak: bytes of memory, and multiply-adds of a matrix product whose numbers have the kind of
 * cudaDataType (on_tensor_cores: 16 bits or fewer, and fp32 where it is told to round to tf32). */
double peak_bytes(void);
double peak_multiply_adds(int type, int on_tensor_cores);
#pragma GCC visibility pop

#endif
