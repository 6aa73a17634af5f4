/* omni_proxy._body_scan: the top-level fields of request and answer bodies in one pass over their bytes.
 *
 * msgspec looks at a body twice, once for what the gateway reads and once for where its fields are, byte by byte. Here
 * the prompt, which is nearly all of it, is looked at once and in blocks. What is accepted is a subset of what msgspec
 * accepts: strict JSON (RFC 8259) in UTF-8, an object, with no escape in a name that matters. Whatever else comes is
 * answered by None, and msgspec says what is wrong with it, if anything is; omni_proxy/call.py is the definition of
 * `scan`, omni_proxy/json_fields.py that of `pick`.
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

static PyObject *raw_of(PyObject *raw, PyObject *body, Span span) {
    const char *from = PyBytes_AS_STRING(body);
    Py_ssize_t begin = (const char *)span.begin - from, length = span.end - span.begin;
    PyObject *data, *made;
    if (length < VIEWED_BYTES) {
        data = PyBytes_FromStringAndSize(from + begin, length);
    } else {
        PyObject *view = PyMemoryView_FromObject(body);
        data = view == NULL ? NULL : PySequence_GetSlice(view, begin, begin + length);
        Py_XDECREF(view);
    }
    if (data == NULL) return NULL;
    made = PyObject_CallOneArg(raw, data);
    Py_DECREF(data);
    return made;
}

static int keep(PyObject *fields, PyObject *raw, PyObject *body, Span key, Span span) {
    int kept = -1;
    PyObject *text = PyUnicode_DecodeUTF8((const char *)key.begin, key.end - key.begin, NULL);
    PyObject *made = text == NULL ? NULL : raw_of(raw, body, span);
    if (made != NULL) kept = PyDict_SetItem(fields, text, made);
    Py_XDECREF(made);
    Py_XDECREF(text);
    return kept;
}

/* 1: done, 0: not for us, -1: an exception is set. */
static int top(Scan *s, PyObject *body, PyObject *raw, const char *wanted, int of_messages, PyObject *fields, Span *at,
               int *has_parts) {
    if (!next_is(s, '{')) return 0;
    do {
        Span key, span;
        if (!name(s, &key)) return 0;
        blank(s);
        span.begin = s->at;
        if (!is(key, wanted)) {
            if (!value(s, 1)) return 0;
        } else if (at->begin != NULL || !prompt(s, of_messages, has_parts)) {
            return 0;
        } else {
            at->begin = span.begin;
            at->end = s->at;
        }
        span.end = s->at;
        if (keep(fields, raw, body, key, span) < 0) {
            if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) return -1;
            PyErr_Clear();
            return 0;
        }
    } while (next_is(s, ','));
    if (!next_is(s, '}')) return 0;
    blank(s);
    return s->at == s->end && at->begin != NULL;
}

static int is_text(PyObject *body) {
    PyObject *text = PyUnicode_DecodeUTF8(PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), NULL);
    if (text == NULL) PyErr_Clear();
    Py_XDECREF(text);
    return text != NULL;
}

PyDoc_STRVAR(scan_doc,
             "scan(body, prompt, of_messages, raw) -> (fields, begin, end, has_parts) or None\n\n"
             "The fields of a JSON object, each made by `raw` of its bytes, and where the field `prompt` begins and ends:\n"
             "a list of messages, or a text. `has_parts`: a message's content is a list. None: ask somebody who knows\n"
             "more of JSON.");

static PyObject *scan(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 4 || !PyBytes_CheckExact(args[0]) || !PyUnicode_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "scan takes bytes, the name of a field, a flag and a type");
        return NULL;
    }
    PyObject *body = args[0];
    const char *wanted = PyUnicode_AsUTF8(args[1]);
    int of_messages = args[2] == Py_True, has_parts = 0;
    const unsigned char *from = (const unsigned char *)PyBytes_AS_STRING(body);
    Scan s = {from, from + PyBytes_GET_SIZE(body), 0};
    Span at = {NULL, NULL};
    PyObject *fields = wanted == NULL ? NULL : PyDict_New();
    if (fields == NULL) return NULL;
    int done = top(&s, body, args[3], wanted, of_messages, fields, &at, &has_parts);
    if (done > 0 && s.high) done = is_text(body);
    if (done > 0) {
        Py_ssize_t begin = at.begin - from, end = at.end - from;
        return Py_BuildValue("(NnnO)", fields, begin, end, has_parts ? Py_True : Py_False);
    }
    Py_DECREF(fields);
    if (done < 0) return NULL;
    Py_RETURN_NONE;
}

#define MOST_PICKED 8
#define MOST_DIGITS 18 /* of a number that fits into 64 bits */

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
    {"pick", (PyCFunction)(void (*)(void))pick, METH_FASTCALL, pick_doc},
    {"scan", (PyCFunction)(void (*)(void))scan, METH_FASTCALL, scan_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_body_scan", "Bodies in one pass.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__body_scan(void) { return PyModuleDef_Init(&definition); }
