/* Reading folders. One that has originals and copies is read into memory, and its DIR is our own; any other is the C library's. */
#include "overlay.h"

#include <dirent.h>
#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>

/* A DIR of the C library begins with its descriptor, a small number (glibc's sysdeps/unix/sysv/linux/dirstream.h). */
#define OURS 0x6d656d706c616e21ull
typedef struct {
    uint64_t mark;
    int descriptor;
    char *entries; /* struct dirent64, one after the other */
    size_t length, capacity, at;
    char path[PATH_MAX];
} Merged;

static Merged *ours(DIR *folder) { return folder && *(uint64_t *)folder == OURS ? (Merged *)folder : NULL; }

typedef struct {
    const char **slots;
    size_t size;
} Names;
static int seen_before(Names *names, const char *name, int adds) {
    uint64_t hash = 14695981039346656037ull;
    for (const char *c = name; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ull;
    for (size_t at = (hash ^ (hash >> 29)) % names->size;; at = (at + 1) % names->size) {
        if (!names->slots[at]) {
            if (adds) names->slots[at] = name;
            return 0;
        }
        if (!strcmp(names->slots[at], name)) return 1;
    }
}
/* Append the entries of a folder of the disk. */
static int read_entries(Merged *merged, int descriptor) {
    if (lseek(descriptor, 0, SEEK_SET) < 0) return -1;
    for (;;) {
        if (merged->capacity - merged->length < 32768) {
            char *more = realloc(merged->entries, merged->capacity = merged->capacity * 2 + 65536);
            if (!more) return errno = ENOMEM, -1;
            merged->entries = more;
        }
        long bytes = syscall(SYS_getdents64, descriptor, merged->entries + merged->length, merged->capacity - merged->length);
        if (bytes < 0) return -1;
        if (!bytes) return 0;
        merged->length += bytes;
    }
}
/* Read both folders; an original shows where it has no copy and is not hidden. */
static int merge(Merged *merged, int copies, int originals) {
    merged->length = merged->at = 0;
    if (read_entries(merged, copies)) return -1;
    size_t of_copies = merged->length, num_copies = 0;
    if (read_entries(merged, originals)) return -1;
    for (size_t at = 0; at < of_copies; at += ((struct dirent64 *)(merged->entries + at))->d_reclen) num_copies++;
    Names names = {calloc(num_copies * 2 + 1, sizeof *names.slots), num_copies * 2 + 1};
    if (!names.slots) return errno = ENOMEM, -1;
    size_t to = 0;
    for (size_t at = 0, size; at < merged->length; at += size) {
        struct dirent64 *entry = (struct dirent64 *)(merged->entries + at);
        size = entry->d_reclen;
        int is_copy = at < of_copies;
        if (!is_copy && (seen_before(&names, entry->d_name, 0) || was_hidden(merged->path, entry->d_name))) continue;
        memmove(merged->entries + to, entry, size);
        entry = (struct dirent64 *)(merged->entries + to);
        if (is_copy) seen_before(&names, entry->d_name, 1);
        to += size;
        entry->d_off = to;
    }
    merged->length = to;
    free(names.slots);
    return 0;
}
static int open_folder(const char *path) { return syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0); }
static int read_both(Merged *merged) {
    char copy[PATH_MAX];
    int copies = copy_path(merged->path, copy) ? -1 : open_folder(copy), originals = open_folder(*merged->path ? merged->path : "/");
    int outcome = copies < 0 || originals < 0 ? -1 : merge(merged, copies, originals), error = errno;
    if (copies >= 0) close(copies);
    if (originals >= 0) close(originals);
    errno = error;
    return outcome;
}
static void dispose(Merged *merged) {
    int error = errno;
    merged->mark = 0;
    free(merged->entries);
    free(merged);
    errno = error;
}
/* NULL without an error: the folder is of copies or of originals alone. */
static Merged *merged_folder(const Place *place, int descriptor) {
    struct stat status;
    if (place->where != COPY || place->is_hidden) return NULL;
    if (syscall(SYS_newfstatat, AT_FDCWD, *place->path ? place->path : "/", &status, AT_SYMLINK_NOFOLLOW) || !S_ISDIR(status.st_mode)) return NULL;
    Merged *merged = calloc(1, sizeof *merged);
    if (!merged) return NULL;
    merged->mark = OURS;
    merged->descriptor = descriptor;
    strcpy(merged->path, place->path);
    if (!read_both(merged)) return merged;
    dispose(merged);
    return NULL;
}
static Merged *merged_descriptor(int descriptor) {
    Place place = {.has_slash = 0};
    char path[PATH_MAX];
    int error = errno;
    if (is_unchanged() || path_of_descriptor(descriptor, path)) return errno = error, NULL;
    strcpy(place.path, in_copies(path) ? path + overlay.length : path);
    if (!strcmp(place.path, "/")) *place.path = 0;
    judge(&place);
    Merged *merged = merged_folder(&place, descriptor);
    errno = error;
    return merged;
}

