/* What was copied and what is hidden, as a set of hashed paths in a file that all processes of the program map; and which folders are held.
 *
 * The set only grows, so that it is read without a lock: a path that is hidden stays so (what is made there later is a copy), and "copied"
 * only says that a copy is to be looked for. Two paths of one hash are not expected: 64 bits, and some thousands of paths. */
#include "overlay.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>

#define NUM_SLOTS ((uint64_t)1 << 21) /* the file is sparse */
#define NUM_FILTERED ((uint64_t)1 << 19)
#define MOST_CHANGES (NUM_SLOTS / 4 * 3)
#define MOST_RULES 64
#define ALL_FLAGS ((uint64_t)7)

typedef struct {
    _Atomic uint32_t is_begun, generation, number, unused;
    _Atomic uint64_t num_changes;
    _Atomic uint64_t filter[NUM_FILTERED / 64]; /* a bit for some of the hash: most paths are in no slot, and the slots in no cache */
    _Atomic uint64_t slots[NUM_SLOTS];          /* 0, or a hash whose last bits are flags */
} Index;

/* A folder whose files are held ('h'), passed ('p'), or passed unless they were there when the program began ('t'): what Python wrote. */
typedef struct {
    char kind;
    const char *path;
    size_t length;
} Rule;

Overlay overlay;
static Index *paths;
static Rule rules[MOST_RULES] = {{'p', "/dev", 4}, {'p', "/proc", 5}, {'p', "/sys", 4}}; /* the kernel's own */
#define NUM_KERNELS 3
static int num_rules = NUM_KERNELS;
static const char *shown[MOST_RULES]; /* 'c': files of which a copy is there from the beginning, with other contents */
static int num_shown;
static _Atomic int state; /* 0 before it is set up, 1 while, 2 after */

/* FNV-1a: the hash of a path goes on from that of the folder. */
#define NO_HASH 14695981039346656037ull
static uint64_t hashed(uint64_t hash, const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) hash = (hash ^ (unsigned char)text[i]) * 1099511628211ull;
    return hash;
}
static uint64_t mixed(uint64_t hash) { /* every bit of it into every other; never 0 without its flags */
    hash = (hash ^ (hash >> 32)) * 0xd6e8feb86659fd93ull;
    hash = (hash ^ (hash >> 29)) & ~ALL_FLAGS;
    return hash ? hash : ALL_FLAGS + 1;
}
static _Atomic uint64_t *filter_of(uint64_t key, uint64_t *bit) {
    *bit = 1ull << (key >> 32) % 64;
    return &paths->filter[(key >> 40) % (NUM_FILTERED / 64)];
}
static int flags_of(uint64_t hash) {
    uint64_t key = mixed(hash), bit;
    _Atomic uint64_t *filter = filter_of(key, &bit);
    if (!(atomic_load_explicit(filter, memory_order_acquire) & bit)) return 0;
    for (uint64_t at = key >> 3;; at++) {
        uint64_t found = atomic_load_explicit(&paths->slots[at % NUM_SLOTS], memory_order_acquire);
        if (!found) return 0;
        if ((found & ~ALL_FLAGS) == key) return found & ALL_FLAGS;
    }
}
static int add_flags(uint64_t hash, int flags) {
    uint64_t key = mixed(hash), bit;
    if (flags != EARLIER && atomic_load(&paths->num_changes) > MOST_CHANGES) return errno = ENOSPC, -1;
    _Atomic uint64_t *filter = filter_of(key, &bit);
    atomic_fetch_or(filter, bit);
    for (uint64_t at = key >> 3;; at++) {
        _Atomic uint64_t *slot = &paths->slots[at % NUM_SLOTS];
        uint64_t found = atomic_load(slot);
        while (!found || (found & ~ALL_FLAGS) == key) {
            if ((found & flags) == (uint64_t)flags && found) return 0;
            if (!atomic_compare_exchange_weak(slot, &found, key | found | flags)) continue;
            if (flags != EARLIER) atomic_fetch_add(&paths->num_changes, 1);
            return 0;
        }
    }
}

