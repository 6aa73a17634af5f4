/* The moving: places of streams, and the thread that reads and writes. It knows no Python objects. */
#ifndef OMNI_PUMP_MOVES_H
#define OMNI_PUMP_MOVES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "pump_chunks.h"

enum {
    MOST_READY = 64,         /* streams served in one turn; the others are still ready in the next */
    GAP_SLOTS = 2048,        /* gaps by milliseconds, as EdgeCounts has them; longer ones are summed apart */
    STACK_BYTES = 256 << 10,
};
static const uint64_t STOP = UINT64_MAX; /* no stream has this id */

typedef enum { FREE, MOVES, GIVEN_BACK } State;

typedef struct {
    State state;
    PyObject *back; /* whom the stream is given back to; only looked at by Python's side */
    int src, dst;
    uint32_t turn; /* how often the place was given away: the id of an earlier stream is not the id of this one */
    int32_t next_free;
    double last_sign;
    long long sent; /* bytes of chunk data that went to dst */
    char *held;     /* whole chunks that dst did not take, then the chunk that has begun, from its first digit */
    Py_ssize_t unsent_size, rest_size, rest_data;
} Stream;

typedef struct {
    uint64_t slots[GAP_SLOTS], longer;
    double longer_s;
} Gaps;

typedef struct {
    PyObject_HEAD
    int epoll, told, stop; /* descriptors: of what is watched; readable when a stream is given back; ends the thread */
    int runs;              /* the thread does */
    pthread_t thread;
    pthread_mutex_t turn, lock; /* who waits for the lock has the turn: the thread cannot take it again meanwhile */
    Stream *streams;
    int32_t places, first_free;
    Py_ssize_t count;
    uint64_t *backs; /* ids of streams that were given back, in their order; room for as many as there are places */
    int32_t backs_count;
    Gaps gaps;
    char *buffer;
    Marks marks;
} Pump;

/* --------------------------------------------------------------------- the places */

static void enter(Pump *self) {
    pthread_mutex_lock(&self->turn);
    pthread_mutex_lock(&self->lock);
    pthread_mutex_unlock(&self->turn);
}

static void leave(Pump *self) { pthread_mutex_unlock(&self->lock); }

static uint64_t id_of(const Pump *self, const Stream *stream) {
    return (uint64_t)stream->turn << 32 | (uint32_t)(stream - self->streams);
}

static Stream *find(const Pump *self, uint64_t id) {
    uint32_t place = (uint32_t)id;
    if (place >= (uint32_t)self->places) return NULL;
    Stream *stream = &self->streams[place];
    return stream->state != FREE && stream->turn == id >> 32 ? stream : NULL;
}

/* Room for more streams, and for as many that are given back. 0: there is no memory. */
static int more_places(Pump *self) {
    int32_t places = self->places ? 2 * self->places : 64;
    uint64_t *backs = realloc(self->backs, places * sizeof(uint64_t));
    if (backs == NULL) return 0;
    self->backs = backs;
    Stream *streams = realloc(self->streams, places * sizeof(Stream));
    if (streams == NULL) return 0;
    self->streams = streams;
    for (int32_t i = places; i-- > self->places;) {
        streams[i] = (Stream){.next_free = self->first_free};
        self->first_free = i;
    }
    self->places = places;
    return 1;
}

static void forget_back(Pump *self, uint64_t id) {
    int32_t at = 0;
    while (self->backs[at] != id) at++;
    memmove(&self->backs[at], &self->backs[at + 1], (--self->backs_count - at) * sizeof(uint64_t));
}

/* Frees a place; what belonged to its stream is the caller's now. */
static Stream release(Pump *self, Stream *stream) {
    Stream was = *stream;
    if (was.state == MOVES) epoll_ctl(self->epoll, EPOLL_CTL_DEL, was.src, NULL);
    else forget_back(self, id_of(self, stream));
    *stream = (Stream){.turn = was.turn + 1, .next_free = self->first_free};
    self->first_free = (int32_t)(stream - self->streams);
    self->count--;
    return was;
}

