// Paths of draft trees, for layers in which a row continues from the inputs or states of the rows
// before it on its path:
//
//     prefix             tree of a pass              row 3 reads, with a kernel of 4:
//     .. -3 -2 -1        0 - 1 - 3                   [-1] [0] [1] [3]
//                          \ 2
#pragma once

#include <cassert>

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

// Sets the parent of each of `rows` rows to the last earlier row that it sees, or to -1 if it sees no
// earlier row. seen [rows, stride]: which rows each row sees.
inline void find_parents(const uint8_t* seen, int64_t stride, int64_t rows, int64_t* parents) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t parent = r - 1;
    while (parent >= 0 && !seen[r * stride + parent]) parent--;
    parents[r] = parent;
  }
}

// Finds the inputs of the last `kernel` rows on the path that ends at `row`. The inputs of `row`
// come last. Inputs before the beginning of the text are null.
inline void path_inputs(const PathInputs& slot, int64_t row, int64_t kernel, const float** inputs) {
  assert(row >= 0 && 1 <= kernel && kernel <= kKernel);
  int64_t at = row;
  for (int64_t k = kernel - 1; k >= 0; k--) {
    if (at >= 0) {
      inputs[k] = slot.rows + at * slot.row_stride;
      assert(-1 <= slot.parents[at] && slot.parents[at] < at);
      at = slot.parents[at];
    } else {
      inputs[k] = -at <= slot.known ? slot.end + at * slot.stride : nullptr;
      at--;
    }
  }
}

// For each row of a slot, the index of the state from which the row continues, and the index of the
// state after the row.
struct Walk {
  static constexpr int64_t kSlot = -1;   // the slot's own state
  static constexpr int64_t kNone = -2;   // the state is not stored, as no row continues from it
  List<int64_t> from, to;
  int64_t branches = 0;  // how many states exist at the same time, besides the slot's own

  // For a chain whose rows all stay: each row continues from the row before it and updates the slot's state.
  void chain(int64_t rows) {
    from.assign(rows, kSlot);
    to.assign(rows, kSlot);
    branches = 0;
  }

  // For a tree: the slot's own state does not change. A row's last child overwrites the row's state.
  void tree(const int64_t* parents, int64_t rows) {
    from.assign(rows, kSlot);
    to.assign(rows, kNone);
    branches = 0;
    last_.assign(rows, -1);
    free_.clear();
    for (int64_t r = 0; r < rows; r++) {
      if (parents[r] >= 0) last_[parents[r]] = r;
    }
    for (int64_t r = 0; r < rows; r++) {
      const int64_t parent = parents[r];
      if (parent >= 0) from[r] = to[parent];
      const bool takes_over = parent >= 0 && last_[parent] == r;
      if (last_[r] < 0) {
        if (takes_over) free_.push_back(from[r]);
      } else if (takes_over) {
        to[r] = from[r];
      } else if (!free_.empty()) {
        to[r] = free_.back();
        free_.pop_back();
      } else {
        to[r] = branches++;
      }
    }
  }

 private:
  List<int64_t> last_, free_;
};

}  // namespace ISA
}  // namespace medusa
