/* A CUDA runtime without CUDA: pinned memory and device memory are the host's, copies are memcpy, and all is counted.
 *
 * Each device has a context from the start or never; the current device of a thread is remembered. A stream is a number
 * of operations that are under way, which libnccl_stub.c does and counts in `pending`; copies and events wait for them.
 *
 *   STUB_CUDART_FAIL                       a variable, "cudaMalloc=2": this function returns this code; "cudaMalloc=2@3":
 *                                          from its third call on, counted since the last stub_fail; "cudaMalloc=2@3-3":
 *                                          the third alone
 *   STUB_CUDART_LATE                       a variable: copies from and to pinned memory are made when their stream is
 *                                          waited for, or an event after them, as late as CUDA may make them
 *
 * A copy that leaves an allocation is refused. While a stream is captured, in cudaStreamCaptureModeGlobal, memory, the
 * state of streams and waiting for the default streams are refused to threads in the global mode, and to all of them
 * waiting for that stream; that spoils the capture.
 *
 * What a test asks:
 *
 *   stub_pinned_bytes, stub_device_bytes   of what was allocated or registered, and not freed
 *   stub_allocations                       calls of cudaHostAlloc that succeeded
 *   stub_streams, stub_events              that were created and not destroyed
 *   stub_late_copies                       that are still to be made
 *   stub_begin_capture(stream)             what ONNX Runtime does, by cudaStreamBeginCapture
 *   stub_captures                          that were begun and not ended
 *   stub_capture_mode                      of the calling thread
 *   stub_fail(code)                        from now on every allocation returns this cudaError_t; 0 ends it
 *   stub_last_error                        what cudaGetLastError would return, without taking it
 *   stub_contexts                          a bit for each device that would have a context now: calls make one on the
 *                                          current device of their thread, as that of the capture mode does
 */
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_ALLOCATIONS = 4096, HOST = 1, DEVICE = 2, REGISTERED = 3 };

typedef struct {
    char *address;
    size_t size;
    int type;
} Allocation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Allocation allocations[MAX_ALLOCATIONS];
static int failure, allocated;
static atomic_int streams, events, captures, late_copies, contexts;
static __thread int current, last_error, capture_mode;

static void make_context(void) { atomic_fetch_or(&contexts, 1 << current); }

static int result(int code) {
    if (code) last_error = code;
    return code;
}

static atomic_int calls; /* of the function that is to fail */

static int told(const char *name) {
    const char *text = getenv("STUB_CUDART_FAIL");
    size_t length = strlen(name);
    if (!text || strncmp(text, name, length) || text[length] != '=') return 0;
    const char *from = strchr(text, '@');
    if (from) {
        const char *to = strchr(from, '-');
        int call = atomic_fetch_add(&calls, 1) + 1;
        if (call < atoi(from + 1) || (to && call > atoi(to + 1))) return 0;
    }
    return atoi(text + length + 1);
}
#define FAIL_IF_TOLD() do { int code = told(__func__); if (code) return result(code); } while (0)

typedef struct Copy {
    void *to;
    const void *from;
    size_t size;
    struct Copy *next;
    struct Stream *awaited; /* set: nothing is copied, but the copies of this stream that were `queued` come before */
    long queued;
} Copy;

typedef struct Stream {
    atomic_int pending; /* first: libnccl_stub.c knows it */
    pthread_mutex_t lock;
    Copy *first, **end;
    long queued, made; /* late copies so far */
    int capturing; /* 2: spoilt */
} Stream;

typedef struct {
    struct timespec time;
    Stream *stream;
    long queued; /* late copies of the stream that it comes after */
} Event;

static _Atomic(Stream *) captured;

/* The locks are recursive: streams may wait for each other, for earlier work. */
static Stream defaults = {.lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP, .end = &defaults.first};

/* 1 and 2 are cudaStreamLegacy and cudaStreamPerThread, whose work waits for each other, as if it were one stream. */
static Stream *stream_of(void *stream) { return (uintptr_t)stream > 2 ? stream : &defaults; }

/* cudaErrorStreamCaptureUnsupported; 2 is cudaStreamCaptureModeRelaxed */
#define FAIL_IF_CAPTURING() do { \
        Stream *of = captured; \
        if (of && capture_mode != 2) { of->capturing = 2; return result(900); } \
    } while (0)

static void make_late_copies_until(Stream *stream, long queued) {
    pthread_mutex_lock(&stream->lock);
    for (Copy *copy = stream->first; copy && stream->made < queued; copy = stream->first) {
        if (copy->awaited) make_late_copies_until(copy->awaited, copy->queued);
        else memcpy(copy->to, copy->from, copy->size), late_copies--;
        stream->first = copy->next;
        stream->made++;
        free(copy);
    }
    if (!stream->first) stream->end = &stream->first;
    pthread_mutex_unlock(&stream->lock);
}

static void make_late_copies(void *stream) { make_late_copies_until(stream_of(stream), LONG_MAX); }

static void queue(Stream *stream, Copy *copy) {
    pthread_mutex_lock(&stream->lock);
    *stream->end = copy;
    stream->end = &copy->next;
    stream->queued++;
    pthread_mutex_unlock(&stream->lock);
}

