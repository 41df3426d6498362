/* From a path that a program gives to a place: links are followed through originals and copies alike. */
#include "overlay.h"

#include <stdio.h>

#define MOST_LINKS 40 /* as the kernel */

int in_copies(const char *path) { return !strncmp(path, overlay.copies, overlay.length) && (path[overlay.length] == '/' || !path[overlay.length]); }
int copy_path(const char *path, char *out) {
    size_t length = strlen(path);
    if (overlay.length + length >= PATH_MAX) return errno = ENAMETOOLONG, -1;
    memcpy(out, overlay.copies, overlay.length);
    memcpy(out + overlay.length, path, length + 1);
    return 0;
}
/* Where the kernel finds it. NULL: the path is too long. */
const char *real_path(const Place *place, char *room) {
    size_t length = strlen(place->path);
    if (place->where == COPY) {
        if (copy_path(place->path, room)) return NULL;
        length += overlay.length;
    } else memcpy(room, place->path, length + 1);
    if (!length || place->has_slash) {
        if (length + 1 >= PATH_MAX) return errno = ENAMETOOLONG, NULL;
        strcpy(room + length, "/");
    }
    return room;
}
int status_of(const Place *place, struct stat *status) {
    char room[PATH_MAX];
    if (place->where == NOWHERE) return errno = ENOENT, -1;
    const char *path = real_path(place, room);
    return path ? syscall(SYS_newfstatat, AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW) : -1;
}
int path_of_descriptor(int descriptor, char *out) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
    if (length < 0) return -1;
    out[length] = 0;
    return *out == '/' ? 0 : -1;
}
/* The program's name for a path of the kernel's. Returns whether they differ. */
static int as_seen(char *path) {
    if (!in_copies(path)) return 0;
    memmove(path, path + overlay.length, strlen(path + overlay.length) + 1);
    return 1;
}
static int base_of(int at, Place *place) {
    if (at == AT_FDCWD) {
        if (syscall(SYS_getcwd, place->path, PATH_MAX) < 0) return -1;
    } else if (path_of_descriptor(at, place->path)) return -1;
    if (*place->path != '/') return -1; /* "(unreachable)" */
    if (!strcmp(place->path, "/")) *place->path = 0;
    place->is_elsewhere = as_seen(place->path);
    return 0;
}

/* The kernel's own links in /proc lead to what is open, which may have no name any more, or was never a file. */
static int leads_to(const Place *place, const char *target) {
    struct stat there, named;
    char room[PATH_MAX];
    const char *last = strrchr(place->path, '/');
    if (strncmp(place->path, "/proc/", 6)) return 1;
    if (*target != '/') return !strstr(target, ":[") && strncmp(target, "anon_inode:", 11);
    if (last - place->path > 3 && !strncmp(last - 3, "/fd/", 4) && last[1] >= '0' && last[1] <= '2' && !last[2]) return 0; /* stdout is as it is */
    const char *path = real_path(place, room);
    return path && !syscall(SYS_newfstatat, AT_FDCWD, path, &there, 0) && !syscall(SYS_newfstatat, AT_FDCWD, target, &named, 0) &&
           there.st_dev == named.st_dev && there.st_ino == named.st_ino;
}
/* The target of a link, or -1: EINVAL where the place is none. */
static ssize_t link_of(Place *place, char *target) {
    char room[PATH_MAX];
    judge(place);
    if (place->where == NOWHERE) return errno = ENOENT, -1;
    const char *path = real_path(place, room);
    ssize_t length = path ? syscall(SYS_readlinkat, AT_FDCWD, path, target, PATH_MAX - 1) : -1;
    if (length < 0) return -1;
    target[length] = 0;
    if (!leads_to(place, target)) return errno = EINVAL, -1;
    return length;
}
/* Go from *place* along *text*. */
static int walk(Place *place, const char *text, int follow) {
    char rest[PATH_MAX], target[PATH_MAX];
    size_t length = strlen(place->path);
    if (strlen(text) >= PATH_MAX) return errno = ENAMETOOLONG, -1;
    strcpy(rest, text);
    for (char *at = rest; *(at += strspn(at, "/"));) {
        size_t size = strcspn(at, "/");
        char *next = at + size;
        int is_last = !next[strspn(next, "/")], has_slash = is_last && *next;
        if (size == 1 && *at == '.') {
            at = next;
            continue;
        }
        if (size == 2 && at[0] == '.' && at[1] == '.') {
            while (length && place->path[--length] != '/') continue;
            place->path[length] = 0;
            place->is_judged = 0;
            at = next;
            continue;
        }
        if (length + size + 2 >= PATH_MAX) return errno = ENAMETOOLONG, -1;
        size_t before = length;
        place->is_judged = 0;
        place->path[length++] = '/';
        memcpy(place->path + length, at, size);
        place->path[length += size] = 0;
        at = next;
        if (is_last && !follow && !has_slash) return 0;
        place->has_slash = 0;
        ssize_t found = link_of(place, target);
        place->has_slash = has_slash;
        if (found < 0) {
            struct stat status;
            if (is_last) continue;
            if (errno != EINVAL || status_of(place, &status)) return -1;
            if (!S_ISDIR(status.st_mode)) return errno = ENOTDIR, -1;
            continue;
        }
        if (++place->num_links > MOST_LINKS) return errno = ELOOP, -1;
        if (place->where == COPY) place->is_elsewhere = 1;
        place->path[before] = 0;
        place->is_judged = 0;
        length = before;
        if (*target == '/') {
            as_seen(target);
            length = 0;
            *place->path = 0;
        }
        if (found + 1 + strlen(at) >= PATH_MAX) return errno = ENAMETOOLONG, -1;
        if (*at) strcat(target, at); /* it begins with a slash */
        strcpy(rest, target);
        at = rest;
    }
    return 0;
}

