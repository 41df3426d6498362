/* What the device does with the Python that it is loaded into: the recorder is started, and objects are looked through.
 *
 * Starting the recorder, where Python's own start did not (child/hook/sitecustomize.py):
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

/* Looking through the objects of Python's garbage collector for those of some classes (child/tracked_objects.py, which says why it has to be
 * one call; the caller has Python's lock). A program of a few packages has 400,000 of them and is looked through ten times. */
static void **slot_of(void **table, size_t mask, void *class) {
    size_t slot = ((size_t)class >> 4) & mask;
    while (table[slot] && table[slot] != class) slot = (slot + 1) & mask;
    return &table[slot];
}
void *memplan_objects_of_classes(void *get_objects, void **classes, size_t count) {
    void *(*call)(void *) = dlsym(RTLD_DEFAULT, "PyObject_CallNoArgs"), *(*new_list)(ssize_t) = dlsym(RTLD_DEFAULT, "PyList_New");
    void *(*item)(void *, ssize_t) = dlsym(RTLD_DEFAULT, "PyList_GetItem"), *(*class_of)(void *) = dlsym(RTLD_DEFAULT, "PyObject_Type");
    ssize_t (*size)(void *) = dlsym(RTLD_DEFAULT, "PyList_Size");
    int (*append)(void *, void *) = dlsym(RTLD_DEFAULT, "PyList_Append");
    void (*release)(void *) = dlsym(RTLD_DEFAULT, "Py_DecRef");
    size_t mask = 1;
    while (mask < 2 * count) mask = 2 * mask + 1;
    void **table = calloc(mask + 1, sizeof *table);
    for (size_t i = 0; i < count; i++) *slot_of(table, mask, classes[i]) = classes[i];
    void *found = new_list(0), *all = found ? call(get_objects) : NULL;
    int has_failed = !all;
    for (ssize_t i = 0, end = all ? size(all) : 0; i < end && !has_failed; i++) {
        void *class = class_of(item(all, i));
        release(class); /* its object keeps it */
        if (*slot_of(table, mask, class)) has_failed = append(found, item(all, i)) != 0;
    }
    if (all) release(all);
    if (has_failed && found) release(found);
    free(table);
    return has_failed ? NULL : found; /* NULL: Python's error is set */
}
