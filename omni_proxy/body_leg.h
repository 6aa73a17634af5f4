/* A body for a leg, from the places of the fields in the client's.
 * omni_proxy/workers/connectors/fields.py is the definition.
 * Included once, by body_scan.c. */
#pragma once

#include "body_names.h"

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