static int type_of(const void *address);
static int is_within(const void *address, size_t size);

static void wait_for(void *stream) {
    struct timespec pause = {0, 100000};
    while (atomic_load(&stream_of(stream)->pending)) nanosleep(&pause, NULL);
}

static int allocate(void **address, size_t size, int type) {
    if (failure) return result(failure);
    make_context();
    FAIL_IF_CAPTURING();
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < MAX_ALLOCATIONS && allocations[at].address) at++;
    *address = at < MAX_ALLOCATIONS ? aligned_alloc(4096, (size + 4095) / 4096 * 4096) : NULL;
    if (*address) allocations[at] = (Allocation){*address, size, type};
    if (*address && type == HOST) allocated++;
    pthread_mutex_unlock(&lock);
    return result(*address ? 0 : 2);
}

static int release(void *address, int type) {
    if (!address) return 0;
    FAIL_IF_CAPTURING();
    int code = 1; /* cudaErrorInvalidValue: twice, or of another kind */
    pthread_mutex_lock(&lock);
    for (int at = 0; at < MAX_ALLOCATIONS; at++) {
        if (allocations[at].address == address && allocations[at].type == type) {
            memset(address, 0xee, allocations[at].size); /* whoever still reads it sees that */
            free(address);
            allocations[at].address = NULL;
            code = 0;
        }
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

static size_t bytes_of(int type) {
    size_t sum = 0;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < MAX_ALLOCATIONS; at++)
        if (allocations[at].address && allocations[at].type == type) sum += allocations[at].size;
    pthread_mutex_unlock(&lock);
    return sum;
}

int cudaHostAlloc(void **address, size_t size, unsigned flags) {
    FAIL_IF_TOLD();
    return flags == 1 ? allocate(address, size, HOST) : result(1);
}
int cudaFreeHost(void *address) {
    FAIL_IF_TOLD();
    return release(address, HOST);
}
int cudaHostRegister(void *address, size_t size, unsigned flags) {
    FAIL_IF_TOLD();
    if (flags != 1) return result(1);
    int code = 2;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < MAX_ALLOCATIONS && code; at++) {
        if (allocations[at].address) continue;
        allocations[at] = (Allocation){address, size, REGISTERED};
        code = 0;
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}
int cudaHostUnregister(void *address) {
    FAIL_IF_TOLD();
    int code = 713; /* cudaErrorHostMemoryNotRegistered */
    pthread_mutex_lock(&lock);
    for (int at = 0; at < MAX_ALLOCATIONS; at++) {
        if (allocations[at].address != address || allocations[at].type != REGISTERED) continue;
        allocations[at].address = NULL;
        code = 0;
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}
int cudaMalloc(void **address, size_t size) {
    FAIL_IF_TOLD();
    return allocate(address, size, DEVICE);
}
int cudaFree(void *address) {
    FAIL_IF_TOLD();
    return release(address, DEVICE);
}
int cudaMemGetInfo(size_t *available, size_t *total) {
    *total = (size_t)64 << 30;
    *available = *total - bytes_of(DEVICE);
    return 0;
}

typedef struct {
    int type, device;
    void *device_pointer, *host_pointer;
    long reserved[8];
} Attributes;

static int type_of(const void *address) {
    int type = 0;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < MAX_ALLOCATIONS; at++) {
        char *from = allocations[at].address;
        if (from && from <= (const char *)address && (const char *)address < from + allocations[at].size)
            type = allocations[at].type == REGISTERED ? HOST : allocations[at].type;
    }
    pthread_mutex_unlock(&lock);
    return type;
}

/* An address that nobody allocated here is that of ordinary memory, of any size. */
static int is_within(const void *address, size_t size) {
    int within = 1;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < MAX_ALLOCATIONS; at++) {
        char *from = allocations[at].address;
        if (from && from <= (const char *)address && (const char *)address < from + allocations[at].size)
            within = (const char *)address + size <= from + allocations[at].size;
    }
    pthread_mutex_unlock(&lock);
    return within;
}

int cudaPointerGetAttributes(Attributes *found, const void *address) {
    FAIL_IF_TOLD();
    memset(found, 0, sizeof *found);
    found->type = type_of(address);
    return 0;
}

int cudaGetDevice(int *device) {
    FAIL_IF_TOLD();
    *device = current;
    return 0;
}
int cudaGetDeviceCount(int *count) {
    FAIL_IF_TOLD();
    *count = 1;
    return 0;
}
int cudaSetDevice(int device) {
    FAIL_IF_TOLD();
    if (device < 0) return result(101);
    current = device;
    return 0;
}
int cudaGetLastError(void) {
    int code = last_error;
    last_error = 0;
    return code;
}
const char *cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "stub error"; }

