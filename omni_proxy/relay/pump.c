/* Moves streams from workers' sockets to clients' as long as nobody has to look at them.
 *
 * A stream is a pair of TCP sockets, and what is read from the one goes to the other as it came: whole HTTP/1.1 chunks
 * of whole events that show no mark. Whatever else happens is not for this file. The stream is then given back with
 * what was read and not sent, and Python goes on: a mark, a chunk of another kind, the end of the connection, an error,
 * a client that does not keep up. So every special case keeps its one implementation, and this one has no decisions.
 *
 * The sockets belong to the event loop's transports, which do not read from the one while it is here and do not write
 * to the other. Nothing here can know that a transport closes its socket: whoever closes one takes the stream out first.
 * All calls come from the loop's thread and hold the interpreter's lock; no call waits.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    BUFFER_BYTES = 64 << 10, /* what one stream may move in one turn */
    MOST_READY = 64,         /* streams served in one turn; the others are still ready in the next */
    MOST_DIGITS = 7,         /* of a chunk's size, as AnswerReader has it for chunks that may pass as they came */
    MOST_REST = 16 << 10,    /* of a chunk that has begun; a larger one is Python's */
    MOST_MARKS = 16,
};

typedef struct {
    PyObject *back; /* whom the stream is given back to; NULL: nobody has this place */
    int src, dst;
    uint32_t turn; /* how often the place was given away: the id of an earlier stream is not the id of this one */
    int32_t next_free;
    double last_sign;
    long long sent;  /* bytes of chunk data that went to dst */
    char *rest;      /* the chunk that has begun, from its first digit */
    Py_ssize_t rest_size, rest_data;
} Stream;

typedef struct {
    PyObject_HEAD
    PyObject *clock, *gap, *marks;
    int epoll, serving;
    Stream *streams;
    int32_t places, first_free;
    Py_ssize_t count;
    char *buffer;
    unsigned char first[256], second[256]; /* is it that byte of a mark? Hardly anything passes both */
} Pump;

typedef struct {
    Py_ssize_t size;      /* of all the chunk; 0: there is more of it to come */
    const char *data;     /* NULL: its data has not begun */
    Py_ssize_t data_size; /* as far as it has come */
} Chunk;

/* ------------------------------------------------------------------ what may pass */

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

