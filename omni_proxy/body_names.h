/* Fields of bodies: a table of their names, and their places in a body that was scanned.
 * Included once, by body_scan.c. */
#pragma once

#include "json_scan.h"

#define SLOTS 256 /* for some 60 names */
#define LONGEST_NAME 40

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

/* Where a field's name (without its quotes) and its value are, in bytes of the body. */
typedef struct {
    uint32_t key, key_end, value, value_end;
} Place;
