/* Making copies, hiding originals, renaming. What changes a place takes the lock; what only opens a copy does not. */
#include "overlay.h"

#include <dlfcn.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>

static int lstat_at(const char *path, struct stat *status) { return syscall(SYS_newfstatat, AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW); }
static void set_times(const char *path, const struct stat *status) {
    struct timespec times[2] = {status->st_atim, status->st_mtim};
    syscall(SYS_utimensat, AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW);
}
/* The folder that *path* is in. */
static int folder_of(const char *path, char *out) {
    const char *slash = strrchr(path, '/');
    if (!slash) return -1;
    memcpy(out, path, slash - path);
    out[slash - path] = 0;
    return 0;
}
static const char *temporary_path(char *room) {
    snprintf(room, PATH_MAX, "%s/work/%u", overlay.scratch, next_number());
    return room;
}
/* Do what puts *copy* into its folder of copies; that the folder changes, or cannot be written, is nothing that the program did. */
static int put(int (*way)(const char *copy, const char *from), const char *copy, const char *from) {
    char folder[PATH_MAX];
    struct stat before;
    if (folder_of(copy, folder) || lstat_at(folder, &before)) return -1;
    int outcome = way(copy, from);
    if (outcome && errno == EACCES && !syscall(SYS_fchmodat, AT_FDCWD, folder, before.st_mode | 0700)) {
        outcome = way(copy, from);
        int error = errno;
        syscall(SYS_fchmodat, AT_FDCWD, folder, before.st_mode & 07777);
        errno = error;
    }
    if (!outcome) set_times(folder, &before);
    return outcome;
}
static int as_folder(const char *copy, const char *from) {
    (void)from;
    return syscall(SYS_mkdirat, AT_FDCWD, copy, 0700);
}
static int by_renaming(const char *copy, const char *from) { return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, copy, 0); }

/* Folders of copies down to that of *path*. They only carry what is in them: of themselves the originals still tell. */
static int make_carriers(const char *path) {
    char copy[PATH_MAX];
    struct stat status;
    if (copy_path(path, copy)) return -1;
    char *last = strrchr(copy, '/');
    *last = 0;
    if (!lstat_at(copy, &status)) return 0;
    *last = '/';
    for (char *slash = copy + overlay.length; (slash = strchr(slash + 1, '/'));) {
        *slash = 0;
        if (lstat_at(copy, &status) && put(as_folder, copy, NULL) && errno != EEXIST) return -1;
        *slash = '/';
    }
    return 0;
}
static void copy_attributes(int from, int to, const struct stat *status) {
    char names[4096], value[65536];
    ssize_t length = flistxattr(from, names, sizeof names);
    for (ssize_t at = 0; at < length; at += strlen(names + at) + 1) {
        ssize_t size = fgetxattr(from, names + at, value, sizeof value);
        if (size >= 0) syscall(SYS_fsetxattr, to, names + at, value, size, 0);
    }
    if (syscall(SYS_fchown, to, status->st_uid, status->st_gid)) syscall(SYS_fchown, to, -1, status->st_gid);
    syscall(SYS_fchmod, to, status->st_mode & 07777);
    struct timespec times[2] = {status->st_atim, status->st_mtim};
    syscall(SYS_utimensat, to, NULL, times, 0);
}

