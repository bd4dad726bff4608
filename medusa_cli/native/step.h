// The library's interface: plain C structures, which Python fills, and the functions of one instruction set.
#pragma once

#include "matmul.h"
#include "pool.h"

namespace medusa {

constexpr int kTables = 4;

constexpr int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// What mixes the rows of a layer.
enum Mixer : int64_t { ATTENTION = 0, SHORT_CONV = 1, DELTA_NET = 2 };

// One decoder layer. A gate without tiles is none: the MLP is then down(act(up(x))). Norms are gains [n padded to 32],
// of centered norms biases of the same size behind them, and null where the layer has none: attention_norm and mlp_norm
// come before attention and MLP, the out norms after them, query_norm, key_norm and value_norm on heads. sinks [heads]:
// scores of attention that no value has, or null. A layer without a key matrix reads the keys and values of another
// one, which has the same place in the cache.
//
// Inputs of a layer besides its states add input_out(act(input_gate(x)) * inputs), normalised, behind the MLP, if these
// matrices have tiles. scalar multiplies the states last.
//
// A mixture of experts has a router [experts, hidden], and gate, up and down hold the matrices of one expert after the
// other. router_bias [experts], or null, is added to scores to choose by. The shared MLP, if it has tiles, adds to all
// rows; shared_router [1, hidden], if it has tiles, weighs it by a sigmoid.
//
// output_gate, if it has tiles, weighs what attention gives by a sigmoid. Layers with a short convolution, and gated
// delta nets, have `input` in place of query, key and value: of a short convolution [3 * hidden, hidden], which makes a
// gate of inputs, one of outputs, and inputs; of a delta net queries, keys and values, with the gate of what its norm
// makes of outputs, and beta and decay of its value heads. conv [kernel, channels]: weights of the convolution;
// decay_log, decay_bias [value_heads], state_norm [value_dim]: of a delta net.
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
  const float* sinks;
  const float* router_bias;
  const float* conv;
  const float* decay_log;
  const float* decay_bias;
  const float* state_norm;
  int64_t table;    // of rotary positions, -1: nothing is turned
  int64_t window;   // positions that a row sees, 0: all
  int64_t experts;  // 0: one MLP
  int64_t kv, dim;  // heads of keys, and the numbers of a head
  int64_t mixer;
  int64_t place;    // in the cache, among the layers of its mixer
  float scalar;
};

struct Model {
  int64_t layers, hidden, heads, vocab;
  int64_t kernel;  // inputs that an output of a convolution reads
  int64_t delta_layers, key_heads, value_heads, key_dim, value_dim;  // of delta nets
  int64_t key_width, value_width;  // numbers of a column of the cache
  int64_t rotary[kTables];         // numbers of a head that are turned
  int64_t positions;               // rows of the rotary tables
  int64_t activation;
  int64_t centered;     // norms subtract the mean: layer norms
  int64_t whole_norms;  // query_norm and key_norm are over all heads together
  int64_t late_norms;   // they follow the rotary positions
  int64_t pairs;        // rotary positions turn neighbours, not halves of a head
  int64_t parallel;     // attention and MLP read the same states
  int64_t top_experts;  // of a row
  int64_t sigmoid;      // experts' scores are sigmoids, not a softmax
  int64_t normalized;   // the chosen experts' scores are divided by their sum
  float eps, scale, embedding_scale;
  float residual;      // factor of what attention and MLP add
  float expert_scale;  // factor of the experts' scores
  float cap;           // soft cap of attention's scores, 0: none
  int64_t inputs;      // numbers of a layer's input besides its states, 0: none
  float inputs_scale, inputs_factor;  // of their projection, and of its sum with their embedding
  Matrix inputs_projection;  // [layers * inputs, hidden]
  const float* inputs_norm;
  const float* cos[kTables];  // [positions, rotary / 2]
  const float* sin[kTables];
  const float* norm;
  Matrix embedding, head;
  const Layer* layer;
};

// keys [places, slots, key_width * capacity], of which a layer uses [kv, capacity / 16, dim, 16], and values [places,
// slots, value_width * capacity], of which it uses [kv, capacity, dim padded to 16]. Free columns hold finite numbers.
// Places are counted for each mixer: inputs [places, slots, capacity, hidden] are those of short convolutions, states
// [slots, places, DeltaState] of delta nets after the slots' lengths, and pending [places, slots, pending_rows,
// DeltaRow] the products of the last tree's rows.
struct Cache {
  float* keys;
  float* values;
  float* inputs;
  float* states;
  float* pending;
  int64_t slots, capacity, pending_rows;
};

// Layers first .. end - 1 for `rows` rows in each of some slots from first_slot on. x [slots * rows, hidden padded to
// 32]: states before and after; behind the last layer comes the last norm. seen [slots or 1, rows, rows with a stride]:
// which rows see each other. inputs [slots * rows, layers * inputs]: embeddings for layers that have inputs besides the
// states; layer 0 completes them. After layer tap_layers[i], its states go to tapped[i]. keeps: all rows are a chain
// that stays, so running states go on to its end.
struct Step {
  int64_t first_slot, slots, rows;
  const int64_t* lengths;      // [slots]: columns that hold a prefix
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

// The functions of the library, for one instruction set.
struct Functions {
  void (*run)(Pool&, const Model&, const Cache&, const Step&);
  // Lets a slot's running states follow a path [count] of the last tree's rows.
  void (*replay)(Pool&, const Model&, const Cache&, int64_t slot, const int64_t* path, int64_t count);
  void (*logits)(Pool&, const Matrix& head, const float* states, int64_t rows, int64_t stride, float* out, int64_t ldy,
                 int32_t* best);
  void (*multiply)(Pool&, const Matrix&, const float* x, int64_t rows, int64_t ldx, float* y, int64_t ldy);
  void (*embed)(Pool&, const Matrix&, const int64_t* ids, int64_t count, float scale, float* out, int64_t ldo);
};

// Where the keys and values of one head lie in the cache.
inline float* keys_of(const Model& m, const Cache& cache, const Layer& layer, int64_t slot, int64_t head) {
  const int64_t part = layer.place * cache.slots + slot;
  return cache.keys + (part * m.key_width + head * layer.dim) * cache.capacity;
}

inline float* values_of(const Model& m, const Cache& cache, const Layer& layer, int64_t slot, int64_t head) {
  const int64_t part = layer.place * cache.slots + slot;
  return cache.values + (part * m.value_width + head * padded(layer.dim, 16)) * cache.capacity;
}

}  // namespace medusa
