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
    memset(results, 0, (size_t)requested * 96); /* cublasLtMatmulHeuristicResult_t: an algorithm without workspace, state success */
    *found = 1;
    return 0;
}

/* cuDNN 9. Descriptors are memory of their own, so that each can be destroyed. */
#define DESCRIPTOR(Kind) \
    int cudnnCreate##Kind##Descriptor(void **out) { *out = calloc(1, sizeof(Descriptor)); return *out ? 0 : 4000; } \
    int cudnnDestroy##Kind##Descriptor(void *descriptor) { free(descriptor); return 0; }
DESCRIPTOR(Tensor) DESCRIPTOR(Filter) DESCRIPTOR(Convolution) DESCRIPTOR(Activation) DESCRIPTOR(Dropout) DESCRIPTOR(Pooling)
int cudnnGetTensorNdDescriptor(const Descriptor *descriptor, int room, int *type, int *num_dims, int *dims, int *strides) {
    *type = descriptor->type;
    *num_dims = descriptor->num_dims;
    for (int i = 0; i < descriptor->num_dims && i < room; i++) {
        dims[i] = descriptor->dims[i];
        strides[i] = descriptor->strides[i];
    }
    return 0;
}

size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDA_MAJOR * 1000; }
const char *cudnnGetErrorString(int status) { return status ? "not served by the stand-in device" : "success"; }
void cudnnGetLastErrorString(char *out, size_t size) { if (size) out[0] = 0; }
int cudnnGetProperty(int property, int *out) {
    *out = property == 0 ? CUDNN_VERSION / 10000 : property == 1 ? CUDNN_VERSION / 100 % 100 : CUDNN_VERSION % 100;
    return 0;
}
int cudnnCreate(void **out) { *out = new_handle(); return 0; }
int cudnnGetStream(void *handle, void **out) { *out = NULL; return 0; }

/* batch normalisation and dropout ask for sizes before they run */
#define NEEDS_NOTHING(Call, ...) int Call(__VA_ARGS__, size_t *out) { *out = 0; return 0; }
NEEDS_NOTHING(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, void *h, int m, int o, void *x, void *z, void *y, void *b, void *a)
NEEDS_NOTHING(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, void *h, int m, int o, void *a, void *x)
NEEDS_NOTHING(cudnnGetBatchNormalizationBackwardExWorkspaceSize, void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx, void *b, void *a)
int cudnnDropoutGetStatesSize(void *handle, size_t *out) { *out = (size_t)1 << 20; return 0; }

/* cuFFT: a plan may need as much again as it transforms (cuFFT documentation, "Accuracy and performance"): an allowance of the larger side */
int cufftCreate(int *plan) { *plan = 1; return 0; }
const char *cusparseGetErrorString(int status) { return status ? "not served by the stand-in device" : "success"; }
const char *cusparseGetErrorName(int status) { return status ? "CUSPARSE_STATUS_NOT_SUPPORTED" : "CUSPARSE_STATUS_SUCCESS"; }

static size_t fourier_bytes(int type) { /* cudaDataType of an element: complex ones are twice their parts */
    switch (type) {
    case 1: case 5: return 16;        /* double */
    case 6: case 2: return 4;         /* half */
    default: return 8;
    }
}
int cufftXtMakePlanMany(int plan, int rank, long long *n, void *inembed, long long istride, long long idist, int in, void *onembed,
                        long long ostride, long long odist, int out, long long batch, size_t *work, int type) {
    size_t elements = batch;
    for (int i = 0; i < rank; i++) elements *= n[i];
    *work = library_workspace("fourier", elements * fourier_bytes(type));
    return 0;
}
