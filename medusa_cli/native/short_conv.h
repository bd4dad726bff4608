// Short depthwise convolutions: a row's output depends on its own inputs and on those of the rows
// before it on its path.
//
//     prefix             tree of a pass              row 3 reads, with a kernel of 4:
//     .. -3 -2 -1        0 - 1 - 3                   [-1] [0] [1] [3]
//                          \ 2
//
// Inputs are kept row by row, so a path of a tree reads the same numbers as a chain, in the same
// order.
#pragma once

#include "simd.h"

namespace medusa {

constexpr int64_t kKernel = 16;  // the largest kernel size

namespace ISA {

// The rows of one slot's inputs. The last `known` rows of the prefix end before `end`, and the rows
// of the pass begin at `rows`.
struct PathInputs {
  const float* end;
  int64_t stride, known;
  const float* rows;
  int64_t row_stride;
  const int64_t* parents;  // -1: the row continues the prefix
};

// Sets the parent of each of `rows` rows to the last earlier row that it sees, or else to -1.
// seen [rows, stride]: which rows each row sees.
inline void find_parents(const uint8_t* seen, int64_t stride, int64_t rows, int64_t* parents) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t parent = r - 1;
    while (parent >= 0 && !seen[r * stride + parent]) parent--;
    parents[r] = parent;
  }
}

// Finds the inputs of the last `kernel` rows on the path that ends at `row`. The inputs of `row`
// come last; inputs from before the beginning are null.
inline void path_inputs(const PathInputs& slot, int64_t row, int64_t kernel, const float** inputs) {
  int64_t at = row;
  for (int64_t k = kernel - 1; k >= 0; k--) {
    if (at >= 0) {
      inputs[k] = slot.rows + at * slot.row_stride;
      at = slot.parents[at];
    } else {
      inputs[k] = -at <= slot.known ? slot.end + at * slot.stride : nullptr;
      at--;
    }
  }
}

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

}  // namespace ISA
}  // namespace medusa
