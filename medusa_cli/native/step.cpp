// One pass over a decoder's layers, compiled once for each instruction set.
#include "step.h"

#include <algorithm>

#include "attention.h"
#include "delta_net.h"
#include "rows.h"
#include "short_conv.h"

namespace medusa {
namespace ISA {

namespace {

// An expert that was chosen for a row, the row's index among the rows gathered for experts, and the
// weight of the expert's output.
struct Pick {
  int64_t expert, row;
  float weight;
};

// Consecutive rows of a pass that belong to one sequence, and a layer's columns for that sequence.
//
// keys [kv, capacity / 16, dim, 16] and values [kv, capacity, dim padded to 16] are those of all
// columns. first: the first row's index in the pass. column: the first row's column.
struct Span {
  float* keys;
  float* values;
  int64_t capacity, first, rows, column;
  const Sight* sight;

  float* keys_of(const Layer& layer, int64_t head) const { return keys + head * layer.dim * capacity; }
  float* values_of(const Layer& layer, int64_t head) const {
    return values + head * padded(layer.dim, 16) * capacity;
  }
};

const Span& span_of(const List<Span>& spans, int64_t row) {
  const auto after = std::upper_bound(spans.begin(), spans.end(), row,
                                      [](int64_t r, const Span& span) { return r < span.first; });
  return *(after - 1);
}

int64_t rows_of(const List<Span>& spans) { return spans.back().first + spans.back().rows; }

// The buffers of passes. Only one pass runs at a time.
struct Workspace {
  RowBuffer normed, attended, inner, given, gathered;
  Buffer<float> qkv, added, gates, scores, out;
  Shares shares;
  List<Mlp> mlps;
  List<Pick> picks;
  List<AttentionRoom> rooms;
  List<Sight> sights;
  List<Span> spans;
  Buffer<float> mixed, held;
  List<int64_t> parents;  // [slots, rows]
  List<Walk> walks;       // per slot
};

Workspace& workspace() {
  static Workspace* shared = new Workspace;
  return *shared;
}

// The offsets of keys, values and the output gate in a row that begins with a layer's queries, and
// the row's width.
struct Widths {
  int64_t key, value, gate, all;
  Widths(const Model& m, const Layer& layer)
      : key(padded(m.heads * layer.dim, kTile)),
        value(key + padded(layer.kv * layer.dim, kTile)),
        gate(value + padded(layer.kv * layer.dim, kTile)),
        all(gate + (layer.output_gate.tiles ? key : 0)) {}
};

// Normalizes and rotates a query or a key; a null gain or null cosines omit that operation.
void turn(const Model& m, const Layer& layer, float* head, const float* gain, const float* cos, const float* sin) {
  if (gain && !m.late_norms) head_norm(m.centered, head, gain, layer.dim, m.eps);
  if (cos) (m.pairs ? rotate_pairs : rotate)(head, cos, sin, m.rotary[layer.table] / 2);
  if (gain && m.late_norms) head_norm(m.centered, head, gain, layer.dim, m.eps);
}

// Normalizes and rotates queries and keys, and writes keys and values into the cache. positions
// [rows]: those of all rows.
void place(Pool& pool, const Model& m, const Layer& layer, const List<Span>& spans, const int32_t* positions,
           float* qkv) {
  const Widths widths(m, layer);
  const int64_t half = layer.table < 0 ? 0 : m.rotary[layer.table] / 2;
  const int64_t dim = layer.dim, wide = padded(dim, 16);
  const bool has_keys = layer.key.tiles;
  const float* query_norm = m.whole_norms ? nullptr : layer.query_norm;
  const float* key_norm = m.whole_norms ? nullptr : layer.key_norm;
  each_row(pool, rows_of(spans), widths.all, [&](int64_t r) {
    float* row = qkv + r * widths.all;
    const Span& span = span_of(spans, r);
    const int64_t column = span.column + r - span.first;
    const float* cos = layer.table < 0 ? nullptr : m.cos[layer.table] + positions[r] * half;
    const float* sin = layer.table < 0 ? nullptr : m.sin[layer.table] + positions[r] * half;
    if (m.whole_norms && layer.query_norm) {
      normalize(m.centered, row, layer.query_norm, row, m.heads * dim, m.eps);
      if (has_keys) normalize(m.centered, row + widths.key, layer.key_norm, row + widths.key, layer.kv * dim, m.eps);
    }
    if (m.clip != 0.0f) {
      for (int64_t i = 0; i < widths.gate; i++) row[i] = std::min(std::max(row[i], -m.clip), m.clip);
    }
    for (int64_t head = 0; head < m.heads; head++) turn(m, layer, row + head * dim, query_norm, cos, sin);
    for (int64_t head = 0; has_keys && head < layer.kv; head++) {
      float* key = row + widths.key + head * dim;
      float* value = row + widths.value + head * dim;
      turn(m, layer, key, key_norm, cos, sin);
      if (layer.value_norm) head_norm(m.centered, value, layer.value_norm, dim, m.eps);
      float* keys = span.keys_of(layer, head) + column / 16 * 16 * dim + column % 16;
      for (int64_t d = 0; d < dim; d++) keys[16 * d] = key[d];
      std::memcpy(span.values_of(layer, head) + column * wide, value, dim * sizeof(float));
    }
  });
}

// Runs attention for the rows of all spans, whose queries are in qkv.
void attend_all(Pool& pool, const Model& m, const Layer& layer, const List<Span>& spans, const float* qkv,
                const Rows& attended, Workspace& work) {
  const Widths widths(m, layer);
  const int64_t dim = layer.dim, groups = m.heads / layer.kv;
  const float* own_sinks = layer.sinks;
  // Blocks have up to QUERIES queries, but fewer if there would be fewer than two blocks per
  // thread.
  const auto blocks_of = [&](int64_t together) {
    int64_t blocks = 0;
    for (const Span& span : spans) blocks += layer.kv * ((span.rows * groups + together - 1) / together);
    return blocks;
  };
  int64_t together = QUERIES;
  while (together > 1 && blocks_of(together) < 2 * pool.threads()) together /= 2;
  work.shares.clear();
  for (const Span& span : spans) work.shares.add(layer.kv * ((span.rows * groups + together - 1) / together), 1);
  work.rooms.resize(std::max<size_t>(work.rooms.size(), pool.threads()));
  pool.run(work.shares.count(), [&](int64_t share, int thread) {
    work.shares.take(share, [&](int64_t number, int64_t part, int64_t) {
      const Span& span = spans[number];
      const int64_t queries = span.rows * groups, blocks = (queries + together - 1) / together;
      const int64_t head = part / blocks, first = part % blocks * together;
      const int64_t count = std::min(together, queries - first);
      const float* from[QUERIES];
      float* to[QUERIES];
      float sinks[QUERIES];
      int64_t rows[QUERIES];
      for (int64_t i = 0; i < count; i++) {
        rows[i] = (first + i) / groups;
        const int64_t query = head * groups + (first + i) % groups;
        const int64_t row = span.first + rows[i], at = query * dim;
        if (own_sinks) sinks[i] = own_sinks[query];
        from[i] = qkv + row * widths.all + at;
        to[i] = writable(attended) + row * attended.stride + at;
      }
      attend(from, rows, static_cast<int>(count), *span.sight, span.keys_of(layer, head), span.values_of(layer, head),
             dim, padded(dim, 16), m.scale, m.cap, own_sinks ? sinks : nullptr, work.rooms[thread], to);
    });
  });
}

// Adds the output [rows, stride] of attention or the MLP to the states x, times the model's
// residual factor. If the layer has a norm for the output, it is applied first.
void add_rows(Pool& pool, const Model& m, float* added, int64_t rows, const float* norm, float* x, int64_t stride) {
  each_row(pool, rows, stride, [&](int64_t r) {
    float* row = added + r * stride;
    if (norm) normalize(m.centered, row, norm, row, m.hidden, m.eps);
    float* state = x + r * stride;
    const F factor = set(m.residual);
    for (int64_t i = 0; i < m.hidden; i += 16) store(state + i, add(load(state + i), mul(factor, load(row + i))));
  });
}

// Adds y W^T to the states x in the same way as add_rows.
void add_product(Pool& pool, const Matrix& w, const Rows& y, int64_t rows, const float* norm, const Model& m, float* x,
                 int64_t stride, Workspace& work) {
  if (!norm && m.residual == 1.0f) {
    matmuls(pool, y, rows, {Target{&w, x, stride, true}});
    return;
  }
  float* added = work.added.room(rows * stride);
  std::memset(added, 0, rows * stride * sizeof(float));
  matmuls(pool, y, rows, {Target{&w, added, stride, false}});
  add_rows(pool, m, added, rows, norm, x, stride);
}

// Chooses two experts by sparsemixer. Each is the best of those that are left, and its weight is a
// softmax over those that are left whose score is close to its own.
void mix_sparsely(const Model& m, int64_t n, const float* scores, Pick* picks) {
  const int64_t wide = padded(n, 16);
  for (int64_t pick = 0; pick < 2; pick++) {
    const int64_t left_out = pick ? picks[0].expert : -1;
    int64_t best = left_out == 0 ? 1 : 0;
    for (int64_t i = best + 1; i < n; i++) {
      if (i != left_out && scores[i] > scores[best]) best = i;
    }
    F total = set(0.0f);
    for (int64_t first = 0; first < wide; first += 16) {
      alignas(64) float near[16];
      for (int64_t i = first; i < first + 16; i++) {
        const bool known = i < n && i != left_out;
        const float gap = known ? scores[best] - scores[i] : 0.0f;
        const bool is_near = known && !(gap / std::max(std::fabs(scores[i]), scores[best]) > 2.0f * m.jitter);
        near[i - first] = is_near ? -gap : -INFINITY;
      }
      total = add(total, exp(load(near)));
    }
    picks[pick].expert = best;
    picks[pick].weight = m.expert_scale / sum(total);
  }
  if (picks[0].expert > picks[1].expert) std::swap(picks[0], picks[1]);
}

// Chooses a row's experts by their scores [experts padded to 16], and sorts them by index.
void choose_experts(const Model& m, const Layer& layer, float* scores, Pick* picks) {
  const int64_t n = layer.experts, wide = padded(n, 16);
  if (m.jitter != 0.0f) return mix_sparsely(m, n, scores, picks);
  for (int64_t i = n; i < wide; i++) scores[i] = -INFINITY;
  if (m.sigmoid) {
    for (int64_t i = 0; i < wide; i += 16) store(scores + i, sigmoid(load(scores + i)));
  } else {
    F most = set(-INFINITY), total = set(0.0f);
    for (int64_t i = 0; i < wide; i += 16) most = max(most, load(scores + i));
    const F shift = set(largest(most));
    for (int64_t i = 0; i < wide; i += 16) {
      const F e = exp(sub(load(scores + i), shift));
      store(scores + i, e);
      total = add(total, e);
    }
    const F inverse = set(1.0f / sum(total));
    for (int64_t i = 0; i < wide; i += 16) store(scores + i, mul(load(scores + i), inverse));
  }
  const auto better = [&](int64_t a, int64_t b) {
    const float x = scores[a] + (layer.router_bias ? layer.router_bias[a] : 0.0f);
    const float y = scores[b] + (layer.router_bias ? layer.router_bias[b] : 0.0f);
    return x > y || (x == y && a < b);
  };
  // picks[0 .. count - 1] are the best so far, the best first.
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    if (count == m.top_experts && !better(i, picks[count - 1].expert)) continue;
    int64_t at = count < m.top_experts ? count++ : count - 1;
    for (; at && better(i, picks[at - 1].expert); at--) picks[at] = picks[at - 1];
    picks[at].expert = i;
  }
  std::sort(picks, picks + count, [](const Pick& a, const Pick& b) { return a.expert < b.expert; });
  float total = 0;
  for (int64_t i = 0; i < count; i++) total += scores[picks[i].expert];
  for (int64_t i = 0; i < count; i++) {
    const float score = scores[picks[i].expert];
    picks[i].weight = (m.normalized ? score / total : score) * m.expert_scale;
  }
}

// Returns the matrix of one expert; the experts' matrices lie one after another.
Matrix of_expert(const Matrix& all, int64_t experts, int64_t expert) {
  const int64_t tile_bytes = all.k / info(all.format).block * info(all.format).tile_bytes;
  Matrix own = all;
  own.n = all.n / experts;
  own.tiles += expert * (own.n / kTile) * tile_bytes;
  if (own.bias) own.bias += expert * own.n;
  return own;
}

// Adds the output of a mixture of experts for normalized rows to the states x. Rows are gathered by
// expert, so that each expert's matrices are read once. A row's output is summed over its experts
// in ascending order.
void add_mixture(Pool& pool, const Model& m, const Layer& layer, const Rows& normed, int64_t rows, float* x,
                 int64_t stride, Workspace& work) {
  const int64_t top = m.top_experts, shared = layer.shared_up.tiles ? rows : 0;
  const int64_t wide = padded(layer.experts, kTile);
  float* scores = work.scores.room(rows * (wide + kTile));
  float* gates = scores + rows * wide;  // of the shared MLP
  matmuls(pool, normed, rows, {Target{&layer.router, scores, wide, false}});
  if (layer.shared_router.tiles) matmuls(pool, normed, rows, {Target{&layer.shared_router, gates, kTile, false}});

  work.picks.resize(rows * top);
  each_row(pool, rows, 16 * wide, [&](int64_t r) {
    choose_experts(m, layer, scores + r * wide, &work.picks[r * top]);
  });
  work.mlps.clear();
  int64_t gathered = 0;
  const int64_t inner_wide = std::max(layer.up.n / layer.experts, shared ? layer.shared_up.n : 0);
  for (int64_t e = 0; e < layer.experts; e++) {
    const int64_t first = gathered;
    for (Pick& pick : work.picks) {
      if (pick.expert == e) pick.row = gathered++;
    }
    if (gathered == first) continue;
    work.mlps.push_back({of_expert(layer.gate, layer.experts, e), of_expert(layer.up, layer.experts, e),
                         of_expert(layer.down, layer.experts, e), first, gathered - first});
  }
  if (shared) work.mlps.push_back({layer.shared_gate, layer.shared_up, layer.shared_down, gathered, rows});

  const bool int8_own = layer.gate.int8_rows || layer.up.int8_rows;
  const bool int8_shared = layer.shared_gate.int8_rows || layer.shared_up.int8_rows;
  const bool int8_inner = layer.down.int8_rows || layer.shared_down.int8_rows;
  const Rows read = work.gathered.rows(gathered + shared, m.hidden, int8_own || int8_shared);
  const auto copy = [&](int64_t from, int64_t to) {
    std::memcpy(writable(read) + to * read.stride, normed.x + from * normed.stride, m.hidden * sizeof(float));
    if (read.q) round_row(read.from(to), 0, read.stride);
  };
  each_row(pool, rows, (top + 1) * stride, [&](int64_t r) {
    for (int64_t i = 0; i < top; i++) copy(r, work.picks[r * top + i].row);
    if (shared) copy(r, gathered + r);
  });
  const Rows inner = work.inner.rows(gathered + shared, inner_wide, int8_inner);
  gated(pool, work.mlps, layer.activation, read, inner, work.shares, work.gates);

  float* out = work.out.room((gathered + shared) * stride);
  work.shares.clear();
  for (const Mlp& mlp : work.mlps) {
    work.shares.add(tiles_of(mlp.down), tiles_of_share(pool, tiles_of(mlp.down), mlp.down.k, mlp.rows));
  }
  pool.run(work.shares.count(), [&](int64_t share, int) {
    work.shares.take(share, [&](int64_t job, int64_t first, int64_t end) {
      const Mlp& mlp = work.mlps[job];
      float* y = out + mlp.first * stride + first * kTile;
      ISA::multiply(mlp.down, inner.from(mlp.first), mlp.rows, first, end, y, stride, false);
    });
  });

  float* added = work.added.room(rows * stride);
  each_row(pool, rows, (top + 1) * stride, [&](int64_t r) {
    float* row = added + r * stride;
    std::memset(row, 0, stride * sizeof(float));
    const auto add_weighted = [&](const float* from, float weight) {
      const F factor = set(weight);
      for (int64_t i = 0; i < m.hidden; i += 16) store(row + i, add(load(row + i), mul(factor, load(from + i))));
    };
    for (int64_t i = 0; i < top; i++) {
      const Pick& pick = work.picks[r * top + i];
      add_weighted(out + pick.row * stride, pick.weight);
    }
    if (!shared) return;
    const float* gate = layer.shared_router.tiles ? gates + r * kTile : nullptr;
    add_weighted(out + (gathered + r) * stride, gate ? first_of(sigmoid(set(*gate))) : 1.0f);
  });
  add_rows(pool, m, added, rows, layer.mlp_out_norm, x, stride);
}

// Adds a projection of the first states, normalized per layer, to the embeddings that layers read
// besides their states.
void complete_inputs(Pool& pool, const Model& m, const Step& step, int64_t rows, int64_t stride, Workspace& work) {
  const int64_t wide = m.layers * m.inputs;
  const Rows states = work.given.rows(rows, m.hidden, m.inputs_projection.int8_rows);
  norm_rows(pool, m, step.x, stride, nullptr, states, rows);
  float* projected = work.out.room(rows * wide);
  matmuls(pool, states, rows, {Target{&m.inputs_projection, projected, wide, false}});
  const F scale = set(m.inputs_scale), factor = set(m.inputs_factor);
  each_row(pool, rows, wide, [&](int64_t r) {
    for (int64_t first = r * wide; first < (r + 1) * wide; first += m.inputs) {
      float* own = projected + first;
      for (int64_t i = 0; i < m.inputs; i += 16) store(own + i, mul(load(own + i), scale));
      normalize(m.centered, own, m.inputs_norm, own, m.inputs, m.eps);
      float* inputs = step.inputs + first;
      for (int64_t i = 0; i < m.inputs; i += 16) store(inputs + i, mul(add(load(own + i), load(inputs + i)), factor));
    }
  });
}

// Computes a layer's output for its inputs besides the states, and adds it to the states.
void add_inputs(Pool& pool, const Model& m, const Layer& layer, int64_t index, const Step& step, int64_t rows,
                int64_t stride, Workspace& work) {
  const Rows states = work.given.rows(rows, m.hidden, layer.input_gate.int8_rows);
  norm_rows(pool, m, step.x, stride, nullptr, states, rows);
  const Rows inner = work.inner.rows(rows, m.inputs, layer.input_out.int8_rows);
  matmuls(pool, states, rows, {Target{&layer.input_gate, writable(inner), inner.stride, false}});
  each_row(pool, rows, m.inputs, [&](int64_t r) {
    float* row = writable(inner) + r * inner.stride;
    const float* inputs = step.inputs + (r * m.layers + index) * m.inputs;
    for (int64_t i = 0; i < m.inputs; i += 16) {
      store(row + i, gate_by(layer.activation, load(row + i), load(inputs + i)));
    }
    if (inner.q) round_row(inner.from(r), 0, inner.stride);
  });
  add_product(pool, layer.input_out, inner, rows, layer.input_norm, m, step.x, stride, work);
}

// Multiplies the output of attention by the sigmoid of its gates.
void gate_outputs(Pool& pool, const Model& m, const Layer& layer, const float* qkv, int64_t rows,
                  const Rows& attended) {
  const Widths widths(m, layer);
  each_row(pool, rows, 16 * widths.key, [&](int64_t r) {
    const float* gates = qkv + r * widths.all + widths.gate;
    float* out = writable(attended) + r * attended.stride;
    for (int64_t i = 0; i < m.heads * layer.dim; i += 16) store(out + i, mul(load(out + i), sigmoid(load(gates + i))));
  });
}

// Multiplies normalized rows with a layer's queries, keys and values; returns the products, and
// writes keys and values into the cache.
float* project(Pool& pool, const Model& m, const Layer& layer, const List<Span>& spans,
               const int32_t* positions, const Rows& read, Workspace& work) {
  const Widths widths(m, layer);
  const int64_t rows = rows_of(spans);
  float* qkv = work.qkv.room(rows * widths.all);
  const Target query = {&layer.query, qkv, widths.all, false};
  if (layer.key.tiles) {
    const Target key = {&layer.key, qkv + widths.key, widths.all, false};
    const Target value = {&layer.value, qkv + widths.value, widths.all, false};
    matmuls(pool, read, rows, {query, key, value});
  } else {
    matmuls(pool, read, rows, {query});
  }
  if (layer.output_gate.tiles) {
    matmuls(pool, read, rows, {Target{&layer.output_gate, qkv + widths.gate, widths.all, false}});
  }
  place(pool, m, layer, spans, positions, qkv);
  return qkv;
}

// Returns the output of attention for normalized rows.
Rows attention(Pool& pool, const Model& m, const Cache& cache, const Step& step, int64_t index, const Rows& read,
               Workspace& work) {
  const Layer& layer = m.layer[index];
  const int64_t rows = step.slots * step.rows;
  work.spans.clear();
  for (int64_t s = 0; s < step.slots; s++) {
    const int64_t slot = step.first_slot + s;
    work.spans.push_back({keys_of(m, cache, layer, slot, 0), values_of(m, cache, layer, slot, 0), cache.capacity,
                          s * step.rows, step.rows, step.lengths[s], &work.sights[s]});
  }
  const float* qkv = project(pool, m, layer, work.spans, step.positions, read, work);
  const Rows attended = work.attended.rows(rows, m.heads * layer.dim, layer.out.int8_rows);
  attend_all(pool, m, layer, work.spans, qkv, attended, work);
  if (layer.output_gate.tiles) gate_outputs(pool, m, layer, qkv, rows, attended);
  return attended;
}

// Returns the output of a short convolution for normalized rows. Its inputs stay in the cache as
// rows.
Rows short_conv(Pool& pool, const Model& m, const Cache& cache, const Step& step, int64_t index, const Rows& read,
                Workspace& work) {
  const Layer& layer = m.layer[index];
  const int64_t rows = step.slots * step.rows, wide = padded(3 * m.hidden, kTile);
  float* made = work.qkv.room(rows * wide);
  matmuls(pool, read, rows, {Target{&layer.input, made, wide, false}});
  const auto new_inputs = [&](int64_t slot) {
    return inputs_of(m, cache, layer, step.first_slot + slot) + step.lengths[slot] * m.hidden;
  };
  each_row(pool, rows, m.hidden, [&](int64_t r) {
    const float* gate = made + r * wide;
    const float* x = gate + 2 * m.hidden;
    float* input = new_inputs(r / step.rows) + r % step.rows * m.hidden;
    for (int64_t i = 0; i < m.hidden; i++) input[i] = gate[i] * x[i];
  });
  const Rows out = work.attended.rows(rows, m.hidden, layer.out.int8_rows);
  each_row(pool, rows, m.kernel * m.hidden, [&](int64_t r) {
    const int64_t slot = r / step.rows;
    const float* inputs[kKernel];
    const PathInputs of_slot = {new_inputs(slot), m.hidden, step.lengths[slot], new_inputs(slot), m.hidden,
                                &work.parents[slot * step.rows]};
    path_inputs(of_slot, r % step.rows, m.kernel, inputs);
    float* y = writable(out) + r * out.stride;
    convolve(inputs, layer.conv, m.kernel, m.hidden, y);
    const float* gate = made + r * wide + m.hidden;
    for (int64_t i = 0; i < m.hidden; i++) y[i] *= gate[i];
  });
  return out;
}

float* state_of(const Model& m, const Cache& cache, const Layer& layer, int64_t slot) {
  return cache.states + (slot * m.delta_layers + layer.place) * DeltaState(m).all;
}

float* pending_of(const Model& m, const Cache& cache, const Layer& layer, int64_t slot) {
  return cache.pending + (layer.place * cache.slots + slot) * cache.pending_rows * DeltaRow(m).all;
}

// Returns the inputs of a delta net's convolution in one slot; the rows' projections begin at
// `rows`.
PathInputs delta_inputs(const Model& m, const float* state, const float* rows, const int64_t* parents) {
  const DeltaRow at(m);
  return {state + (m.kernel - 1) * at.channels(), at.channels(), m.kernel - 1, rows, at.all, parents};
}

// Keeps the convolution's last inputs on the path that ends at `row`.
void keep_inputs(const Model& m, float* state, const PathInputs& inputs, int64_t row) {
  const int64_t channels = DeltaRow(m).channels();
  const float* last[kKernel];
  path_inputs(inputs, row, m.kernel, last);
  // Rows only move towards the front.
  for (int64_t k = 1; k < m.kernel; k++) std::memmove(state + (k - 1) * channels, last[k], channels * sizeof(float));
}

// Calls work(part, head, first tile, number of tiles, thread) for each share of the columns of a
// delta net's heads.
template <class Work>
void each_columns(Pool& pool, const Model& m, int64_t parts, const Work& work) {
  const int64_t tiles = m.value_dim / 16, together = tiles % DEEP ? 1 : DEEP, groups = tiles / together;
  pool.run(parts * m.value_heads * groups, [&](int64_t share, int thread) {
    const int64_t head = share / groups;
    work(head / m.value_heads, head % m.value_heads, share % groups * together, together, thread);
  });
}

// Runs rows through some columns of a head. held: room for the states of the walk.
void follow_columns(const Model& m, const Walk& walk, const float* rows, int64_t count, int64_t head, int64_t tile,
                    int64_t tiles, float* state, float* held, float* out, int64_t stride) {
  const auto work = tiles == DEEP ? follow_rows<DEEP> : follow_rows<1>;
  work(m, walk, rows, count, head, tile, state, held, out, stride);
}

// Returns the output of a gated delta net for normalized rows.
Rows delta_net(Pool& pool, const Model& m, const Cache& cache, const Step& step, int64_t index, const Rows& read,
               Workspace& work) {
  const Layer& layer = m.layer[index];
  const DeltaRow at(m);
  const int64_t rows = step.slots * step.rows, values = m.value_heads * m.value_dim;
  float* made = work.qkv.room(rows * (at.all + values));
  float* gates = made + rows * at.all;
  matmuls(pool, read, rows, {
    Target{&layer.input, made, at.all, false},
    Target{&layer.beta, made + at.beta, at.all, false},
    Target{&layer.decay, made + at.decay, at.all, false},
    Target{&layer.output_gate, gates, values, false},
  });
  const auto state = [&](int64_t slot) { return state_of(m, cache, layer, step.first_slot + slot); };
  const auto inputs_of = [&](int64_t slot) {
    const float* own = made + slot * step.rows * at.all;
    return delta_inputs(m, state(slot), own, &work.parents[slot * step.rows]);
  };
  for (int64_t slot = 0; slot < step.slots; slot++) {
    if (!step.lengths[slot]) std::memset(state(slot), 0, DeltaState(m).all * sizeof(float));
  }
  float* mixed = work.mixed.room(rows * at.all);
  each_row(pool, rows, 4 * at.all, [&](int64_t r) {
    const float* inputs[kKernel];
    path_inputs(inputs_of(r / step.rows), r % step.rows, m.kernel, inputs);
    mix(m, layer, inputs, mixed + r * at.all);
    if (step.keeps) return;
    float* pending = pending_of(m, cache, layer, step.first_slot + r / step.rows);
    std::memcpy(pending + r % step.rows * at.all, made + r * at.all, at.all * sizeof(float));
  });
  if (step.keeps) {
    for (int64_t slot = 0; slot < step.slots; slot++) keep_inputs(m, state(slot), inputs_of(slot), step.rows - 1);
  }

  int64_t places = 0;
  for (int64_t slot = 0; slot < step.slots; slot++) places = std::max(places, work.walks[slot].places);
  const int64_t room = places * DEEP * m.key_dim * 16;
  float* held = work.held.room(pool.threads() * room);
  const Rows out = work.attended.rows(rows, values, layer.out.int8_rows);
  each_columns(pool, m, step.slots, [&](int64_t slot, int64_t head, int64_t tile, int64_t tiles, int thread) {
    float* y = writable(out) + slot * step.rows * out.stride + head * m.value_dim;
    follow_columns(m, work.walks[slot], mixed + slot * step.rows * at.all, step.rows, head, tile, tiles, state(slot),
                   held + thread * room, y, out.stride);
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

void replay(Pool& pool, const Model& m, const Cache& cache, int64_t slot, const int64_t* path, int64_t count) {
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
  float* mixed = work.mixed.room(parts * count * at.all);
  each_row(pool, parts * count, 4 * at.all, [&](int64_t r) {
    const Layer& layer = *layers[r / count];
    const float* inputs[kKernel];
    path_inputs(inputs_of(layer), path[r % count], m.kernel, inputs);
    mix(m, layer, inputs, mixed + r * at.all);
  });
  work.walks.resize(std::max<size_t>(work.walks.size(), 1));
  work.walks[0].chain(count);
  const int64_t room = count * m.value_dim;
  float* out = work.held.room(pool.threads() * room);
  each_columns(pool, m, parts, [&](int64_t part, int64_t head, int64_t tile, int64_t tiles, int thread) {
    follow_columns(m, work.walks[0], mixed + part * count * at.all, count, head, tile, tiles,
                   state_of(m, cache, *layers[part], slot), nullptr, out + thread * room, m.value_dim);
  });
  for (const Layer* layer : layers) {
    keep_inputs(m, state_of(m, cache, *layer, slot), inputs_of(*layer), path[count - 1]);
  }
}

// Finds the parents of a step's rows and the walk of states along them, for layers that follow
// paths.
void find_paths(const Model& m, const Step& step, Workspace& work) {
  work.parents.resize(step.slots * step.rows);
  work.walks.resize(std::max<size_t>(work.walks.size(), step.slots));
  for (int64_t slot = 0; slot < step.slots; slot++) {
    int64_t* parents = &work.parents[slot * step.rows];
    find_parents(step.seen + slot * step.seen_slot, step.seen_row, step.rows, parents);
    if (step.keeps) work.walks[slot].chain(step.rows);
    else work.walks[slot].tree(parents, step.rows);
  }
}

bool reads_int8(const Layer& layer) {
  const Matrix* all[] = {&layer.query, &layer.key,         &layer.value, &layer.input,
                         &layer.beta,  &layer.output_gate, &layer.decay};
  return std::any_of(std::begin(all), std::end(all), [](const Matrix* own) { return own->int8_rows; });
}

// Returns the output of a layer's mixer for normalized rows.
Rows mixed_rows(Pool& pool, const Model& m, const Cache& cache, const Step& step, int64_t index, const Rows& read,
                Workspace& work) {
  const int64_t mixer = m.layer[index].mixer;
  if (mixer == SHORT_CONV) return short_conv(pool, m, cache, step, index, read, work);
  if (mixer == DELTA_NET) return delta_net(pool, m, cache, step, index, read, work);
  return attention(pool, m, cache, step, index, read, work);
}

// Adds a single MLP's output for normalized rows to the states x.
void add_mlp(Pool& pool, const Model& m, const Layer& layer, const Rows& read, int64_t rows, float* x, int64_t stride,
             Workspace& work) {
  const Rows inner = work.inner.rows(rows, layer.up.n, layer.down.int8_rows);
  Rows exact = inner;
  if (layer.inner_norm) exact.q = nullptr;  // rows are rounded after the norm
  work.mlps.assign(1, {layer.gate, layer.up, layer.down, 0, rows});
  gated(pool, work.mlps, layer.activation, read, exact, work.shares, work.gates);
  if (layer.inner_norm) norm_in_place(pool, m, inner, rows, layer.inner_norm, layer.up.n);
  add_product(pool, layer.down, inner, rows, layer.mlp_out_norm, m, x, stride, work);
}

void run(Pool& pool, const Model& m, const Cache& cache, const Step& step) {
  Workspace& work = workspace();
  const int64_t rows = step.slots * step.rows, stride = padded(m.hidden, kUnit);
  if (m.first_norm && step.first == 0) {
    each_row(pool, rows, stride, [&](int64_t r) {
      float* state = step.x + r * stride;
      normalize(m.centered, state, m.norm, state, m.hidden, m.eps);
    });
  }
  if (m.inputs && step.first == 0) complete_inputs(pool, m, step, rows, stride, work);
  if (m.kernel) find_paths(m, step, work);
  // Consecutive layers with the same window share the columns that rows see.
  work.sights.resize(step.slots);
  int64_t window = -1;
  for (int64_t i = step.first; i < step.end; i++) {
    const Layer& layer = m.layer[i];
    if (layer.window != window) {
      window = layer.window;
      for (int64_t s = 0; s < step.slots; s++) {
        look(work.sights[s], step.rows, step.rows, step.lengths[s], step.seen + s * step.seen_slot, step.seen_row,
             step.positions + s * step.rows, window);
      }
    }
    // Files may mix formats, so rows are rounded if any of the matrices that read them needs it.
    const Rows read = work.normed.rows(rows, m.hidden, reads_int8(layer));
    norm_rows(pool, m, step.x, stride, layer.attention_norm, read, rows);
    const Rows attended = mixed_rows(pool, m, cache, step, i, read, work);
    if (layer.attended_norm) norm_in_place(pool, m, attended, rows, layer.attended_norm, m.heads * layer.dim);
    else round_rows(pool, attended, rows);
    const auto add_attention = [&] {
      add_product(pool, layer.out, attended, rows, layer.attention_out_norm, m, step.x, stride, work);
    };
    if (!m.parallel) add_attention();

    const bool int8_mlp = !layer.experts && (layer.gate.int8_rows || layer.up.int8_rows);
    const Rows seen = work.normed.rows(rows, m.hidden, int8_mlp);
    norm_rows(pool, m, step.x, stride, layer.mlp_norm, seen, rows);
    if (m.parallel) add_attention();
    if (layer.experts) {
      add_mixture(pool, m, layer, seen, rows, step.x, stride, work);
    } else {
      add_mlp(pool, m, layer, seen, rows, step.x, stride, work);
    }

    if (layer.input_gate.tiles) add_inputs(pool, m, layer, i, step, rows, stride, work);
    if (layer.scalar != 1.0f) {
      each_row(pool, rows, stride, [&](int64_t r) {
        for (int64_t k = 0; k < m.hidden; k++) step.x[r * stride + k] *= layer.scalar;
      });
    }

    if (i + 1 == m.layers) {
      each_row(pool, rows, stride, [&](int64_t r) {
        float* state = step.x + r * stride;
        normalize(m.centered, state, m.norm, state, m.hidden, m.eps);
      });
    }
    for (int64_t t = 0; t < step.taps; t++) {
      if (step.tap_layers[t] == i) std::memcpy(step.tapped + t * rows * stride, step.x, rows * stride * sizeof(float));
    }
  }
}

// Reads normalized embeddings, if there are any, and normalized states.
Rows draft_reads(Pool& pool, const Model& m, const DraftPass& pass, int64_t rows, Workspace& work) {
  const Layer& layer = *m.layer;
  const int64_t before = pass.embedded ? m.hidden : 0;
  const Rows read = work.normed.rows(rows, before + m.hidden, layer.query.int8_rows);
  each_row(pool, rows, 2 * read.stride, [&](int64_t r) {
    float* row = writable(read) + r * read.stride;
    if (before) normalize(m.centered, pass.embedded + r * m.hidden, layer.input_norm, row, m.hidden, m.eps);
    const float* state = pass.x + r * m.hidden;
    if (layer.attention_norm) normalize(m.centered, state, layer.attention_norm, row + before, m.hidden, m.eps);
    else std::memcpy(row + before, state, m.hidden * sizeof(float));
    if (read.q) round_row(read.from(r), 0, read.stride);
  });
  return read;
}

// Leaves only the last row of each sequence to attend.
void leave_last(const Model& m, const DraftPass& pass, float* qkv, int64_t width, Workspace& work) {
  const uint8_t itself = 1;
  for (int64_t s = 0; s < pass.sequences; s++) {
    Span& span = work.spans[s];
    const int64_t last = span.first + span.rows - 1;
    std::memmove(qkv + s * width, qkv + last * width, width * sizeof(float));
    std::memmove(pass.x + s * m.hidden, pass.x + last * m.hidden, m.hidden * sizeof(float));
    span.column += span.rows - 1;
    span.first = s;
    span.rows = 1;
    look(work.sights[s], 1, 1, span.column, &itself, 1, nullptr, 0);
  }
}

void draft(Pool& pool, const Model& m, const DraftPass& pass) {
  Workspace& work = workspace();
  const Layer& layer = *m.layer;
  work.sights.resize(pass.sequences);
  work.spans.clear();
  int64_t rows = 0;
  for (int64_t s = 0; s < pass.sequences; s++) {
    const DraftRows& own = pass.own[s];
    const int64_t columns = own.earlier + own.rows;
    if (!pass.last) look(work.sights[s], own.rows, columns, own.prefix, own.seen, columns, nullptr, 0);
    work.spans.push_back({own.keys, own.values, own.capacity, rows, own.rows, own.prefix + own.earlier,
                          &work.sights[s]});
    rows += own.rows;
  }
  const Rows read = draft_reads(pool, m, pass, rows, work);
  float* qkv = project(pool, m, layer, work.spans, pass.positions, read, work);
  if (pass.last) {
    leave_last(m, pass, qkv, Widths(m, layer).all, work);
    rows = pass.sequences;
  }
  const Rows attended = work.attended.rows(rows, m.heads * layer.dim, layer.out.int8_rows);
  attend_all(pool, m, layer, work.spans, qkv, attended, work);
  round_rows(pool, attended, rows);
  add_product(pool, layer.out, attended, rows, nullptr, m, pass.x, m.hidden, work);
  const Rows seen = work.normed.rows(rows, m.hidden, layer.gate.int8_rows);
  norm_rows(pool, m, pass.x, m.hidden, layer.mlp_norm, seen, rows);
  add_mlp(pool, m, layer, seen, rows, pass.x, m.hidden, work);
}

// Copies rows of any stride for a matrix, padded with zeros to whole groups.
Rows copy_rows(const Matrix& m, const float* x, int64_t rows, int64_t ldx, Workspace& work) {
  const Rows given = work.given.rows(rows, m.k, m.int8_rows);
  for (int64_t r = 0; r < rows; r++) {
    float* row = writable(given) + r * given.stride;
    const int64_t known = std::min(m.k, ldx);
    std::memcpy(row, x + r * ldx, known * sizeof(float));
    std::memset(row + known, 0, (given.stride - known) * sizeof(float));
  }
  return given;
}

void multiply_rows(Pool& pool, const Matrix& m, const float* x, int64_t rows, int64_t ldx, float* y, int64_t ldy) {
  const Rows given = copy_rows(m, x, rows, ldx, workspace());
  round_rows(pool, given, rows);
  matmuls(pool, given, rows, {Target{&m, y, ldy, false}});
}

// Finds the best channel of each row, or the first of several equal ones.
void find_best(Pool& pool, const Matrix& m, const float* y, int64_t rows, int64_t ldy, int32_t* best) {
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

void logits(Pool& pool, const Matrix& head, const float* states, int64_t rows, int64_t stride, float* out, int64_t ldy,
            int32_t* best) {
  multiply_rows(pool, head, states, rows, stride, out, ldy);
  if (best) find_best(pool, head, out, rows, ldy, best);
}

// Finds the `width` best of n scores, best first; of equal ones, the first is better. The scores are
// followed by room for a multiple of 16.
void find_best_few(float* scores, int64_t n, int64_t width, int32_t* ids, float* best) {
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
      ids[at] = static_cast<int32_t>(i);
    }
  }
}

// Returns the logarithm of the sum of e to the power of scores / temperature, given the largest
// score. Scores are padded with -infinity to a multiple of 16.
float log_sum_exp(const float* scores, int64_t n, float most, float temperature) {
  const F shift = set(most), factor = set(1.0f / temperature);
  F total = set(0.0f);
  for (int64_t i = 0; i < n; i += 16) {
    total = add(total, exp(mul(sub(load(scores + i), shift), factor)));
  }
  return most / temperature + std::log(sum(total));
}

void guess(Pool& pool, const Matrix& m, const Guesses& g) {
  Workspace& work = workspace();
  const Rows given = copy_rows(m, g.states, g.rows, g.stride, work);
  for (int64_t r = 0; g.norm && r < g.rows; r++) {
    float* row = writable(given) + r * given.stride;
    rms_norm(row, g.norm, row, g.stride, g.eps);
  }
  round_rows(pool, given, g.rows);
  const int64_t wide = padded(m.n, kTile);
  float* scores = work.scores.room(g.rows * wide);
  matmuls(pool, given, g.rows, {Target{&m, scores, wide, false}});
  each_row(pool, g.rows, m.n, [&](int64_t r) {
    float* row = scores + r * wide;
    float* best = g.scores + r * g.width;
    find_best_few(row, m.n, g.width, g.ids + r * g.width, best);
    if (g.temperature <= 0) return;
    const float all = log_sum_exp(row, m.n, best[0], g.temperature);
    for (int64_t i = 0; i < g.width; i++) best[i] = best[i] / g.temperature - all;
  });
}

void embed(Pool& pool, const Matrix& m, const int64_t* ids, int64_t count, float scale, float* out, int64_t ldo) {
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

}  // namespace

extern const Functions functions;
const Functions functions = {run, draft, replay, logits, guess, multiply_rows, embed};

}  // namespace ISA
}  // namespace medusa