int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    FAIL_IF_TOLD();
    make_context();
    Stream *made = *stream = calloc(1, sizeof(Stream));
    made->lock = (pthread_mutex_t)PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    made->end = &made->first;
    streams++;
    return result(flags == 1 ? 0 : 1);
}
int cudaStreamDestroy(void *stream) {
    FAIL_IF_TOLD();
    make_late_copies(stream);
    free(stream);
    streams--;
    return 0;
}
int cudaStreamSynchronize(void *stream) {
    if ((uintptr_t)stream <= 2) FAIL_IF_CAPTURING();
    else if (((Stream *)stream)->capturing) {
        ((Stream *)stream)->capturing = 2;
        return result(900);
    }
    wait_for(stream);
    make_late_copies(stream);
    FAIL_IF_TOLD();
    return 0;
}
int cudaStreamQuery(void *stream) {
    FAIL_IF_TOLD();
    FAIL_IF_CAPTURING();
    const Stream *asked = stream_of(stream);
    return atomic_load(&asked->pending) || asked->first ? 600 : 0;
}
int cudaStreamIsCapturing(void *stream, int *status) {
    FAIL_IF_TOLD();
    *status = (uintptr_t)stream > 2 && ((Stream *)stream)->capturing;
    return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    FAIL_IF_TOLD();
    if (kind != 4) return result(1); /* cudaMemcpyDefault: the addresses say */
    if (!is_within(to, size) || !is_within(from, size)) return result(1);
    wait_for(stream);
    if (getenv("STUB_CUDART_LATE") && (type_of(to) == HOST || type_of(from) == HOST)) {
        Copy *copy = malloc(sizeof *copy);
        late_copies++;
        *copy = (Copy){.to = to, .from = from, .size = size};
        queue(stream_of(stream), copy);
    } else { /* ordinary memory has been read, or written, when the call returns */
        make_late_copies(stream);
        memcpy(to, from, size);
    }
    return 0;
}

int stub_begin_capture(void *stream) {
    captured = stream;
    captures++;
    return ((Stream *)stream)->capturing = 1;
}
int stub_captures(void) { return captures; }
int stub_late_copies(void) { return late_copies; }
int cudaStreamEndCapture(void *stream, void **graph) {
    FAIL_IF_TOLD();
    Stream *ended = stream;
    int was = ended->capturing;
    *graph = NULL;
    if (!was) return result(401); /* cudaErrorIllegalState */
    captured = NULL;
    ended->capturing = 0;
    captures--;
    if (was == 2) return result(901); /* cudaErrorStreamCaptureInvalidated */
    *graph = malloc(1);
    return 0;
}
int cudaThreadExchangeStreamCaptureMode(int *mode) {
    FAIL_IF_TOLD();
    int before = capture_mode;
    make_context();
    if (*mode < 0 || *mode > 2) return result(1);
    capture_mode = *mode;
    *mode = before;
    return 0;
}
int stub_capture_mode(void) { return capture_mode; }
int cudaGraphDestroy(void *graph) {
    free(graph);
    return 0;
}

int cudaEventCreateWithFlags(void **event, unsigned flags) {
    FAIL_IF_TOLD();
    if (flags & ~2u) return result(1); /* 2 is cudaEventDisableTiming */
    events++;
    return (*event = calloc(1, sizeof(Event))) ? 0 : 2;
}
int cudaEventDestroy(void *event) {
    FAIL_IF_TOLD();
    free(event);
    events--;
    return 0;
}
int cudaEventRecord(void *event, void *stream) {
    FAIL_IF_TOLD();
    wait_for(stream);
    Event *recorded = event;
    clock_gettime(CLOCK_MONOTONIC, &recorded->time);
    recorded->stream = stream_of(stream);
    recorded->queued = recorded->stream->queued;
    return 0;
}
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    FAIL_IF_TOLD();
    const Event *awaited = event;
    if (flags) return result(1);
    Copy *copy = malloc(sizeof *copy);
    *copy = (Copy){.awaited = awaited->stream, .queued = awaited->queued};
    queue(stream_of(stream), copy);
    return 0;
}
int cudaEventQuery(void *event) {
    FAIL_IF_TOLD();
    const Event *asked = event;
    pthread_mutex_lock(&asked->stream->lock);
    int is_made = asked->stream->made >= asked->queued;
    pthread_mutex_unlock(&asked->stream->lock);
    return is_made ? 0 : 600;
}
int cudaEventSynchronize(void *event) {
    FAIL_IF_TOLD();
    Event *awaited = event;
    make_late_copies_until(awaited->stream, awaited->queued);
    return 0;
}
int cudaEventElapsedTime(float *milliseconds, void *start, void *end) {
    FAIL_IF_TOLD();
    const struct timespec *a = &((Event *)start)->time, *b = &((Event *)end)->time;
    *milliseconds = (float)((b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) / 1e6);
    return 0;
}

size_t stub_pinned_bytes(void) { return bytes_of(HOST) + bytes_of(REGISTERED); }
size_t stub_device_bytes(void) { return bytes_of(DEVICE); }
int stub_allocations(void) { return allocated; }
void stub_fail(int code) {
    failure = code;
    calls = 0;
}
int stub_streams(void) { return streams; }
int stub_events(void) { return events; }
int stub_contexts(void) { return contexts; }
int stub_last_error(void) { return last_error; }