/* --------------------------------------------------------------------- the moving */

/* Keeps what was read: whole chunks that were not sent, and a rest. Without memory for it both connections end, which
 * their transports find out: nothing is lost in silence. */
static void hold(Stream *stream, const char *data, Py_ssize_t unsent, Py_ssize_t rest, Py_ssize_t rest_data) {
    char *held = NULL;
    if (unsent + rest > 0) {
        held = malloc(unsent + rest);
        if (held == NULL) {
            shutdown(stream->src, SHUT_RDWR);
            shutdown(stream->dst, SHUT_RDWR);
            unsent = rest = rest_data = 0;
        } else {
            memcpy(held, data, unsent + rest);
        }
    }
    free(stream->held);
    stream->held = held;
    stream->unsent_size = unsent;
    stream->rest_size = rest;
    stream->rest_data = rest_data;
}

/* Python goes on with a stream. */
static void give_back(Pump *self, Stream *stream, const char *data, Py_ssize_t unsent, Py_ssize_t rest) {
    const uint64_t one = 1;
    hold(stream, data, unsent, rest, 0);
    epoll_ctl(self->epoll, EPOLL_CTL_DEL, stream->src, NULL);
    stream->state = GIVEN_BACK;
    self->backs[self->backs_count++] = id_of(self, stream);
    if (self->backs_count == 1 && write(self->told, &one, sizeof one) < 0) return; /* full: it is readable already */
}

static void count_gap(Gaps *gaps, double seconds) {
    double slot = seconds * 1000.0 + 0.5;
    if (slot >= 0.0 && slot < GAP_SLOTS) {
        gaps->slots[(int)slot]++;
    } else {
        gaps->longer++;
        gaps->longer_s += seconds;
    }
}

/* One read, and one write of what may pass of it. */
static void serve_stream(Pump *self, Stream *stream, uint32_t events, double now) {
    char *buffer = self->buffer;
    Py_ssize_t size = stream->rest_size, whole, data, begun, out = 0;
    if (size > 0) memcpy(buffer, stream->held, size);
    /* The loop's transport reads errors itself: reading one takes it away. */
    ssize_t got = events & EPOLLERR ? -1 : recv(stream->src, buffer + size, BUFFER_BYTES - size, MSG_DONTWAIT);
    if (got < 0 && !(events & EPOLLERR) && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
        give_back(self, stream, buffer, 0, size);
        return;
    }
    size += got;
    if (!may_pass(&self->marks, buffer, size, &whole, &data, &begun)) {
        give_back(self, stream, buffer, 0, size);
        return;
    }
    if (whole > 0) {
        out = send(stream->dst, buffer, whole, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (out < 0) out = 0; /* whatever it is, the transport meets it too */
    }
    if (data + begun > stream->rest_data) {
        count_gap(&self->gaps, now - stream->last_sign);
        stream->last_sign = now;
    }
    stream->sent += data;
    if (out < whole) {
        give_back(self, stream, buffer + out, whole - out, size - whole);
    } else if (size > whole || stream->held != NULL) {
        hold(stream, buffer + whole, 0, size - whole, begun);
    } else {
        stream->rest_data = 0;
    }
}

/* Serves what is ready. 0: the thread is to end. */
static int serve_ready(Pump *self, const struct epoll_event *ready, int count, double now) {
    for (int i = 0; i < count; i++) {
        if (ready[i].data.u64 == STOP) return 0;
        enter(self);
        Stream *stream = find(self, ready[i].data.u64); /* it may have been taken out since */
        if (stream != NULL && stream->state == MOVES) serve_stream(self, stream, ready[i].events, now);
        leave(self);
    }
    return 1;
}

static double monotonic(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* what the loop's time() is of */
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static void *run(void *pump) {
    Pump *self = pump;
    struct epoll_event ready[MOST_READY];
    int count;
    do {
        count = epoll_wait(self->epoll, ready, MOST_READY, -1);
    } while (count < 0 ? errno == EINTR : serve_ready(self, ready, count, monotonic()));
    return NULL;
}

#endif
