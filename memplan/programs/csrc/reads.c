/* What the program opens for reading: each path once, in the file "reads", as the program names it. */
#include "overlay.h"

#include <stdio.h>

#define NUM_NOTED (1 << 15) /* of one process; with more, some paths are noted again */
static _Atomic uint64_t noted[NUM_NOTED];

/* Files of the kernel, of the system and of installed packages, which are known by their versions, are not told. */
static const char *const folders[] = {"/proc/", "/dev/", "/sys/", "/run/", "/usr/", "/lib/", "/lib64/", "/bin/", "/etc/", NULL};
static int is_told(const char *path) {
    for (const char *const *folder = folders; *folder; folder++)
        if (!strncmp(path, *folder, strlen(*folder))) return 0;
    return !strstr(path, "/site-packages/") && !strstr(path, "/dist-packages/") && !strstr(path, "/lib/python3");
}
static int is_new(const char *path) {
    uint64_t hash = 14695981039346656037ull;
    for (const char *c = path; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ull;
    hash |= 1;
    for (uint64_t at = hash >> 20, tries = 0; tries < 64; at++, tries++) {
        uint64_t found = 0;
        if (atomic_compare_exchange_strong(&noted[at % NUM_NOTED], &found, hash)) return 1;
        if (found == hash) return 0;
    }
    return 1;
}
void note_read(int at, const char *path) {
    if (!overlay_is_on() || !overlay.notes_reads || overlay.is_lost || !path || !*path) return;
    int error = errno;
    char whole[2 * PATH_MAX + 2], name[PATH_MAX];
    if (*path == '/') snprintf(whole, sizeof whole, "%s", path);
    else if (at == AT_FDCWD ? syscall(SYS_getcwd, name, sizeof name) > 0 : !path_of_descriptor(at, name)) snprintf(whole, sizeof whole, "%s/%s", name, path);
    else *whole = 0;
    if (*whole && !in_copies(whole) && is_told(whole) && is_new(whole)) {
        snprintf(name, sizeof name, "%s/reads", overlay.scratch);
        int file = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (file >= 0) {
            if (write(file, whole, strlen(whole) + 1) < 0) {} /* then nothing is kept of this run */
            close(file);
        }
    }
    errno = error;
}
