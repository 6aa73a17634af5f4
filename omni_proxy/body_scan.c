/* omni_proxy._body_scan: the top-level fields of request and answer bodies in one pass over their bytes.
 *
 * msgspec looks at a body twice, once for what the gateway reads and once for where its fields are, byte by byte. Here
 * the prompt, which is nearly all of it, is looked at once and in blocks, and what the gateway reads is read where it is
 * said in the usual way. What is accepted is a subset of what msgspec accepts: strict JSON (RFC 8259) in UTF-8, an
 * object, with no escape in a name that matters. Whatever else comes is answered by None, or by a mark (READ) where
 * only a value is unusual, and msgspec says what is wrong with it, if anything is; omni_proxy/call.py is the definition
 * of `scan`, omni_proxy/json_fields.py that of `pick`, omni_proxy/workers/connectors/fields.py that of `leg`.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define MAX_DEPTH 64
#define VIEWED_BYTES 512 /* from this length on a value is a view of the body and not a copy of its own */

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
    blank(s);
    if (s->at >= s->end || *s->at != c) return 0;
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

/* One message: a role that is a string, and what its content begins with. */
static int message(Scan *s, int *has_parts) {
    int roles = 0, contents = 0;
    if (!next_is(s, '{') || next_is(s, '}')) return 0;
    do {
        Span key;
        if (!name(s, &key)) return 0;
        blank(s);
        if (is(key, "role")) {
            if (roles++ || s->at >= s->end || *s->at != '"') return 0;
        } else if (is(key, "content")) {
            if (contents++ || s->at >= s->end) return 0;
            if (*s->at == '[') *has_parts = 1;
        }
        if (!value(s, 2)) return 0;
    } while (next_is(s, ','));
    return roles && next_is(s, '}');
}

static int messages(Scan *s, int *has_parts) {
    if (!next_is(s, '[')) return 0;
    do {
        if (!message(s, has_parts)) return 0;
    } while (next_is(s, ','));
    return next_is(s, ']');
}

/* The value of the field that holds the prompt: a text, or messages. */
static int prompt(Scan *s, int of_messages, int *has_parts) {
    int escaped = 0;
    blank(s);
    return of_messages ? messages(s, has_parts) : next_is(s, '"') && string(s, &escaped);
}

/* ---------------------------------------------------------------------------------------------- names */

#define SLOTS 256 /* for some 60 names */
#define LONGEST_NAME 40

/* What is to be done with a field, by its name; as in omni_proxy/call.py. The low bits: how its value is read. */
enum {
    READING = 15,
    MODEL = 1,
    STREAM,
    CAP,
    FIRST_CAP, /* goes before a plain cap */
    OPTIONS,   /* of a stream */
    SIZE,      /* a number that is not negative */
    TEXTS,     /* a text, or a list of them */
    ONE,
    NO,
    PROMPT,
    TAMPERED = 16, /* marks that a body gets by the names in it */
    NESTED = 32,
    THINKS = 64,
    READ = 128, /* msgspec must read the body */
    STREAMED = 256, /* marks that it gets by its values */
    USAGE = 512,
    PARTS = 1024,
    DOUBLED = 2048, /* a name comes twice */
};

typedef struct {
    int length, code;
    unsigned char text[LONGEST_NAME];
} Entry;

typedef struct {
    Entry entries[SLOTS];
} Names;

static const char NAMES[] = "omni_proxy._body_scan.names";

static size_t slot_of(const unsigned char *text, size_t length) {
    return (length * 31 + text[0] * 7 + text[length - 1] * 13 + text[length / 2] * 29) % SLOTS;
}

static Entry *entry_of(Names *names, const unsigned char *text, size_t length) {
    size_t slot = slot_of(text, length);
    for (;; slot = (slot + 1) % SLOTS) {
        Entry *entry = &names->entries[slot];
        if (entry->length == 0 || ((size_t)entry->length == length && memcmp(entry->text, text, length) == 0)) return entry;
    }
}

static int code_of(Names *names, Span key) {
    size_t length = key.end - key.begin;
    return length == 0 || length > LONGEST_NAME ? 0 : entry_of(names, key.begin, length)->code;
}

