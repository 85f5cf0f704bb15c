/* A libnvidia-ml.so.1 without a GPU behind it: what nvidia-ml-py calls, answered from environment variables.
 *
 *   STUB_NVML_INIT    what nvmlInit returns (an nvmlReturn_t; 9 is no driver, 18 a version mismatch; default 0)
 *   STUB_NVML_ERROR   what every other call returns (default 0; 999 is an unknown error)
 *   STUB_NVML_DRIVER  the driver's version (default 580.65.06)
 *   STUB_NVML_CUDA    the CUDA version it supports, as 1000 * major + 10 * minor (default 13000)
 *   STUB_NVML_GPUS    the GPUs, in PCI order, ";" between them. Each is key=value, "|" between them:
 *       uuid=GPU-...  name=...  capability=9.0  total=BYTES  free=BYTES
 *       mode=0            compute mode: 0 default, 2 prohibited, 3 exclusive process
 *       mig=0             0 off, 1 on, absent: not supported
 *       migs=MIG-..,..    the MIG devices of this GPU
 *       processes=PID:BYTES,PID:BYTES
 *       handle=0          what nvmlDeviceGetHandleByIndex returns: 15 is a GPU that is lost
 *
 * As in the real library, every call before nvmlInit returns 1, an index that there is not 2, and a UUID that there
 * is not 6. A function that is missing here is one that an older driver does not have.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
};

enum { MAX_GPUS = 32, MAX_MIGS = 8, MAX_PROCESSES = 16 };

typedef struct Gpu Gpu;
struct Gpu {
    char uuid[96], name[96];
    int index, major, minor, mode, mig, mig_count, process_count, handle;
    unsigned long long total, free;
    Gpu *parent, *migs[MAX_MIGS];
    struct { unsigned pid; unsigned long long bytes; } processes[MAX_PROCESSES];
};

static int users;
static int gpu_count;
static Gpu gpus[MAX_GPUS];

static int number(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text && *text ? atoi(text) : otherwise;
}

static int text_of(const char *variable, const char *otherwise, char *to, unsigned size) {
    const char *text = getenv(variable);
    text = text && *text ? text : otherwise;
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
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

static void read_migs(Gpu *gpu, const char *rest) {
    while (*rest && gpu->mig_count < MAX_MIGS) {
        Gpu *mig = calloc(1, sizeof *mig);
        rest = field(rest, ',', mig->uuid, sizeof mig->uuid);
        mig->parent = gpu;
        gpu->migs[gpu->mig_count++] = mig;
    }
}

static void read_processes(Gpu *gpu, const char *rest) {
    while (*rest && gpu->process_count < MAX_PROCESSES) {
        char entry[64];
        rest = field(rest, ',', entry, sizeof entry);
        sscanf(entry, "%u:%llu", &gpu->processes[gpu->process_count].pid, &gpu->processes[gpu->process_count].bytes);
        gpu->process_count++;
    }
}

static void read_gpus(void) {
    const char *rest = getenv("STUB_NVML_GPUS");
    for (gpu_count = 0; rest && *rest && gpu_count < MAX_GPUS; gpu_count++) {
        char entry[1024], part[768];
        rest = field(rest, ';', entry, sizeof entry);
        Gpu *gpu = &gpus[gpu_count];
        *gpu = (Gpu){.index = gpu_count, .major = 9, .total = 80ull << 30, .free = 79ull << 30, .mig = -1};
        for (const char *next = entry; *next;) {
            next = field(next, '|', part, sizeof part);
            char *value = strchr(part, '=');
            if (!value) continue;
            *value++ = 0;
            if (!strcmp(part, "uuid")) snprintf(gpu->uuid, sizeof gpu->uuid, "%s", value);
            else if (!strcmp(part, "name")) snprintf(gpu->name, sizeof gpu->name, "%s", value);
            else if (!strcmp(part, "capability")) sscanf(value, "%d.%d", &gpu->major, &gpu->minor);
            else if (!strcmp(part, "total")) gpu->total = strtoull(value, NULL, 10);
            else if (!strcmp(part, "free")) gpu->free = strtoull(value, NULL, 10);
            else if (!strcmp(part, "mode")) gpu->mode = atoi(value);
            else if (!strcmp(part, "mig")) gpu->mig = atoi(value);
            else if (!strcmp(part, "handle")) gpu->handle = atoi(value);
            else if (!strcmp(part, "migs")) read_migs(gpu, value);
            else if (!strcmp(part, "processes")) read_processes(gpu, value);
            else {
                fprintf(stderr, "libnvidia-ml stub: STUB_NVML_GPUS has an unknown key: %s\n", part);
                abort();
            }
        }
        for (int i = 0; i < gpu->mig_count; i++) {
            Gpu *mig = gpu->migs[i];
            snprintf(mig->name, sizeof mig->name, "%.80s MIG %d", gpu->name, i);
            mig->index = i, mig->major = gpu->major, mig->minor = gpu->minor, mig->mig = -1;
            mig->total = gpu->total / gpu->mig_count, mig->free = gpu->free / gpu->mig_count;
        }
    }
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int result = number("STUB_NVML_INIT", OK);
    if (!result && !users++) read_gpus();
    return result;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    users--;
    return OK;
}

#define READY()                                                  \
    do {                                                         \
        int state = users ? number("STUB_NVML_ERROR", OK) : UNINITIALIZED; \
        if (state) return state;                                 \
    } while (0)

const char *nvmlErrorString(int code) {
    switch (code) {
    case 0: return "The operation was successful";
    case 1: return "Uninitialized";
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 6: return "Not Found";
    case 9: return "Driver Not Loaded";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    READY();
    return text_of("STUB_NVML_DRIVER", "580.65.06", text, size);
}

int nvmlSystemGetNVMLVersion(char *text, unsigned size) {
    READY();
    char driver[80];
    int state = text_of("STUB_NVML_DRIVER", "580.65.06", driver, sizeof driver);
    if (state) return state;
    return snprintf(text, size, "13.%s", driver) < (int)size ? OK : INSUFFICIENT_SIZE;
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    READY();
    *version = number("STUB_NVML_CUDA", 13000);
    return OK;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

int nvmlDeviceGetCount_v2(unsigned *count) {
    READY();
    *count = (unsigned)gpu_count;
    return OK;
}

int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) {
    READY();
    if (index >= (unsigned)gpu_count) return INVALID_ARGUMENT;
    *gpu = &gpus[index];
    return gpus[index].handle;
}

int nvmlDeviceGetHandleByIndex(unsigned index, Gpu **gpu) { return nvmlDeviceGetHandleByIndex_v2(index, gpu); }

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **gpu) {
    READY();
    for (int i = 0; i < gpu_count; i++) {
        if (!strcmp(gpus[i].uuid, uuid)) return *gpu = &gpus[i], OK;
        for (int j = 0; j < gpus[i].mig_count; j++)
            if (!strcmp(gpus[i].migs[j]->uuid, uuid)) return *gpu = gpus[i].migs[j], OK;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, Gpu **gpu) {
    READY();
    unsigned domain, bus, device;
    if (sscanf(id, "%x:%x:%x", &domain, &bus, &device) != 3) return INVALID_ARGUMENT;
    if (domain || device || !bus || bus > (unsigned)gpu_count) return NOT_FOUND;
    *gpu = &gpus[bus - 1];
    return OK;
}

int nvmlDeviceGetIndex(Gpu *gpu, unsigned *index) {
    READY();
    *index = (unsigned)gpu->index;
    return OK;
}

int nvmlDeviceGetMinorNumber(Gpu *gpu, unsigned *minor) { return nvmlDeviceGetIndex(gpu, minor); }

int nvmlDeviceGetUUID(Gpu *gpu, char *text, unsigned size) {
    READY();
    return snprintf(text, size, "%s", gpu->uuid) < (int)size ? OK : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetName(Gpu *gpu, char *text, unsigned size) {
    READY();
    return snprintf(text, size, "%s", gpu->name) < (int)size ? OK : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetCudaComputeCapability(Gpu *gpu, int *major, int *minor) {
    READY();
    *major = gpu->major, *minor = gpu->minor;
    return OK;
}

int nvmlDeviceGetMemoryInfo(Gpu *gpu, unsigned long long *memory) {
    READY();
    memory[0] = gpu->total, memory[1] = gpu->free, memory[2] = gpu->total - gpu->free;
    return OK;
}

struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, struct memory_v2 *memory) {
    READY();
    memory->total = gpu->total, memory->reserved = 0, memory->free = gpu->free, memory->used = gpu->total - gpu->free;
    return OK;
}

int nvmlDeviceGetComputeMode(Gpu *gpu, int *mode) {
    READY();
    *mode = gpu->mode;
    return OK;
}

int nvmlDeviceGetMigMode(Gpu *gpu, unsigned *current, unsigned *pending) {
    READY();
    if (gpu->mig < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)gpu->mig;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Gpu *gpu, unsigned *count) {
    READY();
    *count = gpu->mig < 0 ? 0 : 7;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, unsigned index, Gpu **mig) {
    READY();
    if (gpu->mig < 0) return NOT_SUPPORTED;
    if (index >= (unsigned)gpu->mig_count) return NOT_FOUND;
    *mig = gpu->migs[index];
    return OK;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Gpu *mig, Gpu **gpu) {
    READY();
    if (!mig->parent) return INVALID_ARGUMENT;
    *gpu = mig->parent;
    return OK;
}

int nvmlDeviceIsMigDeviceHandle(Gpu *gpu, unsigned *is) {
    READY();
    *is = gpu->parent != NULL;
    return OK;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };

int nvmlDeviceGetPciInfo_v3(Gpu *gpu, struct pci *pci) {
    READY();
    unsigned bus = (unsigned)(gpu->parent ? gpu->parent->index : gpu->index) + 1;
    *pci = (struct pci){.bus = bus};
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", bus & 0xff);
    snprintf(pci->text, sizeof pci->text, "00000000:%02X:00.0", bus & 0xff);
    return OK;
}

struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *count, struct process *list) {
    READY();
    unsigned room = *count;
    *count = (unsigned)gpu->process_count;
    if (room < *count) return INSUFFICIENT_SIZE;
    for (int i = 0; i < gpu->process_count; i++)
        list[i] = (struct process){gpu->processes[i].pid, gpu->processes[i].bytes, ~0u, ~0u};
    return OK;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Gpu *gpu, unsigned *count, struct process *list) {
    (void)gpu, (void)list;
    READY();
    *count = 0;
    return OK;
}
