/* cuSOLVER's factorizations and cuSPARSE's products with a dense matrix: what they answer on the host, which is how much workspace they want.
 *
 * PyTorch asks for a size and allocates that much itself. The sizes are cuSOLVER's and cuSPARSE's own and not documented, so each is an
 * allowance. Most are what LAPACK's routine of that name asks for as its best workspace (LWORK in its documentation), where a panel is what is
 * worked on at a time. What a factorization says of each matrix (info) stays on the device. */
#include "card.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 64 /* LAPACK's ilaenv has 32 or 64 columns */
#define TILE ((size_t)32 * 32)

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Elements of a workspace. Of LAPACK's functions geqrf, orgqr, ormqr and sytrf take a panel of columns, getrf and potrf none: on a GPU they copy
 * what they exchange and multiply. */
static size_t panels(size_t rows, size_t columns) { return PANEL * (rows + columns); }
/* With vectors LAPACK's syevd takes 1 + 6n + 2n^2. cuSOLVER's takes more: 2^31 elements are said to be too few from about n = 25,000 on
 * (NVIDIA/CUDALibrarySamples#246; between 24,000 and 32,000 in jax-ml/jax#23410), which makes it n^2 three times. */
static size_t eigen(size_t n, int vectors) { return PANEL * n + (vectors ? 3 * n * n : 0); }
/* Jacobi's method on many small matrices; seen of cusolverDnCheevjBatched with matrices of 2 and of 4 (cupy/cupy#7261) */
static size_t jacobi(size_t n, size_t batch) { return TILE + n + batch * (TILE + (n + 1) * (n + 1)); }
static size_t singular(size_t m, size_t n) { return smaller(m, n) * smaller(m, n) + panels(m, n); } /* gesvd: R and the panels */
/* LAPACK's gejsv takes 2n^2 + 6n, and works on a copy of the matrix */
static size_t singular_jacobi(size_t m, size_t n) { return m * n + 2 * smaller(m, n) * smaller(m, n) + panels(m, n); }
/* by way of the eigenvalues of A^H A, and with a copy of A */
static size_t singular_approximate(size_t m, size_t n, size_t batch) { return batch * (m * n + eigen(smaller(m, n), 1)); }
static size_t general_eigen(size_t n) { return 2 * n * n + PANEL * n; } /* geev: the Hessenberg matrix, the vectors, and the panels */

/* The older functions count elements, in an int. The newer ones count bytes, and apart those on the host, which are no memory of the GPU. */
static size_t whole(size_t elements, size_t element_bytes) { /* the allowance in whole elements */
    return (library_workspace("factorization", elements * element_bytes) + element_bytes - 1) / element_bytes;
}
static int tell_elements(size_t elements, size_t element_bytes, int *out) {
    *out = whole(smaller(elements, INT_MAX), element_bytes);
    return 0;
}
static size_t bytes_of(int type) { /* cudaDataType: complex of doubles; double, complex of floats; half, bfloat16; float */
    return type == 5 ? 16 : type == 1 || type == 4 ? 8 : type == 2 || type == 14 ? 2 : 4;
}
static int tell_bytes(size_t elements, int type, size_t *on_device, size_t *on_host) {
    *on_device = whole(elements, bytes_of(type)) * bytes_of(type);
    *on_host = 0;
    return 0;
}

/* A function for each of the four types, which of real and of complex ones may have a name of its own. */
#define OF_FOUR_TYPES(real, complex, elements, ...) \
    int cusolverDnS##real(void *h, __VA_ARGS__) { return tell_elements(elements, 4, out); } \
    int cusolverDnD##real(void *h, __VA_ARGS__) { return tell_elements(elements, 8, out); } \
    int cusolverDnC##complex(void *h, __VA_ARGS__) { return tell_elements(elements, 8, out); } \
    int cusolverDnZ##complex(void *h, __VA_ARGS__) { return tell_elements(elements, 16, out); }
