/* Starting programs, which are to find what was written and to write as this one does; loading libraries; sockets in folders. */
#include "overlay.h"

#include <alloca.h>
#include <dlfcn.h>
#include <spawn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>

extern char **environ;

/* A library that this process has made is loaded from where it is. The C library searches where its caller says: it has to see ours, so
 * this must compile to a jump. */
__attribute__((optimize("optimize-sibling-calls"))) EXPORT void *dlopen(const char *path, int mode) {
    static void *(*next)(const char *, int);
    static __thread char room[PATH_MAX] __attribute__((tls_model("initial-exec")));
    if (!next) next = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    if (path && strchr(path, '/') && !is_unchanged()) {
        int at = AT_FDCWD, error = errno;
        const char *found = reading(&at, path, 1, room);
        if (found) path = found;
        else if (*path == '/' && !copy_path(path, room)) path = room; /* removed: the C library says that it is not there */
        errno = error;
    }
    return next(path, mode);
}

/* An environment that begins with what this library needs, where the program gives its child one without. */
static int is_variable(const char *entry, const char *name) { return !strncmp(entry, name, strlen(name)) && entry[strlen(name)] == '='; }
static const char *find_variable(char *const *environment, const char *name) {
    for (; environment && *environment; environment++)
        if (is_variable(*environment, name)) return *environment + strlen(name) + 1;
    return NULL;
}
static size_t count_of(char *const *list) {
    size_t count = 0;
    while (list && list[count]) count++;
    return count;
}
static int has_preload(const char *text) {
    size_t length = strlen(overlay.preload);
    for (; text && *text; text += strcspn(text, ": "), text += strspn(text, ": "))
        if (!strncmp(text, overlay.preload, length) && strchr(": ", text[length])) return 1; /* the end of the text is found too */
    return 0;
}
static int is_kept(char *const *environment) {
    const char *scratch = find_variable(environment, "MEMPLAN_OVERLAY");
    return !overlay_is_on() || !*overlay.preload ||
           (scratch && !strcmp(scratch, overlay.scratch) && has_preload(find_variable(environment, "LD_PRELOAD")));
}
static char **kept(char *const *environment, char **list, char *text) {
    const char *preload = find_variable(environment, "LD_PRELOAD");
    char **to = list;
    *to++ = text;
    text += sprintf(text, "MEMPLAN_OVERLAY=%s", overlay.scratch) + 1;
    *to++ = text;
    if (has_preload(preload)) sprintf(text, "LD_PRELOAD=%s", preload);
    else sprintf(text, "LD_PRELOAD=%s%s%s", overlay.preload, preload && *preload ? ":" : "", preload ? preload : "");
    for (; environment && *environment; environment++)
        if (!is_variable(*environment, "LD_PRELOAD") && !is_variable(*environment, "MEMPLAN_OVERLAY")) *to++ = *environment;
    *to = NULL;
    return list;
}
/* On the stack of the caller: between vfork and exec nothing may be allocated. */
#define KEPT(environment) \
    (is_kept(environment) ? (char **)(environment) \
                          : kept(environment, alloca((count_of(environment) + 3) * sizeof(char *)), \
                                 alloca(2 * PATH_MAX + 64 + (find_variable(environment, "LD_PRELOAD") ? strlen(find_variable(environment, "LD_PRELOAD")) : 0))))

