/* cuDNN's graph interface, which convolutions and attention go through: no plan does anything.
 *
 * What cuDNN takes as workspace it decides by the kernel that it picks. Where it can be asked without a card (cudnn.c), each descriptor has a twin
 * there, and the plans of convolutions, with their workspaces, are its own.
 *
 * Elsewhere there is an allowance. Recorded on an H100 with cuDNN 9.19 (tests/accuracy/recordings): about half of the convolutions take no
 * workspace. The others take, nearly always to the byte, what their tensor-core kernels have to copy: these read and write channels-last with
 * channels in whole 16 bytes, so tensors in PyTorch's default layout are copied there and back (NVIDIA, Convolutional Layers User's Guide, section
 * on tensor layouts), and those in channels-last where they are padded. The gradient of a filter is summed in fp32 parts, as many as keep the
 * card busy. Attention takes 256 bytes, and where heads share a key and a value, their gradients for each head.
 *
 * So a descriptor knows the tensors below it, and passes what they need on to what is made of it: tensor, operation, graph, heuristics,
 * configuration, plan. */
#include "card.h"
#include "descriptors.h"
#include "twins.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* cudnnBackendDescriptorType_t and cudnnBackendAttributeName_t of cuDNN 9, as far as they matter */
enum { ENGINE_HEURISTICS = 4, CONVOLUTION_FORWARD = 10, CONVOLUTION_BACKWARD_FILTER = 11, CONVOLUTION_BACKWARD_DATA = 12, GRAPH = 15,
       TENSOR = 17, MATMUL = 19, REDUCTION = 22, ATTENTION_FORWARD = 41, ATTENTION_BACKWARD = 43 };
enum { HEURISTICS_RESULTS = 202, CONFIG_KNOBS = 302, CONFIG_WORKSPACE = 303, CONFIG_SHARED = 304, PLAN_CONFIG = 401, PLAN_WORKSPACE, PLAN_JSON = 405,
       FORWARD_FILTER = 703, FORWARD_INPUT, FORWARD_OUTPUT, DATA_FILTER = 709, DATA_INPUT, DATA_OUTPUT, FILTER_GRADIENT = 715, FILTER_INPUT,
       FILTER_OUTPUT, TENSOR_TYPE = 901, TENSOR_SHAPE, TENSOR_STRIDES, ENGINE_INDEX = 1301, ENGINE_KNOBS, ENGINE_NOTES,
       ENGINE_BEHAVIOUR = 1305, REDUCED = 1610, REDUCTION_RESULT };
enum { OF_DESCRIPTORS = 15 }; /* cudnnBackendAttributeType_t */

#define ALIGNING 147 /* bytes that a convolution's workspace has besides its copies: 16 or 147 were seen */
#define ATTENTION_BYTES 256
#define LARGEST_TILE_BYTES ((size_t)128 * 256 * 4) /* of a block's sums in fp32 */

typedef struct {
    int64_t first, channels, places; /* the first two dimensions (of a filter: outputs, inputs of a group), and the elements of all others */
    size_t element_bytes;
    int is_channels_last;
} Tensor;
typedef struct { size_t largest; } Tries; /* of the plans of a graph that ran: where PyTorch tries them, the one that stays is the fastest */
typedef struct {
    void *twin;              /* NULL: cuDNN is not asked */
    Tries *tries;            /* of a graph, and of what is made for it; for as long as the program runs */
    size_t workspace;        /* of a plan, as it was said */
    int type, is_attention, has_clusters;
    Tensor tensor;           /* of a tensor */
    Tensor input, output, filter; /* of a convolution; of a reduction what it reduces, and to what */
    size_t allowance;        /* of a convolution a workspace; of attention what the gradients of its heads take */
} Backend;

int cudnnBackendCreateDescriptor(int type, Backend **out) {
    *out = calloc(1, sizeof(Backend));
    if (!*out) return 4000;
    (*out)->type = type;
    (*out)->is_attention = type == MATMUL || type == ATTENTION_FORWARD || type == ATTENTION_BACKWARD; /* PyTorch's only graphs with a product */
    (*out)->twin = (*out)->is_attention ? NULL : twin_create(type);
    return 0;
}
static void drop_twin(Backend *descriptor) {
    if (descriptor->twin) twin_destroy(descriptor->twin);
    descriptor->twin = NULL;
}
int cudnnBackendDestroyDescriptor(Backend *descriptor) {
    drop_twin(descriptor);
    free(descriptor);
    return 0;
}
int cudnnBackendInitialize(Backend *descriptor) { return 0; }
/* The least that any plan wants as workspace, of those that PyTorch is about to choose among in this thread; 0: it is not. */
static __thread size_t least_tried;
int cudnnBackendExecute(void *handle, Backend *plan, Backend *variant) {
    kernel_ran();
    least_tried = 0;
    refused_workspace(0);
    if (plan->tries && plan->workspace > plan->tries->largest) plan->tries->largest = plan->workspace;
    else if (plan->tries && plan->workspace) unsure_workspace(plan->workspace, plan->tries->largest - plan->workspace);
    return 0;
}

