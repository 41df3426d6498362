/* cuBLAS, cuDNN and cuFFT as far as their answers matter: PyTorch allocates cuBLAS's workspaces itself, cuDNN's plans need none here. */
#include "card.h"
#include "descriptors.h"

#include <stdlib.h>
#include <string.h>

/* cuBLAS */
size_t cublasLtGetVersion(void) { return CUDA_MAJOR * 10000; }
int cublasLtMatmulAlgoConfigGetAttribute(void *algorithm, int attribute, void *out, size_t bytes, size_t *written) {
    memset(out, 0, bytes);
    if (written) *written = bytes;
    return 0;
}
int cublasCreate_v2(void **out) { *out = new_handle(); return 0; }
int cublasLtCreate(void **out) { *out = new_handle(); return 0; }
int cublasGetMathMode(void *handle, int *out) { *out = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *out) { *out = 0; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int requested,
                                   char *results, int *found) {
    memset(results, 0, (size_t)requested * 96); /* cublasLtMatmulHeuristicResult_t: algorithms without workspace, state success */
    *found = requested;
    return 0;
}
/* cuDNN's kernels that leave a product to cuBLASLt ask it for one, by descriptors that they hold themselves. */
#define ON_THE_HOST(Call) int Call(void) { return 0; }
ON_THE_HOST(cublasLtDestroy)
ON_THE_HOST(cublasLtMatmulDescInit_internal)
ON_THE_HOST(cublasLtMatmulPreferenceInit_internal)
ON_THE_HOST(cublasLtMatrixLayoutInit_internal)
ON_THE_HOST(cublasLtMatrixTransformDescInit_internal)
int cublasLtGetProperty(int which, int *out) { *out = which == 0 ? CUDA_MAJOR : 0; return 0; } /* libraryPropertyType: the major number */

/* Matrices go to the device and back as copies of rows do: a column is a row of *rows* elements. A vector is a matrix of one row. */
static int copy_matrix(int rows, int columns, size_t bytes, const void *from, int from_ld, void *to, int to_ld) {
    memory_copy((Copy){to, to_ld * bytes, from, from_ld * bytes, rows * bytes, columns});
    return 0;
}
#define COPIES_MATRIX(Call, ...) \
    int Call(int rows, int columns, int element, const void *from, int from_ld, void *to, int to_ld __VA_ARGS__) { \
        return copy_matrix(rows, columns, element, from, from_ld, to, to_ld); \
    }
#define COPIES_VECTOR(Call, ...) \
    int Call(int n, int element, const void *from, int from_step, void *to, int to_step __VA_ARGS__) { \
        return copy_matrix(1, n, element, from, from_step, to, to_step); \
    }
COPIES_MATRIX(cublasSetMatrix)
COPIES_MATRIX(cublasGetMatrix)
COPIES_MATRIX(cublasSetMatrixAsync, , void *stream)
COPIES_MATRIX(cublasGetMatrixAsync, , void *stream)
COPIES_VECTOR(cublasSetVector)
COPIES_VECTOR(cublasGetVector)
COPIES_VECTOR(cublasSetVectorAsync, , void *stream)
COPIES_VECTOR(cublasGetVectorAsync, , void *stream)

/* One number computed on the device: it stays there, or the host reads it (cublasSetPointerMode). */
static int give_result(void *result, size_t bytes) {
    if (card_owns(result)) card_memory_lost((uintptr_t)result, bytes);
    else unknown_read(result, bytes);
    return 0;
}
#define OF_ONE(Call, bytes) int Call(void *handle, int n, void *x, int x_step, void *result) { return give_result(result, bytes); }
#define OF_TWO(Call, bytes) \
    int Call(void *handle, int n, void *x, int x_step, void *y, int y_step, void *result) { return give_result(result, bytes); }
