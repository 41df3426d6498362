/* The card's description and the account of its memory. */
#define _GNU_SOURCE
#include "card.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static Card cards[MOST_CARDS];
static int visible[MOST_CARDS], num_cards, num_visible;
static __thread int current; /* the device that this thread has chosen, as CUDA counts those that it can see */
static pthread_once_t described = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used_bytes[MOST_CARDS]; /* by device */
static uintptr_t next_address[MOST_CARDS], next_handle = 0x1000;

void uuid_of(int card, unsigned char out[16]) {
    memcpy(out, "memplan standin", 16);
    out[15] = card;
}
static int has_name(int card, const char *name, size_t length) { /* GPU-UUID, or its beginning */
    unsigned char uuid[16];
    char text[48] = "GPU-";
    uuid_of(card, uuid);
    for (int i = 0; i < 16; i++) sprintf(text + strlen(text), i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
    return length > 4 && length <= strlen(text) && !strncmp(text, name, length);
}
/* CUDA counts the fastest card first unless it is told to count along the bus. */
static void order(int *out) {
    const char *by = getenv("CUDA_DEVICE_ORDER");
    for (int i = 0; i < num_cards; i++) {
        int at = i;
        if (!by || strcmp(by, "PCI_BUS_ID"))
            for (; at && cards[out[at - 1]].multiprocessors < cards[i].multiprocessors; at--) out[at] = out[at - 1];
        out[at] = i;
    }
}
/* The card that the first *length* characters of an entry of CUDA_VISIBLE_DEVICES name, by its number or UUID; ELSEWHERE for one of the
 * user's own machine that is not among ours; -1 for what names none anywhere. */
#define ELSEWHERE MOST_CARDS
static int named(const char *entry, size_t length, const int *ordered) {
    char *end;
    long number = strtol(entry, &end, 10);
    if (end == entry + length && length) return number < 0 ? -1 : number < num_cards ? ordered[number] : ELSEWHERE;
    for (int i = 0; i < num_cards; i++)
        if (has_name(i, entry, length)) return i;
    return strncmp(entry, "GPU-", 4) && strncmp(entry, "MIG-", 4) ? -1 : ELSEWHERE;
}
/* CUDA_VISIBLE_DEVICES: numbers and UUIDs; the list ends at the first entry that names nothing. A script that chooses among the cards of its
 * own machine, which may have more, finds those that are stood in for, whichever it asks for: as many as it names. */
static void choose(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    int ordered[MOST_CARDS], is_elsewhere = 0;
    order(ordered);
    if (!text || num_cards == 1) {
        memcpy(visible, ordered, sizeof visible);
        num_visible = num_cards;
        return;
    }
    for (size_t length; *text && num_visible < num_cards; text += length + (text[length] == ',')) {
        length = strcspn(text, ",");
        int found = named(text, length, ordered);
        if (found < 0) break;
        is_elsewhere |= found == ELSEWHERE;
        visible[num_visible++] = found;
    }
    if (is_elsewhere) memcpy(visible, ordered, sizeof visible);
}
/* The first device has what lies behind FIRST_ADDRESS; the others share what is free below the addresses where Linux puts programs. */
static uintptr_t first_address(int ordinal) {
    if (!ordinal) return FIRST_ADDRESS;
    return OTHERS_ADDRESS + (ordinal - 1) * (OTHERS_BYTES / (num_visible - 1) / PAGE * PAGE);
}
/* MEMPLAN_CARD: a line for each card on the bus: major minor multiprocessors threads total context name, the name last since it has blanks. */
static void describe(void) {
    const char *text = getenv("MEMPLAN_CARD");
    while (text && *text && num_cards < MOST_CARDS) {
        Card *c = &cards[num_cards];
        size_t line = strcspn(text, "\n");
        int at = 0;
        if (sscanf(text, "%d %d %d %d %zu %zu %n", &c->major, &c->minor, &c->multiprocessors, &c->threads, &c->total_bytes, &c->context_bytes,
                   &at) < 6 || !at)
            break;
        snprintf(c->name, sizeof c->name, "%.*s", (int)line - at, text + at);
        num_cards++;
        text += line + (text[line] == '\n');
    }
    if (!num_cards) {
        fprintf(stderr, "memplan: the simulated GPU finds no MEMPLAN_CARD: start the program with `memplan rehearse`\n");
        _exit(70);
    }
    choose();
    for (int i = 0; i < num_visible; i++) {
        uintptr_t first = first_address(i), for_malloc = i ? OTHERS_BYTES / (num_visible - 1) / 2 : MALLOC_BYTES;
        next_address[i] = first + for_malloc / PAGE * PAGE;
        addresses_begin(i, first, next_address[i]);
    }
}
const Card *card(void) {
    pthread_once(&described, describe);
    return &cards[visible[current]];
}
const Card *card_on_bus(int number) { return card(), &cards[number]; }
int num_cards_on_bus(void) { return card(), num_cards; }
int num_visible_cards(void) { return card(), num_visible; }
int visible_card(int ordinal) { return card(), visible[ordinal]; }
int current_device(void) { return current; }
int choose_device(int ordinal) {
    if (ordinal < 0 || ordinal >= num_visible_cards()) return 0;
    current = ordinal;
    return 1;
}

/* The account that processes share. Locked through the file, so that a process that is killed lets go of it. */
static Slot *slots;
static int account = -1;
static pthread_once_t opened = PTHREAD_ONCE_INIT;

static void open_account(void) {
    const char *path = getenv("MEMPLAN_ACCOUNT");
    if (!path || !*path) return;
    account = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (account < 0 || ftruncate(account, SLOTS * sizeof(Slot))) abort();
    slots = mmap(NULL, SLOTS * sizeof(Slot), PROT_READ | PROT_WRITE, MAP_SHARED, account, 0);
    if (slots == MAP_FAILED) abort();
}
/* This process is a fork that stands for a program with an environment of its own: what its parent has read of its own is read anew. */
void memplan_begin_again(void) {
    const pthread_once_t never = PTHREAD_ONCE_INIT;
    num_cards = num_visible = current = 0;
    described = opened = never;
    if (slots) munmap(slots, SLOTS * sizeof(Slot));
    if (account >= 0) close(account);
    slots = NULL;
    account = -1;
}
static void lock_account(int type) {
    struct flock whole = {.l_type = type};
    while (account >= 0 && fcntl(account, F_SETLKW, &whole) && errno == EINTR) {}
}
static int is_alive(int pid) { /* a zombie, which nobody has waited for yet, holds no memory */
    char path[32], text[256];
    if (!pid || (kill(pid, 0) && errno != EPERM)) return 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    text[length > 0 ? length : 0] = 0;
    const char *state = strrchr(text, ')');
    return !state || (state[2] != 'Z' && state[2] != 'X');
}
static size_t others_bytes(int number) { /* on the card with that number on the bus; with the account locked */
    size_t bytes = 0;
    for (int i = 0; slots && i < SLOTS; i++)
        if (slots[i].pid != getpid() && slots[i].card == number && is_alive(slots[i].pid)) bytes += slots[i].bytes;
    return bytes;
}
static void tell(int device) { /* with the account locked */
    Slot *own = NULL;
    for (int i = 0; slots && i < SLOTS; i++) {
        if (slots[i].pid == getpid() && slots[i].card == visible[device]) own = &slots[i];
        else if (!own && !is_alive(slots[i].pid)) own = &slots[i];
    }
    if (own) *own = (Slot){getpid(), visible[device], used_bytes[device] + cards[visible[device]].context_bytes};
}

static size_t most_of_others; /* that other processes held of a card while this one asked for memory of it */
size_t memplan_most_of_others(void) { return most_of_others; }

static size_t shared_bytes, most_shared; /* with other processes: now, and the most at a time */
size_t memplan_most_shared(void) { return most_shared; }
void card_shares(size_t bytes, int is_more) {
    pthread_mutex_lock(&lock);
    shared_bytes = is_more ? shared_bytes + bytes : shared_bytes - bytes;
    if (shared_bytes > most_shared) most_shared = shared_bytes;
    pthread_mutex_unlock(&lock);
}

int card_take(int device, size_t bytes) {
    card();
    const Card *c = &cards[visible[device]];
    pthread_once(&opened, open_account);
    pthread_mutex_lock(&lock);
    lock_account(F_WRLCK);
    size_t others = others_bytes(visible[device]);
    if (others > most_of_others) most_of_others = others;
    int fits = others + used_bytes[device] + bytes + c->context_bytes <= c->total_bytes;
    if (fits) {
        used_bytes[device] += bytes;
        tell(device);
    }
    lock_account(F_UNLCK);
    pthread_mutex_unlock(&lock);
    return fits;
}
void card_give(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    lock_account(F_WRLCK);
    used_bytes[device] -= bytes;
    tell(device);
    lock_account(F_UNLCK);
    pthread_mutex_unlock(&lock);
}
size_t card_free_bytes(int number) {
    const Card *c = card_on_bus(number);
    pthread_once(&opened, open_account);
    pthread_mutex_lock(&lock);
    lock_account(F_RDLCK);
    size_t taken = others_bytes(number) + c->context_bytes;
    for (int i = 0; i < num_visible; i++)
        if (visible[i] == number) taken += used_bytes[i];
    lock_account(F_UNLCK);
    pthread_mutex_unlock(&lock);
    return taken < c->total_bytes ? c->total_bytes - taken : 0;
}
uintptr_t card_reserve(size_t bytes) {
    card();
    pthread_mutex_lock(&lock);
    uintptr_t address = next_address[current];
    next_address[current] += (bytes + PAGE - 1) / PAGE * PAGE + PAGE; /* a page between: running over an end is no other allocation */
    pthread_mutex_unlock(&lock);
    return address;
}
int device_of(const void *pointer) {
    uintptr_t address = (uintptr_t)pointer;
    for (int i = 0; i < num_visible; i++)
        if (address < next_address[i] && address >= first_address(i)) return i;
    return -1;
}
int card_owns(const void *pointer) { return device_of(pointer) >= 0; }

void *new_handle(void) { return (void *)__sync_add_and_fetch(&next_handle, 64); }

/* MEMPLAN_LOG: a file whose lines tell the parent what must not go unsaid. */
void tell_parent(const char *kind, const char *name, size_t number) {
    const char *path = getenv("MEMPLAN_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    if (number) fprintf(file, "%s %s %zu\n", kind, name, number);
    else fprintf(file, "%s %s\n", kind, name);
    fclose(file);
}
int not_served(const char *call, int code) {
    tell_parent("not served", call, 0);
    fprintf(stderr, "memplan: the simulated GPU does not serve %s\n", call);
    return code;
}
static size_t largest_workspace;
size_t memplan_largest_workspace(void) { return largest_workspace; } /* the most bytes that a library was said to want */
/* An odd number of bytes, which no tensor of numbers has and which takes the same block: so what was allocated for it is found again. */
static size_t told_workspace(const char *line, const char *kind, size_t bytes) {
    static size_t told[1024];
    static unsigned num_told;
    if (!bytes) return 0;
    bytes -= bytes % 2 == 0;
    for (unsigned i = 0; i < num_told; i++)
        if (told[i] == bytes) return bytes;
    int has_room = num_told < sizeof told / sizeof *told;
    if (has_room) told[num_told++] = bytes;
    if (has_room || bytes > largest_workspace) tell_parent(line, kind, bytes);
    if (bytes > largest_workspace) largest_workspace = bytes;
    return bytes;
}
size_t library_workspace(const char *kind, size_t allowance) {
    const char *wanted = getenv("MEMPLAN_WORKSPACES");
    return wanted && *wanted == '1' ? told_workspace("workspace", kind, allowance) : 0;
}
size_t known_workspace(size_t bytes) { return told_workspace("known", "workspace", bytes); }
static size_t refused;
size_t memplan_refused_workspace(void) { return refused; } /* what the last plan of a library wanted, where it was not to run */
void refused_workspace(size_t bytes) { refused = bytes; }
void unsure_workspace(size_t bytes, size_t by) {
    static struct { size_t bytes, by; } told[1024];
    static unsigned num_told;
    unsigned i = 0;
    while (i < num_told && told[i].bytes != bytes) i++;
    if (!by || i == sizeof told / sizeof *told || (i < num_told && told[i].by >= by)) return;
    if (i == num_told) told[num_told++].bytes = bytes;
    told[i].by = by;
    char line[64];
    snprintf(line, sizeof line, "workspace %zu by", bytes);
    tell_parent("unsure", line, by);
}
void library_unknown(const char *kind) {
    static const char *said;
    if (said != kind) tell_parent("unknown", said = kind, 0);
}