static void set_tensor(Tensor *tensor, int name, int64_t count, const void *values) {
    const int64_t *numbers = values;
    switch (name) {
    case TENSOR_TYPE: tensor->element_bytes = bytes_of_type(*(const int *)values); break;
    case TENSOR_STRIDES: tensor->is_channels_last = count > 1 && numbers[1] == 1; break;
    case TENSOR_SHAPE:
        tensor->first = count > 0 ? numbers[0] : 1;
        tensor->channels = count > 1 ? numbers[1] : 1;
        tensor->places = 1;
        for (int64_t i = 2; i < count; i++) tensor->places *= numbers[i];
    }
}
static void set_part(Backend *operation, int name, const Tensor *tensor) {
    switch (name) {
    case FORWARD_FILTER: case DATA_FILTER: case FILTER_GRADIENT: operation->filter = *tensor; break;
    case FORWARD_INPUT: case DATA_INPUT: case FILTER_INPUT: case REDUCED: operation->input = *tensor; break;
    case FORWARD_OUTPUT: case DATA_OUTPUT: case FILTER_OUTPUT: case REDUCTION_RESULT: operation->output = *tensor; break;
    }
}
static void note_attribute(Backend *descriptor, int name, int type, int64_t count, const void *values) {
    if (descriptor->type == TENSOR) set_tensor(&descriptor->tensor, name, count, values);
    if (type != OF_DESCRIPTORS) return;
    for (int64_t i = 0; i < count; i++) {
        const Backend *part = ((Backend *const *)values)[i];
        if (!part) continue;
        descriptor->is_attention |= part->is_attention;
        if (part->tries) descriptor->tries = part->tries;
        if (part->type == TENSOR) set_part(descriptor, name, &part->tensor);
        else if (descriptor->type == GRAPH) descriptor->allowance += part->allowance;
        else if (part->allowance > descriptor->allowance) descriptor->allowance = part->allowance;
    }
}
/* Put the twins of *count* descriptors into *twins*; say whether all of them have one. */
static int have_twins(Backend *const *parts, int64_t count, void **twins) {
    for (int64_t i = 0; i < count; i++)
        if (!(twins[i] = parts[i] ? parts[i]->twin : NULL)) return 0;
    return 1;
}
int cudnnBackendSetAttribute(Backend *descriptor, int name, int type, int64_t count, const void *values) {
    note_attribute(descriptor, name, type, count, values);
    if (!descriptor->twin) return 0;
    if (type != OF_DESCRIPTORS) return twin_set(descriptor->twin, name, type, count, values);
    void **twins = calloc((size_t)count + 1, sizeof *twins);
    if (!twins) return 4000;
    int status = 0;
    if (!have_twins(values, count, twins)) drop_twin(descriptor); /* made of something that cuDNN is not asked about */
    else status = twin_set(descriptor->twin, name, type, count, twins);
    if (name == PLAN_CONFIG && descriptor->twin && count == 1) descriptor->has_clusters = twin_has_clusters(twins[0]);
    free(twins);
    return status;
}

/* A copy for tensor cores: the channels of each group in whole 16 bytes. */
static int64_t padded(int64_t channels, int64_t groups, size_t element_bytes) {
    int64_t whole = 16 / (element_bytes ? element_bytes : 4);
    return (channels / groups + whole - 1) / whole * whole * groups;
}
static size_t copy_bytes(const Tensor *tensor, int64_t groups) {
    return tensor->first * padded(tensor->channels, groups, tensor->element_bytes) * tensor->places * tensor->element_bytes;
}
static int is_padded(const Tensor *tensor, int64_t groups) {
    return padded(tensor->channels, groups, tensor->element_bytes) != tensor->channels;
}
static size_t filter_copy_bytes(const Tensor *filter, int64_t groups) {
    return padded(filter->first, groups, filter->element_bytes) * padded(filter->channels, 1, filter->element_bytes) * filter->places
        * filter->element_bytes;
}
/* As many parts of a filter's gradient in fp32 as the card has multiprocessors, and no more than 8 MiB, which nine of ten keep to; of a large one
 * one. */