#define SINGULAR void *a, int lda, void *s, void *u, int ldu, void *v, int ldv
OF_FOUR_TYPES(potrf_bufferSize, potrf_bufferSize, panels(n, 0), int uplo, int n, void *a, int lda, int *out)
OF_FOUR_TYPES(getrf_bufferSize, getrf_bufferSize, panels(m, n), int m, int n, void *a, int lda, int *out)
OF_FOUR_TYPES(geqrf_bufferSize, geqrf_bufferSize, panels(m, n), int m, int n, void *a, int lda, int *out)
OF_FOUR_TYPES(sytrf_bufferSize, sytrf_bufferSize, panels(n, 0), int n, void *a, int lda, int *out)
OF_FOUR_TYPES(orgqr_bufferSize, ungqr_bufferSize, panels(m, n), int m, int n, int k, void *a, int lda, void *tau, int *out)
OF_FOUR_TYPES(ormqr_bufferSize, unmqr_bufferSize, panels(m, n), int side, int trans, int m, int n, int k, void *a, int lda, void *tau, void *c,
              int ldc, int *out)
OF_FOUR_TYPES(syevd_bufferSize, heevd_bufferSize, eigen(n, vectors), int vectors, int uplo, int n, void *a, int lda, void *w, int *out)
OF_FOUR_TYPES(syevj_bufferSize, heevj_bufferSize, eigen(n, vectors), int vectors, int uplo, int n, void *a, int lda, void *w, int *out,
              void *options)
OF_FOUR_TYPES(syevjBatched_bufferSize, heevjBatched_bufferSize, jacobi(n, batch), int vectors, int uplo, int n, void *a, int lda, void *w, int *out,
              void *options, int batch)
OF_FOUR_TYPES(gesvd_bufferSize, gesvd_bufferSize, singular(m, n), int m, int n, int *out)
OF_FOUR_TYPES(gesvdj_bufferSize, gesvdj_bufferSize, singular_jacobi(m, n), int vectors, int economy, int m, int n, SINGULAR, int *out,
              void *options)
OF_FOUR_TYPES(gesvdjBatched_bufferSize, gesvdjBatched_bufferSize, jacobi(m, batch) + jacobi(n, batch), int vectors, int m, int n, SINGULAR, int *out,
              void *options, int batch)
#define APPROXIMATE int vectors, int rank, int m, int n, void *a, int lda, long long a_step, void *s, long long s_step, void *u, int ldu, \
    long long u_step, void *v, int ldv, long long v_step
OF_FOUR_TYPES(gesvdaStridedBatched_bufferSize, gesvdaStridedBatched_bufferSize, singular_approximate(m, n, batch), APPROXIMATE, int *out, int batch)

/* This one computes, and says on the host how far off each matrix is. */
#define TELLS_RESIDUALS(Call) \
    int Call(void *h, APPROXIMATE, void *work, int work_elements, int *info, double *residuals, int batch) { \
        kernel_ran(); \
        if (residuals) memset(residuals, 0, batch * sizeof *residuals); \
        return 0; \
    }
TELLS_RESIDUALS(cusolverDnSgesvdaStridedBatched)
TELLS_RESIDUALS(cusolverDnDgesvdaStridedBatched)
TELLS_RESIDUALS(cusolverDnCgesvdaStridedBatched)
TELLS_RESIDUALS(cusolverDnZgesvdaStridedBatched)

