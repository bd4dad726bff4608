// The library's interface: plain C structures that Python fills, and the functions for one
// instruction set.
#pragma once

#include "matmul.h"
#include "pool.h"

namespace medusa {

constexpr int kTables = 4;

static constexpr int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// How a layer mixes rows.
enum Mixer : int64_t { ATTENTION = 0, SHORT_CONV = 1, DELTA_NET = 2 };

enum ActivationKind : int64_t { SILU = 0, GELU_TANH = 1, SQUARED_RELU = 2, CLAMPED_SWIGLU = 3, XIELU = 4 };

// An activation and its constants. The clamped SwiGLU has alpha and limit. xIELU has alpha for
// numbers above 0, alpha_below for those below, and beta.
struct Activation {
  int64_t kind;
  float alpha, alpha_below, beta, limit;
};

// One decoder layer.
//
// The gate is optional: if it has no tiles, the MLP is down(act(up(x))). A norm is a gain [n padded
// to 32], followed by a bias of the same size if norms are centered. It is null if the layer lacks
// it. attention_norm and mlp_norm come before attention and the MLP, and the out norms come after
// them. query_norm, key_norm and value_norm apply to heads. attended_norm comes before the matrix
// `out` of attention, and inner_norm before `down` of a single MLP. sinks [heads], or null, are
// additional attention scores without a value. A layer without a key matrix reads the keys and
// values of another layer, which has the same place in the cache.
//
// If input_gate and input_out have tiles, the layer reads inputs besides its states. After the MLP,
// it adds input_out(act(input_gate(x)) * inputs), normalized. At the end, scalar multiplies the
// states.
//
// A mixture of experts has a router [experts, hidden], and gate, up and down hold the experts'
// matrices one after another. router_bias [experts], or null, is added to the scores only to choose
// experts. The shared MLP, if it has tiles, is added to all rows. If shared_router [1, hidden] has
// tiles, its sigmoid weights the shared MLP.
//
// If output_gate has tiles, its sigmoid weights the output of attention. Layers with a short
// convolution or a gated delta net have `input` instead of query, key and value. In a short
// convolution, input [3 * hidden, hidden] yields a gate for the inputs, a gate for the outputs, and
// the inputs. In a delta net, it yields queries, keys and values; output_gate gates the normalized
// outputs, and beta and decay belong to the value heads. conv [kernel, channels] holds the weights
// of the convolution. decay_log, decay_bias [value_heads] and state_norm [value_dim] belong to a
// delta net.
struct Layer {
  Matrix query, key, value, out, gate, up, down;
  Matrix input, output_gate, beta, decay;
  Matrix router, shared_gate, shared_up, shared_down, shared_router;
  Matrix input_gate, input_out;
  const float* attention_norm;
  const float* query_norm;
  const float* key_norm;
  const float* value_norm;
  const float* attention_out_norm;
  const float* mlp_norm;
  const float* mlp_out_norm;
  const float* input_norm;
  const float* attended_norm;
  const float* inner_norm;
  const float* sinks;
  const float* router_bias;
  const float* conv;
  const float* decay_log;
  const float* decay_bias;
  const float* state_norm;
  int64_t table;    // index of the rotary table, -1: nothing is rotated
  int64_t window;   // number of positions that a row sees, 0: all
  int64_t experts;  // number of experts, 0: a single MLP
  int64_t kv, dim;  // key heads, and floats per head
  int64_t mixer;
  int64_t place;    // index in the cache among layers with the same mixer
  Activation activation;
  float scalar;
};

struct Model {
  int64_t layers, hidden, heads, vocab;
  int64_t kernel;  // kernel size of convolutions
  int64_t delta_layers, key_heads, value_heads, key_dim, value_dim;  // of delta nets
  int64_t key_width, value_width;  // floats per column of the cache
  int64_t rotary[kTables];         // floats per head that are rotated
  int64_t positions;               // rows of the rotary tables
  int64_t centered;     // norms subtract the mean (layer norms)
  int64_t whole_norms;  // query_norm and key_norm span all heads together
  int64_t late_norms;   // query_norm and key_norm follow the rotary embeddings
  int64_t pairs;        // rotary embeddings rotate adjacent pairs, not halves of a head
  int64_t parallel;     // attention and MLP read the same states
  int64_t first_norm;   // the last norm also precedes the first layer
  int64_t top_experts;  // per row
  int64_t sigmoid;      // experts' scores are sigmoids, not a softmax
  int64_t normalized;   // the chosen experts' scores are divided by their sum
  float eps, scale;
  float residual;      // factor of the outputs of attention and MLP
  float expert_scale;  // factor of the experts' scores
  float jitter;        // if not 0, two experts are chosen by sparsemixer
  float cap;           // soft cap of attention scores, 0: none
  float clip;          // bound of queries, keys and values, 0: none
  int64_t inputs;      // floats per layer of the inputs besides states, 0: none
  float inputs_scale, inputs_factor;  // of their projection; of its sum with their embedding
  Matrix inputs_projection;  // [layers * inputs, hidden]
  const float* inputs_norm;
  const float* cos[kTables];  // [positions, rotary / 2]
  const float* sin[kTables];
  const float* norm;
  const Layer* layer;
};

// The buffers of a cache. Each mixer counts its own places. Free columns hold finite numbers. Keys,
// values and inputs of a slot lie at index parts[slot], so that slots change places without a copy.
//
// keys [places, slots, key_width * capacity]: a layer uses [kv, capacity / 16, dim, 16] of them.
// values [places, slots, value_width * capacity]: a layer uses [kv, capacity, dim padded to 16].
// inputs [places, slots, capacity, hidden]: the inputs of short convolutions.
// states [slots, places, DeltaState]: the states of delta nets after the slots' lengths.
// pending [places, slots, pending_rows, DeltaRow]: the last tree's rows as delta nets project them.
struct Cache {
  float* keys;
  float* values;
  float* inputs;
  float* states;
  float* pending;
  const int64_t* parts;  // [slots], a permutation
  int64_t slots, capacity, pending_rows;
};

// A pass through layers first .. end - 1 with `rows` rows in each of `slots` slots, beginning at
// first_slot.
//
// x [slots * rows, hidden padded to 32]: the states before and after the pass. The final norm
// follows the last layer. seen [slots or 1, rows, rows with a stride]: which rows see each other.
// inputs [slots * rows, layers * inputs]: embeddings for layers that read inputs besides their
// states; layer 0 completes them. The states after layer tap_layers[i] are copied to tapped[i].
// keeps: all rows form a chain that stays, so running states advance to its end.
struct Step {
  int64_t first_slot, slots, rows;
  const int64_t* lengths;      // [slots]: number of columns that hold the prefix
  const int32_t* positions;    // [slots, rows]
  const uint8_t* seen;
  int64_t seen_slot, seen_row;  // strides
  int64_t first, end, keeps;
  float* x;
  float* inputs;
  int64_t taps;
  const int64_t* tap_layers;
  float* tapped;
};

// The rows of one sequence that enter a drafter's layer.
//
// They see all columns of the prefix, and of the `earlier` columns after it and of each other those
// that seen [rows, earlier + rows] says. keys and values: those of a layer's heads, as in Cache. A
// pass with `last` needs no `seen`.
struct DraftRows {
  float* keys;
  float* values;
  int64_t capacity, prefix, earlier, rows;
  const uint8_t* seen;
};

// A pass through a drafter's decoder layer, which is the only one of its model.
//
// x [rows of all sequences, hidden]: the states before and after the pass. embedded: embeddings of
// the same shape, which attention reads before the states, normalized by input_norm; or null. last:
// the rows of a sequence form a chain, and only the output of the last one is computed; x then
// begins with one row per sequence.
struct DraftPass {
  const DraftRows* own;
  int64_t sequences, last;
  const int32_t* positions;  // [rows of all sequences]
  float* x;
  const float* embedded;
};

// States [rows, stride] whose next tokens a matrix guesses.
//
// norm: the gain [hidden padded to 32] of a norm that precedes the matrix, or null. Guesses are the
// `width` best channels of each row, best first: their ids and scores [rows, width]. With a
// temperature above 0, scores are log probabilities at it.
struct Guesses {
  const float* states;
  int64_t rows, stride;
  const float* norm;
  float eps, temperature;
  int64_t width;
  int32_t* ids;
  float* scores;
};

// The library's functions for one instruction set.
struct Functions {
  void (*run)(Pool&, const Model&, const Cache&, const Step&);
  void (*draft)(Pool&, const Model&, const DraftPass&);
  // Advances a slot's running states along a path [count] of the last tree's rows.
  void (*replay)(Pool&, const Model&, const Cache&, int64_t slot, const int64_t* path, int64_t count);
  void (*logits)(Pool&, const Matrix& head, const float* states, int64_t rows, int64_t stride, float* out, int64_t ldy,
                 int32_t* best);
  void (*guess)(Pool&, const Matrix&, const Guesses&);
  void (*multiply)(Pool&, const Matrix&, const float* x, int64_t rows, int64_t ldx, float* y, int64_t ldy);
  void (*embed)(Pool&, const Matrix&, const int64_t* ids, int64_t count, float scale, float* out, int64_t ldo);
};

// These return where the keys and the values of one head begin in the cache.
static inline float* keys_of(const Model& m, const Cache& cache, const Layer& layer, int64_t slot, int64_t head) {
  const int64_t part = layer.place * cache.slots + cache.parts[slot];
  return cache.keys + (part * m.key_width + head * layer.dim) * cache.capacity;
}

static inline float* values_of(const Model& m, const Cache& cache, const Layer& layer, int64_t slot, int64_t head) {
  const int64_t part = layer.place * cache.slots + cache.parts[slot];
  return cache.values + (part * m.value_width + head * padded(layer.dim, 16)) * cache.capacity;
}

// Returns where the inputs of a short convolution begin in the cache.
static inline float* inputs_of(const Model& m, const Cache& cache, const Layer& layer, int64_t slot) {
  const int64_t part = layer.place * cache.slots + cache.parts[slot];
  return cache.inputs + part * cache.capacity * m.hidden;
}

}  // namespace medusa