int for_each_name(const Place *place, int (*call)(const Place *, const char *, void *), void *with) {
    Merged *merged = merged_folder(place, -1);
    if (!merged) {
        char room[PATH_MAX];
        const char *path = real_path(place, room);
        int folder = path ? open_folder(path) : -1;
        merged = calloc(1, sizeof *merged);
        if (folder < 0 || !merged || read_entries(merged, folder)) {
            if (merged) dispose(merged);
            if (folder >= 0) close(folder);
            return -1;
        }
        close(folder);
    }
    int outcome = 0;
    for (size_t at = 0; at < merged->length && !outcome;) {
        struct dirent64 *entry = (struct dirent64 *)(merged->entries + at);
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) outcome = call(place, entry->d_name, with);
        at += entry->d_reclen;
    }
    dispose(merged);
    return outcome;
}
static int found_one(const Place *folder, const char *name, void *with) {
    (void)folder, (void)name, (void)with;
    return 1;
}
int is_empty_folder(const Place *place) { return !for_each_name(place, found_one, NULL); }

EXPORT DIR *fdopendir(int descriptor) {
    NEXT(fdopendir);
    struct stat status;
    if (!is_unchanged() && !fstat(descriptor, &status) && S_ISDIR(status.st_mode)) {
        Merged *merged = merged_descriptor(descriptor);
        if (merged) return (DIR *)merged;
    }
    return next(descriptor);
}
EXPORT DIR *opendir(const char *path) {
    NEXT(opendir);
    char room[PATH_MAX];
    int at = AT_FDCWD;
    note_read(at, path);
    if (is_unchanged()) return next(path);
    if (!(path = reading(&at, path, 1, room))) return NULL;
    if (!in_copies(path)) return next(path);
    int descriptor = open_folder(path);
    if (descriptor < 0) return NULL;
    DIR *folder = fdopendir(descriptor);
    if (!folder) close(descriptor);
    return folder;
}
EXPORT int closedir(DIR *folder) {
    NEXT(closedir);
    Merged *merged = ours(folder);
    if (!merged) return next(folder);
    int descriptor = merged->descriptor;
    dispose(merged);
    return close(descriptor);
}
EXPORT struct dirent64 *readdir64(DIR *folder) {
    NEXT(readdir64);
    Merged *merged = ours(folder);
    if (!merged) return next(folder);
    if (merged->at >= merged->length) return NULL;
    struct dirent64 *entry = (struct dirent64 *)(merged->entries + merged->at);
    merged->at += entry->d_reclen;
    return entry;
}
/* On the machines that PyTorch has CUDA for, a dirent is a dirent64. */
EXPORT struct dirent *readdir(DIR *folder) {
    NEXT(readdir);
    return ours(folder) ? (struct dirent *)readdir64(folder) : next(folder);
}
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
EXPORT int readdir_r(DIR *folder, struct dirent *entry, struct dirent **result) {
    NEXT(readdir_r);
    if (!ours(folder)) return next(folder, entry, result);
    struct dirent64 *found = readdir64(folder);
    *result = found ? memcpy(entry, found, found->d_reclen) : NULL;
    return 0;
}
EXPORT int readdir64_r(DIR *folder, struct dirent64 *entry, struct dirent64 **result) {
    return readdir_r(folder, (struct dirent *)entry, (struct dirent **)result);
}
EXPORT void rewinddir(DIR *folder) {
    NEXT(rewinddir);
    Merged *merged = ours(folder);
    if (!merged) next(folder);
    else if (read_both(merged)) merged->length = merged->at = 0;
}
EXPORT long telldir(DIR *folder) {
    NEXT(telldir);
    return ours(folder) ? (long)ours(folder)->at : next(folder);
}
EXPORT void seekdir(DIR *folder, long at) {
    NEXT(seekdir);
    if (ours(folder)) ours(folder)->at = at;
    else next(folder, at);
}
EXPORT int dirfd(DIR *folder) {
    NEXT(dirfd);
    return ours(folder) ? ours(folder)->descriptor : next(folder);
}

