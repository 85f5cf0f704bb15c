/* A libcuda.so.1 without a GPU behind it.
 *
 * The real CUDA runtime and the real ONNX Runtime provider load it, ask it the questions that they ask
 * a driver, and act on the answers. It answers from environment variables, read at every call:
 *
 *   STUB_CUDA_INIT     what cuInit returns (a CUresult; default 0)
 *   STUB_CUDA_VERSION  what cuDriverGetVersion reports, as 1000 * major + 10 * minor (default 13000)
 *   STUB_CUDA_DEVICES  the GPUs, in PCI order: "GPU-uuid|name|9.0|memory in bytes" and ";" between them (default: none)
 *   STUB_CUDA_FILES    how many files cuInit keeps open, as the real one does; where it may not, it returns 304
 *   STUB_CUDA_CONTEXT  the number of the primary context that every GPU is said to have (default 0: none)
 *   STUB_CUDA_NO_CONTEXT  there is no such context, and this is what making one returns (default 0: as above)
 *   STUB_CUDA_STICKY   what a call in that context returns, as after a sticky error (a CUresult; default 0)
 *   STUB_CUDA_TRACE    set: say on stderr which functions are looked up and called
 *
 * CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER act as they do on the real one, with two simplifications:
 * "fastest first" is highest compute capability first, and MIG names are unknown. With no visible device
 * a cuInit that would succeed returns 100, as the real one does.
 *
 * As the real one, it is of no use in a process that was forked from one that had initialised it: 3 (not initialised).
 *
 * It holds no memory, stream or kernel: whatever would need a device returns 801 (not supported), and the
 * CUDA runtime, which checks that it talks to NVIDIA's own driver before it opens a device, stops at 500.
 * So a failure of the driver is seen through the real provider, a device only through the functions here.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum {
    OK = 0,
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    OPERATING_SYSTEM = 304,
    NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
};

enum { MAX_DEVICES = 32 };

typedef struct {
    char uuid[64];
    char name[96];
    int major, minor;
    size_t memory;
} Device;

static pid_t initialised; /* the process that called cuInit with success */

static int trace(const char *what, const char *name) {
    if (getenv("STUB_CUDA_TRACE")) fprintf(stderr, "libcuda stub: %s %s\n", what, name);
    return 1;
}
#define CALLED() trace("call", __func__)

static int number(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text && *text ? atoi(text) : otherwise;
}

/* What lies between `from` and the next separator or the end, copied; returns what follows it. */
static const char *field(const char *from, char separator, char *to, size_t size) {
    size_t length = 0;
    while (from[length] && from[length] != separator) length++;
    size_t copied = length < size - 1 ? length : size - 1;
    memcpy(to, from, copied);
    to[copied] = 0;
    return from[length] ? from + length + 1 : from + length;
}

static int installed(Device *devices) {
    const char *rest = getenv("STUB_CUDA_DEVICES");
    int count = 0;
    while (rest && *rest && count < MAX_DEVICES) {
        char entry[256], part[128];
        rest = field(rest, ';', entry, sizeof entry);
        Device *device = &devices[count++];
        const char *next = field(entry, '|', device->uuid, sizeof device->uuid);
        next = field(next, '|', device->name, sizeof device->name);
        next = field(next, '|', part, sizeof part);
        if (sscanf(part, "%d.%d", &device->major, &device->minor) != 2) device->major = 9, device->minor = 0;
        field(next, '|', part, sizeof part);
        device->memory = *part ? strtoull(part, NULL, 10) : (size_t)80 << 30;
    }
    return count;
}

/* The devices of this process in its own order: CUDA_DEVICE_ORDER first, then CUDA_VISIBLE_DEVICES picks. */
static int visible(Device *devices) {
    Device all[MAX_DEVICES];
    int count = installed(all);
    const char *order = getenv("CUDA_DEVICE_ORDER");
    if (!order || strcmp(order, "PCI_BUS_ID")) {
        for (int i = 1; i < count; i++) { /* insertion sort: stable */
            Device moved = all[i];
            int j = i;
            for (; j && all[j - 1].major * 100 + all[j - 1].minor < moved.major * 100 + moved.minor; j--) all[j] = all[j - 1];
            all[j] = moved;
        }
    }
    const char *rest = getenv("CUDA_VISIBLE_DEVICES");
    if (!rest) {
        memcpy(devices, all, sizeof(Device) * count);
        return count;
    }
    int chosen = 0;
    while (*rest && chosen < MAX_DEVICES) {
        char entry[128], *end;
        rest = field(rest, ',', entry, sizeof entry);
        char *text = entry;
        while (*text == ' ') text++;
        int found = -1;
        if (!strncasecmp(text, "GPU-", 4)) {
            for (int i = 0; i < count && found < 0; i++)
                if (!strncasecmp(all[i].uuid, text, strlen(text))) found = i;
        } else {
            long index = strtol(text, &end, 10);
            if (end != text && index >= 0 && index < count) found = (int)index;
        }
        if (found < 0) break; /* what follows a name that means nothing is not seen either */
        for (int i = 0; i < chosen; i++)
            if (!strcmp(devices[i].uuid, all[found].uuid)) return 0; /* a name that is there twice hides everything */
        devices[chosen++] = all[found];
    }
    return chosen;
}

