/* cuSOLVER's factorizations and cuSPARSE's products with a dense matrix: what they answer on the host, which is how much workspace they
 * want.
 *
 * PyTorch asks for a size and allocates that much itself. The sizes are cuSOLVER's and cuSPARSE's own and not documented. Where a comment
 * says "recorded", the formula was found from what an H100 asked for (PyTorch 2.11, CUDA 13.0,
 * tests/accuracy/recordings): of float and double, of up to 1024 rows and 768 columns, with at least as many rows
 * as columns. The number of multiprocessors is in no formula; that constants such as 2^16 and 768 x 1024 are the same on other GPUs and of
 * other versions is a guess. The others are allowances: most are what LAPACK's routine of that name asks for as its best workspace (LWORK
 * in its documentation), where a panel is what is worked on at a time. What a factorization says of each matrix (info) stays on the
 * device. */
#include "card.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 64 /* LAPACK's ilaenv has 32 or 64 columns */
#define TILE ((size_t)32 * 32)
#define RECORDED_ROWS 1024

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
static size_t larger(size_t a, size_t b) { return a > b ? a : b; }
static size_t tiles(size_t n) { return (n + 31) / 32; }
static size_t whole_tiles(size_t elements) { return 32 * tiles(elements); }

/* Elements of a workspace, and whether the H100 asked for as many in all cases that were recorded; if not, it never asked for more. */
typedef struct {
    size_t elements;
    int is_exact;
} Wanted;
static Wanted at_most(size_t elements) { return (Wanted){elements, 0}; }
static size_t panels(size_t rows, size_t columns) { return PANEL * (rows + columns); }

/* potrf: 160 bytes were recorded up to n = 58, 704 of n = 371 and float. Beyond, and between, an allowance. */
static Wanted cholesky(size_t n, size_t element_bytes) {
    if (n <= 58) return (Wanted){160 / element_bytes, 1};
    return at_most(n <= 371 ? 176 : panels(n, 0));
}
/* getrf: the same bytes whatever the type, recorded of square ones up to n = 524: 256 for each 32 columns, and for as many as the next
 * power of two, but not more than 16. Beyond, and of others than square ones, an allowance. */
static Wanted lu(size_t m, size_t n, size_t element_bytes) {
    size_t power = 1;
    while (power < tiles(n) && power < 16) power *= 2;
    size_t elements = 256 * (tiles(n) + 1 + power) / element_bytes;
    return m == n && n <= 544 ? (Wanted){elements, 1} : at_most(larger(elements, panels(m, n)));
}
/* geqrf: 1024 for each column and each of 512 more, and 128 bytes, recorded up to m = 1022 and n = 698 */
static Wanted qr(size_t m, size_t n, size_t element_bytes) {
    size_t elements = TILE * (512 + larger(n, 256)) + 128 / element_bytes;
    return m <= RECORDED_ROWS && n <= m ? (Wanted){elements, 1} : at_most(elements + panels(m, n));
}
/* orgqr: recorded up to m = 1022 and n = 698, exact up to n = 76 and from n = 260 on, where it works on 128 columns at a time. Between
 * there is one: of n = 95, which this is above by 14 % (and geev's workspaces, which have this in them). */
static Wanted orthogonal(size_t m, size_t n) {
    size_t block = n > 128 ? m * 128 + 256 * n - 128 * 128 : m * n;
    if (n > 76 && n <= 128) block += 256 * (n - 64);
    return (Wanted){TILE * 32 + 256 + whole_tiles(block), n <= m && m <= RECORDED_ROWS && (n <= 76 || n >= 260)};
}
/* ormqr: recorded with as many right-hand sides as columns, k, which then leaves open which of the two a term has: the larger. Above by
 * at most 80 elements. */
static size_t apply_orthogonal(size_t m, size_t n, size_t k) {
    size_t columns = larger(n, k);
    return 65536 + 256 * m + 512 * columns + m * columns + columns * columns + columns + 320;
}
/* syevd, with vectors or without: recorded up to n = 354. Above by 0.06 % (median) and 0.1 % at most: where its parts begin is not
 * known. It makes 2^31 elements of n = 26,600, which are said to be too few from about n = 25,000 on (NVIDIA/CUDALibrarySamples#246;
 * between 24,000 and 32,000 in jax-ml/jax#23410). */
