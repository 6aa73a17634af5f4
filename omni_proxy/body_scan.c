/* omni_proxy._body_scan: the top-level fields of request and answer bodies in one pass over their bytes.
 *
 * JSON is passed over in json_scan.h, body_names.h knows the names and places of fields, body_leg.h and body_pick.h are
 * what the module does besides.
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

#include "body_leg.h"
#include "body_names.h"
#include "body_pick.h"
#include "json_scan.h"

#define VIEWED_BYTES 512 /* from this length on a value is a view of the body and not a copy of its own */

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

/* --------------------------------------------------------------------------------- what the gateway reads */

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

#define MOST_FIELDS 64

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

PyDoc_STRVAR(has_doc, "has(body, places, name) -> bool\n\nIs there a field of this name in a body that was scanned?");

static PyObject *has(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t length;
    if (count != 3 || !PyBytes_CheckExact(args[0]) || !PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "has takes a body, the places of its fields and a name");
        return NULL;
    }
    const char *name = PyUnicode_AsUTF8AndSize(args[2], &length);
    if (name == NULL) return NULL;
    for (Py_ssize_t at = 0; at < PyBytes_GET_SIZE(args[1]); at += sizeof(Place)) {
        Place place;
        memcpy(&place, PyBytes_AS_STRING(args[1]) + at, sizeof place);
        const char *key = PyBytes_AS_STRING(args[0]) + place.key;
        if (place.key_end - place.key == length && memcmp(key, name, length) == 0) Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

static PyMethodDef methods[] = {
    {"leg", (PyCFunction)(void (*)(void))leg, METH_FASTCALL, leg_doc},
    {"fields", (PyCFunction)(void (*)(void))fields_of, METH_FASTCALL, fields_doc},
    {"has", (PyCFunction)(void (*)(void))has, METH_FASTCALL, has_doc},
    {"names", names_of, METH_O, names_doc},
    {"pick", (PyCFunction)(void (*)(void))pick, METH_FASTCALL, pick_doc},
    {"scan", (PyCFunction)(void (*)(void))scan, METH_FASTCALL, scan_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_body_scan", "Bodies in one pass.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__body_scan(void) { return PyModuleDef_Init(&definition); }