EXPORT int execve(const char *path, char *const arguments[], char *const environment[]) {
    char room[PATH_MAX];
    int at = AT_FDCWD;
    char **whole = KEPT(environment);
    if (!(path = reading(&at, path, 1, room))) return -1;
    return syscall(SYS_execve, path, arguments, whole);
}
EXPORT int execveat(int at, const char *path, char *const arguments[], char *const environment[], int flags) {
    char room[PATH_MAX];
    char **whole = KEPT(environment);
    if (!(path = reading(&at, path, !(flags & AT_SYMLINK_NOFOLLOW), room))) return -1;
    return syscall(SYS_execveat, at, path, arguments, whole, flags);
}
EXPORT int fexecve(int descriptor, char *const arguments[], char *const environment[]) {
    return syscall(SYS_execveat, descriptor, "", arguments, KEPT(environment), AT_EMPTY_PATH);
}
/* Call *with* for each place where a program of that name may be; stop where it returns 0. */
static int search(const char *name, int (*call)(const char *path, void *with), void *with) {
    const char *folders = getenv("PATH");
    int error = ENOENT;
    if (!*name) return errno = ENOENT, -1;
    if (strchr(name, '/')) return call(name, with);
    if (!folders) folders = "/bin:/usr/bin";
    for (const char *end;; folders = end + 1) {
        char path[PATH_MAX];
        end = strchrnul(folders, ':');
        int length = end - folders;
        if ((size_t)snprintf(path, sizeof path, "%.*s%s%s", length, folders, length ? "/" : "", name) < sizeof path) {
            if (!call(path, with)) return 0;
            if (errno == EACCES) error = EACCES;
            else if (errno != ENOENT && errno != ENOTDIR && errno != ESTALE && errno != ENODEV && errno != ETIMEDOUT) return -1;
        }
        if (!*end) return errno = error, -1;
    }
}
typedef struct {
    char *const *arguments, *const *environment;
} Program;
static int execute(const char *path, void *with) {
    Program *program = with;
    execve(path, program->arguments, program->environment);
    if (errno != ENOEXEC) return -1;
    size_t count = count_of(program->arguments); /* a script without a first line is the shell's */
    char **arguments = alloca((count + 3) * sizeof *arguments);
    arguments[0] = (char *)"/bin/sh";
    arguments[1] = (char *)path;
    for (size_t i = 1; i <= count; i++) arguments[i + 1] = program->arguments[i];
    if (!count) arguments[2] = NULL;
    return execve("/bin/sh", arguments, program->environment);
}
EXPORT int execvpe(const char *name, char *const arguments[], char *const environment[]) {
    Program program = {arguments, environment};
    return search(name, execute, &program);
}
EXPORT int execvp(const char *name, char *const arguments[]) { return execvpe(name, arguments, environ); }
EXPORT int execv(const char *path, char *const arguments[]) { return execve(path, arguments, environ); }
#define LISTED(first, takes_environment, call) \
    va_list list; \
    size_t count = 1; \
    va_start(list, first); \
    while (va_arg(list, char *)) count++; \
    va_end(list); \
    char **arguments = alloca((count + 1) * sizeof *arguments), **environment = environ; \
    arguments[0] = (char *)first; \
    va_start(list, first); \
    for (size_t i = 1; i <= count; i++) arguments[i] = va_arg(list, char *); \
    if (takes_environment) environment = va_arg(list, char **); \
    va_end(list); \
    return call(path, arguments, environment)
EXPORT int execl(const char *path, const char *first, ...) { LISTED(first, 0, execve); }
EXPORT int execle(const char *path, const char *first, ...) { LISTED(first, 1, execve); }
EXPORT int execlp(const char *path, const char *first, ...) { LISTED(first, 0, execvpe); }

