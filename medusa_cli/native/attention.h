// Attention from a step's rows to the columns of their slot, and to each other under a draft tree's
// mask.
//
// Keys lie in tiles of 16 columns [columns / 16, D, 16], so that a lane is a column. Values lie row
// by row [columns, D], so that a lane is a dimension. A score is a sum over D in order. An output
// is a sum over columns in order, to which masked columns add exactly zero. A path of a tree
// therefore gives the same bits as the same tokens in a chain, wherever its columns lie.
#pragma once

#include <algorithm>

#include "simd.h"

namespace medusa {

namespace ISA {

// The columns that the rows of one slot see. Row r sees column c < prefix if c >= lowest[r]. For
// the columns from the prefix on, it has bit masks over tiles of 16 columns, of which tile i begins
// at column 16 * (prefix / 16 + i).
struct Sight {
  int64_t prefix;
  int64_t tiles;                 // masks per row
  List<int64_t> lowest;   // [rows], first column of the window, at most the prefix
  List<int64_t> last;     // [rows], one past the last column that the row sees
  List<uint16_t> masks;   // [rows, tiles]
};

// Sets the columns that `rows` rows see. The rows have the last of `columns` columns after the
// prefix. seen [rows, stride]: which of these columns each row sees. positions [columns]. window:
// the number of positions that a row sees; 0 for no bound, without which no position is read.
inline void look(Sight& sight, int64_t rows, int64_t columns, int64_t prefix, const uint8_t* seen, int64_t stride,
                 const int32_t* positions, int64_t window) {
  const int64_t first = prefix / 16;
  const int64_t tiles = (prefix + columns - 1) / 16 - first + 1;
  sight.prefix = prefix;
  sight.tiles = tiles;
  sight.lowest.assign(rows, 0);
  sight.last.assign(rows, 0);
  sight.masks.assign(rows * tiles, 0);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t own = columns - rows + r;
    const int64_t lowest = window ? std::max<int64_t>(0, positions[own] - window + 1) : 0;
    sight.lowest[r] = std::min(lowest, prefix);
    uint16_t* masks = &sight.masks[r * tiles];
    for (int64_t c = std::max(16 * first, lowest); c < prefix; c++) masks[0] |= 1u << (c % 16);
    for (int64_t j = 0; j < columns; j++) {
      if (!seen[r * stride + j] || (window && positions[j] < lowest)) continue;
      const int64_t column = prefix + j;
      masks[column / 16 - first] |= 1u << (column % 16);
      sight.last[r] = column + 1;
    }
  }
}

inline uint16_t visible(const Sight& sight, int64_t row, int64_t tile) {
  const int64_t first = sight.prefix / 16;
  if (tile >= first) return sight.masks[row * sight.tiles + tile - first];
  const int64_t lowest = sight.lowest[row] - 16 * tile;
  if (lowest <= 0) return 0xffff;
  return lowest >= 16 ? 0 : static_cast<uint16_t>(0xffff << lowest);
}

// The query rows that read keys together (QUERIES) and values together (SUMS), and the vectors of
// 16 dimensions that are summed at once (DEEP).
#if defined(__AVX512BW__)
constexpr int QUERIES = 8, SUMS = 4, DEEP = 4;
#else
constexpr int QUERIES = 4, SUMS = 2, DEEP = 2;
#endif

// Returns cap * tanh(x / cap).
inline F soft_cap(F x, float cap) {
  const F e = exp(mul(set(2.0f / cap), min(x, set(20.0f * cap))));
  return mul(set(cap), sub(set(1.0f), div(set(2.0f), add(e, set(1.0f)))));
}

// Computes the scores [R, stride] of R queries [R, dim] for the columns of tiles first .. end - 1.
// Scores are soft-capped if `cap` is not 0; the scores of masked columns are -inf.
template <int R>
inline void score(const float* queries, const float* keys, int64_t dim, int64_t first, int64_t end, const Sight& sight,
                  const int64_t* rows, float cap, float* scores, int64_t stride) {
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
      const uint16_t mask = visible(sight, rows[r], tile);
      if (mask != 0xffff) total[r] = choose(mask, total[r], set(-INFINITY));
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
  for (; d + 16 * DEEP <= dim; d += 16 * DEEP) {
    weigh<R, DEEP>(weights, stride, values + d, dim, first, end, out + d, dim, d ? nullptr : totals);
  }
  for (; d < dim; d += 16) {
    weigh<R, 1>(weights, stride, values + d, dim, first, end, out + d, dim, d ? nullptr : totals);
  }
}

// Scratch memory for one thread's attention.
struct AttentionRoom {
  List<float> scores, queries, out;
};

// Runs attention for `count` <= QUERIES queries of one key head. queries, outputs: pointers to
// [dim] floats. rows: each query's row in the slot. keys, values: those of the slot and head.
// padded: dim rounded up to whole vectors. sinks: one more score per query, which has no value, or
// null.
inline void attend(const float* const* queries, const int64_t* rows, int count, const Sight& sight, const float* keys,
                   const float* values, int64_t dim, int64_t padded, float scale, float cap, const float* sinks,
                   AttentionRoom& room, float* const* outputs) {
  int64_t lowest = sight.lowest[rows[0]], last = 0;
  for (int i = 0; i < count; i++) {
    lowest = std::min(lowest, sight.lowest[rows[i]]);
    last = std::max(last, sight.last[rows[i]]);
  }
  const int64_t first = lowest / 16;
  const int64_t end = (last + 15) / 16;
  const int64_t stride = 16 * end;
  room.scores.resize(std::max<size_t>(room.scores.size(), QUERIES * stride));
  room.queries.resize(QUERIES * padded);
  room.out.resize(QUERIES * padded);
  for (int i = 0; i < count; i++) {
    for (int64_t d = 0; d < dim; d++) room.queries[i * dim + d] = queries[i][d] * scale;
  }
  float totals[QUERIES], sunk[QUERIES] = {};
  float* scores = room.scores.data();
  for (int i = 0; i < count;) {
    const float* query = &room.queries[i * dim];
    if (count - i >= QUERIES) {
      score<QUERIES>(query, keys, dim, first, end, sight, rows + i, cap, scores + i * stride, stride);
      i += QUERIES;
    } else if (count - i >= 4) {
      score<4>(query, keys, dim, first, end, sight, rows + i, cap, scores + i * stride, stride);
      i += 4;
    } else if (count - i >= 2) {
      score<2>(query, keys, dim, first, end, sight, rows + i, cap, scores + i * stride, stride);
      i += 2;
    } else {
      score<1>(query, keys, dim, first, end, sight, rows + i, cap, scores + i * stride, stride);
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
    float* out = &room.out[i * padded];
    const float* weights = scores + i * stride;
    if (count - i >= SUMS) {
      weigh_rows<SUMS>(weights, stride, values, padded, 16 * first, last, out, totals + i);
      i += SUMS;
    } else {
      weigh_rows<1>(weights, stride, values, padded, 16 * first, last, out, totals + i);
      i += 1;
    }
  }
  for (int i = 0; i < count; i++) {
    const F inverse = set(1.0f / (totals[i] + sunk[i]));
    float* out = &room.out[i * padded];
    for (int64_t d = 0; d < padded; d += 16) store(out + d, mul(load(out + d), inverse));
    std::memcpy(outputs[i], out, dim * sizeof(float));
  }
}

}  // namespace ISA
}  // namespace medusa
