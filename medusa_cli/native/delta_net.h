// Gated delta nets: linear attention with a matrix S [key_dim, value_dim] per value head as memory.
//
// A row with query q, key k and value v decays S, writes the part of v that k does not retrieve
// yet, and reads with q:
//
//     S = decay S        S = S + k (beta (v - k^T S))        out = q^T S
//
// The columns of S do not depend on each other, so a share of the work is some columns of one head.
// It processes a slot's rows one after another; in a tree, parents come first. S lies in tiles of
// 16 columns [value_dim / 16, key_dim, 16]. Each number is one sum in a fixed order, regardless of
// the other rows in the pass.
#pragma once

#include "attention.h"
#include "ops.h"
#include "short_conv.h"
#include "step.h"

namespace medusa {

namespace ISA {

// The offsets of the parts of a row: queries, keys and values after the convolution, then the
// strengths (beta) and decays of the value heads. Before the convolution, a row has the same layout
// and holds the projections from which these are computed.
struct DeltaRow {
  int64_t key, value, beta, decay, all;
  explicit DeltaRow(const Model& m)
      : key(m.key_heads * m.key_dim), value(2 * key), beta(value + m.value_heads * m.value_dim),
        decay(beta + padded(m.value_heads, 16)), all(decay + padded(m.value_heads, 16)) {}
  int64_t channels() const { return beta; }
};

// A slot's state in one layer: the convolution's last inputs [kernel - 1, channels], then S for
// each value head.
struct DeltaState {
  int64_t inputs, head, all;
  explicit DeltaState(const Model& m)
      : inputs((m.kernel - 1) * DeltaRow(m).channels()), head(m.key_dim * m.value_dim),
        all(inputs + m.value_heads * head) {}
};

// The state from which each row of a slot continues, and the place of the state after it.
struct Walk {
  static constexpr int64_t kSlot = -1;   // the slot's own state
  static constexpr int64_t kNone = -2;   // no row continues from it
  List<int64_t> from, to;
  int64_t places = 0;  // states that are held at once, besides the slot's

  // All rows stay: each continues from the row before it and updates the slot's state.
  void chain(int64_t rows) {
    from.assign(rows, kSlot);
    to.assign(rows, kSlot);
    places = 0;
  }

  // The slot's state stays as it is. A row's last child takes over the row's place.
  void tree(const int64_t* parents, int64_t rows) {
    from.assign(rows, kSlot);
    to.assign(rows, kNone);
    places = 0;
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
        to[r] = places++;
      }
    }
  }

 private:
  List<int64_t> last_, free_;
};

// Returns log(1 + y) for 0 <= y <= 1 as 2 atanh(y / (2 + y)).
inline F log1p(F y) {
  const F s = div(y, add(y, set(2.0f))), square = mul(s, s);
  F sum = set(1.0f / 17);
  for (int k = 15; k >= 1; k -= 2) sum = fma(sum, square, set(1.0f / float(k)));
  return mul(mul(set(2.0f), s), sum);
}

// Returns log(1 + e^x).
inline F softplus(F x) { return add(max(x, set(0.0f)), log1p(exp(sub(set(0.0f), abs(x))))); }

// Scales a head's `dim` floats to the length `factor`.
inline void unit_length(float* x, int64_t dim, float factor) {
  F squares = set(0.0f);
  for (int64_t i = 0; i < dim; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const F scale = set(factor / std::sqrt(sum(squares) + 1e-6f));
  for (int64_t i = 0; i < dim; i += 16) store(x + i, mul(load(x + i), scale));
}

// Computes a row [DeltaRow] from the projections of the rows on its path, of which its own are
// last.
inline void mix(const Model& m, const Layer& layer, const float* const* inputs, float* row) {
  const DeltaRow at(m);
  const float* own = inputs[m.kernel - 1];
  convolve(inputs, layer.conv, m.kernel, at.channels(), row);
  for (int64_t c = 0; c < at.channels(); c += 16) store(row + c, silu(load(row + c)));
  const float factor = 1.0f / std::sqrt(float(m.key_dim));
  for (int64_t head = 0; head < m.key_heads; head++) {
    unit_length(row + head * m.key_dim, m.key_dim, factor);
    unit_length(row + at.key + head * m.key_dim, m.key_dim, 1.0f);
  }
  for (int64_t h = 0; h < m.value_heads; h += 16) {
    store(row + at.beta + h, sigmoid(load(own + at.beta + h)));
    const F time = softplus(add(load(own + at.decay + h), load(layer.decay_bias + h)));
    store(row + at.decay + h, exp(sub(set(0.0f), mul(exp(load(layer.decay_log + h)), time))));
  }
}

// Runs one row through V tiles of columns and updates their state. to: where the new state goes; it
// may be equal to `from`, or null.
template <int V>
inline void follow(const float* from, float* to, const float* query, const float* key, const float* value, float beta,
                   float decay, int64_t dim, float* out) {
  const F forget = set(decay);
  F sums[V], write[V];
  MEDUSA_UNROLL for (int v = 0; v < V; v++) sums[v] = set(0.0f);
  for (int64_t i = 0; i < dim; i++) {
    const F k = set(key[i]);
    MEDUSA_UNROLL for (int v = 0; v < V; v++) sums[v] = fma(k, load(from + (v * dim + i) * 16), sums[v]);
  }
  MEDUSA_UNROLL for (int v = 0; v < V; v++) {
    write[v] = mul(set(beta), sub(load(value + 16 * v), mul(forget, sums[v])));
    sums[v] = set(0.0f);
  }
  for (int64_t i = 0; i < dim; i++) {
    const F k = set(key[i]), q = set(query[i]);
    MEDUSA_UNROLL for (int v = 0; v < V; v++) {
      const int64_t at = (v * dim + i) * 16;
      const F next = fma(k, write[v], mul(forget, load(from + at)));
      if (to) store(to + at, next);
      sums[v] = fma(q, next, sums[v]);
    }
  }
  MEDUSA_UNROLL for (int v = 0; v < V; v++) store(out + 16 * v, sums[v]);
}

// Runs the rows [count, DeltaRow] of a slot through V tiles of columns from `tile` on, in one value
// head. state: the slot's state. held [places, V, dim, 16]: room for the states of the walk. out
// [count, stride]: the head's outputs.
template <int V>
inline void follow_rows(const Model& m, const Walk& walk, const float* rows, int64_t count, int64_t head, int64_t tile,
                        float* state, float* held, float* out, int64_t stride) {
  const DeltaRow at(m);
  const int64_t size = V * m.key_dim * 16, key_head = head / (m.value_heads / m.key_heads);
  float* own = state + DeltaState(m).inputs + head * DeltaState(m).head + tile * m.key_dim * 16;
  const auto state_at = [&](int64_t place) -> float* {
    if (place == Walk::kNone) return nullptr;
    return place == Walk::kSlot ? own : held + place * size;
  };
  for (int64_t r = 0; r < count; r++) {
    const float* row = rows + r * at.all;
    follow<V>(state_at(walk.from[r]), state_at(walk.to[r]), row + key_head * m.key_dim, row + at.key + key_head * m.key_dim,
              row + at.value + head * m.value_dim + 16 * tile, row[at.beta + head], row[at.decay + head], m.key_dim,
              out + r * stride + 16 * tile);
  }
}

}  // namespace ISA
}  // namespace medusa
