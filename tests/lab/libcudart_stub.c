/* A CUDA runtime without CUDA: pinned memory and device memory are the host's, copies are memcpy, and all is counted.
 *
 * Each device has a context from the start or never; the current device of a thread is remembered. What a test asks:
 *
 *   stub_pinned_bytes, stub_device_bytes   of what was allocated and not freed
 *   stub_allocations                       calls of cudaHostAlloc that succeeded
 *   stub_fail(code)                        from now on every allocation returns this cudaError_t; 0 ends it
 *   stub_last_error                        what cudaGetLastError would return, without taking it
 */
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

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
    int code = 1; /* cudaErrorInvalidValue: twice, or of another kind */
    pthread_mutex_lock(&lock);
    for (int at = 0; at < MAX_ALLOCATIONS; at++) {
        if (address && allocations[at].address == address && allocations[at].type == type) {
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
int cudaMalloc(void **address, size_t size) { return allocate(address, size, DEVICE); }
int cudaFree(void *address) { return release(address, DEVICE); }

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
    *stream = malloc(1);
    return result(flags == 1 ? 0 : 1);
}
int cudaStreamDestroy(void *stream) {
    free(stream);
    return 0;
}
int cudaStreamSynchronize(void *stream) {
    (void)stream;
    return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    (void)stream;
    if (kind != 4) return result(1); /* cudaMemcpyDefault: the addresses say */
    memcpy(to, from, size);
    return 0;
}

size_t stub_pinned_bytes(void) { return bytes_of(HOST); }
size_t stub_device_bytes(void) { return bytes_of(DEVICE); }
int stub_allocations(void) { return allocated; }
void stub_fail(int code) { failure = code; }
int stub_last_error(void) { return last_error; }