static void forget_names(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, NAMES)); }

PyDoc_STRVAR(names_doc,
             "names(codes) -> table\n\n"
             "What `scan` does with fields, by their names.");

static PyObject *names_of(PyObject *Py_UNUSED(module), PyObject *codes) {
    if (!PyDict_Check(codes) || PyDict_GET_SIZE(codes) > SLOTS / 2) {
        PyErr_SetString(PyExc_TypeError, "names takes a dict of not too many codes");
        return NULL;
    }
    Names *names = PyMem_Calloc(1, sizeof *names);
    PyObject *made = names == NULL ? PyErr_NoMemory() : PyCapsule_New(names, NAMES, forget_names);
    if (made == NULL) {
        PyMem_Free(names);
        return NULL;
    }
    PyObject *name, *code;
    for (Py_ssize_t at = 0; PyDict_Next(codes, &at, &name, &code);) {
        Py_ssize_t length;
        const char *text = PyUnicode_AsUTF8AndSize(name, &length);
        if (text == NULL || length == 0 || length > LONGEST_NAME) {
            if (text != NULL) PyErr_SetString(PyExc_ValueError, "a name is too long");
            Py_DECREF(made);
            return NULL;
        }
        Entry *entry = entry_of(names, (const unsigned char *)text, length);
        memcpy(entry->text, text, length);
        entry->length = (int)length;
        entry->code = (int)PyLong_AsLong(code);
    }
    if (PyErr_Occurred()) Py_CLEAR(made);
    return made;
}

/* --------------------------------------------------------------------------------- what the gateway reads */

#define MOST_FIELDS 64
#define MOST_DIGITS 18 /* of a number that fits into 64 bits */

typedef struct {
    Span keys[MOST_FIELDS], values[MOST_FIELDS];
    int count, marks;
    Span prompt, model;
    long long cap, first_cap; /* 0: none */
} Found;

static int is_null(Scan *s) { return s->at < s->end && *s->at == 'n' && word(s, "null", 4); }

/* `1`: true, `0`: false or null, -1: neither. */
static int flag(Scan *s) {
    if (s->at >= s->end) return -1;
    if (*s->at == 't') return word(s, "true", 4) ? 1 : -1;
    if (*s->at == 'f') return word(s, "false", 5) ? 0 : -1;
    return is_null(s) ? 0 : -1;
}

/* A count from 1 on, or null (0); -1: neither, or not written in the usual way. */
static long long amount(Scan *s) {
    const unsigned char *from = s->at;
    long long count = 0;
    if (is_null(s)) return 0;
    if (s->at >= s->end || *s->at < '1' || *s->at > '9') return -1;
    while (s->at < s->end && *s->at >= '0' && *s->at <= '9' && s->at - from < MOST_DIGITS) count = count * 10 + (*s->at++ - '0');
    return s->at < s->end && (*s->at == ',' || *s->at == '}' || *s->at <= ' ') ? count : -1;
}

static int is_size(Scan *s) {
    const unsigned char *from = s->at;
    if (is_null(s)) return 1;
    if (s->at >= s->end || *s->at == '-' || !number(s) || s->at - from > MOST_DIGITS) return 0;
    return memchr(from, 'e', s->at - from) == NULL && memchr(from, 'E', s->at - from) == NULL;
}

static int is_texts(Scan *s) {
    int escaped = 0;
    if (is_null(s)) return 1;
    if (next_is(s, '"')) return string(s, &escaped);
    if (!next_is(s, '[')) return 0;
    if (next_is(s, ']')) return 1;
    do {
        if (!next_is(s, '"') || !string(s, &escaped)) return 0;
    } while (next_is(s, ','));
    return next_is(s, ']');
}

/* The options of a stream: of them `include_usage` counts. */
static int options(Scan *s, int *marks) {
    int told = 0, usage = 0;
    if (is_null(s)) return 1;
    if (!next_is(s, '{')) return 0;
    if (next_is(s, '}')) return 1;
    do {
        Span key;
        if (!name(s, &key)) return 0;
        blank(s);
        if (!is(key, "include_usage")) {
            if (!value(s, 2)) return 0;
        } else if (told++ || (usage = flag(s)) < 0) {
            return 0;
        }
    } while (next_is(s, ','));
    if (usage) *marks |= USAGE;
    return next_is(s, '}');
}

