// Short depthwise convolutions: a row's output depends on its own inputs and on the inputs of the rows
// before it on its path.
//
// Inputs are kept row by row, so a path of a tree reads the same numbers as a chain, in the same
// order.
#pragma once

#include "workspace.h"

namespace medusa {
namespace ISA {

// Computes out[c] as the sum of weights[k][c] * inputs[k][c] over k in order.
inline void convolve(const float* const* inputs, const float* weights, int64_t kernel, int64_t channels,
                     float* __restrict out) {
  for (int64_t c = 0; c < channels; c++) out[c] = 0;
  for (int64_t k = 0; k < kernel; k++) {
    if (!inputs[k]) continue;
    const float* __restrict weight = weights + k * channels;
    const float* __restrict input = inputs[k];
    for (int64_t c = 0; c < channels; c++) out[c] += weight[c] * input[c];
  }
}

// Returns the output of a short convolution for normalized rows. The convolution's inputs stay in the
// cache as rows.
inline Rows short_conv(Pool& pool, const Model& m, const Cache& cache, const Step& step, int64_t index,
                       const Rows& read, Workspace& work) {
  const Layer& layer = m.layer[index];
  const int64_t rows = step.slots * step.rows, wide = padded(3 * m.hidden, kTile);
  float* projected = work.qkv.reserve(rows * wide);
  matmuls(pool, read, rows, {Target{&layer.input, projected, wide, false}});
  const auto new_inputs = [&](int64_t slot) {
    return inputs_of(m, cache, layer, step.first_slot + slot) + step.lengths[slot] * m.hidden;
  };
  each_row(pool, rows, m.hidden, [&](int64_t r) {
    const float* gate = projected + r * wide;
    const float* x = gate + 2 * m.hidden;
    float* input = new_inputs(r / step.rows) + r % step.rows * m.hidden;
    for (int64_t i = 0; i < m.hidden; i++) input[i] = gate[i] * x[i];
  });
  const Rows out = work.attended.rows(rows, m.hidden, layer.out.int8_rows);
  each_row(pool, rows, m.kernel * m.hidden, [&](int64_t r) {
    const int64_t slot = r / step.rows;
    const float* inputs[kKernel];
    const PathInputs of_slot = {new_inputs(slot), m.hidden, step.lengths[slot],
                                new_inputs(slot), m.hidden, &work.parents[slot * step.rows]};
    path_inputs(of_slot, r % step.rows, m.kernel, inputs);
    float* y = writable(out) + r * out.stride;
    convolve(inputs, layer.conv, m.kernel, m.hidden, y);
    const float* gate = projected + r * wide + m.hidden;
    for (int64_t i = 0; i < m.hidden; i++) y[i] *= gate[i];
  });
  return out;
}

}  // namespace ISA
}  // namespace medusa
