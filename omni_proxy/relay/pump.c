/* Moves streams from workers' sockets to clients' as long as nobody has to look at them.
 *
 * A stream is a pair of TCP sockets, and what is read from the one goes to the other as it came: whole HTTP/1.1 chunks
 * of whole events that show no mark. Whatever else happens is not for this file. The stream is then given back with
 * what was read and not sent, and Python goes on: a mark, a chunk of another kind, the end of the connection, an error,
 * a client that does not keep up. So every special case keeps its one implementation, and this one has no decisions.
 *
 * The moving is done by a thread that never holds the interpreter's lock: a token does not wait for Python, and costs a
 * wait, a read and a write. It knows no Python objects. All that both sides know lies behind one lock, which is held for
 * one stream at a time. A stream that is given back waits, with what belongs to it, until Python collects it or takes
 * it out; until then nobody touches its sockets.
 *
 * The sockets belong to the event loop's transports, which do not read from the one while it is here and do not write
 * to the other. Nothing here can know that a transport closes its socket: whoever closes one takes the stream out first.
 */
#include "pump_moves.h"

/* --------------------------------------------------------------------- the thread */

PyDoc_STRVAR(start_doc, "Begin to move streams, in a thread of its own. Raises OSError.");

static PyObject *pump_start(Pump *self, PyObject *Py_UNUSED(ignored)) {
    sigset_t all, before;
    pthread_attr_t attributes;
    if (self->epoll < 0) return PyErr_SetString(PyExc_ValueError, "the pump is closed"), NULL;
    if (self->runs) Py_RETURN_NONE;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the interpreter's */
    errno = pthread_create(&self->thread, &attributes, run, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (errno != 0) return PyErr_SetFromErrno(PyExc_OSError);
    self->runs = 1;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(turn_doc,
             "turn(now)\n\nMove what is ready, once, as the thread does; only where that was not started. `now`: the "
             "instant of signs of life.");

static PyObject *pump_turn(Pump *self, PyObject *instant) {
    struct epoll_event ready[MOST_READY];
    double now = PyFloat_AsDouble(instant);
    if (PyErr_Occurred()) return NULL;
    if (self->runs) return PyErr_SetString(PyExc_ValueError, "the pump runs by itself"), NULL;
    int count = self->epoll < 0 ? 0 : epoll_wait(self->epoll, ready, MOST_READY, 0);
    if (count > 0) serve_ready(self, ready, count, now);
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------- in and out */

PyDoc_STRVAR(add_doc,
             "add(src, dst, last_sign, back) -> id\n\nTake a stream in. `back(unsent, rest, sent, last_sign)` is called "
             "once, when it is collected after it was given back. Raises OSError.");

static PyObject *pump_add(Pump *self, PyObject *args) {
    int src, dst, failed = 0;
    double last_sign;
    PyObject *back;
    if (!PyArg_ParseTuple(args, "iidO", &src, &dst, &last_sign, &back)) return NULL;
    if (self->epoll < 0) return PyErr_SetString(PyExc_ValueError, "the pump is closed"), NULL;
    enter(self);
    if (self->first_free < 0 && !more_places(self)) {
        leave(self);
        return PyErr_NoMemory();
    }
    Stream *stream = &self->streams[self->first_free];
    uint64_t id = id_of(self, stream);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = id};
    if (epoll_ctl(self->epoll, EPOLL_CTL_ADD, src, &event) < 0) {
        failed = errno;
    } else {
        self->first_free = stream->next_free;
        self->count++;
        *stream = (Stream){.state = MOVES, .back = Py_NewRef(back), .src = src, .dst = dst, .turn = stream->turn,
                           .last_sign = last_sign};
    }
    leave(self);
    if (failed) return errno = failed, PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromUnsignedLongLong(id);
}

static PyObject *told_of(const Stream *was) {
    const char *held = was->held == NULL ? "" : was->held;
    return Py_BuildValue("(y#y#Ld)", held, was->unsent_size, held + was->unsent_size, was->rest_size, was->sent,
                         was->last_sign);
}

/* Takes a stream out of its place; 0: there is no such stream (any more). No Python runs while the lock is held. */
static int take_out(Pump *self, uint64_t id, Stream *was) {
    enter(self);
    Stream *stream = find(self, id);
    if (stream != NULL) *was = release(self, stream);
    leave(self);
    return stream != NULL;
}

PyDoc_STRVAR(take_doc,
             "take(id) -> (unsent, rest, sent, last_sign), or None\n\nTake a stream out; its `back` is not called. None: "
             "it is not here. `unsent` is what the client did not take, where the stream had been given back.");

static PyObject *pump_take(Pump *self, PyObject *number) {
    Stream was;
    uint64_t id = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    if (!take_out(self, id, &was)) Py_RETURN_NONE;
    PyObject *found = told_of(&was);
    free(was.held);
    Py_DECREF(was.back);
    return found;
}

/* The next stream that was given back and is still here; 0: there is none. */
static int next_back(Pump *self, Stream *was) {
    enter(self);
    int found = self->backs_count > 0;
    if (found) *was = release(self, find(self, self->backs[0]));
    leave(self);
    return found;
}

PyDoc_STRVAR(collect_doc, "Have Python go on with all streams that were given back, in their order.");

static PyObject *pump_collect(Pump *self, PyObject *Py_UNUSED(ignored)) {
    uint64_t times;
    Stream was;
    if (self->told >= 0 && read(self->told, &times, sizeof times) < 0) errno = 0;
    while (next_back(self, &was)) {
        PyObject *args = told_of(&was), *done = NULL;
        free(was.held);
        if (args != NULL) done = PyObject_CallObject(was.back, args);
        Py_XDECREF(args);
        if (done == NULL) PyErr_WriteUnraisable(was.back); /* it is one stream's fault, and the others go on */
        Py_XDECREF(done);
        Py_DECREF(was.back);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(last_sign_doc, "last_sign(id) -> float, or None\n\nWhen a stream has said something last.");

static PyObject *pump_last_sign(Pump *self, PyObject *number) {
    double at = 0.0;
    uint64_t id = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    enter(self);
    Stream *stream = find(self, id);
    if (stream != NULL) at = stream->last_sign;
    leave(self);
    if (stream != NULL) return PyFloat_FromDouble(at);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(gaps_doc,
             "gaps() -> ([(milliseconds, count)], longer, longer_s)\n\nThe gaps within streams since the last time: how "
             "many of each length, and how many longer ones of so many seconds together.");

static PyObject *pump_gaps(Pump *self, PyObject *Py_UNUSED(ignored)) {
    Gaps *gaps = malloc(sizeof(Gaps));
    if (gaps == NULL) return PyErr_NoMemory();
    enter(self);
    *gaps = self->gaps;
    self->gaps = (Gaps){0};
    leave(self);
    PyObject *counts = PyList_New(0), *told = NULL;
    for (int slot = 0; counts != NULL && slot < GAP_SLOTS; slot++) {
        if (gaps->slots[slot] == 0) continue;
        PyObject *count = Py_BuildValue("(iK)", slot, (unsigned long long)gaps->slots[slot]);
        if (count == NULL || PyList_Append(counts, count) < 0) Py_CLEAR(counts);
        Py_XDECREF(count);
    }
    if (counts != NULL) told = Py_BuildValue("(NKd)", counts, (unsigned long long)gaps->longer, gaps->longer_s);
    free(gaps);
    return told;
}

PyDoc_STRVAR(fileno_doc, "The descriptor that is readable when a stream has been given back; -1: the pump is closed.");

static PyObject *pump_fileno(Pump *self, PyObject *Py_UNUSED(ignored)) { return PyLong_FromLong(self->told); }

static Py_ssize_t pump_length(Pump *self) { return self->count; }

/* ------------------------------------------------------------------- begin and end */

static void end_thread(Pump *self) {
    const uint64_t one = 1;
    if (!self->runs) return;
    self->runs = 0;
    while (write(self->stop, &one, sizeof one) < 0 && errno == EINTR) continue;
    pthread_join(self->thread, NULL); /* it waits for nothing of Python's */
}

static void close_all(Pump *self) {
    end_thread(self);
    for (int32_t i = 0; i < self->places; i++) {
        if (self->streams[i].state == FREE) continue;
        Stream was = release(self, &self->streams[i]);
        free(was.held);
        Py_DECREF(was.back);
    }
    self->backs_count = 0;
    int *descriptors[] = {&self->epoll, &self->told, &self->stop};
    for (size_t i = 0; i < sizeof descriptors / sizeof *descriptors; i++) {
        if (*descriptors[i] >= 0) close(*descriptors[i]);
        *descriptors[i] = -1;
    }
}

PyDoc_STRVAR(close_doc, "Let all streams go. Nothing is moved any more.");

static PyObject *pump_close(Pump *self, PyObject *Py_UNUSED(ignored)) {
    close_all(self);
    Py_RETURN_NONE;
}

static int take_marks(Pump *self, PyObject *marks) {
    if (PyTuple_GET_SIZE(marks) > MOST_MARKS) return PyErr_SetString(PyExc_ValueError, "too many marks"), -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(marks); i++) {
        PyObject *text = PyTuple_GET_ITEM(marks, i);
        if (!PyBytes_CheckExact(text) || PyBytes_GET_SIZE(text) < 2 || PyBytes_GET_SIZE(text) > MOST_MARK)
            return PyErr_SetString(PyExc_ValueError, "a mark is 2 to 64 bytes"), -1;
        Mark *mark = &self->marks.all[self->marks.count++];
        mark->size = PyBytes_GET_SIZE(text);
        memcpy(mark->text, PyBytes_AS_STRING(text), mark->size);
        self->marks.first[(unsigned char)mark->text[0]] = 1;
        self->marks.second[(unsigned char)mark->text[1]] = 1;
    }
    return 0;
}

static int open_all(Pump *self) {
    struct epoll_event stop = {.events = EPOLLIN, .data.u64 = STOP};
    self->epoll = epoll_create1(EPOLL_CLOEXEC);
    self->told = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    self->stop = eventfd(0, EFD_CLOEXEC);
    if (self->epoll >= 0 && self->told >= 0 && self->stop >= 0 &&
        epoll_ctl(self->epoll, EPOLL_CTL_ADD, self->stop, &stop) == 0)
        return 0;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

static PyObject *pump_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *marks;
    if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &marks)) return NULL;
    Pump *self = (Pump *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    self->epoll = self->told = self->stop = self->first_free = -1;
    pthread_mutex_init(&self->turn, NULL);
    pthread_mutex_init(&self->lock, NULL);
    self->buffer = malloc(BUFFER_BYTES);
    if (self->buffer == NULL) PyErr_NoMemory();
    if (self->buffer == NULL || take_marks(self, marks) < 0 || open_all(self) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static int pump_traverse(Pump *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (int32_t i = 0; i < self->places; i++) Py_VISIT(self->streams[i].back);
    return 0;
}

static int pump_clear(Pump *self) {
    close_all(self);
    return 0;
}

static void pump_dealloc(Pump *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    close_all(self);
    pthread_mutex_destroy(&self->lock);
    pthread_mutex_destroy(&self->turn);
    free(self->streams);
    free(self->backs);
    free(self->buffer);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---------------------------------------------------------------------- the module */

static PyMethodDef pump_methods[] = {
    {"start", (PyCFunction)pump_start, METH_NOARGS, start_doc},
    {"turn", (PyCFunction)pump_turn, METH_O, turn_doc},
    {"add", (PyCFunction)pump_add, METH_VARARGS, add_doc},
    {"take", (PyCFunction)pump_take, METH_O, take_doc},
    {"collect", (PyCFunction)pump_collect, METH_NOARGS, collect_doc},
    {"last_sign", (PyCFunction)pump_last_sign, METH_O, last_sign_doc},
    {"gaps", (PyCFunction)pump_gaps, METH_NOARGS, gaps_doc},
    {"fileno", (PyCFunction)pump_fileno, METH_NOARGS, fileno_doc},
    {"close", (PyCFunction)pump_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(pump_doc, "Pump(marks)\n\nMoves streams; a chunk that shows one of `marks` is Python's.");

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
