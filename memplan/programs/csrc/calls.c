/* The functions of the C library that take a path: each is given the path of the copy where there is one. */
#include "overlay.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/inotify.h>
#include <sys/random.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <utime.h>

/* Most calls need *path* to be led elsewhere, or end with what errno says. */
#define READING(at, path, follow, failure) \
    char room[PATH_MAX]; \
    if (!((path) = reading(&(at), path, follow, room))) return failure
#define CHANGING(at, path, follow) \
    char room[PATH_MAX]; \
    if (!((path) = changing(&(at), path, follow, room))) return -1
#define FOLLOWS(flags) (!((flags) & AT_SYMLINK_NOFOLLOW))

/* Opening. */
static mode_t mode_of(int flags, va_list list) { return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(list, mode_t) : 0; }
#define OPEN(name) \
    EXPORT int name(const char *path, int flags, ...) { \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = mode_of(flags, list); \
        va_end(list); \
        return opened(AT_FDCWD, path, flags, mode); \
    }
#define OPEN_AT(name) \
    EXPORT int name(int at, const char *path, int flags, ...) { \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = mode_of(flags, list); \
        va_end(list); \
        return opened(at, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPEN(__open)
OPEN(__open64)
OPEN_AT(openat)
OPEN_AT(openat64)
EXPORT int __open_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
EXPORT int __open64_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
EXPORT int __openat_2(int at, const char *path, int flags) { return opened(at, path, flags, 0); }
EXPORT int __openat64_2(int at, const char *path, int flags) { return opened(at, path, flags, 0); }
EXPORT int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode); }
EXPORT int creat64(const char *path, mode_t mode) { return creat(path, mode); }

static int flags_of_mode(const char *mode) {
    int flags = *mode == 'r' ? 0 : *mode == 'w' ? O_CREAT | O_TRUNC : O_CREAT | O_APPEND;
    int is_both = 0;
    for (const char *c = mode; *c && *c != ','; c++) {
        is_both |= *c == '+';
        if (*c == 'x') flags |= O_EXCL;
    }
    return flags | (is_both ? O_RDWR : *mode == 'r' ? O_RDONLY : O_WRONLY);
}
#define FOPEN(name) \
    EXPORT FILE *name(const char *path, const char *mode) { \
        NEXT(name); \
        char room[PATH_MAX]; \
        int at = AT_FDCWD; \
        path = writing(&at, path, flags_of_mode(mode), room); \
        return path ? next(path, mode) : NULL; \
    }
FOPEN(fopen)
FOPEN(fopen64)
#define FREOPEN(name) \
    EXPORT FILE *name(const char *path, const char *mode, FILE *file) { \
        NEXT(name); \
        char room[PATH_MAX]; \
        int at = AT_FDCWD; \
        const char *found = path ? writing(&at, path, flags_of_mode(mode), room) : NULL; \
        if (path && !found) { \
            int error = errno; \
            fclose(file); /* as it does when it fails */ \
            return errno = error, NULL; \
        } \
        return next(found, mode, file); \
    }
FREOPEN(freopen)
FREOPEN(freopen64)

/* Names for files that are new: the last six characters before the suffix are X. */
static int make_named(char *template, int suffix, int flags, int is_folder) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    size_t length = strlen(template);
    if (suffix < 0 || length < (size_t)suffix + 6 || strncmp(template + length - suffix - 6, "XXXXXX", 6)) return errno = EINVAL, -1;
    char *name = template + length - suffix - 6;
    for (int tries = 0; tries < 1000; tries++) {
        unsigned char bytes[6];
        if (syscall(SYS_getrandom, bytes, sizeof bytes, 0) != sizeof bytes) return -1;
        for (int i = 0; i < 6; i++) name[i] = letters[bytes[i] % 62];
        int made = is_folder ? mkdir(template, 0700) : opened(AT_FDCWD, template, (flags & ~O_ACCMODE) | O_RDWR | O_CREAT | O_EXCL, 0600);
        if (made >= 0 || errno != EEXIST) return made;
    }
    return errno = EEXIST, -1;
}
EXPORT int mkstemp(char *name) { return make_named(name, 0, 0, 0); }
EXPORT int mkstemp64(char *name) { return make_named(name, 0, 0, 0); }
EXPORT int mkostemp(char *name, int flags) { return make_named(name, 0, flags, 0); }
EXPORT int mkostemp64(char *name, int flags) { return make_named(name, 0, flags, 0); }
EXPORT int mkstemps(char *name, int suffix) { return make_named(name, suffix, 0, 0); }
EXPORT int mkstemps64(char *name, int suffix) { return make_named(name, suffix, 0, 0); }
EXPORT int mkostemps(char *name, int suffix, int flags) { return make_named(name, suffix, flags, 0); }
EXPORT int mkostemps64(char *name, int suffix, int flags) { return make_named(name, suffix, flags, 0); }
EXPORT char *mkdtemp(char *name) { return make_named(name, 0, 0, 1) < 0 ? NULL : name; }

