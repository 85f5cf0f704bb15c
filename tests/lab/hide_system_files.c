/* A library for LD_PRELOAD that hides what this machine itself offers of CUDA from code that looks at files.
 *
 * hide_system_libraries.c does so for the loader. This one does it for a search that reads the loader's cache, looks
 * into /usr/local/cuda or lists /dev: those paths do not exist.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *const hidden[] = {
    "/etc/ld.so.cache", "/usr/local/cuda", "/opt/cuda", "/usr/lib/wsl", "/proc/driver/nvidia",
    "/dev/nvidia", "/dev/dxg", "/dev/nvmap", "/sys/module/nvidia", "/usr/bin/nvidia-", "/usr/local/nvidia",
    "/run/opengl-driver", "/sys/bus/pci/devices",
};
static const char *const system_folders[] = {"/usr/lib", "/usr/lib64", "/lib/", "/lib64/"};
static const char *const libraries[] = {
    "libcuda.so",   "libcudart.so", "libcublas", "libcudnn",      "libcufft",  "libcurand", "libcusparse",
    "libcusolver",  "libcudadebugger",  "libnvrtc",  "libnvJitLink",  "libnvidia", "libnccl",   "libnvinfer",
};

#define STARTS_WITH_ONE_OF(text, list) starts_with_one_of(text, list, sizeof list / sizeof *list)
static int starts_with_one_of(const char *text, const char *const *list, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!strncmp(text, list[i], strlen(list[i]))) return 1;
    return 0;
}

/* What ONNX Runtime's search for devices reads: this machine's stay hidden, and those of $STUB_PCI_DEVICES are shown. */
static const char *shown(const char *path) {
    static const char listed[] = "/sys/bus/pci/devices";
    static __thread char instead[4096];
    const char *folder = getenv("STUB_PCI_DEVICES");
    if (!path || !folder || strncmp(path, listed, sizeof listed - 1)) return path;
    snprintf(instead, sizeof instead, "%s%s", folder, path + sizeof listed - 1);
    return instead;
}

static int absent(const char *path) {
    if (!path || *path != '/') return 0;
    const char *base = strrchr(path, '/') + 1;
    int hide = STARTS_WITH_ONE_OF(path, hidden) ||
               (STARTS_WITH_ONE_OF(path, system_folders) && !strstr(path, "-packages/") && STARTS_WITH_ONE_OF(base, libraries));
    if (hide) errno = ENOENT;
    return hide;
}

#define REAL(type, name, ...)                                                       \
    static type (*real)(__VA_ARGS__);                                               \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, name)

#define OPEN(name)                                                                  \
    int name(const char *path, int flags, ...) {                                    \
        va_list rest;                                                               \
        va_start(rest, flags);                                                      \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;   \
        va_end(rest);                                                               \
        REAL(int, #name, const char *, int, ...);                                   \
        path = shown(path);                                                          \
        return absent(path) ? -1 : real(path, flags, mode);                         \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                \
    int name(int folder, const char *path, int flags, ...) {                        \
        va_list rest;                                                               \
        va_start(rest, flags);                                                      \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;   \
        va_end(rest);                                                               \
        REAL(int, #name, int, const char *, int, ...);                              \
        path = shown(path);                                                          \
        return absent(path) ? -1 : real(folder, path, flags, mode);                 \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                 \
    FILE *name(const char *restrict path, const char *restrict mode) {              \
        REAL(FILE *, #name, const char *, const char *);                            \
        path = shown(path);                                                          \
        return absent(path) ? NULL : real(path, mode);                              \
    }
FOPEN(fopen)
FOPEN(fopen64)

#define STAT(name, type)                                                            \
    int name(const char *restrict path, struct type *restrict to) {                 \
        REAL(int, #name, const char *, struct type *);                              \
        path = shown(path);                                                          \
        return absent(path) ? -1 : real(path, to);                                  \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)

#define XSTAT(name, type) /* what stat() was compiled to before glibc 2.33 */       \
    int name(int version, const char *path, struct type *to) {                      \
        REAL(int, #name, int, const char *, struct type *);                         \
        path = shown(path);                                                          \
        return absent(path) ? -1 : real(version, path, to);                         \
    }
XSTAT(__xstat, stat)
XSTAT(__xstat64, stat64)
XSTAT(__lxstat, stat)
XSTAT(__lxstat64, stat64)

#define FSTATAT(name, type)                                                         \
    int name(int folder, const char *restrict path, struct type *restrict to, int flags) { \
        REAL(int, #name, int, const char *, struct type *, int);                    \
        path = shown(path);                                                          \
        return absent(path) ? -1 : real(folder, path, to, flags);                   \
    }
FSTATAT(fstatat, stat)
FSTATAT(fstatat64, stat64)

int access(const char *path, int mode) {
    REAL(int, "access", const char *, int);
    return absent(path) ? -1 : real(path, mode);
}

DIR *opendir(const char *path) {
    REAL(DIR *, "opendir", const char *);
    path = shown(path);
    return absent(path) ? NULL : real(path);
}

ssize_t readlink(const char *restrict path, char *restrict to, size_t size) {
    REAL(ssize_t, "readlink", const char *, char *, size_t);
    path = shown(path);
    return absent(path) ? -1 : real(path, to, size);
}

char *realpath(const char *restrict path, char *restrict to) {
    REAL(char *, "realpath", const char *, char *);
    return real(shown(path), to);
}

/* A listing leaves out what is absent. Few names are looked at twice: only those that could be hidden. */
static int listed_absent(DIR *folder, const char *name) {
    if (strncmp(name, "lib", 3) && strncmp(name, "nvidia", 6) && strncmp(name, "cuda", 4) && strcmp(name, "dxg")) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd(folder));
    ssize_t length = readlink(link, path, sizeof path - 300);
    if (length <= 0) return 0;
    snprintf(path + length, sizeof path - (size_t)length, "/%s", name);
    return absent(path);
}

#define READDIR(name, type)                                                         \
    struct type *name(DIR *folder) {                                                \
        REAL(struct type *, #name, DIR *);                                          \
        struct type *entry;                                                         \
        do entry = real(folder);                                                    \
        while (entry && listed_absent(folder, entry->d_name));                      \
        return entry;                                                               \
    }
READDIR(readdir, dirent)
READDIR(readdir64, dirent64)