/* Reads a value that the gateway wants to know; 0: it is not said in the usual way. */
static int reading(Scan *s, int how, Found *f) {
    int escaped = 0, said;
    long long count;
    switch (how) {
    case MODEL:
        if (!next_is(s, '"')) return 0;
        f->model.begin = s->at;
        if (!string(s, &escaped) || escaped) return 0;
        f->model.end = s->at - 1;
        return f->model.end > f->model.begin;
    case STREAM:
        said = flag(s);
        if (said > 0) f->marks |= STREAMED;
        return said >= 0;
    case CAP: return (f->cap = amount(s)) >= 0;
    case FIRST_CAP: return (f->first_cap = amount(s)) >= 0;
    case OPTIONS: return options(s, &f->marks);
    case SIZE: return is_size(s);
    case TEXTS: return is_texts(s);
    case ONE: return (count = amount(s)) == 0 || count == 1;
    case NO: return flag(s) == 0;
    default: return 0;
    }
}

static int is_doubled(const Found *f, Span key) {
    size_t length = key.end - key.begin;
    for (int i = 0; i < f->count; i++) {
        if ((size_t)(f->keys[i].end - f->keys[i].begin) == length && memcmp(f->keys[i].begin, key.begin, length) == 0) return 1;
    }
    return 0;
}

/* A field, from its value on. */
static int field(Scan *s, Names *names, int of_messages, Span key, Found *f) {
    int code = code_of(names, key), how = code & READING;
    const unsigned char *from;
    blank(s);
    from = s->at;
    f->marks |= code & ~READING;
    if (how == PROMPT) {
        int has_parts = 0;
        if (f->prompt.begin != NULL || !prompt(s, of_messages, &has_parts)) return 0;
        if (has_parts) f->marks |= PARTS;
        f->prompt.begin = from;
        f->prompt.end = s->at;
    } else if (how == 0 || !reading(s, how, f)) {
        if (how != 0) f->marks |= READ;
        s->at = from;
        if (!value(s, 1)) return 0;
    }
    if (is_doubled(f, key)) f->marks |= DOUBLED | READ;
    f->keys[f->count] = key;
    f->values[f->count].begin = from;
    f->values[f->count++].end = s->at;
    return 1;
}

/* 1: done, 0: not for us. */
static int top(Scan *s, Names *names, int of_messages, Found *f) {
    if (!next_is(s, '{')) return 0;
    do {
        Span key;
        if (f->count == MOST_FIELDS || !name(s, &key) || !field(s, names, of_messages, key, f)) return 0;
    } while (next_is(s, ','));
    if (!next_is(s, '}')) return 0;
    blank(s);
    if (f->model.begin == NULL) f->marks |= READ;
    return s->at == s->end && f->prompt.begin != NULL;
}

static int is_text(PyObject *body) {
    PyObject *text = PyUnicode_DecodeUTF8(PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), NULL);
    if (text == NULL) PyErr_Clear();
    Py_XDECREF(text);
    return text != NULL;
}

/* --------------------------------------------------------------------------------- where the fields are */

/* Where a field's name (without its quotes) and its value are, in bytes of the body. */
typedef struct {
    uint32_t key, key_end, value, value_end;
} Place;

static PyObject *places_of(const Found *f, const unsigned char *from) {
    PyObject *places = PyBytes_FromStringAndSize(NULL, f->count * sizeof(Place));
    if (places == NULL) return NULL;
    for (int i = 0; i < f->count; i++) {
        Place place = {f->keys[i].begin - from, f->keys[i].end - from, f->values[i].begin - from, f->values[i].end - from};
        memcpy(PyBytes_AS_STRING(places) + i * sizeof place, &place, sizeof place);
    }
    return places;
}

