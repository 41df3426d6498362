/* Files that a rehearsed program writes go to a scratch folder, and reads find them there: what the files of this folder share.
 *
 * The library stands first in LD_PRELOAD and takes the place of the functions of the C library that take a path. It names places as the
 * program does ("/home/me/run/log"). The original is at that path; the copy, where there is one, is at SCRATCH/files/home/me/run/log. What
 * the program has removed is hidden: its copy is gone, and its original is not looked at any more.
 *
 *     index.c      what was copied and what is hidden, in memory that all processes of the program share; which folders are held
 *     places.c     from a path to a place: links followed, original or copy
 *     copies.c     making copies, hiding originals, renaming
 *     folders.c    reading folders that have originals and copies
 *     calls.c      the other functions that take a path
 *     processes.c  starting programs, loading libraries, sockets
 *     reads.c      what the program opens for reading
 *     guard.c      what does not ask the C library
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
/* The function that ours stands before. */
#define NEXT(name) \
    static __typeof__(&name) next; \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* What the shared memory says of a path. */
enum {
    COPIED = 1,  /* there may be a copy: it is looked for */
    HIDDEN = 2,  /* the original is not looked at, nor is anything below it */
    EARLIER = 4, /* below a folder for temporary files, and there before the program began */
};

typedef enum { ORIGINAL, COPY, NOWHERE } Where;

typedef struct {
    char path[PATH_MAX]; /* absolute, without links, "." and ".."; "" is the root */
    Where where;
    int is_hidden;    /* the original is */
    int is_held;      /* writing makes a copy */
    int is_elsewhere; /* the kernel would not get there by the path that the program gave */
    int has_slash;    /* the path ended in one: it means a folder */
    int num_links;    /* that were followed */
    int is_judged;    /* the above is of this path */
} Place;

typedef struct {
    int notes_reads; /* somebody asks what the program opens */
    int is_on, is_lost; /* lost: the scratch folder is gone, and nothing may be written any more */
    size_t length;      /* of *copies* */
    char scratch[PATH_MAX], copies[PATH_MAX];
    char preload[PATH_MAX]; /* what LD_PRELOAD says of this library */
} Overlay;
extern Overlay overlay;

/* index.c */
int overlay_is_on(void);
int is_unchanged(void); /* nothing was written or removed yet: every read can be left as it is */
unsigned generation(void); /* changes whenever a path may lead elsewhere than before */
void links_changed(void);
void judge(Place *place); /* where it is, from its path */
int mark(const char *path, int flags);
int was_hidden(const char *folder, const char *name);
unsigned next_number(void);
int lock_changes(void);
void unlock_changes(int lock);

/* places.c */
int resolve(int at, const char *path, int follow, Place *place); /* 0; -1: errno says why it leads nowhere; 1: not ours to say */
int in_copies(const char *path);
int copy_path(const char *path, char *out);
const char *real_path(const Place *place, char *room);
int status_of(const Place *place, struct stat *status);     /* as lstat */
const char *reading(int *at, const char *path, int follow, char *room);
int path_of_descriptor(int descriptor, char *out);
void forget_folders(void);

/* copies.c */
int make_copy(Place *place, int with_content);
int make_room(const char *path); /* in the folder that *path* is in */
int hide(const Place *place, const struct stat *status);
void touch_folder_of(const char *path);
const char *writing(int *at, const char *path, int flags, char *room);
const char *changing(int *at, const char *path, int follow, char *room);
int remove_at(int at, const char *path, int flags);
int rename_at(int from_at, const char *from, int to_at, const char *to, unsigned flags);
int opened(int at, const char *path, int flags, mode_t mode);

/* reads.c */
void note_read(int at, const char *path);

/* guard.c */
void guard_originals(const char *const *folders, int num_folders);

/* folders.c */
int is_empty_folder(const Place *place);
int for_each_name(const Place *place, int (*call)(const Place *folder, const char *name, void *with), void *with);
