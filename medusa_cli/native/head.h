// What is computed outside of passes: products of rows, the logits of states, the guesses of drafters,
// and embeddings.
#pragma once

#include "workspace.h"

namespace medusa {
namespace ISA {

// Copies rows of any stride for a matmul, and pads each row with zeros to whole groups.
inline Rows copy_rows(const Matrix& m, const float* x, int64_t rows, int64_t ldx, Workspace& work) {
  const Rows inputs = work.inputs.rows(rows, m.k, m.int8_rows);
  for (int64_t r = 0; r < rows; r++) {
    float* row = writable(inputs) + r * inputs.stride;
    const int64_t known = std::min(m.k, ldx);
    std::memcpy(row, x + r * ldx, known * sizeof(float));
    std::memset(row + known, 0, (inputs.stride - known) * sizeof(float));
  }
  return inputs;
}

inline void multiply_rows(Pool& pool, const Matrix& m, const float* x, int64_t rows, int64_t ldx, float* y,
                          int64_t ldy) {
  const Rows inputs = copy_rows(m, x, rows, ldx, workspace());
  round_rows(pool, inputs, rows);
  matmuls(pool, inputs, rows, {Target{&m, y, ldy, false}});
}

// Finds the channel with the largest number in each row; of several equal numbers, the first.
inline void find_best(Pool& pool, const Matrix& m, const float* y, int64_t rows, int64_t ldy, int32_t* best) {
  each_row(pool, rows, m.n, [&](int64_t r) {
    const float* row = y + r * ldy;
    F most = set(-INFINITY);
    int64_t i = 0;
    for (; i + 16 <= m.n; i += 16) most = max(most, load(row + i));
    float value = largest(most);
    for (; i < m.n; i++) value = std::max(value, row[i]);
    int64_t at = 0;
    while (at < m.n - 1 && row[at] != value) at++;
    best[r] = static_cast<int32_t>(at);
  });
}

inline void logits(Pool& pool, const Matrix& head, const float* states, int64_t rows, int64_t stride, float* out,
                   int64_t ldy, int32_t* best) {
  multiply_rows(pool, head, states, rows, stride, out, ldy);
  if (best) find_best(pool, head, out, rows, ldy, best);
}

// Finds the `width` best of n scores, best first; of equal scores, the first is better. `scores` has
// space up to a multiple of 16.
inline void find_best_few(float* scores, int64_t n, int64_t width, int64_t* ids, float* best) {
  for (int64_t i = n; i < padded(n, 16); i++) scores[i] = -INFINITY;
  int64_t count = 0;
  for (int64_t first = 0; first < n; first += 16) {
    if (count == width && !(largest(load(scores + first)) > best[count - 1])) continue;
    for (int64_t i = first; i < std::min(first + 16, n); i++) {
      if (count == width && !(scores[i] > best[count - 1])) continue;
      int64_t at = count < width ? count++ : count - 1;
      for (; at && scores[i] > best[at - 1]; at--) {
        best[at] = best[at - 1];
        ids[at] = ids[at - 1];
      }
      best[at] = scores[i];
      ids[at] = i;
    }
  }
}

// Returns the logarithm of the sum of e^(score / temperature) over n scores. most: the largest score.
// Scores are padded with -infinity to a multiple of 16.
inline float log_sum_exp(const float* scores, int64_t n, float most, float temperature) {
  const F shift = set(most), factor = set(1.0f / temperature);
  F total = set(0.0f);
  for (int64_t i = 0; i < n; i += 16) {
    total = add(total, exp(mul(sub(load(scores + i), shift), factor)));
  }
  return most / temperature + std::log(sum(total));
}

inline void guess(Pool& pool, const Matrix& m, const Guesses& g) {
  Workspace& work = workspace();
  const Rows inputs = copy_rows(m, g.states, g.rows, g.stride, work);
  for (int64_t r = 0; g.norm && r < g.rows; r++) {
    float* row = writable(inputs) + r * inputs.stride;
    rms_norm(row, g.norm, row, g.stride, g.eps);
  }
  round_rows(pool, inputs, g.rows);
  const int64_t wide = padded(m.n, kTile);
  float* scores = work.scores.reserve(g.rows * wide);
  matmuls(pool, inputs, g.rows, {Target{&m, scores, wide, false}});
  each_row(pool, g.rows, m.n, [&](int64_t r) {
    float* row = scores + r * wide;
    float* best = g.scores + r * g.width;
    int64_t* ids = g.ids + r * g.width;
    find_best_few(row, m.n, g.width, ids, best);
    for (int64_t i = 0; g.tokens && i < g.width; i++) ids[i] = g.tokens[ids[i]];
    if (g.temperature <= 0) return;
    const float all = log_sum_exp(row, m.n, best[0], g.temperature);
    for (int64_t i = 0; i < g.width; i++) best[i] = best[i] / g.temperature - all;
  });
}

inline void embed(Pool& pool, const Matrix& m, const int64_t* ids, int64_t count, float scale, float* out,
                  int64_t ldo) {
  const int64_t tile_bytes = m.k / info(m.format).block * info(m.format).tile_bytes;
  each_row(pool, count, m.k, [&](int64_t r) {
    Bytes bytes;
    Floats floats;
    const uint8_t* tile = m.tiles + ids[r] / kTile * tile_bytes;
    prefetch(tile, tile_bytes);
    float* row = out + r * ldo;
    for (int64_t k = 0; k < m.k; k += kChunk) {
      floats.inputs = static_cast<int>(std::min<int64_t>(kChunk, m.k - k));
      to_floats(m.format, tile, k, bytes, floats);
      for (int i = 0; i < floats.inputs; i++) row[k + i] = floats.w[i][ids[r] % kTile] * scale;
    }
    for (int64_t i = m.k; i < ldo; i++) row[i] = 0;
  });
}

}  // namespace ISA
}  // namespace medusa