static size_t parts_bytes(size_t copy, size_t element_bytes) {
    size_t part = copy / element_bytes * 4, parts = part * card()->multiprocessors, most = (size_t)8 << 20;
    if (parts > most) parts = most;
    return part > parts ? part : parts;
}
static size_t larger(size_t a, size_t b) { return a > b ? a : b; }
/* Of 7 x 7 and the like 8 parts for each of 64 samples were seen (ConvNeXt, each of its widths), and 704 of 77 samples. */
static size_t wide_parts_bytes(const Tensor *input, const Tensor *filter) {
    return input->first * (input->first % 8 ? 10 : 8) * filter->first * filter->places * 4;
}
static size_t convolution_allowance(const Backend *operation) {
    const Tensor *input = &operation->input, *output = &operation->output, *filter = &operation->filter;
    if (!filter->channels || !filter->element_bytes || input->channels < filter->channels) return 0;
    int64_t groups = input->channels / filter->channels;
    size_t copy = filter_copy_bytes(filter, groups);
    size_t parts = operation->type == CONVOLUTION_BACKWARD_FILTER ? parts_bytes(copy, filter->element_bytes) : 0;
    if (groups > 1 && filter->channels == 1 && filter->first == groups) /* depthwise: kernels of their own, which copy nothing */
        return parts && filter->places > 9 ? larger(parts, wide_parts_bytes(input, filter)) : parts;
    /* images as they come, of up to four channels, have kernels of up to 4 x 4 that pad nothing: 41 of 46 channels-last ones took nothing, the
     * others less than a MiB */
    int is_first = operation->type == CONVOLUTION_FORWARD && input->channels <= 4 && filter->places <= 16;
    if (is_first && input->is_channels_last && filter->element_bytes == 2) return 0;
    int pads = is_padded(input, groups) || is_padded(output, groups), is_default = !input->is_channels_last;
    /* in fp32 some wide filters, some filters' gradients and some gradients of inputs that are padded have kernels for the default layout alone */
    int pads_gradient = pads && operation->type == CONVOLUTION_BACKWARD_DATA;
    int other_layout = filter->element_bytes >= 4 && (filter->places > 9 || parts || pads_gradient);
    int copies_all = is_default || other_layout || (pads && groups > 1);
    size_t copies = copies_all || is_padded(input, groups) ? copy_bytes(input, groups) : 0;
    copies += copies_all || is_padded(output, groups) ? copy_bytes(output, groups) : 0;
    copies += copies_all || pads ? copy : 0;
    return copies + parts ? copies + parts + ALIGNING : 0;
}
/* The gradients of keys and values are written for each head, and then reduced to those heads that share them. */
static size_t heads_bytes(const Backend *operation) {
    const Tensor *all = &operation->input, *shared = &operation->output;
    int is_of_heads = shared->channels < all->channels && shared->places == all->places;
    return is_of_heads ? all->first * all->channels * all->places * all->element_bytes : 0;
}
int cudnnBackendFinalize(Backend *descriptor) {
    if (descriptor->type >= CONVOLUTION_FORWARD && descriptor->type <= CONVOLUTION_BACKWARD_DATA)
        descriptor->allowance = convolution_allowance(descriptor);
    if (descriptor->type == REDUCTION) descriptor->allowance = heads_bytes(descriptor);
    if (descriptor->type == GRAPH && descriptor->twin && !descriptor->tries) descriptor->tries = calloc(1, sizeof(Tries));
    return descriptor->twin ? twin_finalize(descriptor->twin, descriptor->type) : 0;
}
/* Blocks in clusters (Hopper and later) leave partial sums of their tile, as many as run at once, which is known on the card alone: of 4,044 calls
 * on an H100 and an H200 some 150 took more than cuDNN says without one, by 15 MiB at most. */