EXPORT int posix_spawn(pid_t *process, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes,
                       char *const arguments[], char *const environment[]) {
    NEXT(posix_spawn);
    char room[PATH_MAX];
    int at = AT_FDCWD, error = errno;
    if (!(path = reading(&at, path, 1, room))) {
        int failure = errno;
        return errno = error, failure;
    }
    return next(process, path, actions, attributes, arguments, KEPT(environment));
}
static int can_be_executed(const char *path, void *out) {
    if (access(path, X_OK)) return -1;
    strcpy(out, path);
    return 0;
}
EXPORT int posix_spawnp(pid_t *process, const char *name, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes,
                        char *const arguments[], char *const environment[]) {
    NEXT(posix_spawnp);
    char found[PATH_MAX], room[PATH_MAX];
    int at = AT_FDCWD, error = errno;
    const char *path = name;
    if (!is_unchanged() && strlen(name) < PATH_MAX && !search(name, can_be_executed, found) && (path = reading(&at, found, 1, room)) == found)
        path = name;
    errno = error;
    return next(process, path ? path : name, actions, attributes, arguments, KEPT(environment));
}
EXPORT int posix_spawn_file_actions_addopen(posix_spawn_file_actions_t *actions, int descriptor, const char *path, int flags, mode_t mode) {
    NEXT(posix_spawn_file_actions_addopen);
    char room[PATH_MAX];
    int at = AT_FDCWD, error = errno;
    path = writing(&at, path, flags, room);
    int failure = errno;
    errno = error;
    return path ? next(actions, descriptor, path, flags, mode) : failure;
}
/* The C library starts a shell with the environment of this process. */
static void keep_environment(void) {
    if (is_kept(environ)) return;
    char **list = alloca((count_of(environ) + 3) * sizeof(char *)), *text = malloc(2 * PATH_MAX + 64 + 65536);
    if (!text) return;
    kept(environ, list, text);
    putenv(list[0]);
    putenv(list[1]);
}
EXPORT int system(const char *command) {
    NEXT(system);
    keep_environment();
    return next(command);
}
EXPORT FILE *popen(const char *command, const char *mode) {
    NEXT(popen);
    keep_environment();
    return next(command, mode);
}

/* A socket that is made in a folder is made in its copy. A path of a socket is short: a longer one goes by the folder's descriptor. */
static int with_address(int socket, const struct sockaddr *given, socklen_t length, int makes, int (*next)(int, const struct sockaddr *, socklen_t)) {
    const struct sockaddr_un *address = (const struct sockaddr_un *)given;
    size_t start = offsetof(struct sockaddr_un, sun_path);
    if (!overlay_is_on() || !given || length <= start || address->sun_family != AF_UNIX || !*address->sun_path || (!makes && is_unchanged()))
        return next(socket, given, length);
    char path[sizeof address->sun_path + 1], room[PATH_MAX];
    size_t size = length - start < sizeof address->sun_path ? length - start : sizeof address->sun_path;
    int at = AT_FDCWD, folder = -1;
    memcpy(path, address->sun_path, size);
    path[size] = 0;
    const char *found = makes ? writing(&at, path, O_WRONLY | O_CREAT | O_EXCL, room) : reading(&at, path, 1, room);
    if (!found) return errno = makes && errno == EEXIST ? EADDRINUSE : errno, -1;
    if (found == path) return next(socket, given, length);
    struct sockaddr_un other = {.sun_family = AF_UNIX};
    if (strlen(found) < sizeof other.sun_path) strcpy(other.sun_path, found);
    else {
        char *last = strrchr(room, '/');
        *last = 0;
        folder = syscall(SYS_openat, AT_FDCWD, room, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
        if (folder < 0 || (size_t)snprintf(other.sun_path, sizeof other.sun_path, "/proc/self/fd/%d/%s", folder, last + 1) >= sizeof other.sun_path) {
            if (folder >= 0) close(folder);
            return errno = ENAMETOOLONG, -1;
        }
    }
    int outcome = next(socket, (struct sockaddr *)&other, start + strlen(other.sun_path) + 1), error = errno;
    if (folder >= 0) close(folder);
    errno = error;
    return outcome;
}
typedef int (*Addressed)(int, const struct sockaddr *, socklen_t);
EXPORT int bind(int socket, const struct sockaddr *address, socklen_t length) {
    static Addressed next;
    if (!next) next = (Addressed)dlsym(RTLD_NEXT, "bind");
    return with_address(socket, address, length, 1, next);
}
EXPORT int connect(int socket, const struct sockaddr *address, socklen_t length) {
    static Addressed next;
    if (!next) next = (Addressed)dlsym(RTLD_NEXT, "connect");
    return with_address(socket, address, length, 0, next);
}
