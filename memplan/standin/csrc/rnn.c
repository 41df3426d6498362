/* cuDNN's recurrent networks: where the weights lie in their flat buffer, and what a forward keeps for the backward.
 *
 * The weights' layout is documented and without gaps (cuDNN API, cudnnGetRNNWeightParams): the matrices of each pseudo-layer, then all biases.
 * The sizes of the two temporary spaces are not. They are from an H100 (cuDNN 9.19, CUDA 13.0, the 260 networks of
 * tests/accuracy/recordings): all reserve spaces and the workspaces of 252 are equal, those of the other 8 are
 * bounds, up to 4.4 % above (see handed_down). That other GPUs and versions take the same is a guess. */
#include "card.h"
#include "descriptors.h"

#include <stdlib.h>
#include <string.h>

enum { RELU, TANH, LSTM, GRU };
enum { STANDARD, PERSIST_STATIC, PERSIST_DYNAMIC, PERSIST_STATIC_SMALL_H }; /* cudnnRNNAlgo_t */
enum { DOUBLE = 1, BFLOAT16 = 9 };                                          /* cudnnDataType_t */

typedef struct {
    int mode, biases, directions, input_size, hidden_size, output_size, num_layers;
    size_t element_bytes;
    int type, algorithm, drops_out;
} Rnn;
typedef struct {
    size_t tokens; /* time steps of all sequences together */
    size_t longest, batch;
    int is_packed; /* without the places after the ends of the shorter sequences */
} RnnData;

int cudnnCreateRNNDescriptor(void **out) { *out = calloc(1, sizeof(Rnn)); return *out ? 0 : 4000; }
int cudnnDestroyRNNDescriptor(void *rnn) { free(rnn); return 0; }
int cudnnCreateRNNDataDescriptor(void **out) { *out = calloc(1, sizeof(RnnData)); return *out ? 0 : 4000; }
int cudnnDestroyRNNDataDescriptor(void *data) { free(data); return 0; }

static int drops_out(const Descriptor *dropout) { return dropout && dropout->dims[0]; } /* see cudnnSetDropoutDescriptor */
int cudnnSetRNNDescriptor_v8(Rnn *rnn, int algorithm, int mode, int biases, int direction, int input_mode, int type, int precision, int math,
                             int input_size, int hidden_size, int projection_size, int num_layers, void *dropout, unsigned flags) {
    *rnn = (Rnn){mode, biases == 2 ? 2 : biases != 0, direction ? 2 : 1, input_size, hidden_size,
                 projection_size ? projection_size : hidden_size, num_layers, bytes_of_type(type), type, algorithm, drops_out(dropout)};
    return 0;
}
int cudnnSetRNNDataDescriptor(RnnData *data, int type, int layout, int longest, int batch, int width, const int *lengths, void *fill) {
    *data = (RnnData){0, longest, batch, layout == 1}; /* CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_PACKED */
    for (int i = 0; i < batch; i++) data->tokens += lengths && data->is_packed ? lengths[i] : longest;
    return 0;
}

static int gates(const Rnn *rnn) { return rnn->mode == LSTM ? 4 : rnn->mode == GRU ? 3 : 1; }
static int has_projection(const Rnn *rnn) { return rnn->output_size != rnn->hidden_size; }
static size_t input_width(const Rnn *rnn, int pseudo_layer) {
    return pseudo_layer < rnn->directions ? rnn->input_size : (size_t)rnn->output_size * rnn->directions;
}
/* elements of all matrices of a pseudo-layer (a layer in one direction) */
static size_t matrices(const Rnn *rnn, int pseudo_layer) {
    size_t wide = input_width(rnn, pseudo_layer) + rnn->output_size;
    return gates(rnn) * rnn->hidden_size * wide + (has_projection(rnn) ? (size_t)rnn->output_size * rnn->hidden_size : 0);
}
static size_t all_matrices(const Rnn *rnn, int pseudo_layers) {
    size_t sum = 0;
    for (int i = 0; i < pseudo_layers; i++) sum += matrices(rnn, i);
    return sum;
}
static size_t biases(const Rnn *rnn) { return (size_t)rnn->biases * gates(rnn) * rnn->hidden_size; } /* of a pseudo-layer */