/* What a path says. The kernel's struct stat is that of the C library on the machines that PyTorch has CUDA for. */
static int status_at(int at, const char *path, void *status, int flags) {
    READING(at, path, FOLLOWS(flags), -1);
    return syscall(SYS_newfstatat, at, path, status, flags);
}
EXPORT int stat(const char *path, struct stat *status) { return status_at(AT_FDCWD, path, status, 0); }
EXPORT int stat64(const char *path, struct stat64 *status) { return status_at(AT_FDCWD, path, status, 0); }
EXPORT int lstat(const char *path, struct stat *status) { return status_at(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW); }
EXPORT int lstat64(const char *path, struct stat64 *status) { return status_at(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW); }
EXPORT int fstatat(int at, const char *path, struct stat *status, int flags) { return status_at(at, path, status, flags); }
EXPORT int fstatat64(int at, const char *path, struct stat64 *status, int flags) { return status_at(at, path, status, flags); }
/* What programs call that were built with a glibc before 2.33. */
EXPORT int __xstat(int version, const char *path, struct stat *status) { return (void)version, status_at(AT_FDCWD, path, status, 0); }
EXPORT int __xstat64(int version, const char *path, struct stat64 *status) { return (void)version, status_at(AT_FDCWD, path, status, 0); }
EXPORT int __lxstat(int version, const char *path, struct stat *status) {
    return (void)version, status_at(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}
EXPORT int __lxstat64(int version, const char *path, struct stat64 *status) {
    return (void)version, status_at(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}
EXPORT int __fxstatat(int version, int at, const char *path, struct stat *status, int flags) {
    return (void)version, status_at(at, path, status, flags);
}
EXPORT int __fxstatat64(int version, int at, const char *path, struct stat64 *status, int flags) {
    return (void)version, status_at(at, path, status, flags);
}
EXPORT int statx(int at, const char *path, int flags, unsigned mask, struct statx *status) {
    NEXT(statx);
    READING(at, path, FOLLOWS(flags), -1);
    return next(at, path, flags, mask, status);
}
EXPORT int access(const char *path, int mode) {
    int at = AT_FDCWD;
    READING(at, path, 1, -1);
    return syscall(SYS_faccessat, at, path, mode);
}
EXPORT int faccessat(int at, const char *path, int mode, int flags) {
    NEXT(faccessat);
    READING(at, path, FOLLOWS(flags), -1);
    return next(at, path, mode, flags);
}
EXPORT int eaccess(const char *path, int mode) { return faccessat(AT_FDCWD, path, mode, AT_EACCESS); }
EXPORT int euidaccess(const char *path, int mode) { return faccessat(AT_FDCWD, path, mode, AT_EACCESS); }
EXPORT int statfs(const char *path, struct statfs *disk) {
    NEXT(statfs);
    int at = AT_FDCWD;
    READING(at, path, 1, -1);
    return next(path, disk);
}
EXPORT int statfs64(const char *path, struct statfs64 *disk) { return statfs(path, (struct statfs *)disk); }
EXPORT int statvfs(const char *path, struct statvfs *disk) {
    NEXT(statvfs);
    int at = AT_FDCWD;
    READING(at, path, 1, -1);
    return next(path, disk);
}
EXPORT int statvfs64(const char *path, struct statvfs64 *disk) { return statvfs(path, (struct statvfs *)disk); }
EXPORT long pathconf(const char *path, int name) {
    NEXT(pathconf);
    int at = AT_FDCWD;
    READING(at, path, 1, -1);
    return next(path, name);
}
EXPORT ssize_t getxattr(const char *path, const char *name, void *value, size_t size) {
    int at = AT_FDCWD;
    READING(at, path, 1, -1);
    return syscall(SYS_getxattr, path, name, value, size);
}
EXPORT ssize_t lgetxattr(const char *path, const char *name, void *value, size_t size) {
    int at = AT_FDCWD;
    READING(at, path, 0, -1);
    return syscall(SYS_lgetxattr, path, name, value, size);
}
EXPORT ssize_t listxattr(const char *path, char *names, size_t size) {
    int at = AT_FDCWD;
    READING(at, path, 1, -1);
    return syscall(SYS_listxattr, path, names, size);
}
EXPORT ssize_t llistxattr(const char *path, char *names, size_t size) {
    int at = AT_FDCWD;
    READING(at, path, 0, -1);
    return syscall(SYS_llistxattr, path, names, size);
}
EXPORT int inotify_add_watch(int watch, const char *path, uint32_t mask) {
    int at = AT_FDCWD;
    READING(at, path, !(mask & IN_DONT_FOLLOW), -1);
    return syscall(SYS_inotify_add_watch, watch, path, mask);
}

/* Links, and where a program is. */
static ssize_t link_at(int at, const char *path, char *target, size_t size) {
    char room[PATH_MAX], whole[PATH_MAX];
    if (is_unchanged()) return syscall(SYS_readlinkat, at, path, target, size);
    if (!(path = reading(&at, path, 0, room))) return -1;
    ssize_t length = syscall(SYS_readlinkat, at, path, whole, sizeof whole - 1);
    if (length < 0) return -1;
    whole[length] = 0;
    const char *seen = in_copies(whole) ? whole + overlay.length : whole; /* the kernel's own, in /proc */
    if (!*seen) seen = "/";
    length = strlen(seen);
    if ((size_t)length > size) length = size;
    memcpy(target, seen, length);
    return length;
}
EXPORT ssize_t readlink(const char *path, char *target, size_t size) { return link_at(AT_FDCWD, path, target, size); }
EXPORT ssize_t readlinkat(int at, const char *path, char *target, size_t size) { return link_at(at, path, target, size); }
EXPORT ssize_t __readlink_chk(const char *path, char *target, size_t size, size_t room) {
    return size > room ? (abort(), -1) : link_at(AT_FDCWD, path, target, size);
}
EXPORT ssize_t __readlinkat_chk(int at, const char *path, char *target, size_t size, size_t room) {
    return size > room ? (abort(), -1) : link_at(at, path, target, size);
}
EXPORT char *realpath(const char *path, char *out) {
    NEXT(realpath);
    Place place;
    struct stat status;
    if (is_unchanged() || !path || !*path) return next(path, out);
    int error = errno, outcome = resolve(AT_FDCWD, path, 1, &place);
    if (outcome > 0) return next(path, out);
    if (outcome < 0 || status_of(&place, &status)) return NULL;
    errno = error;
    const char *found = *place.path ? place.path : "/";
    return out ? strcpy(out, found) : strdup(found);
}
EXPORT char *__realpath_chk(const char *path, char *out, size_t size) { return size < PATH_MAX ? (abort(), NULL) : realpath(path, out); }
EXPORT char *canonicalize_file_name(const char *path) { return realpath(path, NULL); }
EXPORT char *getcwd(char *out, size_t size) {
    NEXT(getcwd);
    if (is_unchanged()) return next(out, size);
    char whole[PATH_MAX];
    if (syscall(SYS_getcwd, whole, sizeof whole) < 0) return NULL;
    const char *seen = in_copies(whole) ? whole + overlay.length : whole;
    if (!*seen) seen = "/";
    size_t length = strlen(seen) + 1;
    if (!out) {
        if (size && size < length) return errno = ERANGE, NULL;
        if (!(out = malloc(size ? size : length))) return NULL;
    } else if (!size) return errno = EINVAL, NULL;
    else if (size < length) return errno = ERANGE, NULL;
    return memcpy(out, seen, length);
}
EXPORT char *__getcwd_chk(char *out, size_t size, size_t room) { return size > room ? (abort(), NULL) : getcwd(out, size); }
EXPORT char *get_current_dir_name(void) {
    const char *said = getenv("PWD");
    struct stat here, there;
    if (said && *said == '/' && !stat(".", &here) && !stat(said, &there) && here.st_dev == there.st_dev && here.st_ino == there.st_ino)
        return strdup(said);
    return getcwd(NULL, 0);
}
/* A folder of which there is an original is gone to there: what knows nothing of copies finds the program's files. */
EXPORT int chdir(const char *path) {
    Place place;
    char room[PATH_MAX];
    if (is_unchanged()) return syscall(SYS_chdir, path);
    int error = errno, outcome = resolve(AT_FDCWD, path, 1, &place);
    if (outcome < 0) return -1;
    if (!outcome) {
        if (place.where == NOWHERE) return errno = ENOENT, -1;
        if (place.where == COPY && !place.is_hidden && !syscall(SYS_faccessat, AT_FDCWD, *place.path ? place.path : "/", F_OK)) place.where = ORIGINAL;
        if (!(path = real_path(&place, room))) return -1;
    }
    errno = error;
    return syscall(SYS_chdir, path);
}

/* Making, renaming, removing. */
typedef int (*Maker)(const char *path, const void *with);
static int make(int at, const char *path, Maker maker, const void *with, int is_folder) {
    Place place;
    struct stat status;
    char room[PATH_MAX];
    int outcome = 1, error = errno;
    if (overlay_is_on() && (outcome = resolve(at, path, 0, &place)) < 0) return -1;
    if (!outcome && place.is_held) {
        if (overlay.is_lost) return errno = EROFS, -1;
        int has_slash = place.has_slash;
        place.has_slash = 0;
        if (!status_of(&place, &status)) return errno = EEXIST, -1;
        if (errno != ENOENT) return -1;
        if (has_slash && !is_folder) return errno = ENOENT, -1;
        if (make_room(place.path) || copy_path(place.path, room)) return -1;
        if (mark(place.path, is_folder ? COPIED | HIDDEN : COPIED)) return -1; /* in a new folder everything is new */
        errno = error;
        return maker(room, with);
    }
    if (!outcome) {
        if (!real_path(&place, room)) return -1;
        path = room;
    } else if (at != AT_FDCWD && path && *path != '/') return 1; /* cannot be said without the folder */
    errno = error;
    return maker(path, with);
}
static int folder_maker(const char *path, const void *mode) { return syscall(SYS_mkdirat, AT_FDCWD, path, *(const mode_t *)mode); }
EXPORT int mkdirat(int at, const char *path, mode_t mode) {
    int outcome = make(at, path, folder_maker, &mode, 1);
    return outcome > 0 ? syscall(SYS_mkdirat, at, path, mode) : outcome;
}
EXPORT int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
typedef struct {
    mode_t mode;
    dev_t device;
} Node;
static int node_maker(const char *path, const void *with) {
    const Node *node = with;
    return syscall(SYS_mknodat, AT_FDCWD, path, node->mode, node->device);
}
EXPORT int mknodat(int at, const char *path, mode_t mode, dev_t device) {
    Node node = {mode, device};
    int outcome = make(at, path, node_maker, &node, 0);
    return outcome > 0 ? syscall(SYS_mknodat, at, path, mode, device) : outcome;
}
EXPORT int mknod(const char *path, mode_t mode, dev_t device) { return mknodat(AT_FDCWD, path, mode, device); }
EXPORT int __xmknod(int version, const char *path, mode_t mode, dev_t *device) {
    return (void)version, mknodat(AT_FDCWD, path, mode, *device);
}
EXPORT int __xmknodat(int version, int at, const char *path, mode_t mode, dev_t *device) {
    return (void)version, mknodat(at, path, mode, *device);
}
EXPORT int mkfifoat(int at, const char *path, mode_t mode) { return mknodat(at, path, mode | S_IFIFO, 0); }
EXPORT int mkfifo(const char *path, mode_t mode) { return mknodat(AT_FDCWD, path, mode | S_IFIFO, 0); }
static int link_maker(const char *path, const void *target) { return syscall(SYS_symlinkat, target, AT_FDCWD, path); }
EXPORT int symlinkat(const char *target, int at, const char *path) {
    int outcome = make(at, path, link_maker, target, 0);
    if (outcome > 0) outcome = syscall(SYS_symlinkat, target, at, path);
    if (!outcome) links_changed();
    return outcome;
}
EXPORT int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }

typedef struct {
    int at;
    const char *path;
    int flags;
} Source;
static int name_maker(const char *path, const void *with) {
    const Source *from = with;
    return syscall(SYS_linkat, from->at, from->path, AT_FDCWD, path, from->flags);
}
EXPORT int linkat(int from_at, const char *from, int at, const char *path, int flags) {
    char room[PATH_MAX];
    Place goal;
    struct stat status;
    if (overlay_is_on() && from && *from) { /* what is wrong with it comes first */
        int outcome = resolve(from_at, from, !!(flags & AT_SYMLINK_FOLLOW), &goal);
        if (outcome < 0 || (!outcome && status_of(&goal, &status))) return -1;
    }
    int held = overlay_is_on() && !resolve(at, path, 0, &goal) && goal.is_held;
    if (!held && is_unchanged()) return syscall(SYS_linkat, from_at, from, at, path, flags);
    /* both names are of the copy */
    const char *found = held && from && *from ? changing(&from_at, from, !!(flags & AT_SYMLINK_FOLLOW), room) : reading(&from_at, from, 0, room);
    if (!found) return -1;
    Source source = {from_at, found, flags};
    int outcome = make(at, path, name_maker, &source, 0);
    return outcome > 0 ? syscall(SYS_linkat, from_at, found, at, path, flags) : outcome;
}
EXPORT int link(const char *from, const char *path) { return linkat(AT_FDCWD, from, AT_FDCWD, path, 0); }

EXPORT int unlink(const char *path) { return remove_at(AT_FDCWD, path, 0); }
EXPORT int unlinkat(int at, const char *path, int flags) { return remove_at(at, path, flags); }
EXPORT int rmdir(const char *path) { return remove_at(AT_FDCWD, path, AT_REMOVEDIR); }
EXPORT int remove(const char *path) {
    int error = errno;
    if (!remove_at(AT_FDCWD, path, 0)) return 0;
    if (errno != EISDIR && errno != EPERM) return -1;
    errno = error;
    return rmdir(path);
}
EXPORT int rename(const char *from, const char *to) { return rename_at(AT_FDCWD, from, AT_FDCWD, to, 0); }
EXPORT int renameat(int from_at, const char *from, int at, const char *to) { return rename_at(from_at, from, at, to, 0); }
EXPORT int renameat2(int from_at, const char *from, int at, const char *to, unsigned flags) { return rename_at(from_at, from, at, to, flags); }

/* What is said of a file. */
EXPORT int truncate(const char *path, off_t length) {
    int at = AT_FDCWD;
    char room[PATH_MAX];
    if (!(path = writing(&at, path, O_WRONLY | (length ? 0 : O_TRUNC), room))) return -1;
    return syscall(SYS_truncate, path, length);
}
EXPORT int truncate64(const char *path, off64_t length) { return truncate(path, length); }
EXPORT int fchmodat(int at, const char *path, mode_t mode, int flags) {
    NEXT(fchmodat);
    CHANGING(at, path, FOLLOWS(flags));
    return next(at, path, mode, flags);
}
EXPORT int chmod(const char *path, mode_t mode) { return fchmodat(AT_FDCWD, path, mode, 0); }
EXPORT int lchmod(const char *path, mode_t mode) { return fchmodat(AT_FDCWD, path, mode, AT_SYMLINK_NOFOLLOW); }
EXPORT int fchownat(int at, const char *path, uid_t user, gid_t group, int flags) {
    CHANGING(at, path, FOLLOWS(flags));
    return syscall(SYS_fchownat, at, path, user, group, flags);
}
EXPORT int chown(const char *path, uid_t user, gid_t group) { return fchownat(AT_FDCWD, path, user, group, 0); }
EXPORT int lchown(const char *path, uid_t user, gid_t group) { return fchownat(AT_FDCWD, path, user, group, AT_SYMLINK_NOFOLLOW); }
static int times_of(int at, const char *path, const struct timespec *times, int flags) {
    CHANGING(at, path, FOLLOWS(flags));
    return syscall(SYS_utimensat, at, path, times, flags);
}
static const struct timespec *from_timeval(const struct timeval *given, struct timespec *out) {
    for (int i = 0; given && i < 2; i++) out[i] = (struct timespec){given[i].tv_sec, given[i].tv_usec * 1000};
    return given ? out : NULL;
}
static int descriptor_times(int descriptor, const struct timespec *times);
EXPORT int utimensat(int at, const char *path, const struct timespec times[2], int flags) {
    return path ? times_of(at, path, times, flags) : descriptor_times(at, times);
}
EXPORT int utimes(const char *path, const struct timeval *times) {
    struct timespec room[2];
    return times_of(AT_FDCWD, path, from_timeval(times, room), 0);
}
EXPORT int lutimes(const char *path, const struct timeval *times) {
    struct timespec room[2];
    return times_of(AT_FDCWD, path, from_timeval(times, room), AT_SYMLINK_NOFOLLOW);
}
EXPORT int futimesat(int at, const char *path, const struct timeval *times) {
    struct timespec room[2];
    return times_of(at, path, from_timeval(times, room), 0);
}
EXPORT int utime(const char *path, const struct utimbuf *times) {
    struct timespec both[2] = {{times ? times->actime : 0, 0}, {times ? times->modtime : 0, 0}};
    return times_of(AT_FDCWD, path, times ? both : NULL, 0);
}
EXPORT int setxattr(const char *path, const char *name, const void *value, size_t size, int flags) {
    int at = AT_FDCWD;
    CHANGING(at, path, 1);
    return syscall(SYS_setxattr, path, name, value, size, flags);
}
EXPORT int lsetxattr(const char *path, const char *name, const void *value, size_t size, int flags) {
    int at = AT_FDCWD;
    CHANGING(at, path, 0);
    return syscall(SYS_lsetxattr, path, name, value, size, flags);
}
EXPORT int removexattr(const char *path, const char *name) {
    int at = AT_FDCWD;
    CHANGING(at, path, 1);
    return syscall(SYS_removexattr, path, name);
}
EXPORT int lremovexattr(const char *path, const char *name) {
    int at = AT_FDCWD;
    CHANGING(at, path, 0);
    return syscall(SYS_lremovexattr, path, name);
}

/* A file that is open for reading may be an original: what is said of it through its descriptor is said of its copy. */
static const char *copy_of_descriptor(int descriptor, char *room) { /* NULL without an error: it is what it says */
    char path[PATH_MAX];
    struct stat of_descriptor, of_path;
    int at = AT_FDCWD, error = errno;
    errno = 0;
    if (!overlay_is_on() || overlay.is_lost || path_of_descriptor(descriptor, path) || in_copies(path) || fstat(descriptor, &of_descriptor) ||
        syscall(SYS_newfstatat, AT_FDCWD, path, &of_path, AT_SYMLINK_NOFOLLOW) || of_path.st_ino != of_descriptor.st_ino ||
        of_path.st_dev != of_descriptor.st_dev || (!S_ISREG(of_path.st_mode) && !S_ISDIR(of_path.st_mode))) {
        errno = 0;
        return NULL;
    }
    errno = 0;
    const char *found = changing(&at, path, 0, room);
    if (!found) return NULL;
    errno = error;
    return found == path ? (errno = 0, NULL) : found;
}
#define OF_DESCRIPTOR(descriptor, on_copy, as_it_is) \
    char room[PATH_MAX]; \
    int error = errno; \
    const char *copy = copy_of_descriptor(descriptor, room); \
    if (copy) return on_copy; \
    if (errno) return -1; \
    errno = error; \
    return as_it_is
static int descriptor_times(int descriptor, const struct timespec *times) {
    OF_DESCRIPTOR(descriptor, syscall(SYS_utimensat, AT_FDCWD, copy, times, 0), syscall(SYS_utimensat, descriptor, NULL, times, 0));
}
EXPORT int futimens(int descriptor, const struct timespec times[2]) { return descriptor_times(descriptor, times); }
EXPORT int futimes(int descriptor, const struct timeval *times) {
    struct timespec both[2];
    return descriptor_times(descriptor, from_timeval(times, both));
}
EXPORT int fchmod(int descriptor, mode_t mode) {
    OF_DESCRIPTOR(descriptor, syscall(SYS_fchmodat, AT_FDCWD, copy, mode), syscall(SYS_fchmod, descriptor, mode));
}
EXPORT int fchown(int descriptor, uid_t user, gid_t group) {
    OF_DESCRIPTOR(descriptor, syscall(SYS_fchownat, AT_FDCWD, copy, user, group, 0), syscall(SYS_fchown, descriptor, user, group));
}
EXPORT int fsetxattr(int descriptor, const char *name, const void *value, size_t size, int flags) {
    OF_DESCRIPTOR(descriptor, syscall(SYS_setxattr, copy, name, value, size, flags), syscall(SYS_fsetxattr, descriptor, name, value, size, flags));
}
EXPORT int fremovexattr(int descriptor, const char *name) {
    OF_DESCRIPTOR(descriptor, syscall(SYS_removexattr, copy, name), syscall(SYS_fremovexattr, descriptor, name));
}
