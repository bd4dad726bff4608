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

// The lengths of a head's key and value in a cache, in numbers. Both are padded to whole blocks of the
// format, and values also to whole vectors of 16.
static constexpr int64_t key_numbers(int32_t format, int64_t dim) { return padded(dim, info(format).block); }

static constexpr int64_t value_numbers(int32_t format, int64_t dim) { return padded(key_numbers(format, dim), 16); }

// The bytes of a head's key and value.
static constexpr int64_t key_bytes(int32_t format, int64_t dim) {
  return key_numbers(format, dim) / info(format).block * info(format).file_bytes;
}

static constexpr int64_t value_bytes(int32_t format, int64_t dim) {
  return value_numbers(format, dim) / info(format).block * info(format).file_bytes;
}

// The next two functions return where a layer's keys and values of a slot begin in the cache.
static inline uint8_t* keys_of(const Cache& cache, const Layer& layer, int64_t slot) {
  assert(0 <= slot && slot < cache.slots && layer.place >= 0);
  assert(layer.kv * key_bytes(cache.format, layer.dim) <= cache.key_bytes);
  return cache.keys + (layer.place * cache.slots + cache.parts[slot]) * cache.key_bytes * cache.capacity;
}

static inline uint8_t* values_of(const Cache& cache, const Layer& layer, int64_t slot) {
  assert(0 <= slot && slot < cache.slots && layer.place >= 0);
  assert(layer.kv * value_bytes(cache.format, layer.dim) <= cache.value_bytes);
  return cache.values + (layer.place * cache.slots + cache.parts[slot]) * cache.value_bytes * cache.capacity;
}

// Returns where the inputs of a short convolution begin in the cache.
static inline float* inputs_of(const Model& m, const Cache& cache, const Layer& layer, int64_t slot) {
  assert(0 <= slot && slot < cache.slots && layer.place >= 0);
  const int64_t part = layer.place * cache.slots + cache.parts[slot];
  return cache.inputs + part * cache.capacity * m.hidden;
}

}  // namespace medusa
