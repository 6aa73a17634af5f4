/* Passing over JSON (RFC 8259): each function leaves off behind what it is named after; 0: it is not there.
 * Included once, by body_scan.c. */
#pragma once

#include <Python.h>

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define MAX_DEPTH 64
#define MOST_DIGITS 18 /* of a number that fits into 64 bits */

typedef struct {
    const unsigned char *at, *end;
    int high; /* Is there a byte in a string that is not ASCII? */
} Scan;

typedef unsigned char Block __attribute__((vector_size(16)));

typedef struct {
    const unsigned char *begin, *end;
} Span;

static int value(Scan *s, int depth);

static void blank(Scan *s) {
    while (s->at < s->end && *s->at <= ' ' && (*s->at == ' ' || *s->at == '\n' || *s->at == '\r' || *s->at == '\t'))
        s->at++;
}

/* Four hexadecimal digits; -1: there are none. */
static int code_unit(Scan *s) {
    int unit = 0;
    if (s->end - s->at < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int c = *s->at++;
        if (c >= '0' && c <= '9')
            unit = unit * 16 + c - '0';
        else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
            unit = unit * 16 + (c | 0x20) - 'a' + 10;
        else
            return -1;
    }
    return unit;
}

/* After an escape's backslash; 0: it is none. Half a surrogate pair is left to msgspec. */
static int escape(Scan *s) {
    int unit;
    if (s->at >= s->end) return 0;
    switch (*s->at++) {
    case '"': case '\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't':
        return 1;
    case 'u':
        unit = code_unit(s);
        if (unit < 0xD800 || unit > 0xDFFF) return unit >= 0;
        if (unit > 0xDBFF || s->end - s->at < 6 || s->at[0] != '\\' || s->at[1] != 'u') return 0;
        s->at += 2;
        unit = code_unit(s);
        return unit >= 0xDC00 && unit <= 0xDFFF;
    default:
        return 0;
    }
}

/* Of each byte its highest bit, the first byte's lowest. */
static unsigned high_bits(Block block) {
#ifdef __SSE2__
    return (unsigned)_mm_movemask_epi8((__m128i)block);
#else
    uint64_t halves[2];
    unsigned bits = 0;
    memcpy(halves, &block, sizeof halves);
    for (int i = 0; i < 2; i++) {
        uint64_t half = halves[i] >> 7 & UINT64_C(0x0101010101010101);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        half = __builtin_bswap64(half);
#endif
        /* Each bit times one of the factor's lands in the highest byte, in its order. */
        bits |= (unsigned)(half * UINT64_C(0x0102040810204080) >> 56) << 8 * i;
    }
    return bits;
#endif
}

/* Where plain text ends: at a quote, a backslash, a control character, or the end. */
static const unsigned char *plain(const unsigned char *at, const unsigned char *end, int *high) {
    unsigned seen = 0;
    while (end - at >= (Py_ssize_t)sizeof(Block)) {
        Block block;
        memcpy(&block, at, sizeof block);
        unsigned stops = high_bits((Block)((block == '"') | (block == '\\') | (block < 0x20)));
        if (stops) {
            *high |= (seen | (high_bits(block) & (stops - 1) & ~stops)) != 0;
            return at + __builtin_ctz(stops);
        }
        seen |= high_bits(block);
        at += sizeof block;
    }
    while (at < end && *at != '"' && *at != '\\' && *at >= 0x20) seen |= *at++ >> 7;
    *high |= seen != 0;
    return at;
}

/* A string, from behind its first quote to behind its last; 0: it is none. `escaped`: it is not what it looks like. */
static int string(Scan *s, int *escaped) {
    for (;;) {
        s->at = plain(s->at, s->end, &s->high);
        if (s->at >= s->end) return 0;
        switch (*s->at++) {
        case '"': return 1;
        case '\\':
            *escaped = 1;
            if (!escape(s)) return 0;
            break;
        default: return 0;
        }
    }
}

static int digits(Scan *s) {
    const unsigned char *from = s->at;
    while (s->at < s->end && *s->at >= '0' && *s->at <= '9') s->at++;
    return s->at > from;
}

static int number(Scan *s) {
    if (s->at < s->end && *s->at == '-') s->at++;
    if (s->at < s->end && *s->at == '0')
        s->at++;
    else if (!digits(s))
        return 0;
    if (s->at < s->end && *s->at == '.') {
        s->at++;
        if (!digits(s)) return 0;
    }
    if (s->at < s->end && (*s->at == 'e' || *s->at == 'E')) {
        s->at++;
        if (s->at < s->end && (*s->at == '+' || *s->at == '-')) s->at++;
        if (!digits(s)) return 0;
    }
    return 1;
}

static int word(Scan *s, const char *text, size_t length) {
    if ((size_t)(s->end - s->at) < length || memcmp(s->at, text, length) != 0) return 0;
    s->at += length;
    return 1;
}

static int next_is(Scan *s, unsigned char c) {
    /* Most JSON has no blanks. */
    if (s->at >= s->end || *s->at != c) {
        blank(s);
        if (s->at >= s->end || *s->at != c) return 0;
    }
    s->at++;
    return 1;
}

/* A name and its colon; 0: there is none, or one with an escape in it. */
static int name(Scan *s, Span *found) {
    int escaped = 0;
    if (!next_is(s, '"')) return 0;
    found->begin = s->at;
    if (!string(s, &escaped) || escaped) return 0;
    found->end = s->at - 1;
    return next_is(s, ':');
}

static int is(Span span, const char *text) {
    size_t length = strlen(text);
    return (size_t)(span.end - span.begin) == length && memcmp(span.begin, text, length) == 0;
}

static int object(Scan *s, int depth) {
    if (next_is(s, '}')) return 1;
    do {
        int escaped = 0;
        if (!next_is(s, '"') || !string(s, &escaped) || !next_is(s, ':') || !value(s, depth)) return 0;
    } while (next_is(s, ','));
    return next_is(s, '}');
}

static int array(Scan *s, int depth) {
    if (next_is(s, ']')) return 1;
    do {
        if (!value(s, depth)) return 0;
    } while (next_is(s, ','));
    return next_is(s, ']');
}

static int value(Scan *s, int depth) {
    int escaped = 0;
    blank(s);
    if (s->at >= s->end || depth >= MAX_DEPTH) return 0;
    switch (*s->at) {
    case '"': s->at++; return string(s, &escaped);
    case '{': s->at++; return object(s, depth + 1);
    case '[': s->at++; return array(s, depth + 1);
    case 't': return word(s, "true", 4);
    case 'f': return word(s, "false", 5);
    case 'n': return word(s, "null", 4);
    default: return number(s);
    }
}
