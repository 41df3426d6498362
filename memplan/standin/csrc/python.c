/* Starting the recorder from the device, where Python's own start did not (child/hook/sitecustomize.py).
 *
 * `python -S`, `-I` and `-E` leave that out, and so does a launcher that takes PYTHONPATH away; the device is there all the same, since it is
 * preloaded. MEMPLAN_RECORDER is the text of a program, run in the process that first asks for CUDA: not within its call, since PyTorch may
 * be in the middle of counting devices, but as soon as Python's main thread goes on. It says that it has begun, or is asked for again. */
#define _GNU_SOURCE
#include "card.h"

#include <dlfcn.h>
#include <stdlib.h>

static volatile int has_begun, is_pending;
void memplan_recorder_began(void) { has_begun = 1; }

static int run_recorder(void *unused) {
    int (*run)(const char *, void *) = dlsym(RTLD_DEFAULT, "PyRun_SimpleStringFlags");
    is_pending = 0;
    return run && !has_begun ? run("exec(__import__('os').environ['MEMPLAN_RECORDER'], {})", NULL) : 0;
}
void start_recorder(void) {
    if (has_begun || is_pending || !getenv("MEMPLAN_RECORDER")) return;
    int (*is_initialized)(void) = dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    int (*when_python_goes_on)(int (*)(void *), void *) = dlsym(RTLD_DEFAULT, "Py_AddPendingCall");
    if (is_initialized && when_python_goes_on && is_initialized()) is_pending = !when_python_goes_on(run_recorder, NULL);
}
