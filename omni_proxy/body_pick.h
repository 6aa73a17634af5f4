/* A few fields of an answer; omni_proxy/json_fields.py is the definition.
 * Included once, by body_scan.c. */
#pragma once

#include "json_scan.h"

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
