/* What is known of the device's memory, byte for byte: what was copied or set there since the last kernel, so that what goes there and
 * comes straight back is right. A kernel may write anywhere: after one, nothing is known. */
#include "card.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define MOST_PIECES (1 << 14) /* more than the ranks of a large world, each of which sends a piece */
#define MOST_BYTES ((size_t)1 << 16) /* of a piece; what is larger is data, and not kept */
#define MOST_KEPT ((size_t)1 << 26)  /* of all pieces: a model of small weights is thousands of them */
#define MOST_LAST ((size_t)1 << 27)  /* of the last copy that is larger than that */

/* A piece of memory whose bytes are known. No two overlap: what comes later takes its place from those that were there. */
typedef struct {
    uintptr_t address;
    size_t bytes;
    unsigned char *content; /* NULL: every byte is *value* */
    unsigned char value;
} Piece;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Piece pieces[MOST_PIECES];
static int num_pieces;
static size_t kept_bytes; /* of their contents */

/* The last copy that is too large for a piece, where a recorder wants it: a list of data. Reads do not see it. */
static Piece last;
static int keeps_last;

/* The part of a piece that lies in a range; 0 bytes when none does. */
static Piece part_of(const Piece *piece, uintptr_t address, size_t bytes) {
    uintptr_t from = piece->address > address ? piece->address : address;
    uintptr_t piece_end = piece->address + piece->bytes, end = piece_end < address + bytes ? piece_end : address + bytes;
    if (from >= end) return (Piece){0};
    return (Piece){from, end - from, piece->content ? piece->content + (from - piece->address) : NULL, piece->value};
}
/* The functions up to the next line are called with the lock held. */
static void forget_last(void) {
    free(last.content);
    last = (Piece){0};
}
static void forget_all(void) {
    forget_last();
    while (num_pieces) free(pieces[--num_pieces].content);
    kept_bytes = 0;
}
static void add(Piece piece) { /* its content is copied, and its place is free */
    if (!piece.bytes || (piece.content && piece.bytes > MOST_BYTES)) return;
    size_t content_bytes = piece.content ? piece.bytes : 0;
    if (num_pieces == MOST_PIECES || kept_bytes + content_bytes > MOST_KEPT) forget_all(); /* not known is never wrong */
    kept_bytes += content_bytes;
    if (piece.content) {
        unsigned char *copy = malloc(piece.bytes);
        if (!copy) abort();
        piece.content = memcpy(copy, piece.content, piece.bytes);
    }
    pieces[num_pieces++] = piece;
}
static void forget(uintptr_t address, size_t bytes) {
    if (part_of(&last, address, bytes).bytes) forget_last();
    for (int i = num_pieces; i-- > 0;) {
        if (i >= num_pieces) continue; /* `add` has forgotten all */
        Piece whole = pieces[i];
        if (!part_of(&whole, address, bytes).bytes) continue;
        pieces[i] = pieces[--num_pieces];
        if (whole.content) kept_bytes -= whole.bytes;
        if (whole.address < address) add(part_of(&whole, whole.address, address - whole.address));
        if (whole.address + whole.bytes > address + bytes)
            add(part_of(&whole, address + bytes, whole.address + whole.bytes - address - bytes));
        free(whole.content);
    }
}
static size_t read_known(unsigned char *to, uintptr_t from, size_t bytes) { /* how many of the bytes are known */
    size_t known = 0;
    for (int i = 0; i < num_pieces; i++) {
        Piece part = part_of(&pieces[i], from, bytes);
        if (!part.bytes) continue;
        if (part.content) memcpy(to + (part.address - from), part.content, part.bytes);
        else memset(to + (part.address - from), part.value, part.bytes);
        known += part.bytes;
    }
    return known;
}
/* ---- */

void kernel_ran(void) {
    device_works(LAUNCH_NS);
    if (!num_pieces && !last.content) return;
    pthread_mutex_lock(&lock);
    forget_all();
    pthread_mutex_unlock(&lock);
}
void card_memory_lost(uintptr_t address, size_t bytes) {
    if (!num_pieces && !last.content) return;
    pthread_mutex_lock(&lock);
    forget(address, bytes);
    pthread_mutex_unlock(&lock);
}
void card_memory_set(uintptr_t to, unsigned value, size_t width, size_t count) {
    unsigned char pattern[4] = {value, value >> 8, value >> 16, value >> 24};
    size_t bytes = width * count;
    int is_one_byte = !memcmp(pattern, pattern + 1, width - 1);
    unsigned char *content = is_one_byte || bytes > MOST_BYTES ? NULL : malloc(bytes + 1);
    for (size_t i = 0; content && i < bytes; i++) content[i] = pattern[i % width];
    pthread_mutex_lock(&lock);
    forget(to, bytes);
    if (is_one_byte || content) add((Piece){to, bytes, content, pattern[0]});
    pthread_mutex_unlock(&lock);
    free(content);
}

