/* Libraries of CUDA's toolkit that let ONNX Runtime's CUDA provider open a session and place its nodes, without a GPU.
 *
 * Memory of the device is the host's, copies are memcpy, and a kernel that is launched does nothing: results mean
 * nothing. Whatever else the provider links is made beside this, by `Stubs.toolkit`, and says that it worked.
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SYNCHRONOUS_MEMORY = 256, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, WARP_SIZE = 10, DEVICE_MEMORY = 2 };

static int allocate(void **address, size_t size) {
    *address = aligned_alloc(SYNCHRONOUS_MEMORY, (size / SYNCHRONOUS_MEMORY + 1) * SYNCHRONOUS_MEMORY);
    return *address ? 0 : 2;
}

/* Memory of the device is counted, each block by a size in front of it. $STUB_CUDA_MEMORY is how many bytes there are. */
static size_t device_bytes;

static size_t device_total(void) {
    const char *total = getenv("STUB_CUDA_MEMORY");
    return total ? strtoull(total, NULL, 10) : (size_t)64 << 30;
}

size_t stub_device_bytes(void) { return __atomic_load_n(&device_bytes, __ATOMIC_SEQ_CST); }

static int allocate_on_device(void **address, size_t size) {
    void *block;
    if (__atomic_add_fetch(&device_bytes, size, __ATOMIC_SEQ_CST) > device_total()
        || allocate(&block, size + SYNCHRONOUS_MEMORY)) {
        __atomic_sub_fetch(&device_bytes, size, __ATOMIC_SEQ_CST);
        return 2;
    }
    *(size_t *)block = size;
    return *address = (char *)block + SYNCHRONOUS_MEMORY, 0;
}

static int free_on_device(void *address) {
    void *block = (char *)address - SYNCHRONOUS_MEMORY;
    if (address) __atomic_sub_fetch(&device_bytes, *(size_t *)block, __ATOMIC_SEQ_CST), free(block);
    return 0;
}

static int make(void **handle) {
    *handle = malloc(1);
    return 0;
}

int cudaMalloc(void **address, size_t size) { return allocate_on_device(address, size); }
int cudaMallocHost(void **address, size_t size) { return allocate(address, size); }
int cudaHostAlloc(void **address, size_t size, unsigned flags) { return (void)flags, allocate(address, size); }
int cudaFree(void *address) { return free_on_device(address); }
int cudaFreeHost(void *address) { return free(address), 0; }
int cudaMemcpy(void *to, const void *from, size_t size) { return memcpy(to, from, size), 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t size) { return memcpy(to, from, size), 0; }
int cudaMemset(void *to, int value, size_t size) { return memset(to, value, size), 0; }
int cudaMemsetAsync(void *to, int value, size_t size) { return memset(to, value, size), 0; }
int cudaMemGetInfo(size_t *available, size_t *total) {
    *total = device_total();
    return *available = *total - stub_device_bytes(), 0;
}

int cudaStreamCreate(void **stream) { return make(stream); }
int cudaStreamCreateWithFlags(void **stream) { return make(stream); }
int cudaEventCreate(void **event) { return make(event); }
int cudaEventCreateWithFlags(void **event) { return make(event); }
int cublasCreate_v2(void **handle) { return make(handle); }
int cublasLtCreate(void **handle) { return make(handle); }
int cudaStreamEndCapture(void *stream, void **graph) { return (void)stream, make(graph); }
int cudaGraphInstantiate(void **executable) { return make(executable); }
int cudaStreamIsCapturing(void *stream, int *status) { return (void)stream, *status = 0; }

/* As the real one, it is of no use in a process that was forked from one that had used it, 3, and after a sticky error,
 * which the driver's stub reads from the same variable; 2 is no sticky one. */
static int state(void) {
    static pid_t first;
    const char *sticky = getenv("STUB_CUDA_STICKY");
    int code = sticky ? atoi(sticky) : 0;
    if (!first) first = getpid();
    return first != getpid() ? 3 : code == 2 ? 0 : code;
}

static __thread int current;

/* What a real one answers where the driver is too old for it: $STUB_CUDART_CODE, 35. */
static int refusal(void) {
    const char *code = getenv("STUB_CUDART_CODE");
    return code ? atoi(code) : 0;
}

/* As many as the driver's stub has, which are separated in its variable. */
int cudaGetDeviceCount(int *count) {
    const char *devices = getenv("STUB_CUDA_DEVICES");
    *count = 1;
    while (devices && (devices = strchr(devices, ';'))) devices++, (*count)++;
    if (refusal()) *count = 0;
    return refusal();
}
int cudaGetDevice(int *device) { return *device = current, refusal(); }
int cudaSetDevice(int device) {
    int count;
    cudaGetDeviceCount(&count);
    if (device < 0 || device >= count) return 101;
    return current = device, state();
}
int cudaRuntimeGetVersion(int *version) { return *version = 13000, 0; }
int cudaDriverGetVersion(int *version) { return *version = 13000, 0; }
const char *cudaGetErrorString(int code) { return (void)code, "stub error"; }
const char *cudaGetErrorName(int code) { return (void)code, "stubError"; }

int cudaPointerGetAttributes(int *attributes, const void *address) {
    (void)address;
    memset(attributes, 0, 4 * sizeof(int));
    attributes[0] = DEVICE_MEMORY;
    return 0;
}

/* That of the first device of the driver's stub: uuid|name|9.0|memory;... */
static void read_capability(int *major, int *minor) {
    const char *field = getenv("STUB_CUDA_DEVICES");
    *major = 9, *minor = 0;
    if (field && (field = strchr(field, '|')) && (field = strchr(field + 1, '|'))) sscanf(field + 1, "%d.%d", major, minor);
}

int cudaDeviceGetAttribute(int *value, int attribute) {
    int major, minor;
    read_capability(&major, &minor);
    *value = attribute == CAPABILITY_MAJOR   ? major
             : attribute == CAPABILITY_MINOR ? minor
             : attribute == WARP_SIZE        ? 32
                                             : 1024;
    return 0;
}

/* cudaDeviceProp of CUDA 12 and 13, which are the same as far as the compute capability. */
typedef struct {
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t memory, shared_memory;
    int registers, warp_size;
    size_t pitch;
    int threads, block[3], grid[3], clock;
    size_t constants;
    int major, minor;
    char others[600];
} Properties;

int cudaGetDeviceProperties(Properties *found) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "stub");
    found->memory = (size_t)64 << 30;
    found->shared_memory = 48 << 10;
    found->registers = 65536;
    found->warp_size = 32;
    read_capability(&found->major, &found->minor);
    found->threads = 1024;
    for (int axis = 0; axis < 3; axis++) found->block[axis] = found->grid[axis] = 1024;
    return refusal();
}
int cudaGetDeviceProperties_v2(Properties *found) { return cudaGetDeviceProperties(found); }

void **__cudaRegisterFatBinary(void) {
    static void *handle;
    return &handle;
}
