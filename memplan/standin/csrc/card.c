/* The card's description and the account of its memory. */
#define _GNU_SOURCE
#include "card.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static Card the_card;
static pthread_once_t described = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used_bytes;
static uintptr_t next_address = FIRST_ADDRESS, next_handle = 0x1000;

/* MEMPLAN_CARD: major minor multiprocessors total context name, the name last since it has blanks. */
static void describe(void) {
    const char *text = getenv("MEMPLAN_CARD");
    int at = 0;
    if (!text || sscanf(text, "%d %d %d %zu %zu %n", &the_card.major, &the_card.minor, &the_card.multiprocessors, &the_card.total_bytes,
                        &the_card.context_bytes, &at) < 5 || !at) {
        fprintf(stderr, "memplan stand-in: MEMPLAN_CARD is not set: start the program with `memplan rehearse`\n");
        _exit(70);
    }
    strncpy(the_card.name, text + at, sizeof the_card.name - 1);
}
const Card *card(void) {
    pthread_once(&described, describe);
    return &the_card;
}

int card_take(size_t bytes) {
    const Card *c = card();
    pthread_mutex_lock(&lock);
    int fits = used_bytes + bytes + c->context_bytes <= c->total_bytes;
    if (fits) used_bytes += bytes;
    pthread_mutex_unlock(&lock);
    return fits;
}
void card_give(size_t bytes) {
    pthread_mutex_lock(&lock);
    used_bytes -= bytes;
    pthread_mutex_unlock(&lock);
}
size_t card_free_bytes(void) {
    pthread_mutex_lock(&lock);
    size_t taken = used_bytes + card()->context_bytes;
    pthread_mutex_unlock(&lock);
    return taken < card()->total_bytes ? card()->total_bytes - taken : 0;
}
uintptr_t card_reserve(size_t bytes) {
    pthread_mutex_lock(&lock);
    uintptr_t address = next_address;
    next_address += (bytes + PAGE - 1) / PAGE * PAGE + PAGE; /* a page between: running over an end is no other allocation */
    pthread_mutex_unlock(&lock);
    return address;
}
int card_owns(const void *pointer) { return (uintptr_t)pointer >= FIRST_ADDRESS && (uintptr_t)pointer < next_address; }

void *new_handle(void) { return (void *)__sync_add_and_fetch(&next_handle, 64); }

/* MEMPLAN_LOG: a file whose lines tell the parent what must not go unsaid. */
static void log_line(const char *kind, const char *name, size_t bytes) {
    const char *path = getenv("MEMPLAN_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    if (bytes) fprintf(file, "%s %s %zu\n", kind, name, bytes);
    else fprintf(file, "%s %s\n", kind, name);
    fclose(file);
}
int not_served(const char *call, int code) {
    log_line("not served", call, 0);
    fprintf(stderr, "memplan stand-in: %s is not served\n", call);
    return code;
}
size_t library_workspace(const char *kind, size_t allowance) {
    static size_t largest;
    const char *wanted = getenv("MEMPLAN_WORKSPACES");
    if (!wanted || *wanted != '1' || !allowance) return 0;
    if (allowance > largest) log_line("workspace", kind, largest = allowance);
    return allowance;
}
void library_unknown(const char *kind) {
    static const char *said;
    if (said != kind) log_line("unknown", said = kind, 0);
}