OF_TWO(cublasSdot_v2, 4)
OF_TWO(cublasDdot_v2, 8)
OF_TWO(cublasCdotu_v2, 8)
OF_TWO(cublasCdotc_v2, 8)
OF_TWO(cublasZdotu_v2, 16)
OF_TWO(cublasZdotc_v2, 16)
OF_ONE(cublasSnrm2_v2, 4)
OF_ONE(cublasDnrm2_v2, 8)
OF_ONE(cublasScnrm2_v2, 4)
OF_ONE(cublasDznrm2_v2, 8)
OF_ONE(cublasSasum_v2, 4)
OF_ONE(cublasDasum_v2, 8)
OF_ONE(cublasScasum_v2, 4)
OF_ONE(cublasDzasum_v2, 8)
OF_ONE(cublasIsamax_v2, 4)
OF_ONE(cublasIdamax_v2, 4)
OF_ONE(cublasIcamax_v2, 4)
OF_ONE(cublasIzamax_v2, 4)
OF_ONE(cublasIsamin_v2, 4)
OF_ONE(cublasIdamin_v2, 4)
OF_ONE(cublasIcamin_v2, 4)
OF_ONE(cublasIzamin_v2, 4)
int cublasDotEx(void *handle, int n, void *x, int x_type, int x_step, void *y, int y_type, int y_step, void *result, int type, int compute) {
    int is_half = type == 2 || type == 14, is_wide = type == 1 || type == 4; /* cudaDataType: half, bfloat16; double, complex of floats */
    return give_result(result, is_half ? 2 : is_wide ? 8 : type == 5 ? 16 : 4);
}

/* Batched solvers say on the host whether their arguments were right, and on the device what came of each matrix. */
#define SAYS_ARGUMENTS_ARE_RIGHT(Call, ...) int Call(__VA_ARGS__) { kernel_ran(); *info = 0; return 0; }
#define GELS void *h, int trans, int m, int n, int columns, void *a, int lda, void *c, int ldc, int *info, int *on_device, int batch
#define GEQRF void *h, int m, int n, void *a, int lda, void *tau, int *info, int batch
#define GETRS void *h, int trans, int n, int columns, void *a, int lda, int *pivots, void *b, int ldb, int *info, int batch
SAYS_ARGUMENTS_ARE_RIGHT(cublasSgelsBatched, GELS)
SAYS_ARGUMENTS_ARE_RIGHT(cublasDgelsBatched, GELS)
SAYS_ARGUMENTS_ARE_RIGHT(cublasCgelsBatched, GELS)
SAYS_ARGUMENTS_ARE_RIGHT(cublasZgelsBatched, GELS)
SAYS_ARGUMENTS_ARE_RIGHT(cublasSgeqrfBatched, GEQRF)
SAYS_ARGUMENTS_ARE_RIGHT(cublasDgeqrfBatched, GEQRF)
SAYS_ARGUMENTS_ARE_RIGHT(cublasCgeqrfBatched, GEQRF)
SAYS_ARGUMENTS_ARE_RIGHT(cublasZgeqrfBatched, GEQRF)
SAYS_ARGUMENTS_ARE_RIGHT(cublasSgetrsBatched, GETRS)
SAYS_ARGUMENTS_ARE_RIGHT(cublasDgetrsBatched, GETRS)
SAYS_ARGUMENTS_ARE_RIGHT(cublasCgetrsBatched, GETRS)
SAYS_ARGUMENTS_ARE_RIGHT(cublasZgetrsBatched, GETRS)

/* cuDNN 9. Descriptors are memory of their own, so that each can be destroyed. */
#define DESCRIPTOR(Kind) \
    int cudnnCreate##Kind##Descriptor(void **out) { *out = calloc(1, sizeof(Descriptor)); return *out ? 0 : 4000; } \
    int cudnnDestroy##Kind##Descriptor(void *descriptor) { free(descriptor); return 0; }
