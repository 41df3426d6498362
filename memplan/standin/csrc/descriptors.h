/* cuDNN's descriptors of tensors: shapes that some caller reads back. */
#ifndef MEMPLAN_DESCRIPTORS_H
#define MEMPLAN_DESCRIPTORS_H

#include <stddef.h>

typedef struct {
    int type, num_dims, dims[8], strides[8];
} Descriptor;

static inline size_t bytes_of_type(int type) { /* cudnnDataType_t */
    switch (type) {
    case 1: case 4: case 11: return 8;          /* double, and 64-bit integers */
    case 2: case 9: return 2;                   /* half, bfloat16 */
    case 3: case 8: case 12: case 13: case 10: return 1; /* bytes, fp8, bool */
    default: return 4;
    }
}
static inline void describe(Descriptor *out, int num_dims, const int *dims) {
    int stride = 1;
    out->num_dims = num_dims;
    for (int i = num_dims; i-- > 0; stride *= dims[i]) {
        out->dims[i] = dims[i];
        out->strides[i] = stride;
    }
}
#endif
