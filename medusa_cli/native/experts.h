// Mixtures of experts: the choice of a row's experts, and their outputs.
#pragma once

#include "workspace.h"

namespace medusa {
namespace ISA {

// Chooses two experts by sparsemixer. The second is the best expert apart from the first. An expert's
// weight is its share in a softmax over the experts that it was chosen from, counting only those whose
// scores are close to its own.
inline void sparsemixer(const Model& m, int64_t n, const float* scores, Pick* picks) {
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

// Chooses a row's experts by their scores [experts padded to 16], and sorts the chosen ones by index.
inline void choose_experts(const Model& m, const Layer& layer, float* scores, Pick* picks) {
  const int64_t n = layer.experts, wide = padded(n, 16);
  if (m.jitter != 0.0f) return sparsemixer(m, n, scores, picks);
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
  // picks[0 .. count - 1] are the best experts so far, best first.
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    if (count == m.top_experts && !better(i, picks[count - 1].expert)) continue;
    int64_t at = count < m.top_experts ? count++ : count - 1;
    for (; at && better(i, picks[at - 1].expert); at--) picks[at] = picks[at - 1];
    picks[at].expert = i;
  }
  assert(count == m.top_experts);
  std::sort(picks, picks + count, [](const Pick& a, const Pick& b) { return a.expert < b.expert; });
  float total = 0;
  for (int64_t i = 0; i < count; i++) total += scores[picks[i].expert];
  for (int64_t i = 0; i < count; i++) {
    const float score = scores[picks[i].expert];
    picks[i].weight = (m.normalized ? score / total : score) * m.expert_scale;
  }
}

// Returns the matrix of one expert; the experts' matrices lie one after another.
inline Matrix of_expert(const Matrix& all, int64_t experts, int64_t expert) {
  const int64_t tile_bytes = all.k / info(all.format).block * info(all.format).tile_bytes;
  assert(0 <= expert && expert < experts && all.n % experts == 0 && all.n / experts % kTile == 0);
  Matrix own = all;
  own.n = all.n / experts;
  own.tiles += expert * (own.n / kTile) * tile_bytes;
  if (own.bias) own.bias += expert * own.n;
  return own;
}

// Adds the output of a mixture of experts for normalized rows to the states x. Rows are gathered by
// expert, so that each expert's matrices are read only once. A row's output is summed over the row's
// experts in ascending order.
inline void add_mixture(Pool& pool, const Model& m, const Layer& layer, const Rows& normed, int64_t rows, float* x,
                        int64_t stride, Workspace& work) {
  const int64_t top = m.top_experts, shared = layer.shared_up.tiles ? rows : 0;
  const int64_t wide = padded(layer.experts, kTile);
  float* scores = work.scores.reserve(rows * (wide + kTile));
  float* gates = scores + rows * wide;  // of the shared MLP
  matmuls(pool, normed, rows, {Target{&layer.router, scores, wide, false}});
  if (layer.shared_router.tiles) matmuls(pool, normed, rows, {Target{&layer.shared_router, gates, kTile, false}});

  work.picks.resize(rows * top);
  each_row(pool, rows, 16 * wide,
           [&](int64_t r) { choose_experts(m, layer, scores + r * wide, &work.picks[r * top]); });
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

  float* out = work.out.reserve((gathered + shared) * stride);
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

  float* added = work.added.reserve(rows * stride);
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

}  // namespace ISA
}  // namespace medusa