static char *whole_file(const char *name) { /* it stays: rules point into it */
    char path[PATH_MAX];
    struct stat status;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", overlay.scratch, name) >= sizeof path) return NULL;
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (file < 0) return NULL;
    char *text = NULL;
    if (!fstat(file, &status) && status.st_size) {
        text = mmap(NULL, status.st_size + 1, PROT_READ, MAP_PRIVATE, file, 0);
        if (text == MAP_FAILED) text = NULL;
    }
    close(file);
    return text;
}
/* The file "rules": a line for each, its kind, a blank and the path; a line break in a path is written as 1. */
static void read_rules(const char *text) {
    static char room[1 << 16];
    size_t length = strnlen(text, sizeof room - 1);
    memcpy(room, text, length);
    num_shown = overlay.notes_reads = 0;
    for (char *line = room, *end; (end = strchr(line, '\n')) && num_rules < MOST_RULES; line = end + 1) {
        *end = 0;
        for (char *c = line; *c; c++)
            if (*c == 1) *c = '\n';
        if (*line == 'l') snprintf(overlay.preload, sizeof overlay.preload, "%s", line + 2);
        else if (*line == 'r') overlay.notes_reads = 1;
        else if (*line == 'c' && num_shown < MOST_RULES) shown[num_shown++] = line + 2;
        else rules[num_rules++] = (Rule){*line, line + 2, strcmp(line + 2, "/") ? strlen(line + 2) : 0};
    }
}
/* What is in the folders for temporary files before the program begins is the user's. */
static void mark_earlier(void) {
    for (int i = 0; i < num_rules; i++) {
        if (rules[i].kind != 't') continue;
        int folder = syscall(SYS_openat, AT_FDCWD, rules[i].path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
        char entries[8192];
        for (long bytes; folder >= 0 && (bytes = syscall(SYS_getdents64, folder, entries, sizeof entries)) > 0;)
            for (long at = 0; at < bytes;) {
                struct dirent64 *entry = (struct dirent64 *)(entries + at);
                uint64_t hash = hashed(hashed(NO_HASH, rules[i].path, rules[i].length), "/", 1);
                add_flags(hashed(hash, entry->d_name, strlen(entry->d_name)), EARLIER);
                at += entry->d_reclen;
            }
        if (folder >= 0) close(folder);
    }
}
static void *mapped_index(void) {
    char path[PATH_MAX];
    if ((size_t)snprintf(path, sizeof path, "%s/index", overlay.scratch) >= sizeof path) return NULL;
    int file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return NULL;
    struct stat status;
    void *found = MAP_FAILED;
    if (!fstat(file, &status) && (status.st_size >= (off_t)sizeof(Index) || !ftruncate(file, sizeof(Index))))
        found = mmap(NULL, sizeof(Index), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return found == MAP_FAILED ? NULL : found;
}
static void set_up(void) {
    const char *scratch = getenv("MEMPLAN_OVERLAY");
    if (!scratch || *scratch != '/' || strlen(scratch) > PATH_MAX / 2) return;
    strcpy(overlay.scratch, scratch);
    overlay.length = snprintf(overlay.copies, sizeof overlay.copies, "%s/files", scratch);
    char *text = whole_file("rules");
    paths = text ? mapped_index() : NULL;
    if (text) read_rules(text);
    overlay.is_lost = !paths;
    overlay.is_on = 1;
    uint32_t no = 0;
    if (!paths || !atomic_compare_exchange_strong(&paths->is_begun, &no, 1)) return;
    const char *passed[MOST_RULES];
    int num_passed = 0;
    for (int i = 0; i < num_rules; i++)
        if (rules[i].kind != 'h') passed[num_passed++] = rules[i].path;
    mark_earlier();
    for (int i = 0; i < num_shown; i++) add_flags(hashed(NO_HASH, shown[i], strlen(shown[i])), COPIED);
    guard_originals(passed, num_passed);
}
__attribute__((constructor)) static void begin(void) {
    int before = 0, error = errno;
    if (atomic_compare_exchange_strong(&state, &before, 1)) {
        set_up();
        atomic_store(&state, 2);
    }
    errno = error;
}
/* A fork of a process that is warm (child/warm.py) begins again: MEMPLAN_OVERLAY names the folder of its own rehearsal. */
EXPORT void memplan_overlay_begin(void) {
    overlay.is_on = overlay.is_lost = 0;
    paths = NULL;
    num_rules = NUM_KERNELS;
    forget_folders();
    atomic_store(&state, 0);
    begin();
}
/* A process that removes the scratch folder itself must see it as it is: below its copies it would find the user's folders, and remove them. */
EXPORT void memplan_overlay_end(void) {
    overlay.is_on = 0;
    atomic_store(&state, 2);
}
int overlay_is_on(void) {
    if (atomic_load_explicit(&state, memory_order_acquire) != 2) begin(); /* called by the constructor of another library */
    return overlay.is_on;
}

int is_unchanged(void) { return !overlay_is_on() || overlay.is_lost || !atomic_load_explicit(&paths->num_changes, memory_order_acquire); }
unsigned generation(void) { return overlay.is_lost ? 0 : atomic_load_explicit(&paths->generation, memory_order_acquire); }
void links_changed(void) {
    if (overlay_is_on() && !overlay.is_lost) atomic_fetch_add(&paths->generation, 1);
}
unsigned next_number(void) { return overlay.is_lost ? 0 : atomic_fetch_add(&paths->number, 1); }
int mark(const char *path, int flags) { return overlay.is_lost ? (errno = EROFS, -1) : add_flags(hashed(NO_HASH, path, strlen(path)), flags); }
int was_hidden(const char *folder, const char *name) {
    uint64_t hash = hashed(hashed(hashed(NO_HASH, folder, strlen(folder)), "/", 1), name, strlen(name));
    return flags_of(hash) & HIDDEN;
}

/* The rule of the deepest folder decides; what no rule names is held. */
static int is_held(const char *path) {
    const Rule *found = NULL;
    for (int i = 0; i < num_rules; i++) {
        const Rule *rule = &rules[i];
        if ((found && rule->length <= found->length) || strncmp(path, rule->path, rule->length)) continue;
        if (path[rule->length] == '/' || (!path[rule->length] && rule->kind != 't')) found = rule; /* the temporary folder itself is held */
    }
    if (!found) return 1;
    if (found->kind != 't') return found->kind == 'h';
    if (overlay.is_lost) return 1;
    size_t first = found->length + 1 + strcspn(path + found->length + 1, "/");
    return flags_of(hashed(NO_HASH, path, first)) & EARLIER;
}
void judge(Place *place) {
    const char *path = place->path;
    uint64_t hash = NO_HASH;
    int is_below_hidden = 0, flags = 0;
    size_t from = 0, length = strlen(path);
    place->is_judged = 1;
    place->is_held = is_held(path);
    place->where = ORIGINAL;
    place->is_hidden = 0;
    if (is_unchanged()) return;
    for (size_t i = 1; i <= length; i++) {
        if (i < length && path[i] != '/') continue;
        hash = hashed(hash, path + from, i - from);
        from = i;
        flags = flags_of(hash);
        if (i < length && flags & HIDDEN) is_below_hidden = 1;
    }
    if (!length) flags = flags_of(hash);
    place->is_hidden = is_below_hidden || flags & HIDDEN;
    struct stat status;
    char copy[PATH_MAX];
    if ((is_below_hidden || flags & COPIED) && !copy_path(path, copy) && !syscall(SYS_newfstatat, AT_FDCWD, copy, &status, AT_SYMLINK_NOFOLLOW))
        place->where = COPY;
    else if (place->is_hidden) place->where = NOWHERE;
}

/* One change at a time, over all processes: a lock of an open file goes with whoever held it, however that ended. */
int lock_changes(void) {
    char path[PATH_MAX + 8];
    snprintf(path, sizeof path, "%s/lock", overlay.scratch);
    int lock = overlay.is_lost ? -1 : syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock < 0) {
        if (overlay.is_lost || errno == ENOENT) errno = EROFS; /* the rehearsal has ended: nothing is written after it */
        return -1;
    }
    while (flock(lock, LOCK_EX) < 0 && errno == EINTR) continue;
    return lock;
}
void unlock_changes(int lock) {
    int error = errno;
    flock(lock, LOCK_UN); /* a process that was forked meanwhile holds it too */
    close(lock);
    errno = error;
}
