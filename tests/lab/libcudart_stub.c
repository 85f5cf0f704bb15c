/* A libcudart without a GPU behind it: device memory is this process's own, a stream is a number of operations that are
 * under way, and every copy waits for those. It has the functions that ortgpu/distributed/cuda_runtime.py calls.
 *
 *   STUB_CUDART_FAIL  "cudaMalloc=2": this function returns this code
 *
 * libnccl_stub.c does its operations on the streams that are made here, and counts them in `pending`.
 */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    atomic_int pending;
} Stream;

static int failure(const char *name) {
    const char *told = getenv("STUB_CUDART_FAIL");
    size_t length = strlen(name);
    return told && !strncmp(told, name, length) && told[length] == '=' ? atoi(told + length + 1) : 0;
}
#define FAIL_IF_TOLD() do { int code = failure(__func__); if (code) return code; } while (0)

static void wait_for(Stream *stream) {
    struct timespec pause = {0, 100000};
    while (stream && atomic_load(&stream->pending)) nanosleep(&pause, NULL);
}

int cudaSetDevice(int device) {
    FAIL_IF_TOLD();
    return device < 0 ? 101 : 0;
}

int cudaMalloc(void **address, size_t size) {
    FAIL_IF_TOLD();
    return (*address = malloc(size)) ? 0 : 2;
}

int cudaFree(void *address) {
    FAIL_IF_TOLD();
    free(address);
    return 0;
}

int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    FAIL_IF_TOLD();
    (void)flags;
    return (*stream = calloc(1, sizeof(Stream))) ? 0 : 2;
}

int cudaStreamQuery(void *stream) {
    FAIL_IF_TOLD();
    return atomic_load(&((Stream *)stream)->pending) ? 600 : 0;
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    FAIL_IF_TOLD();
    (void)kind;
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