static int ready(void) { return initialised == getpid() ? OK : NOT_INITIALIZED; }

static int one(int ordinal, Device *device) {
    Device devices[MAX_DEVICES];
    int state = ready();
    if (state) return state;
    if (ordinal < 0 || ordinal >= visible(devices)) return INVALID_DEVICE;
    *device = devices[ordinal];
    return OK;
}

/* Those that it got are closed again where it does not get all. */
static int opens_its_files(void) {
    enum { MOST = 256 };
    int files[MOST], wanted = number("STUB_CUDA_FILES", 0);
    for (int count = 0; count < wanted && count < MOST; count++) {
        files[count] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (files[count] >= 0) continue;
        while (count--) close(files[count]);
        return 0;
    }
    return 1;
}

int cuInit(unsigned flags) {
    CALLED();
    (void)flags;
    Device devices[MAX_DEVICES];
    int result = number("STUB_CUDA_INIT", OK);
    if (initialised && initialised != getpid()) result = NOT_INITIALIZED;
    if (!result && !initialised && !opens_its_files()) result = OPERATING_SYSTEM;
    if (!result && !visible(devices)) result = NO_DEVICE;
    if (!result) initialised = getpid();
    return result;
}

int cuDriverGetVersion(int *version) {
    CALLED();
    if (!version) return INVALID_VALUE;
    *version = number("STUB_CUDA_VERSION", 13000);
    return OK;
}

int cuDeviceGetCount(int *count) {
    CALLED();
    Device devices[MAX_DEVICES];
    int state = ready();
    if (!state) *count = visible(devices);
    return state;
}

int cuDeviceGet(int *device, int ordinal) {
    CALLED();
    Device found;
    int state = one(ordinal, &found);
    if (!state) *device = ordinal;
    return state;
}

int cuDeviceGetName(char *name, int length, int device) {
    CALLED();
    Device found;
    int state = one(device, &found);
    if (!state) snprintf(name, (size_t)length, "%s", found.name);
    return state;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    CALLED();
    Device found;
    int state = one(device, &found);
    if (state) return state;
    memset(uuid, 0, 16);
    int digits = 0;
    for (const char *text = found.uuid + (strncasecmp(found.uuid, "GPU-", 4) ? 0 : 4); *text && digits < 32; text++) {
        int value = *text >= '0' && *text <= '9' ? *text - '0' : (*text | 32) >= 'a' && (*text | 32) <= 'f' ? (*text | 32) - 'a' + 10 : -1;
        if (value < 0) continue;
        uuid[digits / 2] |= (unsigned char)(value << (digits % 2 ? 0 : 4));
        digits++;
    }
    return OK;
}

int cuDeviceGetUuid(unsigned char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }

int cuDeviceComputeCapability(int *major, int *minor, int device) {
    CALLED();
    Device found;
    int state = one(device, &found);
    if (!state) *major = found.major, *minor = found.minor;
    return state;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    CALLED();
    Device found;
    int state = one(device, &found);
    if (!state) *bytes = found.memory;
    return state;
}

int cuDeviceTotalMem(size_t *bytes, int device) { return cuDeviceTotalMem_v2(bytes, device); }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    CALLED();
    Device found;
    int state = one(device, &found);
    if (state) return state;
    switch (attribute) {
    case 1: *value = 1024; break;            /* threads per block */
    case 10: *value = 32; break;             /* warp size */
    case 16: *value = 132; break;            /* multiprocessors */
    case 20: *value = 0; break;              /* compute mode: default */
    case 33: *value = device + 1; break;     /* PCI bus */
    case 75: *value = found.major; break;
    case 76: *value = found.minor; break;
    default: *value = 0;
    }
    return OK;
}

int cuDeviceGetPCIBusId(char *text, int length, int device) {
    CALLED();
    Device found;
    int state = one(device, &found);
    if (!state) snprintf(text, (size_t)length, "0000:%02x:00.0", device + 1);
    return state;
}