static int has_mark(const Pump *self, const char *p, const char *end) {
    Py_ssize_t marks = PyTuple_GET_SIZE(self->marks);
    for (; p + 1 < end; p++) {
        if (!self->first[(unsigned char)p[0]] || !self->second[(unsigned char)p[1]]) continue;
        for (Py_ssize_t i = 0; i < marks; i++) {
            PyObject *mark = PyTuple_GET_ITEM(self->marks, i);
            Py_ssize_t size = PyBytes_GET_SIZE(mark);
            if (end - p >= size && memcmp(p, PyBytes_AS_STRING(mark), size) == 0) return 1;
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
static int may_pass(const Pump *self, const char *p, Py_ssize_t size, Py_ssize_t *whole, Py_ssize_t *data,
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
        if (has_mark(self, chunk.data, chunk.data + chunk.data_size)) return 0;
        *whole += chunk.size;
        *data += chunk.data_size;
    }
    return 1;
}

/* --------------------------------------------------------------------- the places */

static uint64_t id_of(const Pump *self, int32_t place) {
    return (uint64_t)self->streams[place].turn << 32 | (uint32_t)place;
}

static Stream *find(const Pump *self, uint64_t id) {
    uint32_t place = (uint32_t)id;
    if (place >= (uint32_t)self->places) return NULL;
    Stream *stream = &self->streams[place];
    return stream->back != NULL && stream->turn == id >> 32 ? stream : NULL;
}

static int more_places(Pump *self) {
    int32_t places = self->places ? 2 * self->places : 64;
    Stream *streams = PyMem_Realloc(self->streams, places * sizeof(Stream));
    if (streams == NULL) return PyErr_NoMemory(), -1;
    self->streams = streams;
    for (int32_t i = places; i-- > self->places;) {
        streams[i] = (Stream){.next_free = self->first_free};
        self->first_free = i;
    }
    self->places = places;
    return 0;
}

/* Frees a place; returns whom its stream is given back to, for the caller to let go. */
static PyObject *release(Pump *self, Stream *stream) {
    PyObject *back = stream->back;
    epoll_ctl(self->epoll, EPOLL_CTL_DEL, stream->src, NULL);
    PyMem_Free(stream->rest);
    *stream = (Stream){.turn = stream->turn + 1, .next_free = self->first_free};
    self->first_free = (int32_t)(stream - self->streams);
    self->count--;
    return back;
}

static int keep_rest(Stream *stream, const char *rest, Py_ssize_t size, Py_ssize_t data) {
    char *kept = NULL;
    if (size > 0) {
        kept = PyMem_Malloc(size);
        if (kept == NULL) return PyErr_NoMemory(), -1;
        memcpy(kept, rest, size);
    }
    PyMem_Free(stream->rest);
    stream->rest = kept;
    stream->rest_size = size;
    stream->rest_data = data;
    return 0;
}

/* --------------------------------------------------------------------- the moving */

/* Python goes on with a stream: `unsent` is whole chunks on their way out, `rest` has not been looked at. */
static int give_back(Pump *self, Stream *stream, const char *unsent, Py_ssize_t unsent_size, const char *rest,
                     Py_ssize_t rest_size) {
    PyObject *args = Py_BuildValue("(y#y#Ld)", unsent, unsent_size, rest, rest_size, stream->sent, stream->last_sign);
    PyObject *back = release(self, stream), *done = NULL;
    if (args != NULL) done = PyObject_CallObject(back, args);
    Py_DECREF(back);
    Py_XDECREF(args);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int count_gap(Pump *self, double seconds) {
    PyObject *value = PyFloat_FromDouble(seconds), *done = NULL;
    if (value != NULL) done = PyObject_CallOneArg(self->gap, value);
    Py_XDECREF(value);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* One read, and one write of what may pass of it. Python may be called: only as the last thing that is done. */
static int serve_stream(Pump *self, Stream *stream, uint32_t events, double now) {
    char *buffer = self->buffer;
    Py_ssize_t size = stream->rest_size, whole, data, begun, out = 0;
    if (size > 0) memcpy(buffer, stream->rest, size);
    /* The loop's transport reads errors itself: reading one takes it away. */
    ssize_t got = events & EPOLLERR ? -1 : recv(stream->src, buffer + size, BUFFER_BYTES - size, MSG_DONTWAIT);
    if (got < 0 && !(events & EPOLLERR) && (errno == EAGAIN || errno == EINTR)) return 0;
    if (got <= 0) return give_back(self, stream, "", 0, buffer, size);
    size += got;
    if (!may_pass(self, buffer, size, &whole, &data, &begun)) return give_back(self, stream, "", 0, buffer, size);
    if (whole > 0) {
        out = send(stream->dst, buffer, whole, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (out < 0) out = 0; /* whatever it is, the transport meets it too */
    }
    double gap = now - stream->last_sign;
    int heard = data + begun > stream->rest_data;
    stream->sent += data;
    if (heard) stream->last_sign = now;
    if (out < whole) {
        if (give_back(self, stream, buffer + out, whole - out, buffer + whole, size - whole) < 0) return -1;
    } else if (keep_rest(stream, buffer + whole, size - whole, begun) < 0) {
        return -1;
    }
    return heard ? count_gap(self, gap) : 0;
}

static int serve_ready(Pump *self, const struct epoll_event *ready, int count) {
    PyObject *time = PyObject_CallNoArgs(self->clock);
    double now = time == NULL ? -1.0 : PyFloat_AsDouble(time);
    Py_XDECREF(time);
    if (PyErr_Occurred()) return -1;
    for (int i = 0; i < count; i++) {
        Stream *stream = find(self, ready[i].data.u64); /* the one before it may have ended it */
        if (stream != NULL && serve_stream(self, stream, ready[i].events, now) < 0) return -1;
    }
    return 0;
}

PyDoc_STRVAR(serve_doc, "Move what is ready: one read and one write for each stream, for a bounded number of them.");

static PyObject *pump_serve(Pump *self, PyObject *Py_UNUSED(ignored)) {
    struct epoll_event ready[MOST_READY];
    if (self->serving || self->epoll < 0) Py_RETURN_NONE;
    int count = epoll_wait(self->epoll, ready, MOST_READY, 0), failed = 0;
    if (count > 0) {
        self->serving = 1;
        failed = serve_ready(self, ready, count);
        self->serving = 0;
    }
    if (failed) return NULL;
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------- in and out */

PyDoc_STRVAR(add_doc,
             "add(src, dst, last_sign, back) -> id\n\nTake a stream in. `back(unsent, rest, sent, last_sign)` is called "
             "once, when it is given back. Raises OSError.");

static PyObject *pump_add(Pump *self, PyObject *args) {
    int src, dst;
    double last_sign;
    PyObject *back;
    if (!PyArg_ParseTuple(args, "iidO", &src, &dst, &last_sign, &back)) return NULL;
    if (self->epoll < 0) return PyErr_SetString(PyExc_ValueError, "the pump is closed"), NULL;
    if (self->first_free < 0 && more_places(self) < 0) return NULL;
    int32_t place = self->first_free;
    Stream *stream = &self->streams[place];
    uint64_t id = id_of(self, place);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = id};
    if (epoll_ctl(self->epoll, EPOLL_CTL_ADD, src, &event) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    self->first_free = stream->next_free;
    self->count++;
    stream->back = Py_NewRef(back);
    stream->src = src;
    stream->dst = dst;
    stream->last_sign = last_sign;
    return PyLong_FromUnsignedLongLong(id);
}

/* False without an error: there is no such stream (any more). */
static int find_by(const Pump *self, PyObject *number, Stream **stream) {
    uint64_t id = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return 0;
    *stream = find(self, id);
    return *stream != NULL;
}

PyDoc_STRVAR(take_doc,
             "take(id) -> (rest, sent, last_sign), or None\n\nTake a stream out; its `back` is not called. None: it is "
             "not here.");

static PyObject *pump_take(Pump *self, PyObject *number) {
    Stream *stream;
    if (!find_by(self, number, &stream)) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    const char *rest = stream->rest == NULL ? "" : stream->rest;
    PyObject *found = Py_BuildValue("(y#Ld)", rest, stream->rest_size, stream->sent, stream->last_sign);
    if (found != NULL) Py_DECREF(release(self, stream));
    return found;
}

PyDoc_STRVAR(last_sign_doc, "last_sign(id) -> float, or None\n\nWhen a stream has said something last.");

static PyObject *pump_last_sign(Pump *self, PyObject *number) {
    Stream *stream;
    if (find_by(self, number, &stream)) return PyFloat_FromDouble(stream->last_sign);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(fileno_doc, "The descriptor that is readable when a stream is ready.");

static PyObject *pump_fileno(Pump *self, PyObject *Py_UNUSED(ignored)) { return PyLong_FromLong(self->epoll); }

static Py_ssize_t pump_length(Pump *self) { return self->count; }

/* ------------------------------------------------------------------- begin and end */

static void let_go(Pump *self) {
    for (int32_t i = 0; i < self->places; i++) {
        if (self->streams[i].back != NULL) Py_DECREF(release(self, &self->streams[i]));
    }
    if (self->epoll >= 0) close(self->epoll);
    self->epoll = -1;
}

PyDoc_STRVAR(close_doc, "Let all streams go. Nothing is moved any more.");

static PyObject *pump_close(Pump *self, PyObject *Py_UNUSED(ignored)) {
    let_go(self);
    Py_RETURN_NONE;
}

static int take_marks(Pump *self, PyObject *marks) {
    if (PyTuple_GET_SIZE(marks) > MOST_MARKS) return PyErr_SetString(PyExc_ValueError, "too many marks"), -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(marks); i++) {
        PyObject *mark = PyTuple_GET_ITEM(marks, i);
        if (!PyBytes_CheckExact(mark) || PyBytes_GET_SIZE(mark) < 2)
            return PyErr_SetString(PyExc_ValueError, "a mark is two bytes or more"), -1;
        self->first[(unsigned char)PyBytes_AS_STRING(mark)[0]] = 1;
        self->second[(unsigned char)PyBytes_AS_STRING(mark)[1]] = 1;
    }
    self->marks = Py_NewRef(marks);
    return 0;
}

static PyObject *pump_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *clock, *gap, *marks;
    if (!PyArg_ParseTuple(args, "OOO!", &clock, &gap, &PyTuple_Type, &marks)) return NULL;
    Pump *self = (Pump *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->epoll = self->first_free = -1;
    self->clock = Py_NewRef(clock);
    self->gap = Py_NewRef(gap);
    self->buffer = PyMem_Malloc(BUFFER_BYTES);
    if (self->buffer == NULL) PyErr_NoMemory();
    else if (take_marks(self, marks) == 0 && (self->epoll = epoll_create1(EPOLL_CLOEXEC)) < 0)
        PyErr_SetFromErrno(PyExc_OSError);
    if (self->epoll < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static int pump_traverse(Pump *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->clock);
    Py_VISIT(self->gap);
    for (int32_t i = 0; i < self->places; i++) Py_VISIT(self->streams[i].back);
    return 0;
}

static int pump_clear(Pump *self) {
    let_go(self);
    Py_CLEAR(self->clock);
    Py_CLEAR(self->gap);
    return 0;
}

static void pump_dealloc(Pump *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    pump_clear(self);
    Py_XDECREF(self->marks);
    PyMem_Free(self->streams);
    PyMem_Free(self->buffer);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---------------------------------------------------------------------- the module */

static PyMethodDef pump_methods[] = {
    {"add", (PyCFunction)pump_add, METH_VARARGS, add_doc},
    {"take", (PyCFunction)pump_take, METH_O, take_doc},
    {"last_sign", (PyCFunction)pump_last_sign, METH_O, last_sign_doc},
    {"serve", (PyCFunction)pump_serve, METH_NOARGS, serve_doc},
    {"fileno", (PyCFunction)pump_fileno, METH_NOARGS, fileno_doc},
    {"close", (PyCFunction)pump_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(pump_doc,
             "Pump(clock, gap, marks)\n\nMoves streams. `clock()` is the time of signs of life, `gap(seconds)` counts the "
             "time between two; a chunk that shows one of `marks` is Python's.");

static PyType_Slot pump_slots[] = {
    {Py_tp_doc, (void *)pump_doc},  {Py_tp_new, pump_new},           {Py_tp_dealloc, pump_dealloc},
    {Py_tp_clear, pump_clear},      {Py_tp_traverse, pump_traverse}, {Py_tp_methods, pump_methods},
    {Py_sq_length, pump_length},    {0, NULL},
};

static PyType_Spec pump_spec = {
    .name = "omni_proxy.relay._pump.Pump",
    .basicsize = sizeof(Pump),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = pump_slots,
};

static int module_exec(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &pump_spec, NULL);
    if (type == NULL) return -1;
    int failed = PyModule_AddObjectRef(module, "Pump", type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "_pump", "Moves streams from workers' sockets to clients'.", 0, NULL, module_slots, NULL,
    NULL, NULL,
};

PyMODINIT_FUNC PyInit__pump(void) { return PyModuleDef_Init(&module_def); }
