// The library's functions for one instruction set, and where a layer's columns lie in the cache.
#pragma once

#include "matmul.h"
#include "pool.h"

namespace medusa {

static constexpr int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

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
  assert(0 <= slot && slot < cache.slots && layer.place >= 0 && 0 <= head && head < layer.kv);
  assert((head + 1) * layer.dim <= m.key_width);
  const int64_t part = layer.place * cache.slots + cache.parts[slot];
  return cache.keys + (part * m.key_width + head * layer.dim) * cache.capacity;
}

static inline float* values_of(const Model& m, const Cache& cache, const Layer& layer, int64_t slot, int64_t head) {
  assert(0 <= slot && slot < cache.slots && layer.place >= 0 && 0 <= head && head < layer.kv);
  assert((head + 1) * padded(layer.dim, 16) <= m.value_width);
  const int64_t part = layer.place * cache.slots + cache.parts[slot];
  return cache.values + (part * m.value_width + head * padded(layer.dim, 16)) * cache.capacity;
}

// Returns where the inputs of a short convolution begin in the cache.
static inline float* inputs_of(const Model& m, const Cache& cache, const Layer& layer, int64_t slot) {
  assert(0 <= slot && slot < cache.slots && layer.place >= 0);
  const int64_t part = layer.place * cache.slots + cache.parts[slot];
  return cache.inputs + part * cache.capacity * m.hidden;
}

}  // namespace medusa