static PyObject *answer(const Found *f, const unsigned char *from) {
    long long cap = f->first_cap ? f->first_cap : f->cap;
    const char *model = (const char *)f->model.begin;
    PyObject *values[] = {
        PyLong_FromLong(f->marks),
        places_of(f, from),
        PyLong_FromSsize_t(f->prompt.begin - from),
        PyLong_FromSsize_t(f->prompt.end - from),
        f->marks & READ ? PyUnicode_New(0, 0) : PyUnicode_DecodeUTF8(model, (const char *)f->model.end - model, NULL),
        cap ? PyLong_FromLongLong(cap) : Py_NewRef(Py_None),
    };
    Py_ssize_t count = sizeof values / sizeof *values;
    PyObject *made = PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (values[i] == NULL) Py_CLEAR(made);
        if (made == NULL) Py_XDECREF(values[i]);
        else PyTuple_SET_ITEM(made, i, values[i]);
    }
    return made;
}

PyDoc_STRVAR(scan_doc,
             "scan(body, names, of_messages) -> (marks, places, begin, end, model, cap) or None\n\n"
             "Of a JSON object: the marks by its fields' names and values, where its fields are, where the prompt (a list\n"
             "of messages, or a text) begins and ends, the model's name (empty with the mark READ) and the most tokens of\n"
             "the answer. None: ask somebody who knows more of JSON.");

static PyObject *scan(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyBytes_CheckExact(args[0]) || !PyCapsule_IsValid(args[1], NAMES)) {
        PyErr_SetString(PyExc_TypeError, "scan takes bytes, a table of names and a flag");
        return NULL;
    }
    const unsigned char *from = (const unsigned char *)PyBytes_AS_STRING(args[0]);
    Scan s = {from, from + PyBytes_GET_SIZE(args[0]), 0};
    Found found;
    found.count = found.marks = 0;
    found.prompt = found.model = (Span){NULL, NULL};
    found.cap = found.first_cap = 0;
    if (PyBytes_GET_SIZE(args[0]) > UINT32_MAX) Py_RETURN_NONE;
    if (!top(&s, PyCapsule_GetPointer(args[1], NAMES), args[2] == Py_True, &found)) Py_RETURN_NONE;
    if (s.high && !is_text(args[0])) Py_RETURN_NONE;
    return answer(&found, from);
}

static PyObject *raw_of(PyObject *raw, PyObject *body, Place place) {
    Py_ssize_t length = place.value_end - place.value;
    PyObject *data, *made;
    if (length < VIEWED_BYTES) {
        data = PyBytes_FromStringAndSize(PyBytes_AS_STRING(body) + place.value, length);
    } else {
        PyObject *view = PyMemoryView_FromObject(body);
        data = view == NULL ? NULL : PySequence_GetSlice(view, place.value, place.value_end);
        Py_XDECREF(view);
    }
    if (data == NULL) return NULL;
    made = PyObject_CallOneArg(raw, data);
    Py_DECREF(data);
    return made;
}

PyDoc_STRVAR(fields_doc,
             "fields(body, places, raw) -> dict\n\n"
             "The fields of a body that was scanned, each made by `raw` of its bytes.");

static PyObject *fields_of(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyBytes_CheckExact(args[0]) || !PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "fields takes a body, the places of its fields and a type");
        return NULL;
    }
    PyObject *fields = PyDict_New();
    for (Py_ssize_t at = 0; fields != NULL && at < PyBytes_GET_SIZE(args[1]); at += sizeof(Place)) {
        Place place;
        memcpy(&place, PyBytes_AS_STRING(args[1]) + at, sizeof place);
        const char *key = PyBytes_AS_STRING(args[0]) + place.key;
        PyObject *text = PyUnicode_DecodeUTF8(key, place.key_end - place.key, NULL);
        PyObject *made = text == NULL ? NULL : raw_of(args[2], args[0], place);
        if (made == NULL || PyDict_SetItem(fields, text, made) < 0) Py_CLEAR(fields);
        Py_XDECREF(made);
        Py_XDECREF(text);
    }
    return fields;
}

/* -------------------------------------------------------------------------------------- a body for a leg */

#define MOST_RULES 32 /* bits of a word */

/* Writes a member behind a comma; without `at` it only counts. */
static Py_ssize_t member(unsigned char *at, const unsigned char *key, Py_ssize_t key_size, const void *value, Py_ssize_t size) {
    if (at != NULL) {
        *at++ = ',';
        memcpy(at, key, key_size);
        at[key_size] = ':';
        memcpy(at + key_size + 1, value, size);
    }
    return key_size + size + 2;
}

