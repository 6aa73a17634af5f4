/* What of a stream may pass: whole HTTP/1.1 chunks of whole events that show no mark. */
#ifndef OMNI_PUMP_CHUNKS_H
#define OMNI_PUMP_CHUNKS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

enum {
    BUFFER_BYTES = 64 << 10, /* what one stream may move in one turn */
    MOST_DIGITS = 7,         /* of a chunk's size, as AnswerReader has it for chunks that may pass as they came */
    MOST_REST = 16 << 10,    /* of a chunk that has begun; a larger one is Python's */
    MOST_MARKS = 16,
    MOST_MARK = 64,
};

typedef struct {
    Py_ssize_t size;
    char text[MOST_MARK];
} Mark;

typedef struct {
    Mark all[MOST_MARKS];
    int count;
    unsigned char first[256], second[256]; /* is it that byte of a mark? Hardly anything passes both */
} Marks;

typedef struct {
    Py_ssize_t size;      /* of all the chunk; 0: there is more of it to come */
    const char *data;     /* NULL: its data has not begun */
    Py_ssize_t data_size; /* as far as it has come */
} Chunk;

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* The chunk that begins at p. False: it is none that may pass, however it goes on. */
static int read_chunk(const char *p, Py_ssize_t size, Chunk *chunk) {
    Py_ssize_t at = 0, length = 0, whole;
    *chunk = (Chunk){0, NULL, 0};
    for (int digit; at < size && at <= MOST_DIGITS && (digit = hex_digit(p[at])) >= 0; at++) length = length * 16 + digit;
    if (at > MOST_DIGITS) return 0;
    if (at == size) return 1;
    if (length == 0 || p[at] != '\r') return 0;
    if (at + 1 == size) return 1;
    if (p[at + 1] != '\n') return 0;
    whole = at + 2 + length + 2;
    if (whole > BUFFER_BYTES) return 0;
    if (at + 2 < size) {
        chunk->data = p + at + 2;
        chunk->data_size = Py_MIN(length, size - at - 2);
    }
    if (whole - 2 < size && p[whole - 2] != '\r') return 0;
    if (whole - 1 < size && p[whole - 1] != '\n') return 0;
    if (whole <= size) chunk->size = whole;
    return 1;
}

static int has_mark(const Marks *marks, const char *p, const char *end) {
    for (; p + 1 < end; p++) {
        if (!marks->first[(unsigned char)p[0]] || !marks->second[(unsigned char)p[1]]) continue;
        for (int i = 0; i < marks->count; i++) {
            const Mark *mark = &marks->all[i];
            if (end - p >= mark->size && memcmp(p, mark->text, mark->size) == 0) return 1;
        }
    }
    return 0;
}

/* Is the end of an event in it? Whoever waits for the chunk's end would keep the event from the client. */
static int has_boundary(const char *p, Py_ssize_t size) {
    for (Py_ssize_t i = 0; i + 1 < size; i++) {
        if (p[i] == '\n' && (p[i + 1] == '\n' || (p[i + 1] == '\r' && i + 2 < size && p[i + 2] == '\n'))) return 1;
        if (p[i] == '\r' && p[i + 1] == '\r') return 1;
    }
    return 0;
}

/* How much of some bytes is whole chunks, with how much data, and how much data of a chunk that has begun.
 * False: something in them is for Python. */
static int may_pass(const Marks *marks, const char *p, Py_ssize_t size, Py_ssize_t *whole, Py_ssize_t *data,
                    Py_ssize_t *begun) {
    Chunk chunk;
    *whole = *data = *begun = 0;
    while (*whole < size) {
        if (!read_chunk(p + *whole, size - *whole, &chunk)) return 0;
        if (chunk.size == 0) {
            *begun = chunk.data_size;
            return size - *whole <= MOST_REST && !has_boundary(chunk.data, chunk.data_size);
        }
        if (chunk.data_size < 2 || memcmp(chunk.data + chunk.data_size - 2, "\n\n", 2) != 0) return 0;
        if (has_mark(marks, chunk.data, chunk.data + chunk.data_size)) return 0;
        *whole += chunk.size;
        *data += chunk.data_size;
    }
    return 1;
}

#endif