int cudnnGetRNNWeightSpaceSize(void *handle, Rnn *rnn, size_t *out) {
    int pseudo_layers = rnn->num_layers * rnn->directions;
    *out = (all_matrices(rnn, pseudo_layers) + pseudo_layers * biases(rnn)) * rnn->element_bytes;
    return 0;
}
/* *linear*: the gates' matrices for the input, then those for the recurrence, then the projection */
int cudnnGetRNNWeightParams(void *handle, Rnn *rnn, int pseudo_layer, size_t bytes, char *weights, int linear, Descriptor *matrix,
                            char **matrix_address, Descriptor *bias, char **bias_address) {
    int num_gates = gates(rnn), pseudo_layers = rnn->num_layers * rnn->directions;
    size_t wide = input_width(rnn, pseudo_layer), hidden = rnn->hidden_size, offset = all_matrices(rnn, pseudo_layer);
    size_t rows = hidden, columns = wide;
    if (linear < num_gates) {
        offset += linear * hidden * wide;
    } else {
        columns = rnn->output_size;
        offset += num_gates * hidden * wide + (linear - num_gates) * hidden * columns;
        if (linear == 2 * num_gates) rows = rnn->output_size, columns = hidden;
    }
    int is_projection = linear == 2 * num_gates;
    if (matrix && matrix_address) {
        describe(matrix, 3, (int[]){1, rows, columns});
        *matrix_address = is_projection && !has_projection(rnn) ? NULL : weights + offset * rnn->element_bytes;
    }
    int has_bias = !is_projection && (rnn->biases == 2 || (rnn->biases == 1 && linear < num_gates));
    if (bias && bias_address) {
        size_t at = all_matrices(rnn, pseudo_layers) + pseudo_layer * biases(rnn) + linear * hidden;
        describe(bias, 3, (int[]){1, hidden, 1});
        *bias_address = has_bias ? weights + at * rnn->element_bytes : NULL;
    }
    return 0;
}
/* The tensors that the temporary spaces hold, in bytes: each begins at a multiple of 32 bytes. */
typedef struct {
    size_t in, out; /* of all tokens: the input, the output of a layer in one direction */
    size_t state;   /* of a layer in one direction */
    size_t gates, directions, layers;
} Parts;
static size_t aligned(size_t bytes) { return (bytes + 31) / 32 * 32; }
static Parts parts(const Rnn *rnn, const RnnData *data) {
    size_t hidden = rnn->hidden_size * rnn->element_bytes, in = data->tokens * rnn->input_size * rnn->element_bytes;
    size_t out = data->tokens * hidden, state = data->batch * hidden;
    return (Parts){aligned(in), aligned(out), aligned(state), gates(rnn), rnn->directions, rnn->num_layers};
}
/* Reserve space. Each cell keeps its gates: an LSTM the state besides, a GRU three more; all layers but the last their outputs, and of
 * dropout between them a bit for each of these, of padded sequences. Nobody recorded a projection: the output before it is counted in. */
static size_t reserve_space(const Rnn *rnn, const RnnData *data) {
    Parts of = parts(rnn, data);
    size_t kept = rnn->mode == LSTM ? 5 : rnn->mode == GRU ? 6 : 1, inner = of.layers - 1;
    size_t output = aligned(data->tokens * rnn->output_size * rnn->element_bytes);
    size_t bits = data->longest * data->batch * of.directions * rnn->output_size;
    size_t cell = (kept + (has_projection(rnn) ? 1 : 0)) * of.out;
    return of.directions * (of.layers * cell + inner * output + (rnn->drops_out ? inner * aligned((bits + 7) / 8) : 0)) + 256;
}

/* Workspace: the weights once more, and the larger of what the forward and the backward pass need (the names are a guess). The
 * persistent algorithm was recorded for small hidden sizes, of float and half; of bfloat16 it takes what the standard one does. */
static int is_persistent(const Rnn *rnn) { return rnn->algorithm != STANDARD && rnn->type != BFLOAT16; }
static size_t of_forward(const Rnn *rnn, Parts of, int training) {
    size_t both_ways = of.directions == 2 ? 4 : 0, outputs = of.directions * of.gates + both_ways;
    size_t states = is_persistent(rnn) ? (both_ways ? 6 : 2) : outputs;
    if (is_persistent(rnn)) outputs += 4 * of.gates;
    if (training && rnn->drops_out && of.layers > 1 && !both_ways) outputs++;
    return outputs * of.out + states * of.layers * of.state;
}
/* The gradient between layers in one direction. The standard algorithm holds some time steps of it where there are many: from 16 of 96 to
 * 96 of 264 in 7 networks, more of small batches than of large ones. The bound is above all of them, by 0.01 to 4.4 % of the workspace. Up
 * to 64 time steps it is all of it, as recorded up to 62, except that one network of 29 takes less (0.3 % of the workspace). */
