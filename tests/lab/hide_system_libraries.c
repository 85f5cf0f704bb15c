/* An auditor of the dynamic loader (see rtld-audit(7)) that hides what this machine itself offers of CUDA.
 *
 * A library that the loader found in /etc/ld.so.cache or in its default folders, and whose name begins like one
 * of NVIDIA's, is made to look absent, and so is one in a toolkit's usual place, which the RUNPATH of some releases of
 * ONNX Runtime names. What LD_LIBRARY_PATH, another RPATH or an absolute path leads to is left alone, so a test decides
 * alone what there is, whether the machine has a driver, a toolkit, or neither.
 *
 * Built without libc: an auditor lives in a link namespace of its own, and would load a second one.
 */
static const char *const hidden[] = {
    "libcuda.so",   "libcudart.so", "libcublas",    "libcudnn",      "libcufft",  "libcurand",
    "libcusparse",  "libcusolver",  "libnvrtc",     "libnvJitLink",  "libnvidia", "libnccl",  "libnvinfer",
};

static const char *const toolkits[] = {"/usr/local/cuda", "/opt/cuda"};

enum { FROM_CACHE = 0x08, FROM_DEFAULT = 0x40 }; /* LA_SER_CONFIG, LA_SER_DEFAULT */

unsigned la_version(unsigned version) {
    (void)version;
    return 1;
}

static int begins(const char *text, const char *with) {
    while (*with && *text == *with) text++, with++;
    return !*with;
}

char *la_objsearch(const char *name, unsigned long *cookie, unsigned source) {
    (void)cookie;
    const char *base = name;
    for (const char *c = name; *c; c++)
        if (*c == '/') base = c + 1;
    int there = source == FROM_CACHE || source == FROM_DEFAULT;
    for (unsigned i = 0; i < sizeof toolkits / sizeof *toolkits; i++) there |= begins(name, toolkits[i]);
    for (unsigned i = 0; there && i < sizeof hidden / sizeof *hidden; i++)
        if (begins(base, hidden[i])) return "/proc/hidden"; /* not NULL: the loader's errno would be an old one */
    return (char *)name;
}
