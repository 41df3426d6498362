/* Matrix products of cuBLAS and cuBLASLt: nothing is computed, and the clock goes on by what each would take.
 *
 * That is the longer of its bytes at the card's bandwidth and its multiply-adds at the card's throughput. Tensor cores want rows of a multiple of
 * 16 bytes (NVIDIA, Matrix Multiplication Background User's Guide, section "Tensor Core Requirements"): a product one of whose matrices is not
 * laid out so is counted as half as fast. Where elements of two bytes do not even begin at multiples of four, a copy to shared memory moves
 * them one by one, and it is counted as a quarter: odd sizes of bf16 have been measured 25 times slower than even ones
 * (github.com/pytorch/pytorch/issues/106469), and Inductor pads all three products of GPT-2's head on an A100, copies included, as the
 * memory shows that was published of it (6.19 GiB with 50,257 words, 5.89 with 50,304: Raschka, LLMs-from-scratch, ch05/10). */
#include "attributes.h"
#include "card.h"

#include <stdlib.h>

#define THROUGHPUT_SHARE 0.7 /* of the peak, that products reach */

enum { R_32F = 0, R_64F = 1, R_16F = 2, C_32F = 4, C_64F = 5 }; /* cudaDataType */
enum { COMPUTE_FAST_16F = 74, COMPUTE_FAST_TF32 = 77, MATH_TF32 = 3 }; /* cublasComputeType_t, cublasMath_t */

static int is_tf32_allowed; /* of the handle that was told last; PyTorch tells each before each product */
int cublasSetMathMode(void *handle, int mode) {
    is_tf32_allowed = mode & MATH_TF32 ? 1 : 0;
    return 0;
}

/* Rows of elements that lie one behind the other in memory (cuBLAS calls them columns), at a distance of *step* elements. */
typedef struct { int type; int64_t length, num_rows, step; } Matrix;

static int bytes_of(int type) { /* cudaDataType */
    switch (type) {
    case R_64F: case C_32F: return 8;
    case C_64F: return 16;
    case R_16F: case 14: return 2;                   /* half, bfloat16 */
    case 3: case 8: case 28: case 29: return 1;      /* bytes, fp8 */
    default: return 4;
    }
}
static double bytes_in(Matrix matrix) { return (double)matrix.length * matrix.num_rows * bytes_of(matrix.type); }
/* What of tensor cores' throughput is left, as *matrix* lies at *address*. */
static double aligned_share(Matrix matrix, const void *address) {
    uint64_t places = (uint64_t)(matrix.step * bytes_of(matrix.type)) | (uintptr_t)address;
    return places % 16 == 0 ? 1 : places % 4 == 0 ? 0.5 : 0.25;
}
static double least(double a, double b, double c) { return a < b ? (a < c ? a : c) : b < c ? b : c; }
static int multiply(Matrix a, double aligned, Matrix b, Matrix c, double multiply_adds, int64_t batch, int compute) {
    int is_short = bytes_of(a.type) <= 2;
    int on_tensor_cores = is_short || (a.type == R_32F && ((compute >= COMPUTE_FAST_16F && compute <= COMPUTE_FAST_TF32) || is_tf32_allowed));
    double share = THROUGHPUT_SHARE * (on_tensor_cores ? aligned : 1);
    double computing = multiply_adds * batch / (peak_multiply_adds(a.type, on_tensor_cores) * share);
    double moving = bytes_take((bytes_in(a) + bytes_in(b) + bytes_in(c)) * batch);
    kernel_ran();
    device_works(computing > moving ? computing : moving);
    return 0;
}
static int multiply_columns(int ta, int tb, int64_t m, int64_t n, int64_t k, Matrix a, const void *at, Matrix b, const void *bt, Matrix c,
                            const void *ct, int64_t batch, int compute) {
    a.length = ta ? k : m, a.num_rows = ta ? m : k;
    b.length = tb ? n : k, b.num_rows = tb ? k : n;
    c.length = m, c.num_rows = n;
    return multiply(a, least(aligned_share(a, at), aligned_share(b, bt), aligned_share(c, ct)), b, c, (double)m * n * k, batch, compute);
}

#define MATRIX(type, step) ((Matrix){type, 0, 0, step})
#define OF_ONE_TYPE(Letter, type, Size, suffix) \
    int cublas##Letter##gemm_v2##suffix(void *h, int ta, int tb, Size m, Size n, Size k, const void *alpha, const void *a, Size lda, \
                                        const void *b, Size ldb, const void *beta, void *c, Size ldc) { \
        return multiply_columns(ta, tb, m, n, k, MATRIX(type, lda), a, MATRIX(type, ldb), b, MATRIX(type, ldc), c, 1, 0); \
    } \
    int cublas##Letter##gemmStridedBatched##suffix(void *h, int ta, int tb, Size m, Size n, Size k, const void *alpha, const void *a, Size lda, \
                                                   long long a_step, const void *b, Size ldb, long long b_step, const void *beta, void *c, \
                                                   Size ldc, long long c_step, Size batch) { \
        return multiply_columns(ta, tb, m, n, k, MATRIX(type, lda), a, MATRIX(type, ldb), b, MATRIX(type, ldc), c, batch, 0); \
    }