static size_t eigen(size_t n) { return 3 * n * n + 768 * n + 65536 + 128 + n / 2; }
/* syevBatched: recorded of 2, 8 and 64 matrices, up to n = 31; above by 0.3 % at most. A larger one is not taken for less than by syevd. */
static size_t eigen_batched(size_t n, size_t batch) { return batch * eigen(n) + 256; }
/* syevj, with vectors or without; recorded of float, from n = 35 to n = 370 (PyTorch takes it up to 512) */
static Wanted eigen_jacobi(size_t n, size_t element_bytes) {
    size_t k = tiles(n);
    return (Wanted){n * n + n + TILE * (k + 1) + 4 * k * k + k, n > 32 && n <= 512 && element_bytes == 4};
}
/* Jacobi's method on many small matrices; seen of cusolverDnCheevjBatched with matrices of 2 and of 4 (cupy/cupy#7261) */
static size_t jacobi(size_t n, size_t batch) { return TILE + n + batch * (TILE + (n + 1) * (n + 1)); }
/* gesvdjBatched, which is for matrices up to 32 x 32: however many of whatever size were recorded */
static Wanted singular_batched(size_t m, size_t n) { return (Wanted){31 * 32, m <= 32 && n <= 32}; }
static size_t singular(size_t m, size_t n) { return smaller(m, n) * smaller(m, n) + panels(m, n); } /* gesvd: R and the panels */
/* gesvdj. Of a square matrix it is syevj's workspace and a copy with 1024 for each 32 columns, above by at most 32 elements. Of others, Q R
 * first: recorded is geqrf's workspace, or ormqr's where that is larger (then above by at most 100 elements), and the factors of the
 * reflections. With all of U, not recorded, ormqr has all rows for its columns. */
static Wanted singular_jacobi(size_t rows, size_t columns, int has_all, size_t element_bytes) {
    size_t m = larger(rows, columns), n = smaller(rows, columns), k = tiles(n);
    size_t square = whole_tiles(eigen_jacobi(n, element_bytes).elements + n * n + TILE * k) + 32;
    if (m == n) return at_most(square);
    Wanted first = qr(m, n, element_bytes);
    size_t applied = apply_orthogonal(m, has_all ? m : n, n);
    size_t most = larger(applied + 32, square);
    if (first.elements < most) first = at_most(most);
    return (Wanted){whole_tiles(first.elements) + whole_tiles(n), first.is_exact && rows >= columns};
}
/* by way of the eigenvalues of A^H A, and with a copy of A */
static size_t singular_approximate(size_t m, size_t n, size_t batch) { return batch * (m * n + eigen(smaller(m, n))); }
/* geev without vectors: orgqr's and 3 vectors, or the matrix and 4, in parts that begin at multiples of 128 elements; recorded up to
 * n = 586, above by 0.8 % (median), from n = 77 to 128 by 9 %. With vectors, not recorded, two more matrices. */
static size_t general_eigen(size_t n, int vectors) {
    size_t least = larger(orthogonal(n, n).elements + 3 * n + 256, n * n + 4 * n);
    return (least + 127) / 128 * 128 + (vectors ? 2 * n * n + PANEL * n : 0);
}

/* The older functions count elements, in an int. The newer ones count bytes, and apart those on the host, which are no memory of the GPU. */
static size_t whole(Wanted wanted, size_t element_bytes) { /* an allowance in whole elements */
    if (wanted.is_exact) return wanted.elements;
    return (library_workspace("factorization", wanted.elements * element_bytes) + element_bytes - 1) / element_bytes;
}
static int tell_wanted(Wanted wanted, size_t element_bytes, int is_real, int *out) {
    *out = whole((Wanted){smaller(wanted.elements, INT_MAX), wanted.is_exact && is_real}, element_bytes);
    return 0;
}
static size_t bytes_of(int type) { /* cudaDataType: complex of doubles; double, complex of floats; half, bfloat16; float */
    return type == 5 ? 16 : type == 1 || type == 4 ? 8 : type == 2 || type == 14 ? 2 : 4;
}
static int tell_bytes(Wanted wanted, int type, size_t *on_device, size_t *on_host) {
    wanted.is_exact = wanted.is_exact && (type == 0 || type == 1);
    *on_device = whole(wanted, bytes_of(type)) * bytes_of(type);
    *on_host = 0;
    return 0;
}