/* The members of a leg's body but for those at its end; -1: an exception is set. `rest`: the rules that met no field. */
static Py_ssize_t members(unsigned char *to, PyObject *body, PyObject *places, Names *names, PyObject *values, uint32_t *rest) {
    const unsigned char *from = (const unsigned char *)PyBytes_AS_STRING(body);
    Py_ssize_t size = 0, rules = PyTuple_GET_SIZE(values);
    *rest = UINT32_MAX;
    for (Py_ssize_t at = 0; at < PyBytes_GET_SIZE(places); at += sizeof(Place)) {
        Place place;
        memcpy(&place, PyBytes_AS_STRING(places) + at, sizeof place);
        const unsigned char *key = from + place.key - 1;
        Py_ssize_t key_size = place.key_end - place.key + 2, code = code_of(names, (Span){key + 1, from + place.key_end});
        unsigned char *end = to == NULL ? NULL : to + size;
        if (code == 0) {
            size += member(end, key, key_size, from + place.value, place.value_end - place.value);
            continue;
        }
        if (code > rules) {
            PyErr_SetString(PyExc_ValueError, "a name has no rule");
            return -1;
        }
        PyObject *value = PyTuple_GET_ITEM(values, code - 1);
        *rest &= ~(UINT32_C(1) << (code - 1));
        if (PyBytes_GET_SIZE(value) > 0)
            size += member(end, key, key_size, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value));
    }
    return size;
}

static int are_bytes(PyObject *values) {
    if (!PyTuple_CheckExact(values) || PyTuple_GET_SIZE(values) > MOST_RULES) return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++)
        if (!PyBytes_CheckExact(PyTuple_GET_ITEM(values, i))) return 0;
    return 1;
}

PyDoc_STRVAR(leg_doc,
             "leg(body, places, names, values, otherwise, tail) -> bytes\n\n"
             "A body from the fields of one that was scanned. The code of a name, from 1 on, says which of `values` stands\n"
             "in place of the client's (empty: the field is left out) and which of `otherwise` is put behind all fields\n"
             "where the client sent none of that code. `tail`: what comes last. Each of these begins with a comma.");

static PyObject *leg(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 6 || !PyBytes_CheckExact(args[0]) || !PyBytes_CheckExact(args[1]) || !PyCapsule_IsValid(args[2], NAMES) ||
        !are_bytes(args[3]) || !are_bytes(args[4]) || PyTuple_GET_SIZE(args[3]) != PyTuple_GET_SIZE(args[4]) ||
        !PyBytes_CheckExact(args[5])) {
        PyErr_SetString(PyExc_TypeError, "leg takes a body, the places of its fields, a table of names, rules and an end");
        return NULL;
    }
    PyObject *values = args[3], *otherwise = args[4], *tail = args[5];
    Names *names = PyCapsule_GetPointer(args[2], NAMES);
    uint32_t rest;
    Py_ssize_t size = members(NULL, args[0], args[1], names, values, &rest), rules = PyTuple_GET_SIZE(values);
    if (size < 0) return NULL;
    Py_ssize_t whole = size + PyBytes_GET_SIZE(tail);
    for (Py_ssize_t i = 0; i < rules; i++)
        if (rest >> i & 1) whole += PyBytes_GET_SIZE(PyTuple_GET_ITEM(otherwise, i));
    PyObject *made = PyBytes_FromStringAndSize(NULL, whole ? whole + 1 : 2);
    if (made == NULL) return NULL;
    unsigned char *to = (unsigned char *)PyBytes_AS_STRING(made), *at = to + size;
    members(to, args[0], args[1], names, values, &rest);
    for (Py_ssize_t i = 0; i < rules; i++) {
        PyObject *one = PyTuple_GET_ITEM(otherwise, i);
        if (!(rest >> i & 1)) continue;
        memcpy(at, PyBytes_AS_STRING(one), PyBytes_GET_SIZE(one));
        at += PyBytes_GET_SIZE(one);
    }
    memcpy(at, PyBytes_AS_STRING(tail), PyBytes_GET_SIZE(tail));
    to[0] = '{'; /* in place of the first comma */
    to[whole ? whole : 1] = '}';
    return made;
}