DESCRIPTOR(Tensor) DESCRIPTOR(Filter) DESCRIPTOR(Convolution) DESCRIPTOR(Activation) DESCRIPTOR(Dropout) DESCRIPTOR(Pooling)
DESCRIPTOR(CTCLoss)
int cudnnSetTensorNdDescriptor(Descriptor *descriptor, int type, int num_dims, const int *dims, const int *strides) {
    if (num_dims > 8) return 2000; /* CUDNN_STATUS_BAD_PARAM: cuDNN has as many at most */
    descriptor->type = type;
    descriptor->num_dims = num_dims;
    memcpy(descriptor->dims, dims, num_dims * sizeof *dims);
    memcpy(descriptor->strides, strides, num_dims * sizeof *strides);
    return 0;
}
int cudnnGetTensorNdDescriptor(const Descriptor *descriptor, int room, int *type, int *num_dims, int *dims, int *strides) {
    *type = descriptor->type;
    *num_dims = descriptor->num_dims;
    for (int i = 0; i < descriptor->num_dims && i < room; i++) {
        dims[i] = descriptor->dims[i];
        strides[i] = descriptor->strides[i];
    }
    return 0;
}
/* of a matrix of a recurrent network, which is all that PyTorch asks of */
int cudnnGetFilterNdDescriptor(const Descriptor *descriptor, int room, int *type, int *format, int *num_dims, int *dims) {
    *type = descriptor->type;
    *format = 0;
    *num_dims = descriptor->num_dims;
    for (int i = 0; i < descriptor->num_dims && i < room; i++) dims[i] = descriptor->dims[i];
    return 0;
}

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDA_MAJOR * 1000; }
const char *cudnnGetErrorString(int status) { return status ? "not served by the simulated GPU" : "success"; }
void cudnnGetLastErrorString(char *out, size_t size) { if (size) out[0] = 0; }
/* its minor number had one digit until 9.0 */
enum { MAJOR_UNIT = CUDNN_VERSION >= 90000 ? 10000 : 1000 };
int cudnnGetProperty(int property, int *out) {
    *out = property == 0 ? CUDNN_VERSION / MAJOR_UNIT : property == 1 ? CUDNN_VERSION % MAJOR_UNIT / 100 : CUDNN_VERSION % 100;
    return 0;
}
int cudnnCreate(void **out) { *out = new_handle(); return 0; }
int cudnnGetStream(void *handle, void **out) { *out = NULL; return 0; }

/* Batch normalization asks for sizes before it runs. Of channels last, the H100 (cuDNN 9.19, CUDA 13.0, tests/accuracy/recordings) wanted
 * sums of 64 channels over tiles of rows, one for each group and tile, and two more: two floats a channel forward and backward, and a word a
 * group; equal in the 9 recorded, of float and half. Of channels first, and as reserve space, it wanted nothing. Double, and numbers of
 * channels that are no multiple of 8, were not recorded. */
enum { CHANNELS_TOGETHER = 64, SUMS_BYTES = CHANNELS_TOGETHER * 2 * sizeof(float) };
enum { SPATIAL_PERSISTENT = 2 }; /* cudnnBatchNormMode_t: PyTorch's for what it takes for channels last */
static size_t sums_of_channels(int mode, const Descriptor *x, int tile, int tile_bytes, int rest) {
    if (x->num_dims < 4 || x->strides[1] != 1 || x->dims[1] == 1) return 0;
    size_t rows = x->dims[0], channels = x->dims[1], wider = x->type == 1 ? 2 : 1;
    for (int i = 2; i < x->num_dims; i++) rows *= x->dims[i];
    if (rows == (size_t)x->dims[0] && mode != SPATIAL_PERSISTENT) return 0; /* of one place, channels last are channels first as well */
    size_t groups = (channels + CHANNELS_TOGETHER - 1) / CHANNELS_TOGETHER, tiles = groups * ((rows + tile - 1) / tile);
    size_t bytes = wider * (tiles * tile_bytes + 2 * SUMS_BYTES + rest + 4 * groups);
    return wider > 1 || channels % 8 ? library_workspace("batch normalization", bytes) : bytes;
}
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int mode, int with, const Descriptor *x, void *z, void *y, void *b,
                                                             void *a, size_t *out) {
    *out = sums_of_channels(mode, x, bytes_of_type(x->type) == 2 ? 160 : 64, SUMS_BYTES + 4, 48); /* each tile has a word of its own */
    return 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int with, const Descriptor *x, void *y, void *dy, void *dz,
                                                      void *dx, void *b, void *a, size_t *out) {
    *out = sums_of_channels(mode, x, 96, SUMS_BYTES, 32);
    return 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int with, void *a, void *x, size_t *out) { *out = 0; return 0; }

