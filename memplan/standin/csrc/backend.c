/* cuDNN's graph interface, which convolutions and attention go through: every plan exists and does nothing.
 *
 * What cuDNN would take as workspace it decides on the card. For a convolution an allowance can be reasoned: its tensor-core kernels read and
 * write channels-last, so tensors in PyTorch's default layout are copied there and back in the workspace (NVIDIA, Convolutional Layers User's
 * Guide, section on tensor layouts), and the gradient of a filter is summed in fp32 parts. So a descriptor knows the bytes of the tensors below
 * it, and passes an allowance on to what is made of it: tensor, operation, graph, heuristics, configuration, plan. */
#include "card.h"
#include "descriptors.h"

#include <stdlib.h>
#include <string.h>

/* cudnnBackendDescriptorType_t and cudnnBackendAttributeName_t of cuDNN 9, as far as they matter */
enum { ENGINE_HEURISTICS = 4, CONVOLUTION_FORWARD = 10, CONVOLUTION_BACKWARD_FILTER = 11, CONVOLUTION_BACKWARD_DATA = 12, TENSOR = 17,
       MATMUL = 19, ATTENTION_FORWARD = 41, ATTENTION_BACKWARD = 43 };
enum { HEURISTICS_RESULTS = 202, CONFIG_KNOBS = 302, CONFIG_WORKSPACE = 303, CONFIG_SHARED = 304, PLAN_WORKSPACE = 402, PLAN_JSON = 405,
       FILTER_GRADIENT = 715, TENSOR_TYPE = 901, TENSOR_SHAPE = 902, TENSOR_STRIDES = 903, ENGINE_INDEX = 1301, ENGINE_KNOBS = 1302,
       ENGINE_NOTES = 1303, ENGINE_BEHAVIOUR = 1305 };
enum { OF_DESCRIPTORS = 15 }; /* cudnnBackendAttributeType_t */

typedef struct {
    int type;
    size_t element_bytes, elements; /* of a tensor */
    int is_channels_last, is_attention;
    size_t allowance;
} Backend;

int cudnnBackendCreateDescriptor(int type, Backend **out) {
    *out = calloc(1, sizeof(Backend));
    if (!*out) return 4000;
    (*out)->type = type;
    (*out)->is_attention = type == MATMUL || type == ATTENTION_FORWARD || type == ATTENTION_BACKWARD; /* PyTorch's only graphs with a product */
    return 0;
}
int cudnnBackendDestroyDescriptor(Backend *descriptor) { free(descriptor); return 0; }
int cudnnBackendFinalize(Backend *descriptor) { return 0; }
int cudnnBackendInitialize(Backend *descriptor) { return 0; }
int cudnnBackendExecute(void *handle, Backend *plan, Backend *variant) { kernel_ran(); return 0; }

static int is_convolution(const Backend *descriptor) {
    return descriptor->type >= CONVOLUTION_FORWARD && descriptor->type <= CONVOLUTION_BACKWARD_DATA;
}
static void set_tensor(Backend *tensor, int name, int64_t count, const void *values) {
    const int64_t *numbers = values;
    switch (name) {
    case TENSOR_TYPE: tensor->element_bytes = bytes_of_type(*(const int *)values); break;
    case TENSOR_STRIDES: tensor->is_channels_last = count > 1 && numbers[1] == 1; break;
    case TENSOR_SHAPE:
        tensor->elements = 1;
        for (int64_t i = 0; i < count; i++) tensor->elements *= numbers[i];
    }
}
static size_t allowance_of(const Backend *operation, int name, const Backend *tensor) {
    size_t copied = tensor->is_channels_last ? 0 : tensor->elements * tensor->element_bytes;
    return copied + (name == FILTER_GRADIENT ? tensor->elements * 4 : 0);
}
int cudnnBackendSetAttribute(Backend *descriptor, int name, int type, int64_t count, const void *values) {
    if (descriptor->type == TENSOR) set_tensor(descriptor, name, count, values);
    if (type != OF_DESCRIPTORS) return 0;
    for (int64_t i = 0; i < count; i++) {
        const Backend *part = ((Backend *const *)values)[i];
        if (!part) continue;
        descriptor->is_attention |= part->is_attention;
        if (is_convolution(descriptor) && part->type == TENSOR) descriptor->allowance += allowance_of(descriptor, name, part);
        else if (part->allowance > descriptor->allowance) descriptor->allowance = part->allowance;
    }
    return 0;
}
int cudnnBackendGetAttribute(Backend *descriptor, int name, int type, int64_t requested, int64_t *count, void *values) {
    if (count) *count = 1;
    switch (name) {
    case HEURISTICS_RESULTS:
        if (values && requested > 0) {
            Backend *found = *(Backend **)values;
            found->allowance = descriptor->allowance;
            found->is_attention = descriptor->is_attention;
        }
        break;
    case PLAN_WORKSPACE:
        if (values) *(int64_t *)values = library_workspace("convolution", descriptor->allowance);
        if (descriptor->is_attention) library_unknown("attention");
        break;
    case CONFIG_WORKSPACE: case ENGINE_INDEX: if (values) *(int64_t *)values = 0; break;
    case CONFIG_SHARED: if (values) *(int32_t *)values = 0; break;
    case CONFIG_KNOBS: case ENGINE_KNOBS: case ENGINE_NOTES: case ENGINE_BEHAVIOUR: if (count) *count = 0; break;
    case PLAN_JSON: if (requested > 0 && values) *(char *)values = 0; break;
    }
    return 0;
}
