/* TensorRT as far as ONNX Runtime's TensorRT provider goes before it builds an engine: no plugins, and no parser.
 *
 * One source for libnvinfer and libnvonnxparser. A registry is an object of C++: a pointer to a table of methods, which
 * all answer 0 here.
 */
#include <stddef.h>

enum { METHODS = 128 };  /* more than IPluginRegistry has in NvInferRuntime.h of TensorRT 10 */

static long answer_nothing(void) { return 0; }

void *getPluginRegistry(void) {
    static void *methods[METHODS];
    static void *registry[] = {methods};
    for (int each = 0; each < METHODS; each++) methods[each] = (void *)answer_nothing;
    return registry;
}

int getInferLibVersion(void) { return 101600; }

#define MAKES_NOTHING(name) void *name(void) { return NULL; }
MAKES_NOTHING(createInferRuntime_INTERNAL)
MAKES_NOTHING(createInferBuilder_INTERNAL)
MAKES_NOTHING(createInferRefitter_INTERNAL)
MAKES_NOTHING(createNvOnnxParser_INTERNAL)
MAKES_NOTHING(createNvOnnxParserRefitter_INTERNAL)