int cuGetErrorName(int error, const char **text) {
    static const struct { int code; const char *name; } names[] = {
        {0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {3, "CUDA_ERROR_NOT_INITIALIZED"},
        {34, "CUDA_ERROR_STUB_LIBRARY"}, {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"}, {100, "CUDA_ERROR_NO_DEVICE"},
        {101, "CUDA_ERROR_INVALID_DEVICE"}, {500, "CUDA_ERROR_NOT_FOUND"}, {801, "CUDA_ERROR_NOT_SUPPORTED"},
        {802, "CUDA_ERROR_SYSTEM_NOT_READY"}, {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
        {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"}, {999, "CUDA_ERROR_UNKNOWN"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == error) return *text = names[i].name, OK;
    *text = NULL;
    return INVALID_VALUE;
}

int cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

int cuGetExportTable(const void **table, const void *id) {
    CALLED();
    (void)id;
    *table = NULL;
    return NOT_FOUND;
}

int cuCtxGetCurrent(void **context) {
    CALLED();
    *context = NULL;
    return ready();
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    CALLED();
    Device found;
    int state = one(device, &found);
    if (!state) *flags = 0, *active = number("STUB_CUDA_CONTEXT", 0) && !number("STUB_CUDA_NO_CONTEXT", OK);
    return state;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    CALLED();
    Device found;
    int state = one(device, &found);
    if (!state) state = number("STUB_CUDA_NO_CONTEXT", OK);
    *context = (void *)(intptr_t)number("STUB_CUDA_CONTEXT", 0);
    return state ? state : *context ? OK : NOT_SUPPORTED;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    Device found;
    return one(device, &found);
}

int cuCtxGetId(void *context, unsigned long long *id) {
    *id = context ? (intptr_t)context : number("STUB_CUDA_CONTEXT", 0); /* NULL: of the calling thread */
    return ready();
}

static int in_context(void) {
    int state = ready();
    if (state) return state;
    return number("STUB_CUDA_CONTEXT", 0) ? number("STUB_CUDA_STICKY", OK) : INVALID_CONTEXT;
}

int cuCtxPushCurrent_v2(void *context) { return (void)context, ready(); }
int cuCtxPopCurrent_v2(void **context) { return *context = (void *)(intptr_t)number("STUB_CUDA_CONTEXT", 0), ready(); }
int cuThreadExchangeStreamCaptureMode(int *mode) { return (void)mode, ready(); }
int cuMemGetInfo_v2(size_t *available, size_t *total) { return *available = *total = (size_t)64 << 30, in_context(); }
int cuStreamCreate(void **stream, unsigned flags) { return (void)flags, *stream = (void *)16, in_context(); }
int cuStreamQuery(void *stream) { return (void)stream, in_context(); }
int cuStreamDestroy_v2(void *stream) { return (void)stream, in_context(); }

/* Imported by name by the provider and by cuBLAS; never reached without a context. */
int cuTensorMapEncodeTiled(void) { return CALLED() ? NOT_SUPPORTED : 0; }
int cuTensorMapEncodeIm2col(void) { return CALLED() ? NOT_SUPPORTED : 0; }
int cuModuleLoadData(void) { return CALLED() ? NOT_SUPPORTED : 0; }
int cuModuleGetFunction(void) { return CALLED() ? NOT_SUPPORTED : 0; }
int cuModuleUnload(void) { return CALLED() ? NOT_SUPPORTED : 0; }
static int unsupported(void) { return CALLED() ? NOT_SUPPORTED : 0; }

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status);
int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags);

static void *address(const char *symbol) {
#define FUNCTION(name) if (!strcmp(symbol, #name)) return (void *)name
#define VERSIONED(name) if (!strcmp(symbol, #name)) return (void *)name##_v2
    FUNCTION(cuInit);
    FUNCTION(cuDriverGetVersion);
    FUNCTION(cuDeviceGetCount);
    FUNCTION(cuDeviceGet);
    FUNCTION(cuDeviceGetName);
    VERSIONED(cuDeviceGetUuid);
    FUNCTION(cuDeviceComputeCapability);
    VERSIONED(cuDeviceTotalMem);
    FUNCTION(cuDeviceGetAttribute);
    FUNCTION(cuDeviceGetPCIBusId);
    FUNCTION(cuGetErrorName);
    FUNCTION(cuGetErrorString);
    FUNCTION(cuGetExportTable);
    FUNCTION(cuCtxGetCurrent);
    FUNCTION(cuDevicePrimaryCtxGetState);
    FUNCTION(cuDevicePrimaryCtxRetain);
    VERSIONED(cuGetProcAddress);
    return (void *)unsupported;
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    trace("look up", symbol);
    (void)version, (void)flags;
    *function = address(symbol);
    if (status) *status = 0;
    return OK;
}

int cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