#define OF_ANY_TYPE(Size, suffix) \
    int cublasGemmEx##suffix(void *h, int ta, int tb, Size m, Size n, Size k, const void *alpha, const void *a, int a_type, Size lda, \
                             const void *b, int b_type, Size ldb, const void *beta, void *c, int c_type, Size ldc, int compute, int algorithm) { \
        return multiply_columns(ta, tb, m, n, k, MATRIX(a_type, lda), a, MATRIX(b_type, ldb), b, MATRIX(c_type, ldc), c, 1, compute); \
    } \
    int cublasSgemmEx##suffix(void *h, int ta, int tb, Size m, Size n, Size k, const void *alpha, const void *a, int a_type, Size lda, \
                              const void *b, int b_type, Size ldb, const void *beta, void *c, int c_type, Size ldc) { \
        return multiply_columns(ta, tb, m, n, k, MATRIX(a_type, lda), a, MATRIX(b_type, ldb), b, MATRIX(c_type, ldc), c, 1, 0); \
    } \
    int cublasGemmStridedBatchedEx##suffix(void *h, int ta, int tb, Size m, Size n, Size k, const void *alpha, const void *a, int a_type, \
                                           Size lda, long long a_step, const void *b, int b_type, Size ldb, long long b_step, \
                                           const void *beta, void *c, int c_type, Size ldc, long long c_step, Size batch, int compute, \
                                           int algorithm) { \
        return multiply_columns(ta, tb, m, n, k, MATRIX(a_type, lda), a, MATRIX(b_type, ldb), b, MATRIX(c_type, ldc), c, batch, compute); \
    }
OF_ONE_TYPE(S, R_32F, int, ) OF_ONE_TYPE(S, R_32F, int64_t, _64)
OF_ONE_TYPE(D, R_64F, int, ) OF_ONE_TYPE(D, R_64F, int64_t, _64)
OF_ONE_TYPE(C, C_32F, int, ) OF_ONE_TYPE(C, C_32F, int64_t, _64)
OF_ONE_TYPE(Z, C_64F, int, ) OF_ONE_TYPE(Z, C_64F, int64_t, _64)
OF_ONE_TYPE(H, R_16F, int, ) OF_ONE_TYPE(H, R_16F, int64_t, _64)
OF_ANY_TYPE(int, ) OF_ANY_TYPE(int64_t, _64)

/* cuBLASLt says what lies where by descriptors. */
enum { LAYOUT_STEP = 4, LAYOUT_BATCH = 5 }; /* cublasLtMatrixLayoutAttribute_t */
typedef struct {
    Matrix matrix;
    int64_t batch;
} Layout;
int cublasLtMatrixLayoutCreate(Layout **out, int type, uint64_t rows, uint64_t columns, int64_t step) {
    *out = malloc(sizeof **out);
    if (!*out) return 3; /* CUBLAS_STATUS_ALLOC_FAILED */
    **out = (Layout){{type, rows, columns, step}, 1};
    return 0;
}
int cublasLtMatrixLayoutDestroy(Layout *layout) { free(layout); return 0; }
int cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value, size_t bytes) {
    if (attribute == LAYOUT_STEP) layout->matrix.step = *(const int64_t *)value;
    if (attribute == LAYOUT_BATCH) layout->batch = *(const int32_t *)value;
    return 0;
}
int cublasLtMatmul(void *handle, const int *operation, const void *alpha, const void *a, const Layout *of_a, const void *b, const Layout *of_b,
                   const void *beta, const void *c, const Layout *of_c, void *d, const Layout *of_d, const void *algorithm, void *workspace,
                   size_t bytes, void *stream) {
    Matrix result = of_d->matrix;
    double summed = (double)of_a->matrix.length * of_a->matrix.num_rows / (result.length ? result.length : 1); /* A is m x k, or k x m */
    double aligned = least(aligned_share(of_a->matrix, a), aligned_share(of_b->matrix, b), aligned_share(result, d));
    return multiply(of_a->matrix, aligned, of_b->matrix, result, (double)result.length * result.num_rows * summed, of_d->batch, *operation);
}
typedef struct { int compute; } Operation;
int cublasLtMatmulDescCreate(Operation **out, int compute, int scale_type) {
    *out = malloc(sizeof **out);
    if (!*out) return 3;
    (*out)->compute = compute;
    return 0;
}
int cublasLtMatmulDescDestroy(Operation *operation) { free(operation); return 0; }