/* Folders whose links have been followed before. A slot is written under an odd number, and read again where the number changed. */
#define NUM_FOLDERS 512
#define MOST_LENGTH 232
typedef struct {
    _Atomic unsigned writes;
    unsigned generation;
    int is_elsewhere, num_links;
    char given[MOST_LENGTH], path[MOST_LENGTH];
} Folder;
static Folder folders[NUM_FOLDERS];
void forget_folders(void) { memset(folders, 0, sizeof folders); }

static Folder *slot_of(const char *given) {
    unsigned hash = 2166136261u;
    for (; *given; given++) hash = (hash ^ (unsigned char)*given) * 16777619u;
    return &folders[(hash ^ (hash >> 15)) % NUM_FOLDERS];
}
static int recall(const char *given, Place *place) {
    Folder *slot = slot_of(given);
    unsigned writes = atomic_load_explicit(&slot->writes, memory_order_acquire);
    if (!writes || writes % 2 || slot->generation != generation() || strncmp(slot->given, given, MOST_LENGTH)) return 0;
    memcpy(place->path, slot->path, MOST_LENGTH);
    int is_elsewhere = slot->is_elsewhere, num_links = slot->num_links;
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&slot->writes, memory_order_relaxed) != writes) return 0;
    place->is_elsewhere |= is_elsewhere;
    place->num_links = num_links;
    return 1;
}
static void remember(const char *given, const Place *place, unsigned at_generation) {
    Folder *slot = slot_of(given);
    unsigned writes = atomic_load(&slot->writes);
    if (strlen(given) >= MOST_LENGTH || strlen(place->path) >= MOST_LENGTH) return;
    if (writes % 2 || !atomic_compare_exchange_strong(&slot->writes, &writes, writes + 1)) return; /* another thread writes it */
    atomic_thread_fence(memory_order_release);
    slot->generation = at_generation;
    slot->is_elsewhere = place->is_elsewhere;
    slot->num_links = place->num_links;
    strcpy(slot->given, given);
    strcpy(slot->path, place->path);
    atomic_store_explicit(&slot->writes, writes + 2, memory_order_release);
}
/* Go to the folder *text*, *length* characters, from *place*. */
static int walk_to_folder(Place *place, const char *text, size_t length) {
    char given[PATH_MAX];
    size_t base = strlen(place->path);
    if (!length) return 0;
    if (base + length + 2 >= PATH_MAX) return errno = ENAMETOOLONG, -1;
    memcpy(given, place->path, base);
    given[base] = '/';
    memcpy(given + base + 1, text, length);
    given[base + 1 + length] = 0;
    unsigned at_generation = generation();
    if (recall(given, place)) return 0;
    if (walk(place, given + base, 1)) return -1;
    struct stat status;
    place->has_slash = 0;
    judge(place);
    if (status_of(place, &status)) return -1;
    if (!S_ISDIR(status.st_mode)) return errno = ENOTDIR, -1;
    if (strncmp(place->path, "/proc", 5)) remember(given, place, at_generation); /* what is in /proc depends on who asks */
    return 0;
}

int resolve(int at, const char *path, int follow, Place *place) {
    if (!path || !*path) return 1;
    place->is_elsewhere = place->has_slash = place->num_links = place->is_judged = 0;
    *place->path = 0;
    size_t length = strnlen(path, PATH_MAX);
    if (length == PATH_MAX) return 1;
    while (length > 1 && path[length - 1] == '/') length--;
    int has_slash = path[length] == '/';
    size_t leaf = length;
    while (leaf && path[leaf - 1] != '/') leaf--;
    int is_folder = (length - leaf == 1 && path[leaf] == '.') || (length - leaf == 2 && path[leaf] == '.' && path[leaf + 1] == '.');
    if (is_folder) leaf = length;
    if (*path != '/' && base_of(at, place)) return 1;
    if (*path == '/' && in_copies(path)) { /* a path that leaked from us, as from /proc */
        path += overlay.length;
        length -= overlay.length;
        leaf = leaf > overlay.length ? leaf - overlay.length : 0;
        place->is_elsewhere = 1;
    }
    if (walk_to_folder(place, path, leaf)) return -1;
    if (leaf < length) {
        char name[NAME_MAX + 2];
        if (length - leaf > NAME_MAX) return errno = ENAMETOOLONG, -1;
        memcpy(name, path + leaf, length - leaf);
        strcpy(name + (length - leaf), has_slash ? "/" : "");
        if (walk(place, name, follow)) return -1;
    }
    place->has_slash = has_slash && *place->path;
    if (!place->is_judged) judge(place);
    return 0;
}

/* What a call that reads is to be given instead of (*at, path); NULL: there is nothing, and errno says so. */
const char *reading(int *at, const char *path, int follow, char *room) {
    if (is_unchanged()) return path;
    int error = errno;
    Place place;
    int outcome = resolve(*at, path, follow, &place);
    if (outcome < 0) return NULL;
    if (!outcome && place.where == NOWHERE) return errno = ENOENT, NULL;
    if (!outcome && (place.where == COPY || place.is_elsewhere)) {
        path = real_path(&place, room);
        *at = AT_FDCWD;
    }
    if (path) errno = error;
    return path;
}
