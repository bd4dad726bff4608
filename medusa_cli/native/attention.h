// Attention from a step's rows to the columns of their slot, and to each other under a draft tree's
// mask.
//
// Keys lie in tiles of 16 columns [columns / 16, D, 16], so that a lane is a column. Values lie row
// by row [columns, D], so that a lane is a dimension. A score is a sum over D in order. An output
// is a sum over columns in order, to which masked columns add exactly zero. A path of a tree
// therefore gives the same bits as the same tokens in a chain, wherever its columns lie.
#pragma once

#include <algorithm>
#include <cassert>

#include "simd.h"

namespace medusa {

namespace ISA {

// The columns that the rows of one slot see. Row r sees column c < prefix if c >= lowest[r]. For
// the columns from the prefix on, it has bit masks over tiles of 16 columns, of which tile i begins
// at column 16 * (prefix / 16 + i).
struct AttentionMask {
  int64_t prefix;
  int64_t tiles;                 // per row
  List<int64_t> lowest;   // [rows], first column of the window, at most the prefix
  List<int64_t> last;     // [rows], one past the last column that the row sees
  List<uint16_t> bits;   // [rows, tiles]
};

// Sets the columns that `rows` rows see. The rows have the last of `columns` columns after the
// prefix. seen [rows, stride]: which of these columns each row sees. positions [columns]. window:
// the number of positions that a row sees; 0 for no bound, without which no position is read.
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
    // No row is without a column, whose softmax would be 0 / 0.
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

// The query rows that read keys together (kQueries) and values together (kSums), and the vectors of
// 16 dimensions that are summed at once (kDeep).
#if defined(__AVX512BW__)
constexpr int kQueries = 8, kSums = 4, kDeep = 4;
#else
constexpr int kQueries = 4, kSums = 2, kDeep = 2;
#endif

// Returns cap * tanh(x / cap).
inline F soft_cap(F x, float cap) {
  const F e = exp(mul(set(2.0f / cap), min(x, set(20.0f * cap))));
  return mul(set(cap), sub(set(1.0f), div(set(2.0f), add(e, set(1.0f)))));
}

// Computes the scores [R, stride] of R queries [R, dim] for the columns of tiles first .. end - 1.
// Scores are soft-capped if `cap` is not 0; the scores of masked columns are -inf.
template <int R>
inline void score(const float* queries, const float* keys, int64_t dim, int64_t first, int64_t end,
                  const AttentionMask& mask, const int64_t* rows, float cap, float* scores, int64_t stride) {
  for (int64_t tile = first; tile < end; tile++) {
    const float* key = keys + tile * dim * 16;
    F total[R];
    MEDUSA_UNROLL for (int r = 0; r < R; r++) total[r] = set(0.0f);
    for (int64_t d = 0; d < dim; d++) {
      const F k = load(key + d * 16);
      MEDUSA_UNROLL for (int r = 0; r < R; r++) total[r] = fma(set(queries[r * dim + d]), k, total[r]);
    }
    MEDUSA_UNROLL for (int r = 0; r < R; r++) {
      if (cap != 0.0f) total[r] = soft_cap(total[r], cap);
      const uint16_t columns = visible(mask, rows[r], tile);
      if (columns != 0xffff) total[r] = choose(columns, total[r], set(-INFINITY));
      store(scores + r * stride + tile * 16, total[r]);
    }
  }
}

inline float first_of(F x) {
  alignas(64) float lanes[16];
  store(lanes, x);
  return lanes[0];
}

// Sums V vectors of values over columns first .. end - 1, weighted by R rows of weights. If
// `totals` is not null, it receives the sums of the weights.
template <int R, int V>
inline void weigh(const float* weights, int64_t stride, const float* values, int64_t dim, int64_t first, int64_t end,
                  float* out, int64_t out_stride, float* totals) {
  F sums[R][V], total[R];
  MEDUSA_UNROLL for (int r = 0; r < R; r++) {
    total[r] = set(0.0f);
    MEDUSA_UNROLL for (int v = 0; v < V; v++) sums[r][v] = set(0.0f);
  }
  for (int64_t c = first; c < end; c++) {
    F value[V];
    MEDUSA_UNROLL for (int v = 0; v < V; v++) value[v] = load(values + c * dim + 16 * v);
    MEDUSA_UNROLL for (int r = 0; r < R; r++) {
      const F weight = set(weights[r * stride + c]);
      MEDUSA_UNROLL for (int v = 0; v < V; v++) sums[r][v] = fma(weight, value[v], sums[r][v]);
      if (totals) total[r] = add(total[r], weight);
    }
  }
  MEDUSA_UNROLL for (int r = 0; r < R; r++) {
    MEDUSA_UNROLL for (int v = 0; v < V; v++) store(out + r * out_stride + 16 * v, sums[r][v]);
    if (totals) totals[r] = first_of(total[r]);
  }
}

template <int R>
inline void weigh_rows(const float* weights, int64_t stride, const float* values, int64_t dim, int64_t first,
                       int64_t end, float* out, float* totals) {
  int64_t d = 0;
  for (; d + 16 * kDeep <= dim; d += 16 * kDeep) {
    weigh<R, kDeep>(weights, stride, values + d, dim, first, end, out + d, dim, d ? nullptr : totals);
  }
  for (; d < dim; d += 16) {
    weigh<R, 1>(weights, stride, values + d, dim, first, end, out + d, dim, d ? nullptr : totals);
  }
}

// Scratch memory for one thread's attention.
struct AttentionBuffers {
  List<float> scores, queries, out;
};

// Runs attention for `count` <= kQueries queries of one key head. queries, outputs: pointers to
// [dim] floats. rows: each query's row in the slot. keys, values: those of the slot and head.
// padded: dim rounded up to whole vectors. sinks: one more score per query, which has no value, or
// null.
inline void attend(const float* const* queries, const int64_t* rows, int count, const AttentionMask& mask,
                   const float* keys, const float* values, int64_t dim, int64_t padded, float scale, float cap,
                   const float* sinks, AttentionBuffers& buffers, float* const* outputs) {
  assert(1 <= count && count <= kQueries && padded % 16 == 0 && dim <= padded);
  int64_t lowest = mask.lowest[rows[0]], last = 0;
  for (int i = 0; i < count; i++) {
    lowest = std::min(lowest, mask.lowest[rows[i]]);
    last = std::max(last, mask.last[rows[i]]);
  }
  const int64_t first = lowest / 16;
  const int64_t end = (last + 15) / 16;
  const int64_t stride = 16 * end;
  buffers.scores.resize(std::max<size_t>(buffers.scores.size(), kQueries * stride));
  buffers.queries.resize(kQueries * padded);
  buffers.out.resize(kQueries * padded);
  for (int i = 0; i < count; i++) {
    for (int64_t d = 0; d < dim; d++) buffers.queries[i * dim + d] = queries[i][d] * scale;
  }
  float totals[kQueries], sunk[kQueries] = {};
  float* scores = buffers.scores.data();
  for (int i = 0; i < count;) {
    const float* query = &buffers.queries[i * dim];
    if (count - i >= kQueries) {
      score<kQueries>(query, keys, dim, first, end, mask, rows + i, cap, scores + i * stride, stride);
      i += kQueries;
    } else if (count - i >= 4) {
      score<4>(query, keys, dim, first, end, mask, rows + i, cap, scores + i * stride, stride);
      i += 4;
    } else if (count - i >= 2) {
      score<2>(query, keys, dim, first, end, mask, rows + i, cap, scores + i * stride, stride);
      i += 2;
    } else {
      score<1>(query, keys, dim, first, end, mask, rows + i, cap, scores + i * stride, stride);
      i += 1;
    }
  }
  for (int i = 0; i < count; i++) {
    float* row = scores + i * stride;
    F most = set(-INFINITY);
    for (int64_t c = 16 * first; c < 16 * end; c += 16) most = max(most, load(row + c));
    if (sinks) most = max(most, set(sinks[i]));
    const F shift = set(largest(most));
    for (int64_t c = 16 * first; c < 16 * end; c += 16) store(row + c, exp(sub(load(row + c), shift)));
    if (sinks) sunk[i] = first_of(exp(sub(set(sinks[i]), shift)));
  }
  for (int i = 0; i < count;) {
    float* out = &buffers.out[i * padded];
    const float* weights = scores + i * stride;
    if (count - i >= kSums) {
      weigh_rows<kSums>(weights, stride, values, padded, 16 * first, last, out, totals + i);
      i += kSums;
    } else {
      weigh_rows<1>(weights, stride, values, padded, 16 * first, last, out, totals + i);
      i += 1;
    }
  }
  for (int i = 0; i < count; i++) {
    const F inverse = set(1.0f / (totals[i] + sunk[i]));
    float* out = &buffers.out[i * padded];
    for (int64_t d = 0; d < padded; d += 16) store(out + d, mul(load(out + d), inverse));
    std::memcpy(outputs[i], out, dim * sizeof(float));
  }
}

}  // namespace ISA
}  // namespace medusa