static int does_not_fit(const struct stat *status, int file) {
    struct statvfs disk;
    if (fstatvfs(file, &disk) || (uint64_t)status->st_blocks * 512 <= (uint64_t)disk.f_bavail * disk.f_frsize) return 0;
    dprintf(2, "memplan: no room in %s for a copy of a file of %lld MiB that the program opens for writing\n", overlay.scratch,
            (long long)status->st_size >> 20);
    return 1;
}
static int copy_range(int from, int to, off_t at, off_t end) {
    char *buffer = NULL;
    int outcome = 0;
    while (at < end && !outcome) {
        off_t in = at, out = at;
        ssize_t moved = buffer ? -1 : syscall(SYS_copy_file_range, from, &in, to, &out, (size_t)(end - at), 0);
        if (moved <= 0) { /* other disks, old kernels */
            if (!buffer && !(buffer = malloc(1 << 20))) return -1;
            size_t most = end - at < 1 << 20 ? end - at : 1 << 20;
            moved = pread(from, buffer, most, at);
            for (ssize_t done = 0, some; done < moved && !outcome; done += some) {
                some = pwrite(to, buffer + done, moved - done, at + done);
                if (some < 0) outcome = -1;
            }
            if (moved < 0) outcome = -1;
            if (!moved) break; /* it is shorter than it was */
        }
        at += moved;
    }
    int error = errno;
    free(buffer);
    errno = error;
    return outcome;
}
static int copy_content(int from, int to, const struct stat *status) {
    if (!status->st_size || !ioctl(to, FICLONE, from)) return 0;
    if (does_not_fit(status, to)) return errno = ENOSPC, -1;
    if (ftruncate(to, status->st_size)) return -1;
    for (off_t at = 0; at < status->st_size;) { /* holes stay holes */
        off_t data = lseek(from, at, SEEK_DATA);
        if (data < 0 && errno == ENXIO) break;
        off_t end = data < 0 ? status->st_size : lseek(from, data, SEEK_HOLE);
        if (data < 0) data = at;
        if (end < 0) end = status->st_size;
        if (copy_range(from, to, data, end)) return -1;
        at = end;
    }
    return 0;
}
/* A copy of a file or of a link, at *to*. */
static int copy_file(const char *original, const char *to, const struct stat *status, int with_content) {
    if (S_ISLNK(status->st_mode)) {
        char target[PATH_MAX];
        ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, original, target, sizeof target - 1);
        if (length < 0) return -1;
        target[length] = 0;
        if (syscall(SYS_symlinkat, target, AT_FDCWD, to)) return -1;
        syscall(SYS_fchownat, AT_FDCWD, to, status->st_uid, status->st_gid, AT_SYMLINK_NOFOLLOW);
        set_times(to, status);
        return 0;
    }
    int in = syscall(SYS_openat, AT_FDCWD, original, O_RDONLY | O_CLOEXEC | O_NOFOLLOW, 0);
    if (in < 0 && with_content) return -1;
    int out = syscall(SYS_openat, AT_FDCWD, to, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int outcome = out < 0 || (with_content && copy_content(in, out, status)) ? -1 : 0;
    if (!outcome) copy_attributes(in, out, status);
    int error = errno;
    if (in >= 0) close(in);
    if (out >= 0) close(out);
    if (outcome) syscall(SYS_unlinkat, AT_FDCWD, to, 0);
    errno = error;
    return outcome;
}
/* A folder of which the copy tells from now on: its own permissions and times, and what is new in it. */
static int copy_folder(const char *path, const struct stat *status) {
    char copy[PATH_MAX], carried[PATH_MAX + 2];
    snprintf(carried, sizeof carried, "%s/", path);
    if (make_carriers(carried) || copy_path(path, copy)) return -1;
    int in = syscall(SYS_openat, AT_FDCWD, *path ? path : "/", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    int out = syscall(SYS_openat, AT_FDCWD, copy, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (out >= 0) copy_attributes(in, out, status);
    if (in >= 0) close(in);
    if (out >= 0) close(out);
    return out >= 0 ? mark(path, COPIED) : -1;
}
static int copy_locked(Place *place, int with_content) {
    struct stat status;
    char work[PATH_MAX], copy[PATH_MAX];
    judge(place); /* another process may have made it meanwhile */
    if (place->where != ORIGINAL) return place->where == COPY ? 0 : (errno = ENOENT, -1);
    if (status_of(place, &status)) return -1;
    if (S_ISDIR(status.st_mode)) {
        if (copy_folder(place->path, &status)) return -1;
    } else if (S_ISREG(status.st_mode) || S_ISLNK(status.st_mode)) {
        if (copy_path(place->path, copy) || make_carriers(place->path)) return -1;
        if (copy_file(place->path, temporary_path(work), &status, with_content)) return -1;
        if (put(by_renaming, copy, work) || mark(place->path, COPIED)) return -1;
    } else return errno = EPERM, -1; /* a device or a socket is no file of which there could be two */
    judge(place);
    return 0;
}
int make_copy(Place *place, int with_content) {
    if (place->where == COPY) return 0;
    int lock = lock_changes();
    if (lock < 0) return -1;
    int outcome = copy_locked(place, with_content);
    unlock_changes(lock);
    return outcome;
}

static int may(const char *path, int mode) {
    NEXT(faccessat);
    return next(AT_FDCWD, *path ? path : "/", mode, AT_EACCESS);
}
static int folder_place(const char *path, Place *folder) {
    folder->is_elsewhere = folder->has_slash = 0;
    if (folder_of(path, folder->path)) return errno = EBUSY, -1; /* of the root */
    judge(folder);
    return 0;
}
int make_room(const char *path) {
    Place folder;
    struct stat status;
    if (folder_place(path, &folder) || status_of(&folder, &status)) return -1;
    if (!S_ISDIR(status.st_mode)) return errno = ENOTDIR, -1;
    if (folder.where == COPY) return 0;
    if (may(folder.path, W_OK | X_OK)) return -1;
    return make_copy(&folder, 0);
}
void touch_folder_of(const char *path) {
    char copy[PATH_MAX], folder[PATH_MAX];
    if (folder_of(path, folder) || copy_path(folder, copy)) return;
    struct timespec times[2] = {{0, UTIME_OMIT}, {0, UTIME_NOW}};
    syscall(SYS_utimensat, AT_FDCWD, copy, times, 0);
}
/* For the report, a line for each original that is hidden. */
static void note(const char *path) {
    char room[PATH_MAX + 16], line[PATH_MAX + 1];
    size_t length = strlen(path);
    snprintf(room, sizeof room, "%s/removed", overlay.scratch);
    memcpy(line, path, length);
    line[length] = 0; /* a name may have any other character */
    int file = syscall(SYS_openat, AT_FDCWD, room, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (write(file, line, length + 1) < 0) {} /* it is for the report alone */
    close(file);
}
int hide(const Place *place, const struct stat *status) {
    if (place->is_hidden) return 0;
    if (mark(place->path, HIDDEN)) return -1;
    if (!S_ISREG(status->st_mode)) links_changed();
    note(place->path);
    return 0;
}
/* The original of a place that has a copy too. */
static int original_status(const Place *place, struct stat *status) {
    if (place->is_hidden) return errno = ENOENT, -1;
    return lstat_at(place->path, status);
}

/* What a call that opens is to be given instead of (*at, path), everything made ready for it; NULL: errno says why not. */
const char *writing(int *at, const char *path, int flags, char *room) {
    int is_temporary = (flags & O_TMPFILE) == O_TMPFILE, is_new = flags & O_CREAT && flags & O_EXCL;
    int writes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC) || is_temporary;
    if ((flags & O_ACCMODE) != O_WRONLY && !(flags & O_PATH)) note_read(*at, path);
    if (flags & O_PATH || !writes) return reading(at, path, !(flags & O_NOFOLLOW), room);
    if (!overlay_is_on()) return path;
    int error = errno;
    Place place;
    struct stat status;
    int outcome = resolve(*at, path, !(flags & O_NOFOLLOW) && !is_new, &place);
    if (outcome) return outcome < 0 ? NULL : path;
    if (!place.is_held) {
        if (place.is_elsewhere) path = real_path(&place, room), *at = AT_FDCWD;
        errno = error;
        return path;
    }
    if (overlay.is_lost) return errno = EROFS, NULL;
    if (place.has_slash && flags & O_CREAT && !is_temporary) return errno = EISDIR, NULL;
    if (!status_of(&place, &status)) {
        if (is_new) return errno = EEXIST, NULL;
        int only_reads = (flags & O_ACCMODE) == O_RDONLY && !(flags & O_TRUNC);
        int is_folder_to_change = S_ISDIR(status.st_mode) && is_temporary;
        if (place.where == ORIGINAL && (is_folder_to_change || (S_ISREG(status.st_mode) && !only_reads))) {
            if (may(place.path, S_ISREG(status.st_mode) ? W_OK : W_OK | X_OK) || make_copy(&place, !(flags & O_TRUNC))) return NULL;
        }
    } else if (errno != ENOENT || !(flags & O_CREAT)) return NULL;
    else if (make_room(place.path) || mark(place.path, COPIED)) return NULL;
    else place.where = COPY;
    if (place.where == COPY || place.is_elsewhere) path = real_path(&place, room), *at = AT_FDCWD;
    if (path) errno = error;
    return path;
}
int opened(int at, const char *path, int flags, mode_t mode) {
    char room[PATH_MAX];
    path = writing(&at, path, flags, room);
    if (!path) return -1;
    return syscall(SYS_openat, at, path, flags, mode);
}

/* The same for a call that changes what is said of a file: its permissions, owner, times. */
const char *changing(int *at, const char *path, int follow, char *room) {
    if (!overlay_is_on()) return path;
    int error = errno;
    Place place;
    struct stat status;
    int outcome = resolve(*at, path, follow, &place);
    if (outcome) return outcome < 0 ? NULL : path;
    if (place.is_held) {
        if (overlay.is_lost) return errno = EROFS, NULL;
        if (status_of(&place, &status)) return NULL;
        if (place.where == ORIGINAL && geteuid() && geteuid() != status.st_uid && may(place.path, W_OK)) return errno = EPERM, NULL;
        if (make_copy(&place, 1)) return NULL;
    }
    if (place.where == COPY || place.is_elsewhere) path = real_path(&place, room), *at = AT_FDCWD;
    if (path) errno = error;
    return path;
}

/* A folder of copies that is not wanted any more, with what it carries. */
static int discard(const char *copy) {
    char work[PATH_MAX];
    return by_renaming(temporary_path(work), copy);
}
static int may_remove(const Place *place, const struct stat *status) {
    Place folder;
    struct stat of_folder;
    if (folder_place(place->path, &folder) || status_of(&folder, &of_folder)) return -1;
    if (folder.where == ORIGINAL && may(folder.path, W_OK | X_OK)) return -1;
    uid_t user = geteuid();
    if (of_folder.st_mode & S_ISVTX && user && user != status->st_uid && user != of_folder.st_uid) return errno = EPERM, -1;
    return 0;
}
static int remove_locked(Place *place, int is_folder) {
    struct stat status, original;
    char copy[PATH_MAX];
    judge(place);
    if (status_of(place, &status)) return -1;
    if (is_folder && !S_ISDIR(status.st_mode)) return errno = ENOTDIR, -1;
    if (!is_folder && S_ISDIR(status.st_mode)) return errno = EISDIR, -1;
    if (!is_folder && place->has_slash) return errno = ENOTDIR, -1;
    if (may_remove(place, &status)) return -1;
    if (is_folder && !is_empty_folder(place)) return errno = ENOTEMPTY, -1;
    if (copy_path(place->path, copy)) return -1;
    int has_copy = place->where == COPY, has_original = !original_status(place, &original);
    if (has_original && hide(place, &original)) return -1;
    if (is_folder ? lstat_at(copy, &status) : !has_copy) {
    } else if (has_original && is_folder) discard(copy);
    else if (syscall(SYS_unlinkat, AT_FDCWD, copy, is_folder ? AT_REMOVEDIR : 0)) return -1;
    if (!S_ISREG(status.st_mode)) links_changed();
    if (has_original) touch_folder_of(place->path);
    return 0;
}
static int is_link(int at, const char *path) { /* or a folder: paths lead through it */
    struct stat status;
    int error = errno, leads = !syscall(SYS_newfstatat, at, path, &status, AT_SYMLINK_NOFOLLOW) && !S_ISREG(status.st_mode);
    errno = error;
    return leads;
}
int remove_at(int at, const char *path, int flags) {
    int error = errno;
    if (!overlay_is_on()) return syscall(SYS_unlinkat, at, path, flags);
    Place place;
    char room[PATH_MAX];
    int outcome = resolve(at, path, 0, &place);
    if (outcome < 0) return -1;
    if (!outcome && place.is_held) {
        size_t length = strlen(path);
        if (flags & AT_REMOVEDIR && path[length - 1] == '.' && (length == 1 || path[length - 2] == '/')) return errno = EINVAL, -1;
        if (!*place.path) return errno = EBUSY, -1;
        struct stat status;
        if (overlay.is_lost) return errno = EROFS, -1;
        if (status_of(&place, &status) || make_room(place.path)) return -1;
        int lock = lock_changes();
        if (lock < 0) return -1;
        outcome = remove_locked(&place, flags & AT_REMOVEDIR);
        unlock_changes(lock);
        if (!outcome) errno = error;
        return outcome;
    }
    if (!outcome && place.is_elsewhere) path = real_path(&place, room), at = AT_FDCWD;
    errno = error;
    int leads = flags & AT_REMOVEDIR || is_link(at, path);
    outcome = syscall(SYS_unlinkat, at, path, flags);
    if (!outcome && leads) links_changed();
    return outcome;
}

/* Everything below a folder that is about to be renamed has to go with it. */
static int copy_below(const Place *folder, const char *name, void *with) {
    (void)with;
    Place place = {.has_slash = 0};
    struct stat status;
    if ((size_t)snprintf(place.path, sizeof place.path, "%s/%s", folder->path, name) >= sizeof place.path) return errno = ENAMETOOLONG, -1;
    judge(&place);
    if (place.where == NOWHERE) return 0;
    if (status_of(&place, &status)) return -1;
    if (!S_ISREG(status.st_mode) && !S_ISLNK(status.st_mode) && !S_ISDIR(status.st_mode)) return 0;
    if (copy_locked(&place, 1)) return -1;
    return S_ISDIR(status.st_mode) && !place.is_hidden ? for_each_name(&place, copy_below, NULL) : 0;
}
static int rename_locked(Place *from, Place *to, unsigned flags) {
    struct stat status, other, original;
    char copy[PATH_MAX], goal[PATH_MAX];
    judge(from);
    judge(to);
    if (status_of(from, &status) || may_remove(from, &status)) return -1;
    int is_folder = S_ISDIR(status.st_mode), there = !status_of(to, &other);
    size_t length = strlen(from->path);
    if ((from->has_slash || to->has_slash) && !is_folder) return errno = ENOTDIR, -1;
    if (is_folder && !strncmp(from->path, to->path, length) && to->path[length] == '/') return errno = EINVAL, -1;
    if (there && !strncmp(to->path, from->path, strlen(to->path)) && from->path[strlen(to->path)] == '/') return errno = ENOTEMPTY, -1;
    if (there && flags & RENAME_NOREPLACE) return errno = EEXIST, -1;
    if (there && is_folder != S_ISDIR(other.st_mode)) return errno = is_folder ? ENOTDIR : EISDIR, -1;
    if (there && may_remove(to, &other)) return -1;
    if (!strcmp(from->path, to->path)) return 0;
    if (there && is_folder && !is_empty_folder(to)) return errno = ENOTEMPTY, -1;
    if (copy_locked(from, 1) || (is_folder && !from->is_hidden && for_each_name(from, copy_below, NULL))) return -1;
    if (copy_path(from->path, copy) || copy_path(to->path, goal) || mark(to->path, COPIED)) return -1;
    int had_original = !original_status(from, &original);
    if (is_folder) { /* what was below its new name must not show */
        struct stat hidden;
        if (!original_status(to, &hidden) && hide(to, &hidden)) return -1;
        if (mark(to->path, HIDDEN)) return -1;
        if (!lstat_at(goal, &hidden) && discard(goal)) return -1;
    } else if (there && to->where == COPY && other.st_dev == status.st_dev && other.st_ino == status.st_ino) return 0; /* two names of one file */
    if (had_original && hide(from, &original)) return -1;
    if (by_renaming(goal, copy)) return -1;
    if (had_original) touch_folder_of(from->path);
    if (!S_ISREG(status.st_mode) || (there && !S_ISREG(other.st_mode))) links_changed();
    return 0;
}
/* Between what is held and what is not: as between two disks, but for files, which a program may have on one. */
static int move_file(const Place *from, const Place *to) {
    struct stat status, other;
    char source[PATH_MAX], goal[PATH_MAX], work[PATH_MAX + 32];
    if (status_of(from, &status)) return -1;
    if (!S_ISREG(status.st_mode) && !S_ISLNK(status.st_mode)) return errno = EXDEV, -1;
    if (!status_of(to, &other) && S_ISDIR(other.st_mode)) return errno = EISDIR, -1;
    if (!real_path(from, source)) return -1;
    if (to->is_held) {
        if (make_room(to->path) || copy_path(to->path, goal) || mark(to->path, COPIED)) return -1;
        temporary_path(work);
    } else {
        if (!real_path(to, goal)) return -1;
        snprintf(work, sizeof work, "%s.%d", goal, (int)syscall(SYS_gettid));
    }
    if (copy_file(source, work, &status, 1)) return -1;
    if (by_renaming(goal, work)) {
        int error = errno;
        syscall(SYS_unlinkat, AT_FDCWD, work, 0);
        return errno = error, -1;
    }
    return remove_at(AT_FDCWD, from->path, 0);
}
int rename_at(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    int error = errno;
    Place source, goal;
    int outcome = 1, other = 1;
    if (overlay_is_on() && (outcome = resolve(from_at, from, 0, &source)) >= 0) other = resolve(to_at, to, 0, &goal);
    if (outcome < 0 || other < 0) return -1;
    if (outcome || other || (!source.is_held && !goal.is_held)) {
        char from_room[PATH_MAX], to_room[PATH_MAX];
        if (!outcome && source.is_elsewhere) from = real_path(&source, from_room), from_at = AT_FDCWD;
        if (!other && goal.is_elsewhere) to = real_path(&goal, to_room), to_at = AT_FDCWD;
        errno = error;
        int leads = is_link(from_at, from) || is_link(to_at, to);
        outcome = syscall(SYS_renameat2, from_at, from, to_at, to, flags);
        if (!outcome && leads) links_changed();
        return outcome;
    }
    if (overlay.is_lost) return errno = EROFS, -1;
    if (flags & ~RENAME_NOREPLACE) return errno = EINVAL, -1; /* as disks that cannot exchange */
    if (!*source.path || !*goal.path) return errno = EBUSY, -1;
    struct stat status;
    if (status_of(&source, &status)) return -1;
    if (source.is_held != goal.is_held) {
        struct stat there;
        if (flags && !status_of(&goal, &there)) return errno = EEXIST, -1;
        outcome = move_file(&source, &goal);
    } else {
        if (make_room(goal.path) || make_room(source.path)) return -1;
        int lock = lock_changes();
        if (lock < 0) return -1;
        outcome = rename_locked(&source, &goal, flags);
        unlock_changes(lock);
    }
    if (!outcome) errno = error;
    return outcome;
}