/* What is asked of a dropout's descriptor is whether it drops anything. */
int cudnnRestoreDropoutDescriptor(Descriptor *dropout, void *handle, float share, void *states, size_t bytes, unsigned long long seed) {
    kernel_ran();
    dropout->dims[0] = share > 0;
    return 0;
}
int cudnnSetDropoutDescriptor(Descriptor *dropout, void *handle, float share, void *states, size_t bytes, unsigned long long seed) {
    card_memory_lost((uintptr_t)states, bytes); /* random states are made there */
    dropout->dims[0] = share > 0;
    return 0;
}
int cudnnDropoutGetStatesSize(void *handle, size_t *out) { *out = (size_t)1 << 20; return 0; }

/* CTC: how much cuDNN takes is not documented. It is what the equations need (Graves and others 2006, sections 4.1 and 4.2), for each time
 * step a forward and a backward variable of each label and of the blanks around them and the probabilities after the softmax, and a row
 * for each sequence: equal in the 58 losses recorded on an H100 (cuDNN 9.19, CUDA 13.0, tests/accuracy/recordings), all of 255 labels,
 * which PyTorch says where the lengths are on the GPU. How the row, of 513 floats, depends on the labels was not seen. */
enum { RECORDED_LABELS = 255, RECORDED_ROW = 513 };
static size_t ctc_workspace(const Descriptor *probabilities, size_t longest_labels) { /* probabilities: time steps, batch, classes */
    size_t batch = probabilities->dims[1], each = 2 * (2 * longest_labels + 1) + probabilities->dims[2];
    size_t row = longest_labels > RECORDED_LABELS ? 2 * longest_labels + 3 : RECORDED_ROW;
    size_t bytes = batch * (probabilities->dims[0] * each + row) * sizeof(float);
    return longest_labels == RECORDED_LABELS && CUDNN_VERSION >= 90000 ? bytes : library_workspace("CTC loss", bytes);
}
/* A descriptor says how many labels there may be, which is all that is asked of it. */
int cudnnSetCTCLossDescriptor_v8(Descriptor *loss, int type, int normalized, int nan, int longest_labels) {
    loss->dims[0] = longest_labels;
    return 0;
}
int cudnnSetCTCLossDescriptor_v9(Descriptor *loss, int type, int normalized, int gradient, int longest_labels) {
    return cudnnSetCTCLossDescriptor_v8(loss, type, normalized, gradient, longest_labels);
}
int cudnnGetCTCLossWorkspaceSize_v8(void *handle, int algorithm, const Descriptor *loss, const Descriptor *probabilities,
                                    const Descriptor *gradients, size_t *out) {
    *out = ctc_workspace(probabilities, loss->dims[0]);
    return 0;
}
/* of lengths on the host */
int cudnnGetCTCLossWorkspaceSize(void *handle, const Descriptor *probabilities, const Descriptor *gradients, const int *labels,
                                 const int *label_lengths, const int *input_lengths, int algorithm, const Descriptor *loss, size_t *out) {
    int longest = 0;
    for (int i = 0; i < probabilities->dims[1]; i++) longest = label_lengths[i] > longest ? label_lengths[i] : longest;
    *out = ctc_workspace(probabilities, longest);
    return 0;
}