/* A function for each of the four types, which of real and of complex ones may have a name of its own. Of potrf, geqrf and syevd only
 * the newer functions were recorded, so what these say is an allowance. */
#define OF_FOUR_TYPES(real, complex, wanted, ...) \
    int cusolverDnS##real(void *h, __VA_ARGS__) { enum { bytes = 4 }; return tell_wanted(wanted, bytes, 1, out); } \
    int cusolverDnD##real(void *h, __VA_ARGS__) { enum { bytes = 8 }; return tell_wanted(wanted, bytes, 1, out); } \
    int cusolverDnC##complex(void *h, __VA_ARGS__) { enum { bytes = 8 }; return tell_wanted(wanted, bytes, 0, out); } \
    int cusolverDnZ##complex(void *h, __VA_ARGS__) { enum { bytes = 16 }; return tell_wanted(wanted, bytes, 0, out); }
#define SINGULAR void *a, int lda, void *s, void *u, int ldu, void *v, int ldv
OF_FOUR_TYPES(potrf_bufferSize, potrf_bufferSize, at_most(cholesky(n, bytes).elements), int uplo, int n, void *a, int lda, int *out)
OF_FOUR_TYPES(getrf_bufferSize, getrf_bufferSize, lu(m, n, bytes), int m, int n, void *a, int lda, int *out)
OF_FOUR_TYPES(geqrf_bufferSize, geqrf_bufferSize, at_most(qr(m, n, bytes).elements), int m, int n, void *a, int lda, int *out)
OF_FOUR_TYPES(sytrf_bufferSize, sytrf_bufferSize, at_most(panels(n, 0)), int n, void *a, int lda, int *out)
OF_FOUR_TYPES(orgqr_bufferSize, ungqr_bufferSize, orthogonal(m, n), int m, int n, int k, void *a, int lda, void *tau, int *out)
OF_FOUR_TYPES(ormqr_bufferSize, unmqr_bufferSize, at_most(apply_orthogonal(side ? n : m, side ? m : n, k)), int side, int trans, int m,
              int n, int k, void *a, int lda, void *tau, void *c, int ldc, int *out)
OF_FOUR_TYPES(syevd_bufferSize, heevd_bufferSize, at_most(eigen(n)), int vectors, int uplo, int n, void *a, int lda, void *w, int *out)
OF_FOUR_TYPES(syevj_bufferSize, heevj_bufferSize, eigen_jacobi(n, bytes), int vectors, int uplo, int n, void *a, int lda, void *w, int *out,
              void *options)
OF_FOUR_TYPES(syevjBatched_bufferSize, heevjBatched_bufferSize, at_most(jacobi(n, batch)), int vectors, int uplo, int n, void *a, int lda,
              void *w, int *out, void *options, int batch)
OF_FOUR_TYPES(gesvd_bufferSize, gesvd_bufferSize, at_most(singular(m, n)), int m, int n, int *out)
OF_FOUR_TYPES(gesvdj_bufferSize, gesvdj_bufferSize, singular_jacobi(m, n, vectors && !economy, bytes), int vectors, int economy, int m,
              int n, SINGULAR, int *out, void *options)
OF_FOUR_TYPES(gesvdjBatched_bufferSize, gesvdjBatched_bufferSize, singular_batched(m, n), int vectors, int m, int n, SINGULAR, int *out,
              void *options, int batch)
#define APPROXIMATE int vectors, int rank, int m, int n, void *a, int lda, long long a_step, void *s, long long s_step, void *u, int ldu, \
    long long u_step, void *v, int ldv, long long v_step
