// The columns of a cache. A column is the key and the value of one token in one head, in the cache's number type: F32,
// F16 or Q8_0.
//
// Keys are a matrix in tiles (formats.h) whose channels are the columns. Values are rows as a file stores them. Each
// column is rounded by itself, so its bits do not depend on other columns.
// Keys in Q8_0 are stored without a bias that all keys share (step.cpp, leave_out_bias).
#pragma once

#include <algorithm>

#include "rows.h"

namespace medusa {
namespace ISA {

// The maximum number of floats in a head, as in head_norm.
constexpr int64_t kMostDim = 1024;

// One head's columns.
struct Columns {
  int32_t format;
  uint8_t* keys;
  uint8_t* values;
};

// Writes a row of k numbers into a channel of a tile.
template <class T>
inline void put_channel(const T* row, int64_t k, int channel, uint8_t* tile) {
  auto* out = reinterpret_cast<T*>(tile) + channel;
  for (int64_t d = 0; d < k; d++) out[kTile * d] = row[d];
}

// Rounds `wide` numbers (a multiple of 16, or of 32 in Q8_0) to a row in the layout of a GGUF file. First, numbers are
// limited to the range of fp16, because even masked columns must be finite.
inline void round_head(int32_t format, float* x, int64_t wide, uint8_t* row) {
  constexpr float limit = 65504.0f;
  for (int64_t d = 0; d < wide; d += 16) {
    const F bounded = min(max(load(x + d), set(-limit)), set(limit));
    if (format == F16) store_half(reinterpret_cast<uint16_t*>(row) + d, bounded);
    else store(x + d, bounded);
  }
  if (format == Q8_0) round_q8_0(x, wide, row);
}

// Writes a key and a value of `dim` numbers into a column.
inline void write_column(const Columns& own, int64_t column, const float* key, const float* value, int64_t dim) {
  const int64_t key_dim = key_numbers(own.format, dim), value_dim = value_numbers(own.format, dim);
  uint8_t* tile = own.keys + column / kTile * kTile * key_bytes(own.format, dim);
  uint8_t* row = own.values + column * value_bytes(own.format, dim);
  const int channel = column % kTile;
  if (own.format == F32) {
    put_channel(key, dim, channel, tile);
    std::memcpy(row, value, dim * sizeof(float));
    return;
  }
  assert(value_dim <= kMostDim);
  alignas(64) float x[kMostDim];
  alignas(64) uint8_t rounded[2 * kMostDim];
  const int64_t wide = padded(key_dim, 16);
  std::memcpy(x, key, dim * sizeof(float));
  std::fill(x + dim, x + wide, 0.0f);
  round_head(own.format, x, wide, rounded);
  if (own.format == F16) put_channel(reinterpret_cast<const uint16_t*>(rounded), dim, channel, tile);
  else pack_channel(Q8_0, rounded, key_dim, channel, tile);
  std::memcpy(x, value, dim * sizeof(float));
  std::fill(x + dim, x + value_dim, 0.0f);
  round_head(own.format, x, value_dim, row);
}

// Returns the keys [tiles, dim, 16] of some tiles as floats. Keys in fp16 are converted into `buffer`.
inline const float* float_keys(const Columns& own, int64_t dim, int64_t first, int64_t tiles, float* buffer) {
  const uint8_t* keys = own.keys + first * kTile * key_bytes(own.format, dim);
  if (own.format == F32) return reinterpret_cast<const float*>(keys);
  const auto* halves = reinterpret_cast<const uint16_t*>(keys);
  for (int64_t i = 0; i < tiles * dim * kTile; i += 16) store(buffer + i, load_half(halves + i));
  return buffer;
}

// Returns the values [count, dim padded to 16 or 32] of some columns as floats. Values in fp16 or Q8_0 are converted
// into `buffer`.
inline const float* float_values(const Columns& own, int64_t dim, int64_t first, int64_t count, float* buffer) {
  const int64_t wide = value_numbers(own.format, dim);
  const uint8_t* values = own.values + first * value_bytes(own.format, dim);
  if (own.format == F32) return reinterpret_cast<const float*>(values);
  if (own.format == F16) {
    const auto* halves = reinterpret_cast<const uint16_t*>(values);
    for (int64_t i = 0; i < count * wide; i += 16) store(buffer + i, load_half(halves + i));
    return buffer;
  }
  constexpr int64_t block = info(Q8_0).file_bytes;
  for (int64_t i = 0; i < count * wide; i += kUnit, values += block) {
    uint16_t half;
    std::memcpy(&half, values, 2);
    const F scale = set_half(half);
    const auto* q = reinterpret_cast<const int8_t*>(values + 2);
    store(buffer + i, mul(load_i8(q), scale));
    store(buffer + i + 16, mul(load_i8(q + 16), scale));
  }
  return buffer;
}

}  // namespace ISA
}  // namespace medusa
