/* cuDNN's recurrent networks: where the weights lie in their flat buffer, and what a forward keeps for the backward.
 *
 * The weights' layout is documented and without gaps (cuDNN API, cudnnGetRNNWeightParams): the matrices of each pseudo-layer, then all biases.
 * The sizes of the two temporary spaces are not: what the backward of the cell's equations needs is counted as the reserve space, and one
 * set of gates for all time steps as the workspace. */
#include "card.h"
#include "descriptors.h"

#include <stdlib.h>
#include <string.h>

enum { RELU, TANH, LSTM, GRU };

typedef struct {
    int mode, biases, directions, input_size, hidden_size, output_size, num_layers;
    size_t element_bytes;
} Rnn;
typedef struct {
    size_t tokens; /* time steps of all sequences together */
} RnnData;

int cudnnCreateRNNDescriptor(void **out) { *out = calloc(1, sizeof(Rnn)); return *out ? 0 : 4000; }
int cudnnDestroyRNNDescriptor(void *rnn) { free(rnn); return 0; }
int cudnnCreateRNNDataDescriptor(void **out) { *out = calloc(1, sizeof(RnnData)); return *out ? 0 : 4000; }
int cudnnDestroyRNNDataDescriptor(void *data) { free(data); return 0; }

int cudnnSetRNNDescriptor_v8(Rnn *rnn, int algorithm, int mode, int biases, int direction, int input_mode, int type, int precision, int math,
                             int input_size, int hidden_size, int projection_size, int num_layers, void *dropout, unsigned flags) {
    *rnn = (Rnn){mode, biases == 2 ? 2 : biases != 0, direction ? 2 : 1, input_size, hidden_size,
                 projection_size ? projection_size : hidden_size, num_layers, bytes_of_type(type)};
    return 0;
}
int cudnnSetRNNDataDescriptor(RnnData *data, int type, int layout, int longest, int batch, int width, const int *lengths, void *fill) {
    data->tokens = 0;
    for (int i = 0; i < batch; i++) data->tokens += lengths ? lengths[i] : longest;
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
int cudnnGetRNNTempSpaceSizes(void *handle, Rnn *rnn, int training, RnnData *data, size_t *workspace, size_t *reserve) {
    size_t cells = data->tokens * rnn->num_layers * rnn->directions;
    size_t gate_bytes = data->tokens * rnn->directions * gates(rnn) * rnn->hidden_size * rnn->element_bytes;
    /* an LSTM keeps its gates and the cell's state, a GRU its gates and the recurrent part of the candidate, all the layer's output */
    size_t kept = (size_t)gates(rnn) * rnn->hidden_size + (rnn->mode == LSTM || rnn->mode == GRU ? rnn->hidden_size : 0) + rnn->output_size;
    if (workspace) *workspace = library_workspace("recurrent", gate_bytes);
    if (reserve) *reserve = training ? cells * kept * rnn->element_bytes : 0;
    return 0;
}

/* The calls of cuDNN 7, which PyTorch makes where it has cuDNN 8 (up to 2.3): the width and type of the input come with each of them. */
int cudnnSetRNNDescriptor_v6(void *handle, Rnn *rnn, int hidden_size, int num_layers, void *dropout, int input_mode, int direction, int mode,
                             int algorithm, int precision) {
    *rnn = (Rnn){mode, 2, direction ? 2 : 1, 0, hidden_size, hidden_size, num_layers, 0}; /* two biases unless told otherwise */
    return 0;
}
int cudnnSetRNNProjectionLayers(void *handle, Rnn *rnn, int projection_size, int output_size) {
    rnn->output_size = projection_size;
    return 0;
}
static Rnn *with_input(Rnn *rnn, const Descriptor *input) { /* of one time step: batch, width, 1 */
    rnn->input_size = input->dims[1];
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
    RnnData data = {0};
    for (int i = 0; i < steps; i++) data.tokens += inputs[i]->dims[0];
    return cudnnGetRNNTempSpaceSizes(NULL, with_input(rnn, inputs[0]), 1, &data, workspace, reserve);
}
int cudnnGetRNNWorkspaceSize(void *handle, Rnn *rnn, int steps, Descriptor *const *inputs, size_t *out) {
    return temporary_sizes(rnn, steps, inputs, out, NULL);
}
int cudnnGetRNNTrainingReserveSize(void *handle, Rnn *rnn, int steps, Descriptor *const *inputs, size_t *out) {
    return temporary_sizes(rnn, steps, inputs, NULL, out);
}
