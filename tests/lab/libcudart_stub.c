/* A CUDA runtime without CUDA: pinned memory and device memory are the host's, copies are memcpy, and all is counted.
 *
 * Each device has a context from the start or never; the current device of a thread is remembered. A stream is a number
 * of operations that are under way, which libnccl_stub.c does and counts in `pending`; copies and events wait for them.
 *
 *   STUB_CUDART_FAIL                       a variable, "cudaMalloc=2": this function returns this code
 *
 * What a test asks:
 *
 *   stub_pinned_bytes, stub_device_bytes   of what was allocated and not freed
 *   stub_allocations                       calls of cudaHostAlloc that succeeded
 *   stub_fail(code)                        from now on every allocation returns this cudaError_t; 0 ends it
 *   stub_last_error                        what cudaGetLastError would return, without taking it
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_ALLOCATIONS = 4096, HOST = 1, DEVICE = 2 };

typedef struct {
    char *address;
    size_t size;
    int type;
} Allocation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Allocation allocations[MAX_ALLOCATIONS];
static int failure, allocated;
static __thread int current, last_error;

static int result(int code) {
    if (code) last_error = code;
    return code;
}

static int told(const char *name) {
    const char *text = getenv("STUB_CUDART_FAIL");
    size_t length = strlen(name);
    return text && !strncmp(text, name, length) && text[length] == '=' ? atoi(text + length + 1) : 0;
}
#define FAIL_IF_TOLD() do { int code = told(__func__); if (code) return result(code); } while (0)

typedef struct {
    atomic_int pending;
} Stream;

static void wait_for(Stream *stream) {
    struct timespec pause = {0, 100000};
    while ((uintptr_t)stream > 2 && atomic_load(&stream->pending)) nanosleep(&pause, NULL); /* 1 and 2: the defaults */
}

static int allocate(void **address, size_t size, int type) {
    if (failure) return result(failure);
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
    return flags == 1 ? allocate(address, size, HOST) : result(1);
}
int cudaFreeHost(void *address) { return release(address, HOST); }
int cudaMalloc(void **address, size_t size) {
    FAIL_IF_TOLD();
    return allocate(address, size, DEVICE);
}
int cudaFree(void *address) {
    FAIL_IF_TOLD();
    return release(address, DEVICE);
}

typedef struct {
    int type, device;
    void *device_pointer, *host_pointer;
    long reserved[8];
} Attributes;

int cudaPointerGetAttributes(Attributes *found, const void *address) {
    memset(found, 0, sizeof *found);
    pthread_mutex_lock(&lock);
    for (int at = 0; at < MAX_ALLOCATIONS; at++) {
        char *from = allocations[at].address;
        if (from && from <= (const char *)address && (const char *)address < from + allocations[at].size)
            found->type = allocations[at].type;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

int cudaGetDevice(int *device) {
    *device = current;
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
    *stream = calloc(1, sizeof(Stream));
    return result(flags == 1 ? 0 : 1);
}
int cudaStreamDestroy(void *stream) {
    free(stream);
    return 0;
}
int cudaStreamSynchronize(void *stream) {
    wait_for(stream);
    return 0;
}
int cudaStreamQuery(void *stream) {
    FAIL_IF_TOLD();
    return atomic_load(&((Stream *)stream)->pending) ? 600 : 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    FAIL_IF_TOLD();
    if (kind != 4) return result(1); /* cudaMemcpyDefault: the addresses say */
    wait_for(stream);
    memcpy(to, from, size);
    return 0;
}

int cudaEventCreate(void **event) {
    FAIL_IF_TOLD();
    return (*event = calloc(1, sizeof(struct timespec))) ? 0 : 2;
}
int cudaEventRecord(void *event, void *stream) {
    FAIL_IF_TOLD();
    wait_for(stream);
    clock_gettime(CLOCK_MONOTONIC, event);
    return 0;
}
int cudaEventElapsedTime(float *milliseconds, void *start, void *end) {
    FAIL_IF_TOLD();
    struct timespec *a = start, *b = end;
    *milliseconds = (float)((b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) / 1e6);
    return 0;
}

size_t stub_pinned_bytes(void) { return bytes_of(HOST); }
size_t stub_device_bytes(void) { return bytes_of(DEVICE); }
int stub_allocations(void) { return allocated; }
void stub_fail(int code) { failure = code; }
int stub_last_error(void) { return last_error; }
