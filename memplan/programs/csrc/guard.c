/* What the C library is not asked for cannot be led to a copy: programs that call the kernel themselves, as those written in Go. The kernel
 * refuses them what would change a file of the user's (Landlock, from ABI 3, Linux 6.2, on); reading stays free. Where the kernel cannot,
 * they are not held. */
#include "overlay.h"

#include <linux/types.h>
#include <sys/prctl.h>

/* <linux/landlock.h>, which older systems do not have. */
#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#define SYS_landlock_add_rule 445
#define SYS_landlock_restrict_self 446
#endif
typedef struct {
    uint64_t access;
} Ruleset;
typedef struct __attribute__((packed)) {
    uint64_t access;
    int32_t folder;
} Beneath;
enum { GET_VERSION = 1, PATH_BENEATH = 1, OLDEST_VERSION = 3 };
#define WRITE_FILE (1ull << 1)
#define TRUNCATE (1ull << 14)
#define OF_FOLDERS (0x1ff0ull | 1ull << 13) /* removing, making of every kind, and renaming between folders */

static void allow(int rules, int file, uint64_t access) {
    Beneath beneath = {access, file};
    syscall(SYS_landlock_add_rule, rules, PATH_BENEATH, &beneath, 0);
}
/* From here on this process, and all that it starts, may write below *folders* only, and to its own outputs. */
void guard_originals(const char *const *folders, int num_folders) {
    struct stat status;
    if (syscall(SYS_landlock_create_ruleset, NULL, 0, GET_VERSION) < OLDEST_VERSION) return;
    Ruleset handled = {WRITE_FILE | TRUNCATE | OF_FOLDERS};
    int rules = syscall(SYS_landlock_create_ruleset, &handled, sizeof handled, 0);
    if (rules < 0) return;
    for (int i = 0; i < num_folders; i++) {
        int folder = syscall(SYS_openat, AT_FDCWD, folders[i], O_PATH | O_CLOEXEC, 0);
        if (folder < 0) continue;
        allow(rules, folder, handled.access);
        close(folder);
    }
    for (int output = 0; output < 3; output++)
        if (!fstat(output, &status) && S_ISREG(status.st_mode)) allow(rules, output, WRITE_FILE | TRUNCATE);
    if (!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) syscall(SYS_landlock_restrict_self, rules, 0);
    close(rules);
}
