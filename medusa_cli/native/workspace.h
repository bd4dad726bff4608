// The buffers of passes, and the records that they hold.
#pragma once

#include "attention.h"
#include "paths.h"
#include "rows.h"

namespace medusa {
namespace ISA {

// An expert that was chosen for a row, the row's index among the rows gathered for experts, and the
// weight of the expert's output.
struct Pick {
  int64_t expert, row;
  float weight;
};

// Consecutive rows of a pass that belong to one sequence, and a layer's columns for that sequence.
//
// all: the columns of all heads, head by head. first: the first row's index in the pass. column: the
// first row's column.
struct Span {
  Columns all;
  int64_t capacity, first, rows, column;
  const AttentionMask* mask;

  Columns of(const Layer& layer, int64_t head) const {
    const int64_t before = head * capacity;
    return {all.format, all.keys + before * key_bytes(all.format, layer.dim),
            all.values + before * value_bytes(all.format, layer.dim)};
  }
};

inline const Span& span_of(const List<Span>& spans, int64_t row) {
  const auto after =
      std::upper_bound(spans.begin(), spans.end(), row, [](int64_t r, const Span& span) { return r < span.first; });
  assert(after != spans.begin() && row < (after - 1)->first + (after - 1)->rows);
  return *(after - 1);
}

inline int64_t rows_of(const List<Span>& spans) { return spans.back().first + spans.back().rows; }

// The buffers of passes. Only one pass runs at a time.
struct Workspace {
  RowBuffer normed, attended, inner, inputs, gathered;
  Buffer<float> qkv, added, gates, scores, out;
  Shares shares;
  List<Mlp> mlps;
  List<Pick> picks;
  List<AttentionBuffers> attention;
  List<AttentionMask> masks;
  List<Span> spans;
  Buffer<float> prepared, branches;
  List<int64_t> parents;  // [slots, rows]
  List<Walk> walks;       // per slot
};

inline Workspace& workspace() {
  static Workspace* shared = new Workspace;
  return *shared;
}

}  // namespace ISA
}  // namespace medusa
