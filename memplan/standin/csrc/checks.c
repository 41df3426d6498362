/* Reads that PyTorch makes for itself around a factorization: may it begin, and did it go well? They decide no size, and none of them is the
 * program's question, so nobody is asked: the answer is the one that PyTorch goes on with. Such a read is known by where in PyTorch it is made,
 * the nearest function first. */
#define _GNU_SOURCE
#include "card.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <string.h>

enum { NO_CHECK = -1, PYTHON = -2 };
#define MOST_FRAMES 48 /* from a copy up to the function that asked for it there are about twenty */
#define REMEMBERED 1024

static const struct {
    const char *function; /* a part of its mangled name, which differs between versions in its arguments */
    int answer;
} checks[] = {
    {"native20_linalg_check_errors", 0}, /* has any failed? */
    {"native14linalg_eig_out", 1}, /* is all finite? */
    {"native18linalg_eigvals_out", 1},
    {"generated18LinalgSvdBackward05apply", 1}, /* does the loss not depend on what complex vectors leave open? */
    {"generated18LinalgEigBackward05apply", 1},
    {"generated19LinalgEighBackward05apply", 1},
};

static int answer_in(void *address) {
    Dl_info found;
    if (!dladdr(address, &found)) return NO_CHECK;
    if (strstr(found.dli_fname, "libtorch_cuda_linalg")) return 0; /* where cuSOLVER and MAGMA are called: whether they converged, and panels */
    if (!found.dli_sname) return NO_CHECK;
    if (!strncmp(found.dli_sname, "Py", 2) || !strncmp(found.dli_sname, "_Py", 3)) return PYTHON; /* it asks: a checkpoint runs in a backward */
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        if (strstr(found.dli_sname, checks[i].function)) return checks[i].answer;
    return NO_CHECK;
}
/* To find a name takes up to a millisecond, and a program reads from the same places again and again. */
static int remembered_answer_in(void *address) {
    static __thread struct { void *address; int answer; } known[REMEMBERED];
    size_t at = (uintptr_t)address % REMEMBERED;
    if (known[at].address != address) {
        known[at].answer = answer_in(address);
        known[at].address = address;
    }
    return known[at].answer;
}
int is_own_check(unsigned char *to, size_t bytes) {
    void *frames[MOST_FRAMES];
    int num_frames = backtrace(frames, MOST_FRAMES);
    for (int i = 0; i < num_frames; i++) {
        int answer = remembered_answer_in(frames[i]);
        if (answer == PYTHON) return 0;
        if (answer == NO_CHECK) continue;
        memset(to, bytes == 1 ? answer : 0, bytes);
        return 1;
    }
    return 0;
}
