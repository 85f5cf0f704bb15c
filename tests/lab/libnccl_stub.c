/* A libnccl.so.2 between processes of one host: what ranks hand in goes through a file that all of them have mapped.
 *
 * Communicators are not blocking: a call returns ncclInProgress, a thread does the work, and ncclCommGetAsyncError tells
 * of it. A rank that does not take part is waited for until ncclCommAbort. Operations that differ between ranks wait for
 * each other for ever, as those of NCCL may.
 *
 *   STUB_NCCL_FOLDER   where the files are
 *   STUB_NCCL_VERSION  what ncclGetVersion says (default 22809)
 *   STUB_NCCL_FAIL     "ncclAllReduce=2": this function returns this code, after a line NCCL WARN
 *   STUB_NCCL_SPOIL    set: one element of each result is wrong
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM = 2, INVALID = 4, IN_PROGRESS = 7 };
enum { INT32 = 2, FLOAT16 = 6, FLOAT32 = 7, BFLOAT16 = 9 };
enum { MAX_RANKS = 8, SLOT = 1 << 27 };

typedef struct { char bytes[128]; } UniqueId;
typedef struct { atomic_int pending; } Stream;

/* The file: a header, then a slot for what each rank hands in. */
typedef struct {
    atomic_int joined;
    atomic_ulong arrived[MAX_RANKS]; /* operations that a rank has handed in */
    atomic_ulong taken[MAX_RANKS];   /* operations whose result a rank has taken */
    atomic_ulong kind[MAX_RANKS];    /* of the last operation: which, type and count */
} Header;

typedef struct {
    int rank, ranks;
    Header *header;
    char *slots;
    unsigned long done;
    atomic_int state, aborted;
} Communicator;

typedef struct {
    Communicator *communicator;
    Stream *stream;
    const void *send;
    void *receive;
    size_t count;
    int type, operation;
} Work;

static int failure(const char *name) {
    const char *told = getenv("STUB_NCCL_FAIL");
    size_t length = strlen(name);
    if (!told || strncmp(told, name, length) || told[length] != '=') return SUCCESS;
    printf("stub:1:1 [0] stub.cc:1 NCCL WARN %s was told to fail\n", name);
    return atoi(told + length + 1);
}
#define FAIL_IF_TOLD() do { int code = failure(__func__); if (code) return code; } while (0)

static void rest(void) {
    struct timespec pause = {0, 200000};
    nanosleep(&pause, NULL);
}

int ncclGetVersion(int *version) {
    const char *told = getenv("STUB_NCCL_VERSION");
    *version = told ? atoi(told) : 22809;
    return SUCCESS;
}

const char *ncclGetErrorString(int code) { return code == SYSTEM ? "unhandled system error" : "an error of the stub"; }

const char *ncclGetLastError(void *communicator) {
    (void)communicator;
    return "said by the stub";
}

int ncclGetUniqueId(UniqueId *id) {
    FAIL_IF_TOLD();
    memset(id, 0, sizeof *id);
    return getrandom(id->bytes, 16, 0) == 16 ? SUCCESS : SYSTEM;
}

static size_t size_of(int type) { return type == INT32 || type == FLOAT32 ? 4 : 2; }

static void *join(void *argument) {
    Communicator *self = argument;
    while (atomic_load(&self->header->joined) < self->ranks && !atomic_load(&self->aborted)) rest();
    atomic_store(&self->state, SUCCESS);
    return NULL;
}

