// Attention from a step's rows to the columns of their slot, and to each other under the mask of a
// draft tree and of a sliding window.
//
// Keys lie in tiles of 16 columns [columns / 16, D, 16], so that a lane is a column. Values lie row
// by row [columns, D], so that a lane is a dimension. A score is a sum over D in order; for keys in
// Q8_0, it is the matmul's sum for a query that is rounded to 8 bits. An output is a sum over columns
// in order, to which masked columns add exactly zero. A path of a tree therefore gives the same bits
// as the same tokens in a chain, wherever the path's columns lie.
//
// While a block of columns lies in a CPU cache, many queries read the block:
//
//     for each block of columns:   scores of all queries, their maxima
//     for each block of columns:   weights of all queries, their sums with the values
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>

#include "kv_cache.h"

namespace medusa {

namespace ISA {

// The columns that the rows of one slot see. Row r sees column c < prefix if c >= lowest[r]. For
// the columns from the prefix on, each row has bit masks over tiles of 16 columns. Tile i begins at
// column 16 * (prefix / 16 + i).
struct AttentionMask {
  int64_t prefix;
  int64_t tiles;                 // per row
  List<int64_t> lowest;   // [rows], first column of the window, at most the prefix
  List<int64_t> last;     // [rows], one past the last column that the row sees
  List<uint16_t> bits;   // [rows, tiles]
};

// Sets the columns that each of `rows` rows sees. After the prefix come `columns` columns; the last
// of them are the rows' own. seen [rows, stride]: which of these columns each row sees. positions
// [columns]: read only if there is a window. window: the number of positions that a row sees; 0 for
// no limit.
inline void build_mask(AttentionMask& mask, int64_t rows, int64_t columns, int64_t prefix, const uint8_t* seen,
                       int64_t stride, const int32_t* positions, int64_t window) {
  assert(prefix >= 0 && 1 <= rows && rows <= columns && columns <= stride);
  const int64_t first = prefix / 16;
  const int64_t tiles = (prefix + columns - 1) / 16 - first + 1;
  mask.prefix = prefix;
  mask.tiles = tiles;
  mask.lowest.assign(rows, 0);
  mask.last.assign(rows, 0);
  mask.bits.assign(rows * tiles, 0);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t own = columns - rows + r;
    // Every row sees its own column. If a row saw no column, its softmax would be 0 / 0.
    assert(seen[r * stride + own]);
    const int64_t lowest = window ? std::max<int64_t>(0, positions[own] - window + 1) : 0;
    mask.lowest[r] = std::min(lowest, prefix);
    uint16_t* bits = &mask.bits[r * tiles];
    for (int64_t c = std::max(16 * first, lowest); c < prefix; c++) bits[0] |= 1u << (c % 16);
    for (int64_t j = 0; j < columns; j++) {
      if (!seen[r * stride + j] || (window && positions[j] < lowest)) continue;
      const int64_t column = prefix + j;
      bits[column / 16 - first] |= 1u << (column % 16);
      mask.last[r] = column + 1;
    }
  }
}

inline uint16_t visible(const AttentionMask& mask, int64_t row, int64_t tile) {
  const int64_t first = mask.prefix / 16;
  if (tile >= first) return mask.bits[row * mask.tiles + tile - first];
  const int64_t lowest = mask.lowest[row] - 16 * tile;
  if (lowest <= 0) return 0xffff;
  return lowest >= 16 ? 0 : static_cast<uint16_t>(0xffff << lowest);
}

// Registers hold the sums for kQueries queries at once. Each query has kDeep vectors of 16 sums: the scores of 16
// columns, or 16 dimensions of the output.
#if defined(__AVX512BW__)
constexpr int kQueries = 8, kDeep = 2;
#else
constexpr int kQueries = 6, kDeep = 1;
#endif

// The maximum number of queries that attend together.
constexpr int kTogether = 48;

// kBlock: the numbers in a block of keys or values: 16 KB of floats, half of the smallest first-level cache. kWeights:
// the maximum number of columns in a block, plus 16 floats (a cache line). With this line between them, the weights of
// several queries lie in different sets of the cache.
constexpr int64_t kBlock = 4096, kWeights = kBlock / 16 + 16;

inline float first_of(F x) {
  alignas(64) float lanes[16];
  store(lanes, x);
  return lanes[0];
}

// Returns cap * tanh(x / cap).
inline F soft_cap(F x, float cap) {
  const F e = exp(mul(set(2.0f / cap), min(x, set(20.0f * cap))));
  return mul(set(cap), sub(set(1.0f), div(set(2.0f), add(e, set(1.0f)))));
}

// Adds V vectors of a matrix to R rows of sums, weighted by factors: for k below `count`, in order,
//
//     sums[r][v] += factors[r * NEXT + k * STEP] * matrix[v * next + k * step]
//
// The rows of sums are `stride` floats apart. BEGIN: the sums begin with 0.
template <int R, int V, int NEXT, int STEP, bool BEGIN>
MEDUSA_INLINE void add_weighted(const float* factors, const float* matrix, int64_t next, int64_t step, int64_t count,
                                float* sums, int64_t stride) {
  F total[R][V];
  MEDUSA_UNROLL for (int r = 0; r < R; r++) {
    MEDUSA_UNROLL for (int v = 0; v < V; v++) total[r][v] = BEGIN ? set(0.0f) : load(sums + r * stride + 16 * v);
  }
  for (int64_t k = 0; k < count; k++) {
    F x[V];
    MEDUSA_UNROLL for (int v = 0; v < V; v++) x[v] = load(matrix + v * next + k * step);
    MEDUSA_UNROLL for (int r = 0; r < R; r++) {
      const F factor = set(factors[r * NEXT + k * STEP]);
      MEDUSA_UNROLL for (int v = 0; v < V; v++) total[r][v] = fma(factor, x[v], total[r][v]);
    }
  }
  MEDUSA_UNROLL for (int r = 0; r < R; r++) {
    MEDUSA_UNROLL for (int v = 0; v < V; v++) store(sums + r * stride + 16 * v, total[r][v]);
  }
}

// Computes the scores [R, stride] of R queries [dim, R] for `tiles` tiles of keys [tiles, dim, 16].
template <int R>
inline void score(const float* queries, const float* keys, int64_t dim, int64_t tiles, float* scores, int64_t stride) {
  const int64_t size = dim * 16;
  int64_t tile = 0;
  for (; tile + kDeep <= tiles; tile += kDeep) {
    add_weighted<R, kDeep, 1, R, true>(queries, keys + tile * size, size, 16, dim, scores + 16 * tile, stride);
  }
  for (; tile < tiles; tile++) {
    add_weighted<R, 1, 1, R, true>(queries, keys + tile * size, size, 16, dim, scores + 16 * tile, stride);
  }
}

// Soft-caps the scores of a row for tiles first .. end - 1 if `cap` is not 0. Sets scores of masked columns to -inf.
// Returns, by lane, the largest score of these and all earlier tiles. before: by lane, that of all earlier tiles.
inline F finish_scores(float* scores, const AttentionMask& mask, int64_t row, int64_t first, int64_t end, float cap,
                       F before) {
  for (int64_t tile = first; tile < end; tile++, scores += 16) {
    F score = load(scores);
    const uint16_t columns = visible(mask, row, tile);
    if (cap != 0.0f) score = soft_cap(score, cap);
    if (columns != 0xffff) score = choose(columns, score, set(-INFINITY));
    if (cap != 0.0f || columns != 0xffff) store(scores, score);
    before = max(before, score);
  }
  return before;
}

// Adds values [count, wide], weighted by e^(score - shift), to the sums [R, wide] of R queries; adds the
// weights to `totals`.
template <int R>
inline void weigh(const float* scores, int64_t stride, const float* shifts, const float* values, int64_t wide,
                  int64_t count, float* sums, float* totals) {
  alignas(64) float weights[R * kWeights];
  for (int r = 0; r < R; r++) {
    const F shift = set(shifts[r]);
    for (int64_t c = 0; c < count; c += 16) {
      store(weights + r * kWeights + c, exp(sub(load(scores + r * stride + c), shift)));
    }
  }
  for (int64_t c = 0; c < count; c++) {
    MEDUSA_UNROLL for (int r = 0; r < R; r++) totals[r] += weights[r * kWeights + c];
  }
  int64_t d = 0;
  for (; d + 16 * kDeep <= wide; d += 16 * kDeep) {
    add_weighted<R, kDeep, kWeights, 1, false>(weights, values + d, 16, wide, count, sums + d, wide);
  }
  for (; d < wide; d += 16) {
    add_weighted<R, 1, kWeights, 1, false>(weights, values + d, 16, wide, count, sums + d, wide);
  }
}

// Scratch memory for one thread's attention.
struct AttentionBuffers {
  RowBuffer rounded;
  Buffer<float> queries, scores, maxima, block, sums;
};

// Runs attention for `count` <= kTogether queries of one key head. queries, outputs: pointers to
// [dim] floats. rows: each query's row in the slot. own: the columns of the slot and head. sinks: an
// additional score per query, to which no value belongs; or null.
inline void attend(const float* const* queries, const int64_t* rows, int64_t count, const AttentionMask& mask,
                   const Columns& own, int64_t dim, float scale, float cap, const float* sinks,
                   AttentionBuffers& buffers, float* const* outputs) {
  assert(1 <= count && count <= kTogether);
  int64_t lowest = mask.lowest[rows[0]], last = 0;
  for (int64_t i = 0; i < count; i++) {
    lowest = std::min(lowest, mask.lowest[rows[i]]);
    last = std::max(last, mask.last[rows[i]]);
  }
  const int64_t first = lowest / 16, end = (last + 15) / 16, stride = 16 * (end - first);
  const int64_t wide = value_numbers(own.format, dim);
  const int64_t tiles = std::max<int64_t>(1, kBlock / (16 * wide)), columns = 16 * tiles;
  float* scores = buffers.scores.reserve(count * stride);
  float* maxima = buffers.maxima.reserve(count * 16);
  float* block = buffers.block.reserve(columns * wide);
  float* sums = buffers.sums.reserve(count * wide);
  float* scaled = buffers.queries.reserve(count * dim);
  Rows rounded = {};
  if (own.format == Q8_0) {
    rounded = buffers.rounded.rows(count, dim, true);
    for (int64_t i = 0; i < count; i++) {
      for (int64_t d = 0; d < dim; d++) writable(rounded)[i * rounded.stride + d] = queries[i][d] * scale;
      round_row(rounded.from(i), 0, rounded.stride);
    }
  } else {
    by_blocks<kQueries>(count, [&](auto r, int64_t i) {
      for (int64_t q = 0; q < r; q++) {
        for (int64_t d = 0; d < dim; d++) scaled[i * dim + d * r + q] = queries[i + q][d] * scale;
      }
    });
  }

  for (int64_t i = 0; i < count; i++) store(maxima + 16 * i, set(-INFINITY));
  for (int64_t tile = first; tile < end; tile += tiles) {
    const int64_t block_end = std::min(end, tile + tiles);
    float* to = scores + 16 * (tile - first);
    if (own.format == Q8_0) {
      const Matrix keys = {Q8_0, 1, 16 * end, key_numbers(Q8_0, dim), own.keys, nullptr};
      multiply(keys, rounded, count, tile, block_end, to, stride, false);
    } else {
      const float* keys = float_keys(own, dim, tile, block_end - tile, block);
      by_blocks<kQueries>(count, [&](auto r, int64_t i) {
        score<decltype(r)::value>(scaled + i * dim, keys, dim, block_end - tile, to + i * stride, stride);
      });
    }
    for (int64_t i = 0; i < count; i++) {
      const F before = load(maxima + 16 * i);
      store(maxima + 16 * i, finish_scores(to + i * stride, mask, rows[i], tile, block_end, cap, before));
    }
  }

  float shifts[kTogether], totals[kTogether] = {};
  for (int64_t i = 0; i < count; i++) {
    const F by_lane = load(maxima + 16 * i);
    shifts[i] = largest(sinks ? max(by_lane, set(sinks[i])) : by_lane);
  }
  std::memset(sums, 0, count * wide * sizeof(float));
  for (int64_t column = 16 * first; column < last; column += columns) {
    const int64_t here = std::min(columns, last - column);
    const float* values = float_values(own, dim, column, here, block);
    by_blocks<kQueries>(count, [&](auto r, int64_t i) {
      weigh<decltype(r)::value>(scores + i * stride + column - 16 * first, stride, shifts + i, values, wide, here,
                                sums + i * wide, totals + i);
    });
  }
  for (int64_t i = 0; i < count; i++) {
    const float sunk = sinks ? first_of(exp(sub(set(sinks[i]), set(shifts[i])))) : 0.0f;
    const F inverse = set(1.0f / (totals[i] + sunk));
    float* row = sums + i * wide;
    for (int64_t d = 0; d < wide; d += 16) store(row + d, mul(load(row + d), inverse));
    std::memcpy(outputs[i], row, dim * sizeof(float));
  }
}

}  // namespace ISA
}  // namespace medusa