/* cuFFT */
int cufftCreate(int *plan) { *plan = 1; return 0; }
const char *cusparseGetErrorString(int status) { return status ? "not served by the simulated GPU" : "success"; }
const char *cusparseGetErrorName(int status) { return status ? "CUSPARSE_STATUS_NOT_SUPPORTED" : "CUSPARSE_STATUS_SUCCESS"; }

static size_t fourier_bytes(int type) { /* cudaDataType of an element: complex ones are twice their parts */
    switch (type) {
    case 1: case 5: return 16;        /* double */
    case 6: case 2: return 4;         /* half */
    default: return 8;
    }
}
static int has_primes_up_to(long long n, long long most) {
    for (long long prime = 2; prime <= most; prime++)
        while (n > 1 && n % prime == 0) n /= prime;
    return n == 1;
}
/* Transforms that want nothing, of floats: recorded of an H100 (CUDA 13.0, tests/accuracy/recordings) of
 * powers of two up to 2^14 alone and up to 2^9 in two and three dimensions, and of other sides without a prime factor above 13 up to
 * 396. To real numbers none longer was recorded. */
static int needs_nothing(int rank, const long long *n, int becomes_real) {
    for (int i = 0; i < rank; i++) {
        int is_power = (n[i] & (n[i] - 1)) == 0;
        if (!has_primes_up_to(n[i], 13) || n[i] > (is_power && rank == 1 && !becomes_real ? 1 << 14 : 512)) return 0;
    }
    return 1;
}
/* Of others an upper bound. Those recorded wanted nothing (such as 43 x 70 and 431, but not 71 x 6) or as much as they transform, as
 * complex numbers. A long side with a large prime factor is a convolution (Bluestein) of the next length 2^a 3^b 5^c from twice its own
 * on, twice, each in whole KiB, which is exact for the complex ones recorded, of 8458 to 17235; up to 3010, and up to 3625 for real ones
 * of odd length, none was recorded. A real one of odd length is taken for complex, and a little longer; one of even length for complex of
 * half the length, but for twice that where it is long: of 5540 that was recorded, of 2852 not. */
static size_t convolved(long long side, size_t others, size_t element_bytes) {
    long long length = 2 * side - 1;
    while (!has_primes_up_to(length, 5)) length++;
    return 2 * ((others * length * element_bytes + 1023) / 1024 * 1024);
}
static size_t transform_bytes(int rank, const long long *n, size_t batch, int is_real, size_t element_bytes) {
    size_t elements = batch, most = 0;
    for (int i = 0; i < rank; i++) {
        size_t last = !is_real || i < rank - 1 ? n[i] : n[i] % 2 || n[i] > 2852 ? n[i] + 32 : n[i] / 2 + 1;
        elements *= last;
    }
    for (int i = 0; i < rank; i++) {
        long long side = is_real && i == rank - 1 && n[i] % 2 == 0 ? n[i] / 2 : n[i];
        int is_odd = is_real && i == rank - 1 && n[i] % 2;
        if (side <= (is_odd ? 3625 : 3010) || has_primes_up_to(side, 13)) continue;
        size_t others = batch;
        for (int j = 0; j < rank; j++) others *= j == i ? 1 : n[j];
        size_t bytes = convolved(side, others, element_bytes);
        if (bytes > most) most = bytes;
    }
    return most > elements * element_bytes ? most : elements * element_bytes;
}
int cufftXtMakePlanMany(int plan, int rank, long long *n, void *inembed, long long istride, long long idist, int in, void *onembed,
                        long long ostride, long long odist, int out, long long batch, size_t *work, int type) {
    int is_float = type == 4, becomes_real = out != 4; /* CUDA_C_32F: complex numbers of floats */
    *work = is_float && needs_nothing(rank, n, becomes_real) ? 0
        : library_workspace("fourier", transform_bytes(rank, n, batch, in != out, fourier_bytes(type)));
    return 0;
}