#define IN_BYTES size_t *on_device, size_t *on_host
int cusolverDnXpotrf_bufferSize(void *h, void *options, int uplo, int64_t n, int type, void *a, int64_t lda, int computes, IN_BYTES) {
    return tell_bytes(panels(n, 0), type, on_device, on_host);
}
int cusolverDnXgeqrf_bufferSize(void *h, void *options, int64_t m, int64_t n, int type, void *a, int64_t lda, int tau_type, void *tau, int computes,
                                IN_BYTES) {
    return tell_bytes(panels(m, n), type, on_device, on_host);
}
int cusolverDnXsytrs_bufferSize(void *h, int uplo, int64_t n, int64_t columns, int type, void *a, int64_t lda, void *pivots, int b_type, void *b,
                                int64_t ldb, IN_BYTES) {
    return tell_bytes(n * columns, type, on_device, on_host); /* the right-hand sides in another order */
}
int cusolverDnXsyevd_bufferSize(void *h, void *options, int vectors, int uplo, int64_t n, int type, void *a, int64_t lda, int w_type, void *w,
                                int computes, IN_BYTES) {
    return tell_bytes(eigen(n, vectors), type, on_device, on_host);
}
int cusolverDnXsyevBatched_bufferSize(void *h, void *options, int vectors, int uplo, int64_t n, int type, void *a, int64_t lda, int w_type, void *w,
                                      int computes, IN_BYTES, int64_t batch) {
    return tell_bytes(batch * eigen(n, vectors), type, on_device, on_host);
}
int cusolverDnXgeev_bufferSize(void *h, void *options, int left, int right, int64_t n, int type, void *a, int64_t lda, int w_type, void *w,
                               int left_type, void *vl, int64_t ldvl, int right_type, void *vr, int64_t ldvr, int computes, IN_BYTES) {
    return tell_bytes(general_eigen(n), type, on_device, on_host);
}

/* cuSPARSE: a product may make a copy of the sparse matrix in another order (its transpose, or rows shared out among threads): an allowance of
 * as much as the matrix itself takes. The indices of both kinds of matrix have 4 or 8 bytes: cusparseIndexType_t is 2 or 3. */
typedef struct {
    int64_t rows, columns, nonzeros;
    size_t bytes;
} Sparse;

static int make_sparse(Sparse **out, Sparse matrix) {
    *out = malloc(sizeof matrix);
    if (!*out) return 2; /* CUSPARSE_STATUS_ALLOC_FAILED */
    **out = matrix;
    return 0;
}
static size_t index_bytes(int type) { return type == 3 ? 8 : 4; }
int cusparseCreateCsr(Sparse **out, int64_t rows, int64_t columns, int64_t nonzeros, void *offsets, void *indices, void *values, int offset_type,
                      int index_type, int base, int type) {
    size_t bytes = nonzeros * (bytes_of(type) + index_bytes(index_type)) + (rows + 1) * index_bytes(offset_type);
    return make_sparse(out, (Sparse){rows, columns, nonzeros, bytes});
}
int cusparseCreateCoo(Sparse **out, int64_t rows, int64_t columns, int64_t nonzeros, void *row_indices, void *column_indices, void *values,
                      int index_type, int base, int type) {
    return make_sparse(out, (Sparse){rows, columns, nonzeros, nonzeros * (bytes_of(type) + 2 * index_bytes(index_type))});
}
int cusparseDestroySpMat(Sparse *matrix) { free(matrix); return 0; }
int cusparseSpMatGetSize(const Sparse *matrix, int64_t *rows, int64_t *columns, int64_t *nonzeros) {
    *rows = matrix->rows;
    *columns = matrix->columns;
    *nonzeros = matrix->nonzeros;
    return 0;
}
#define PRODUCT(Call, ...) int Call(void *h, __VA_ARGS__, size_t *out) { *out = library_workspace("sparse product", a->bytes); return 0; }
PRODUCT(cusparseSpMM_bufferSize, int transposes, int b_transposes, void *alpha, Sparse *a, void *b, void *beta, void *c, int computes, int way)
PRODUCT(cusparseSpMV_bufferSize, int transposes, void *alpha, Sparse *a, void *x, void *beta, void *y, int computes, int way)
PRODUCT(cusparseSpSM_bufferSize, int transposes, int b_transposes, void *alpha, Sparse *a, void *b, void *c, int computes, int way, void *solver)
PRODUCT(cusparseSpSV_bufferSize, int transposes, void *alpha, Sparse *a, void *x, void *y, int computes, int way, void *solver)
PRODUCT(cusparseSDDMM_bufferSize, int transposes, int b_transposes, void *alpha, void *b, void *c, void *beta, Sparse *a, int computes, int way)