static int64_t asked_workspace(Backend *plan, int64_t bytes) {
    static int is_told;
    if (!is_told++) tell_parent("asked", "cuDNN", 0);
    plan->workspace = known_workspace((size_t)bytes);
    refused_workspace(0);
    if (plan->has_clusters) unsure_workspace(plan->workspace, card()->multiprocessors * LARGEST_TILE_BYTES);
    return (int64_t)plan->workspace;
}
/* Whether PyTorch tries cuDNN's plans now, to take the fastest: torch.backends.cudnn.benchmark, as its libraries have it. */
static int tries_plans(void) {
    static void *(*context)(void);
    static int (*is_benchmark)(const void *);
    if (!is_benchmark) {
        void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
        if (!torch) return 0;
        context = dlsym(torch, "_ZN2at13globalContextEv");
        is_benchmark = dlsym(torch, "_ZNK2at7Context14benchmarkCuDNNEv");
        dlclose(torch); /* PyTorch keeps it */
    }
    return context && is_benchmark && (is_benchmark(context()) & 1);
}
/* PyTorch goes on to the next of cuDNN's plans where a workspace cannot be allocated (aten/src/ATen/native/cudnn/Conv_v8.cpp, try_configs), as a GPU
 * with less memory than it cannot. The memory of a run may be unlimited, for GPUs of several sizes: MEMPLAN_MOST_WORKSPACE is what each of them has,
 * and 0 where memory is not unlimited. */
static size_t most_workspace(void) {
    const char *most = getenv("MEMPLAN_MOST_WORKSPACE");
    return most && *most ? strtoull(most, NULL, 10) : 0;
}
static int is_too_large(size_t bytes) {
    size_t most = most_workspace();
    if (bytes <= (most ? most : card()->total_bytes)) return 0;
    refused_workspace(bytes);
    return 1;
}
/* Where PyTorch tries plans it asks how much is free, and tries those whose workspace has room there (generate_and_filter_plans): a program takes
 * what there is, and does with less. What it needs shows where there is room for the least workspace, and small ones. */
#define SMALL_SHARE 64 /* of the smallest GPU of the kind */
size_t room_for_trials(size_t free_bytes) {
    size_t most = most_workspace();
    if (!most || !least_tried) return free_bytes;
    return least_tried > most / SMALL_SHARE ? least_tried : most / SMALL_SHARE;
}
static void note_tried(size_t bytes) {
    if (tries_plans() && (!least_tried || bytes < least_tried)) least_tried = bytes ? bytes : 1;
}
static int64_t workspace_of(const Backend *plan) {
    if (!plan->is_attention) return library_workspace("convolution", plan->allowance);
    if (card()->major != 9) library_unknown("attention"); /* recorded on Hopper alone */
    return ATTENTION_BYTES + plan->allowance;
}
/* What the twin says; where it gives descriptors, those of the caller are twins of them afterwards. */
static int get_of_twin(Backend *descriptor, int name, int type, int64_t requested, int64_t *count, void *values) {
    if (type == OF_DESCRIPTORS && values) {
        void **twins = calloc((size_t)requested + 1, sizeof *twins);
        int status = !twins ? 4000 : !have_twins(values, requested, twins) ? 2000 : twin_get(descriptor->twin, name, type, requested, count, twins);
        free(twins);
        for (int64_t i = 0; !status && i < requested; i++) ((Backend **)values)[i]->tries = descriptor->tries;
        return status;
    }
    int status = twin_get(descriptor->twin, name, type, requested, count, values);
    if (name != PLAN_WORKSPACE || !values || status) return status;
    if (is_too_large((size_t)*(int64_t *)values)) return 3000; /* CUDNN_STATUS_NOT_SUPPORTED */
    *(int64_t *)values = asked_workspace(descriptor, *(int64_t *)values);
    note_tried((size_t)*(int64_t *)values);
    return 0;
}
int cudnnBackendGetAttribute(Backend *descriptor, int name, int type, int64_t requested, int64_t *count, void *values) {
    if (descriptor->twin) return get_of_twin(descriptor, name, type, requested, count, values);
    for (int64_t i = 0; type == OF_DESCRIPTORS && values && i < requested; i++) drop_twin(((Backend **)values)[i]);
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
        if (values) *(int64_t *)values = workspace_of(descriptor);
        break;
    case CONFIG_WORKSPACE: case ENGINE_INDEX: if (values) *(int64_t *)values = 0; break;
    case CONFIG_SHARED: if (values) *(int32_t *)values = 0; break;
    case CONFIG_KNOBS: case ENGINE_KNOBS: case ENGINE_NOTES: case ENGINE_BEHAVIOUR: if (count) *count = 0; break;
    case PLAN_JSON: if (requested > 0 && values) *(char *)values = 0; break;
    }
    return 0;
}