/* ------------------------------------------------------------------------------- a few fields of an answer */

#define MOST_PICKED 8

/* A count as a number, nothing where the field is absent or null, and of anything else its bytes. */
static PyObject *worth(Span span) {
    Py_ssize_t length = span.end - span.begin;
    long long count = 0;
    if (length == 0 || is(span, "null")) Py_RETURN_NONE;
    if (length <= MOST_DIGITS) {
        const unsigned char *at = span.begin;
        while (at < span.end && *at >= '0' && *at <= '9') count = count * 10 + (*at++ - '0');
        if (at == span.end) return PyLong_FromLongLong(count);
    }
    return PyBytes_FromStringAndSize((const char *)span.begin, length);
}

/* Where the values of these fields are; the last of a name counts. 0: not for us, as is a name that may be no text. */
static int find(Scan *s, const Span *names, Py_ssize_t count, Span *found) {
    if (!next_is(s, '{')) return 0;
    blank(s);
    if (s->at < s->end && *s->at == '}') {
        s->at++;
    } else {
        do {
            Span key, span;
            s->high = 0;
            if (!name(s, &key) || s->high) return 0;
            blank(s);
            span.begin = s->at;
            if (!value(s, 1)) return 0;
            span.end = s->at;
            for (Py_ssize_t i = 0; i < count; i++) {
                Py_ssize_t length = key.end - key.begin;
                if (names[i].end - names[i].begin != length || memcmp(names[i].begin, key.begin, length) != 0) continue;
                found[i] = span;
                break;
            }
        } while (next_is(s, ','));
        if (!next_is(s, '}')) return 0;
    }
    blank(s);
    return s->at == s->end;
}

PyDoc_STRVAR(pick_doc,
             "pick(body, names) -> values or None\n\n"
             "Of a JSON object the values of these fields: a count as a number, other values as bytes, None where a field\n"
             "is absent or null. None for all: ask somebody who knows more of JSON.");

static PyObject *pick(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Span names[MOST_PICKED], found[MOST_PICKED] = {{NULL, NULL}};
    if (count != 2 || !PyBytes_CheckExact(args[0]) || !PyTuple_CheckExact(args[1]) ||
        PyTuple_GET_SIZE(args[1]) > MOST_PICKED) {
        PyErr_SetString(PyExc_TypeError, "pick takes bytes and a few names of fields");
        return NULL;
    }
    Py_ssize_t wanted = PyTuple_GET_SIZE(args[1]);
    for (Py_ssize_t i = 0; i < wanted; i++) {
        Py_ssize_t length;
        const char *text = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(args[1], i), &length);
        if (text == NULL) return NULL;
        names[i].begin = (const unsigned char *)text;
        names[i].end = names[i].begin + length;
    }
    const unsigned char *from = (const unsigned char *)PyBytes_AS_STRING(args[0]);
    Scan s = {from, from + PyBytes_GET_SIZE(args[0]), 0};
    if (!find(&s, names, wanted, found)) Py_RETURN_NONE;
    PyObject *values = PyTuple_New(wanted);
    for (Py_ssize_t i = 0; values != NULL && i < wanted; i++) {
        PyObject *one = worth(found[i]);
        if (one == NULL) Py_CLEAR(values);
        else PyTuple_SET_ITEM(values, i, one);
    }
    return values;
}

static PyMethodDef methods[] = {
    {"leg", (PyCFunction)(void (*)(void))leg, METH_FASTCALL, leg_doc},
    {"fields", (PyCFunction)(void (*)(void))fields_of, METH_FASTCALL, fields_doc},
    {"names", names_of, METH_O, names_doc},
    {"pick", (PyCFunction)(void (*)(void))pick, METH_FASTCALL, pick_doc},
    {"scan", (PyCFunction)(void (*)(void))scan, METH_FASTCALL, scan_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_body_scan", "Bodies in one pass.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__body_scan(void) { return PyModuleDef_Init(&definition); }