int ncclCommInitRankConfig(Communicator **communicator, int ranks, UniqueId id, int rank, const void *config) {
    FAIL_IF_TOLD();
    (void)config;
    if (ranks > MAX_RANKS) return INVALID;
    char path[512];
    int end = snprintf(path, sizeof path, "%s/nccl-", getenv("STUB_NCCL_FOLDER"));
    for (int i = 0; i < 16; i++) end += snprintf(path + end, sizeof path - end, "%02x", (unsigned char)id.bytes[i]);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    size_t size = 4096 + (size_t)ranks * SLOT;
    if (file < 0 || ftruncate(file, (off_t)size)) return SYSTEM;
    Communicator *self = calloc(1, sizeof *self);
    char *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return SYSTEM;
    self->rank = rank, self->ranks = ranks, self->header = (Header *)mapped, self->slots = mapped + 4096;
    atomic_store(&self->state, IN_PROGRESS);
    atomic_fetch_add(&self->header->joined, 1);
    pthread_t thread;
    if (pthread_create(&thread, NULL, join, self)) return SYSTEM;
    pthread_detach(thread);
    *communicator = self;
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(Communicator *self, int *state) {
    FAIL_IF_TOLD();
    *state = atomic_load(&self->state);
    return SUCCESS;
}

int ncclCommAbort(Communicator *self) {
    atomic_store(&self->aborted, 1);
    return SUCCESS;
}

static double as_number(const char *from, size_t i, int type) {
    if (type == INT32) return ((const int32_t *)from)[i];
    if (type == FLOAT32) return ((const float *)from)[i];
    if (type == FLOAT16) return (double)((const _Float16 *)from)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void put_number(char *to, size_t i, int type, double number) {
    if (type == INT32) ((int32_t *)to)[i] = (int32_t)number;
    else if (type == FLOAT32) ((float *)to)[i] = (float)number;
    else if (type == FLOAT16) ((_Float16 *)to)[i] = (_Float16)number;
    else {
        float value = (float)number;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
    }
}

static int all(Communicator *self, atomic_ulong *counters, unsigned long number) {
    for (int r = 0; r < self->ranks; r++)
        if (atomic_load(&counters[r]) < number) return 0;
    return 1;
}

static int wait_for_all(Communicator *self, atomic_ulong *counters, unsigned long number) {
    while (!all(self, counters, number)) {
        if (atomic_load(&self->aborted)) return 0;
        rest();
    }
    return 1;
}

static int all_do(Communicator *self, unsigned long kind) {
    for (int r = 0; r < self->ranks; r++)
        if (atomic_load(&self->header->kind[r]) != kind) return 0;
    return 1;
}

static void compute(Work *work) {
    Communicator *self = work->communicator;
    size_t size = size_of(work->type);
    if (work->operation == 'g')
        for (int r = 0; r < self->ranks; r++)
            memcpy((char *)work->receive + r * work->count * size, self->slots + (size_t)r * SLOT, work->count * size);
    else {
        size_t first = work->operation == 's' ? self->rank * work->count : 0;
        for (size_t i = 0; work->type == FLOAT32 && i < work->count; i++) { /* the large ones: nothing in the way of a compiler */
            float sum = 0;
            for (int r = 0; r < self->ranks; r++) sum += ((float *)(self->slots + (size_t)r * SLOT))[first + i];
            ((float *)work->receive)[i] = sum;
        }
        for (size_t i = 0; work->type != FLOAT32 && i < work->count; i++) {
            double sum = 0;
            for (int r = 0; r < self->ranks; r++) sum += as_number(self->slots + (size_t)r * SLOT, first + i, work->type);
            put_number(work->receive, i, work->type, sum);
        }
    }
    if (getenv("STUB_NCCL_SPOIL")) put_number(work->receive, 0, work->type, 100);
}

static void *execute(void *argument) {
    Work *work = argument;
    Communicator *self = work->communicator;
    unsigned long number = ++self->done, kind = ((unsigned long)work->count << 16) | (work->type << 8) | work->operation;
    size_t handed = work->count * size_of(work->type) * (work->operation == 's' ? self->ranks : 1);
    if (wait_for_all(self, self->header->taken, number - 1)) {
        memcpy(self->slots + (size_t)self->rank * SLOT, work->send, handed);
        atomic_store(&self->header->kind[self->rank], kind);
        atomic_store(&self->header->arrived[self->rank], number);
        if (wait_for_all(self, self->header->arrived, number)) {
            while (!all_do(self, kind) && !atomic_load(&self->aborted)) rest();
            if (!atomic_load(&self->aborted)) compute(work);
            atomic_store(&self->header->taken[self->rank], number);
        }
    }
    atomic_fetch_sub(&work->stream->pending, 1);
    free(work);
    return NULL;
}

static int begin(const void *send, void *receive, size_t count, int type, int operation, Communicator *self, Stream *stream) {
    while (atomic_load(&stream->pending)) rest(); /* one at a time, in their order */
    Work *work = malloc(sizeof *work);
    *work = (Work){self, stream, send, receive, count, type, operation};
    atomic_fetch_add(&stream->pending, 1);
    pthread_t thread;
    if (pthread_create(&thread, NULL, execute, work)) return SYSTEM;
    pthread_detach(thread);
    return SUCCESS;
}

int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, Communicator *self, Stream *stream) {
    FAIL_IF_TOLD();
    return op ? INVALID : begin(send, receive, count, type, 'r', self, stream);
}

int ncclAllGather(const void *send, void *receive, size_t count, int type, Communicator *self, Stream *stream) {
    FAIL_IF_TOLD();
    return begin(send, receive, count, type, 'g', self, stream);
}

int ncclReduceScatter(const void *send, void *receive, size_t count, int type, int op, Communicator *self, Stream *stream) {
    FAIL_IF_TOLD();
    return op ? INVALID : begin(send, receive, count, type, 's', self, stream);
}