static size_t handed_down(const Rnn *rnn, const RnnData *data, Parts of) {
    size_t steps = (3 * data->longest + 7) / 8;
    if (steps < 64) steps = 64;
    return is_persistent(rnn) || of.layers == 1 || steps * of.state > of.out ? of.out : steps * of.state;
}
static size_t of_backward(const Rnn *rnn, const RnnData *data, Parts of) {
    size_t wider = data->tokens * rnn->element_bytes * (rnn->input_size > rnn->hidden_size ? rnn->input_size : rnn->hidden_size);
    size_t more = !is_persistent(rnn) ? 0 : rnn->mode == LSTM ? 12 : rnn->mode == GRU ? 14 : 9, is_deep = of.layers > 1;
    if (of.directions == 2) return (2 + 2 * is_deep + more) * of.out + aligned(4 * wider) + 6 * of.layers * of.state;
    if (more) more += is_deep;
    return handed_down(rnn, data, of) + more * of.out + aligned(wider) + (more ? 2 : 1) * of.layers * of.state;
}
/* *is_bound*: no recording is equal to it: the standard algorithm where it hands down a part, and what was not recorded at all */
static size_t workspace(const Rnn *rnn, const RnnData *data, int training, int *is_bound) {
    Parts of = parts(rnn, data);
    size_t forward = of_forward(rnn, of, training), backward = of_backward(rnn, data, of);
    size_t states = of.directions * of.layers * of.state * 2;
    size_t weights = all_matrices(rnn, rnn->num_layers * rnn->directions) * rnn->element_bytes;
    size_t bytes = of.directions * of.layers * ((size_t)8 << 20) + aligned(weights) + 256 + (rnn->mode == LSTM ? states : 0);
    if (!data->is_packed) { /* input, output and states are packed, in the backward pass their gradients too */
        size_t packed = of.in + of.directions * of.out + states * (rnn->mode == LSTM ? 2 : 1);
        forward += packed;
        backward += 2 * packed;
        bytes += aligned(8 * data->batch);
    }
    if (has_projection(rnn)) bytes += of.directions * of.out; /* not recorded */
    int is_larger = training && backward > forward, in_parts = of.directions == 1 && handed_down(rnn, data, of) < of.out;
    int is_other = rnn->algorithm == PERSIST_STATIC || rnn->algorithm == PERSIST_DYNAMIC || rnn->type == DOUBLE || has_projection(rnn);
    *is_bound = (is_larger && in_parts) || is_other || CUDNN_VERSION < 90000;
    return bytes + (is_larger ? backward : forward);
}
int cudnnGetRNNTempSpaceSizes(void *handle, Rnn *rnn, int training, RnnData *data, size_t *work, size_t *reserve) {
    int is_bound;
    size_t bytes = workspace(rnn, data, training, &is_bound);
    if (work) *work = is_bound ? library_workspace("recurrent", bytes) : bytes;
    if (reserve) *reserve = training ? reserve_space(rnn, data) : 0;
    return 0;
}

/* The calls of cuDNN 7, which PyTorch makes where it has cuDNN 8 (up to 2.3): the width and type of the input come with each of them. */
int cudnnSetRNNDescriptor_v6(void *handle, Rnn *rnn, int hidden_size, int num_layers, void *dropout, int input_mode, int direction, int mode,
                             int algorithm, int precision) {
    *rnn = (Rnn){mode, 2, direction ? 2 : 1, 0, hidden_size, hidden_size, num_layers, 0, 0, algorithm, drops_out(dropout)};
    /* two biases unless told otherwise */
    return 0;
}
int cudnnSetRNNProjectionLayers(void *handle, Rnn *rnn, int projection_size, int output_size) {
    rnn->output_size = projection_size;
    return 0;
}
static Rnn *with_input(Rnn *rnn, const Descriptor *input) { /* of one time step: batch, width, 1 */
    rnn->input_size = input->dims[1];
    rnn->type = input->type;
    rnn->element_bytes = bytes_of_type(input->type);
    return rnn;
}
int cudnnGetRNNParamsSize(void *handle, Rnn *rnn, const Descriptor *input, size_t *out, int type) {
    return cudnnGetRNNWeightSpaceSize(handle, with_input(rnn, input), out);
}
int cudnnGetRNNLinLayerMatrixParams(void *handle, Rnn *rnn, int pseudo_layer, const Descriptor *input, void *of_weights, char *weights,
                                    int linear, Descriptor *matrix, char **address) {
    return cudnnGetRNNWeightParams(handle, with_input(rnn, input), pseudo_layer, 0, weights, linear, matrix, address, NULL, NULL);
}
int cudnnGetRNNLinLayerBiasParams(void *handle, Rnn *rnn, int pseudo_layer, const Descriptor *input, void *of_weights, char *weights, int linear,
                                  Descriptor *bias, char **address) {
    return cudnnGetRNNWeightParams(handle, with_input(rnn, input), pseudo_layer, 0, weights, linear, NULL, NULL, bias, address);
}
static int temporary_sizes(Rnn *rnn, int steps, Descriptor *const *inputs, size_t *workspace, size_t *reserve) {
    RnnData data = {0, steps, inputs[0]->dims[0], 1}; /* always packed */
    for (int i = 0; i < steps; i++) data.tokens += inputs[i]->dims[0];
    return cudnnGetRNNTempSpaceSizes(NULL, with_input(rnn, inputs[0]), 1, &data, workspace, reserve);
}
int cudnnGetRNNWorkspaceSize(void *handle, Rnn *rnn, int steps, Descriptor *const *inputs, size_t *out) {
    return temporary_sizes(rnn, steps, inputs, out, NULL);
}
int cudnnGetRNNTrainingReserveSize(void *handle, Rnn *rnn, int steps, Descriptor *const *inputs, size_t *out) {
    return temporary_sizes(rnn, steps, inputs, NULL, out);
}