/* What the C library does without asking the functions above. */
typedef struct dirent64 **Entries;
EXPORT int scandirat64(int at, const char *path, Entries *list, int (*wanted)(const struct dirent64 *),
                       int (*compare)(const struct dirent64 **, const struct dirent64 **)) {
    int descriptor = opened(at, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    DIR *folder = descriptor < 0 ? NULL : fdopendir(descriptor);
    Entries found = NULL;
    size_t count = 0, capacity = 0;
    if (!folder) return -1;
    for (struct dirent64 *entry; (entry = readdir64(folder));) {
        if (wanted && !wanted(entry)) continue;
        if (count == capacity) found = realloc(found, (capacity = capacity * 2 + 16) * sizeof *found);
        if (!found || !(found[count] = malloc(entry->d_reclen))) abort();
        memcpy(found[count++], entry, entry->d_reclen);
    }
    closedir(folder);
    if (count && compare) qsort(found, count, sizeof *found, (int (*)(const void *, const void *))compare);
    *list = found ? found : malloc(sizeof *found);
    return count;
}
EXPORT int scandir64(const char *path, Entries *list, int (*wanted)(const struct dirent64 *),
                     int (*compare)(const struct dirent64 **, const struct dirent64 **)) {
    return scandirat64(AT_FDCWD, path, list, wanted, compare);
}
typedef int (*Wanted)(const struct dirent64 *);
typedef int (*Compare)(const struct dirent64 **, const struct dirent64 **);
EXPORT int scandir(const char *path, struct dirent ***list, int (*wanted)(const struct dirent *),
                   int (*compare)(const struct dirent **, const struct dirent **)) {
    return scandirat64(AT_FDCWD, path, (Entries *)list, (Wanted)wanted, (Compare)compare);
}
EXPORT int scandirat(int at, const char *path, struct dirent ***list, int (*wanted)(const struct dirent *),
                     int (*compare)(const struct dirent **, const struct dirent **)) {
    return scandirat64(at, path, (Entries *)list, (Wanted)wanted, (Compare)compare);
}

static int seen_stat(const char *path, struct stat *status, int flags) {
    char room[PATH_MAX];
    int at = AT_FDCWD;
    path = reading(&at, path, !flags, room);
    return path ? syscall(SYS_newfstatat, at, path, status, flags) : -1;
}
static int glob_stat(const char *path, struct stat *status) { return seen_stat(path, status, 0); }
static int glob_lstat(const char *path, struct stat *status) { return seen_stat(path, status, AT_SYMLINK_NOFOLLOW); }
EXPORT int glob(const char *pattern, int flags, int (*failed)(const char *, int), glob_t *found) {
    NEXT(glob);
    if (is_unchanged() || flags & GLOB_ALTDIRFUNC) return next(pattern, flags, failed, found);
    found->gl_closedir = (void (*)(void *))closedir;
    found->gl_readdir = (struct dirent * (*)(void *))readdir;
    found->gl_opendir = (void *(*)(const char *))opendir;
    found->gl_lstat = glob_lstat;
    found->gl_stat = glob_stat;
    return next(pattern, flags | GLOB_ALTDIRFUNC, failed, found);
}
EXPORT int glob64(const char *pattern, int flags, int (*failed)(const char *, int), glob64_t *found) {
    return glob(pattern, flags, failed, (glob_t *)found);
}