OF_FOUR_TYPES(gesvdaStridedBatched_bufferSize, gesvdaStridedBatched_bufferSize, at_most(singular_approximate(m, n, batch)), APPROXIMATE,
              int *out, int batch)

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
    return tell_bytes(cholesky(n, bytes_of(type)), type, on_device, on_host);
}
int cusolverDnXgeqrf_bufferSize(void *h, void *options, int64_t m, int64_t n, int type, void *a, int64_t lda, int tau_type, void *tau, int computes,
                                IN_BYTES) {
    return tell_bytes(qr(m, n, bytes_of(type)), type, on_device, on_host);
}
int cusolverDnXsytrs_bufferSize(void *h, int uplo, int64_t n, int64_t columns, int type, void *a, int64_t lda, void *pivots, int b_type, void *b,
                                int64_t ldb, IN_BYTES) {
    return tell_bytes(at_most(n * columns), type, on_device, on_host); /* the right-hand sides in another order */
}
int cusolverDnXsyevd_bufferSize(void *h, void *options, int vectors, int uplo, int64_t n, int type, void *a, int64_t lda, int w_type, void *w,
                                int computes, IN_BYTES) {
    return tell_bytes(at_most(eigen(n)), type, on_device, on_host);
}
int cusolverDnXsyevBatched_bufferSize(void *h, void *options, int vectors, int uplo, int64_t n, int type, void *a, int64_t lda, int w_type, void *w,
                                      int computes, IN_BYTES, int64_t batch) {
    return tell_bytes(at_most(eigen_batched(n, batch)), type, on_device, on_host);
}
int cusolverDnXgeev_bufferSize(void *h, void *options, int left, int right, int64_t n, int type, void *a, int64_t lda, int w_type, void *w,
                               int left_type, void *vl, int64_t ldvl, int right_type, void *vr, int64_t ldvr, int computes, IN_BYTES) {
    return tell_bytes(at_most(general_eigen(n, left || right)), type, on_device, on_host);
}

/* cuSPARSE: a product may make a copy of the sparse matrix in another order (its transpose, or rows shared out among threads): an allowance of
 * as much as the matrix itself takes. The indices of both kinds of matrix have 4 or 8 bytes: cusparseIndexType_t is 2 or 3. */
typedef struct {
    int64_t rows, columns, nonzeros;
    size_t bytes;
    int type, is_csr;
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
    return make_sparse(out, (Sparse){rows, columns, nonzeros, bytes, type, 1});
}
int cusparseCreateCoo(Sparse **out, int64_t rows, int64_t columns, int64_t nonzeros, void *row_indices, void *column_indices, void *values,
                      int index_type, int base, int type) {
    return make_sparse(out, (Sparse){rows, columns, nonzeros, nonzeros * (bytes_of(type) + 2 * index_bytes(index_type)), type, 0});
}
int cusparseDestroySpMat(Sparse *matrix) { free(matrix); return 0; }
int cusparseSpMatGetSize(const Sparse *matrix, int64_t *rows, int64_t *columns, int64_t *nonzeros) {
    *rows = matrix->rows;
    *columns = matrix->columns;
    *nonzeros = matrix->nonzeros;
    return 0;
}
#define PRODUCT(Call, ...) int Call(void *h, __VA_ARGS__, size_t *out) { *out = library_workspace("sparse product", a->bytes); return 0; }
/* Recorded of floats in rows: one number for each 256 by CUSPARSE_SPMM_CSR_ALG1, which PyTorch takes for COO; two for each 24 by
 * CUSPARSE_SPMM_CSR_ALG2. Both are exact, but for one column on the right (which is not known here), of which ALG2 wanted 95 bytes
 * where this has 9831. Of larger numbers there may be fewer at a time: an allowance. */
static size_t product_bytes(const Sparse *a, int way) {
    int is_float = a->is_csr && a->type == 0;
    size_t nonzeros = a->nonzeros * (is_float ? 1 : larger(1, bytes_of(a->type) / 4));
    if (a->is_csr && way == 4) {
        size_t bytes = 4 * ((nonzeros + 255) / 256 + 2) - 1;
        return is_float ? bytes : library_workspace("sparse product", bytes);
    }
    return library_workspace("sparse product", a->is_csr && way == 6 ? 8 * ((nonzeros + 23) / 24 + 1) - 1 : a->bytes);
}
int cusparseSpMM_bufferSize(void *h, int transposes, int b_transposes, void *alpha, Sparse *a, void *b, void *beta, void *c, int computes,
                            int way, size_t *out) {
    *out = product_bytes(a, way);
    return 0;
}
PRODUCT(cusparseSpMV_bufferSize, int transposes, void *alpha, Sparse *a, void *x, void *beta, void *y, int computes, int way)
PRODUCT(cusparseSpSM_bufferSize, int transposes, int b_transposes, void *alpha, Sparse *a, void *b, void *c, int computes, int way, void *solver)
PRODUCT(cusparseSpSV_bufferSize, int transposes, void *alpha, Sparse *a, void *x, void *y, int computes, int way, void *solver)
PRODUCT(cusparseSDDMM_bufferSize, int transposes, int b_transposes, void *alpha, void *b, void *c, void *beta, Sparse *a, int computes, int way)
