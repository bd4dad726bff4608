// Gated delta nets: linear attention with a matrix S [key_dim, value_dim] per value head as memory.
//
// A row with query q, key k and value v decays S, writes the part of v that k does not retrieve
// yet, and reads with q:
//
//     S = decay S        S = S + k (beta (v - k^T S))        out = q^T S
//
// The columns of S do not depend on each other, so a share of the work is some columns of one head.
// A share processes a slot's rows one after another; in a tree, parents come first. S lies in tiles
// of 16 columns [value_dim / 16, key_dim, 16]. Each number is one sum in a fixed order, whatever the
// other rows in the pass are.
#pragma once

#include "short_conv.h"

namespace medusa {
namespace ISA {

// The offsets of the parts of a row: queries, keys and values after the convolution, then the
// strengths (beta) and decays of the value heads. Before the convolution, a row with the same layout
// holds the projections from which these parts are computed.
struct DeltaRow {
  int64_t key, value, beta, decay, all;
  explicit DeltaRow(const Model& m)
      : key(m.key_heads * m.key_dim),
        value(2 * key),
        beta(value + m.value_heads * m.value_dim),
        decay(beta + padded(m.value_heads, 16)),
        all(decay + padded(m.value_heads, 16)) {}
  int64_t channels() const { return beta; }
};

// A slot's state in one layer: the convolution's last inputs [kernel - 1, channels], then S for
// each value head.
struct DeltaState {
  int64_t inputs, head, all;
  explicit DeltaState(const Model& m)
      : inputs((m.kernel - 1) * DeltaRow(m).channels()),
        head(m.key_dim * m.value_dim),
        all(inputs + m.value_heads * head) {}
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

// Computes a row [DeltaRow]. inputs: the projections of the rows on its path, which end with the
// row's own projections.
inline void prepare_row(const Model& m, const Layer& layer, const float* const* inputs, float* row) {
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

// Runs one row through V tiles of columns. from: their state before the row. to: the place of their
// state after the row, which may be `from`, or null if nothing reads the new state.
template <int V>
inline void delta_rule(const float* from, float* to, const float* query, const float* key, const float* value,
                       float beta, float decay, int64_t dim, float* out) {
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
// head. state: the slot's state. branches [walk.branches, V, dim, 16]: the other states of the walk. out
// [count, stride]: the head's outputs.
template <int V>
inline void delta_rule_rows(const Model& m, const Walk& walk, const float* rows, int64_t count, int64_t head,
                            int64_t tile, float* state, float* branches, float* out, int64_t stride) {
  const DeltaRow at(m);
  const int64_t size = V * m.key_dim * 16, key_head = head / (m.value_heads / m.key_heads);
  float* own = state + DeltaState(m).inputs + head * DeltaState(m).head + tile * m.key_dim * 16;
  const auto state_at = [&](int64_t index) -> float* {
    if (index == Walk::kNone) return nullptr;
    return index == Walk::kSlot ? own : branches + index * size;
  };
  for (int64_t r = 0; r < count; r++) {
    const float* row = rows + r * at.all;
    delta_rule<V>(state_at(walk.from[r]), state_at(walk.to[r]), row + key_head * m.key_dim,
                  row + at.key + key_head * m.key_dim, row + at.value + head * m.value_dim + 16 * tile,
                  row[at.beta + head], row[at.decay + head], m.key_dim, out + r * stride + 16 * tile);
  }
}

inline float* state_of(const Model& m, const Cache& cache, const Layer& layer, int64_t slot) {
  assert(0 <= slot && slot < cache.slots && 0 <= layer.place && layer.place < m.delta_layers);
  return cache.states + (slot * m.delta_layers + layer.place) * DeltaState(m).all;
}

inline float* pending_of(const Model& m, const Cache& cache, const Layer& layer, int64_t slot) {
  return cache.pending + (layer.place * cache.slots + slot) * cache.pending_rows * DeltaRow(m).all;
}

// Returns the inputs of a delta net's convolution in one slot. rows: the projections of the pass's
// rows.
inline PathInputs delta_inputs(const Model& m, const float* state, const float* rows, const int64_t* parents) {
  const DeltaRow at(m);
  return {state + (m.kernel - 1) * at.channels(), at.channels(), m.kernel - 1, rows, at.all, parents};
}

// Keeps the convolution's last inputs on the path that ends at `row`.
inline void keep_inputs(const Model& m, float* state, const PathInputs& inputs, int64_t row) {
  const int64_t channels = DeltaRow(m).channels();
  const float* last[kKernel];
  path_inputs(inputs, row, m.kernel, last);
  // Inputs only move towards the front, so none is overwritten before it has been moved.
  for (int64_t k = 1; k < m.kernel; k++) std::memmove(state + (k - 1) * channels, last[k], channels * sizeof(float));
}

// Calls work(part, head, first tile, number of tiles, thread) for each share of the columns of a
// delta net's heads.
template <class Work>
inline void each_columns(Pool& pool, const Model& m, int64_t parts, const Work& work) {
  const int64_t tiles = m.value_dim / 16, together = tiles % kDeep ? 1 : kDeep, groups = tiles / together;
  pool.run(parts * m.value_heads * groups, [&](int64_t share, int thread) {
    const int64_t head = share / groups;
    work(head / m.value_heads, head % m.value_heads, share % groups * together, together, thread);
  });
}

// Runs rows through some columns of a head. branches: see delta_rule_rows.
inline void delta_rule_columns(const Model& m, const Walk& walk, const float* rows, int64_t count, int64_t head,
                               int64_t tile, int64_t tiles, float* state, float* branches, float* out, int64_t stride) {
  const auto work = tiles == kDeep ? delta_rule_rows<kDeep> : delta_rule_rows<1>;
  work(m, walk, rows, count, head, tile, state, branches, out, stride);
}

// Returns the output of a gated delta net for normalized rows.
inline Rows delta_net(Pool& pool, const Model& m, const Cache& cache, const Step& step, int64_t index, const Rows& read,
                      Workspace& work) {
  const Layer& layer = m.layer[index];
  const DeltaRow at(m);
  const int64_t rows = step.slots * step.rows, values = m.value_heads * m.value_dim;
  float* projected = work.qkv.reserve(rows * (at.all + values));
  float* gates = projected + rows * at.all;
  matmuls(pool, read, rows,
          {
              Target{&layer.input, projected, at.all, false},
              Target{&layer.beta, projected + at.beta, at.all, false},
              Target{&layer.decay, projected + at.decay, at.all, false},
              Target{&layer.output_gate, gates, values, false},
          });
  const auto state = [&](int64_t slot) { return state_of(m, cache, layer, step.first_slot + slot); };
  const auto inputs_of = [&](int64_t slot) {
    const float* own = projected + slot * step.rows * at.all;
    return delta_inputs(m, state(slot), own, &work.parents[slot * step.rows]);
  };
  for (int64_t slot = 0; slot < step.slots; slot++) {
    if (!step.lengths[slot]) std::memset(state(slot), 0, DeltaState(m).all * sizeof(float));
  }
  float* prepared = work.prepared.reserve(rows * at.all);
  each_row(pool, rows, 4 * at.all, [&](int64_t r) {
    const float* inputs[kKernel];
    path_inputs(inputs_of(r / step.rows), r % step.rows, m.kernel, inputs);
    prepare_row(m, layer, inputs, prepared + r * at.all);
    if (step.keeps) return;
    float* pending = pending_of(m, cache, layer, step.first_slot + r / step.rows);
    std::memcpy(pending + r % step.rows * at.all, projected + r * at.all, at.all * sizeof(float));
  });
  if (step.keeps) {
    for (int64_t slot = 0; slot < step.slots; slot++) keep_inputs(m, state(slot), inputs_of(slot), step.rows - 1);
  }

  int64_t most = 0;
  for (int64_t slot = 0; slot < step.slots; slot++) most = std::max(most, work.walks[slot].branches);
  const int64_t size = most * kDeep * m.key_dim * 16;
  float* branches = work.branches.reserve(pool.threads() * size);
  const Rows out = work.attended.rows(rows, values, layer.out.int8_rows);
  each_columns(pool, m, step.slots, [&](int64_t slot, int64_t head, int64_t tile, int64_t tiles, int thread) {
    float* y = writable(out) + slot * step.rows * out.stride + head * m.value_dim;
    delta_rule_columns(m, work.walks[slot], prepared + slot * step.rows * at.all, step.rows, head, tile, tiles,
                       state(slot), branches + thread * size, y, out.stride);
  });
  each_row(pool, rows, 16 * values, [&](int64_t r) {
    for (int64_t head = 0; head < m.value_heads; head++) {
      float* y = writable(out) + r * out.stride + head * m.value_dim;
      const float* gate = gates + r * values + head * m.value_dim;
      rms_norm(y, layer.state_norm, y, m.value_dim, m.eps);
      for (int64_t i = 0; i < m.value_dim; i += 16) store(y + i, mul(load(y + i), silu(load(gate + i))));
    }
  });
  return out;
}

// Advances the states of all delta nets in a slot along a path [count] of the last tree's rows.
inline void replay(Pool& pool, const Model& m, const Cache& cache, int64_t slot, const int64_t* path, int64_t count) {
  Workspace& work = workspace();
  const DeltaRow at(m);
  List<const Layer*> layers;
  for (int64_t i = 0; i < m.layers; i++) {
    if (m.layer[i].mixer == DELTA_NET) layers.push_back(m.layer + i);
  }
  work.parents.assign(cache.pending_rows, -1);
  for (int64_t i = 1; i < count; i++) work.parents[path[i]] = path[i - 1];
  const auto inputs_of = [&](const Layer& layer) {
    return delta_inputs(m, state_of(m, cache, layer, slot), pending_of(m, cache, layer, slot), work.parents.data());
  };
  const int64_t parts = layers.size();
  float* prepared = work.prepared.reserve(parts * count * at.all);
  each_row(pool, parts * count, 4 * at.all, [&](int64_t r) {
    const Layer& layer = *layers[r / count];
    const float* inputs[kKernel];
    path_inputs(inputs_of(layer), path[r % count], m.kernel, inputs);
    prepare_row(m, layer, inputs, prepared + r * at.all);
  });
  work.walks.resize(std::max<size_t>(work.walks.size(), 1));
  work.walks[0].chain(count);
  const int64_t size = count * m.value_dim;
  float* out = work.branches.reserve(pool.threads() * size);
  each_columns(pool, m, parts, [&](int64_t part, int64_t head, int64_t tile, int64_t tiles, int thread) {
    delta_rule_columns(m, work.walks[0], prepared + part * count * at.all, count, head, tile, tiles,
                       state_of(m, cache, *layers[part], slot), nullptr, out + thread * size, m.value_dim);
  });
  for (const Layer* layer : layers) {
    keep_inputs(m, state_of(m, cache, *layer, slot), inputs_of(*layer), path[count - 1]);
  }
}

}  // namespace ISA
}  // namespace medusa