/* Who is asked what a read gets that nobody knows: a function of the recorder, which lives in the same process. */
typedef void (*Reader)(void *to, size_t bytes);
static Reader reader;
void memplan_on_read(Reader asked) { reader = asked; }

void unknown_read(void *to, size_t bytes) {
    memset(to, 0, bytes);
    if (bytes && reader && !is_own_check(to, bytes)) reader(to, bytes); /* without the lock: it may run Python, and wait for other threads */
}

void memplan_keep_last_copy(void) { keeps_last = 1; }
int memplan_last_copy(const void *address, void *out, size_t bytes) { /* was it all of these bytes? */
    pthread_mutex_lock(&lock);
    int is_last = last.content && last.address == (uintptr_t)address && last.bytes == bytes;
    if (is_last) memcpy(out, last.content, bytes);
    pthread_mutex_unlock(&lock);
    return is_last;
}

static void keep_last(const Copy *copy) { /* with the lock held */
    if (!keeps_last || copy->height != 1 || copy->width <= MOST_BYTES || copy->width > MOST_LAST) return;
    forget_last();
    last = (Piece){(uintptr_t)copy->to, copy->width, malloc(copy->width), 0};
    if (!last.content) abort();
    memcpy(last.content, copy->from, copy->width);
}
static void keep(const Copy *copy) {
    pthread_mutex_lock(&lock);
    for (size_t row = 0; row < copy->height; row++) {
        uintptr_t to = (uintptr_t)copy->to + row * copy->to_pitch;
        forget(to, copy->width);
        add((Piece){to, copy->width, (unsigned char *)copy->from + row * copy->from_pitch});
    }
    keep_last(copy);
    pthread_mutex_unlock(&lock);
}
static void move(const Copy *copy) {
    pthread_mutex_lock(&lock);
    for (size_t row = 0; row < copy->height; row++) {
        uintptr_t from = (uintptr_t)copy->from + row * copy->from_pitch, to = (uintptr_t)copy->to + row * copy->to_pitch;
        static Piece found[MOST_PIECES]; /* the lock is held */
        int num_found = 0;
        for (int i = 0; i < num_pieces; i++) {
            Piece part = part_of(&pieces[i], from, copy->width);
            if (!part.bytes) continue;
            if (part.content) {
                unsigned char *content = malloc(part.bytes);
                if (!content) abort();
                part.content = memcpy(content, part.content, part.bytes);
            }
            part.address += to - from;
            found[num_found++] = part;
        }
        forget(to, copy->width);
        while (num_found) {
            add(found[--num_found]);
            free(found[num_found].content);
        }
    }
    pthread_mutex_unlock(&lock);
}
/* The rows one behind the other; how many of their bytes are known. */
static size_t read_rows(unsigned char *rows, const Copy *copy) {
    size_t known = 0;
    if (!num_pieces) return 0;
    pthread_mutex_lock(&lock);
    for (size_t row = 0; row < copy->height; row++)
        known += read_known(rows + row * copy->width, (uintptr_t)copy->from + row * copy->from_pitch, copy->width);
    pthread_mutex_unlock(&lock);
    return known;
}
static void recall(const Copy *copy) {
    size_t bytes = copy->width * copy->height;
    int is_whole = copy->height == 1 || copy->to_pitch == copy->width;
    unsigned char *rows = is_whole ? copy->to : malloc(bytes + 1);
    if (!rows) abort();
    if (read_rows(rows, copy) < bytes) {
        unknown_read(rows, bytes); /* one question, however many rows it has */
        read_rows(rows, copy);     /* what is known of it is right all the same */
    }
    for (size_t row = 0; !is_whole && row < copy->height; row++)
        memcpy((char *)copy->to + row * copy->to_pitch, rows + row * copy->width, copy->width);
    if (!is_whole) free(rows);
}
int memory_known(const void *address, void *out, size_t bytes) {
    pthread_mutex_lock(&lock);
    size_t known = read_known(out, (uintptr_t)address, bytes);
    pthread_mutex_unlock(&lock);
    return known == bytes;
}
void memory_copy(Copy copy) {
    int to_device = card_owns(copy.to), from_device = card_owns(copy.from);
    if (!copy.width || !copy.height) return;
    if (to_device && from_device) move(&copy);
    else if (to_device) keep(&copy);
    else if (from_device) recall(&copy);
    else
        for (size_t row = 0; row < copy.height; row++)
            memmove((char *)copy.to + row * copy.to_pitch, (const char *)copy.from + row * copy.from_pitch, copy.width);
}
