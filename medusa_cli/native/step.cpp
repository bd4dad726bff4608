// One pass over a decoder's layers, compiled once for each instruction set.
#include "delta_net.h"
#include "experts.h"
#include "head.h"
#include "short_conv.h"

namespace medusa {
namespace ISA {

namespace {

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

// Normalizes a query or a key unless `gain` is null, and rotates it unless `cos` is null.
void norm_and_rotate(const Model& m, const Layer& layer, float* head, const float* gain, const float* cos,
                     const float* sin) {
  if (gain && !m.late_norms) head_norm(m.centered, head, gain, layer.dim, m.eps);
  if (cos) (m.pairs ? rotate_pairs : rotate)(head, cos, sin, m.rotary[layer.table] / 2);
  if (gain && m.late_norms) head_norm(m.centered, head, gain, layer.dim, m.eps);
}

// Subtracts a head's unrotated bias from its key, in the dimensions that rotate by less than a radian within 16,384
// positions. All keys lose the same numbers. This changes all scores of a query by the same number, so the softmax
// stays the same. What is left of a key has smaller numbers: in Qwen2.5, biases reach 240, and the numbers that are
// left reach only some 10.
void leave_out_bias(const Model& m, const Layer& layer, int64_t head, float* key) {
  const int64_t half = m.rotary[layer.table] / 2;
  // scale: the cosines at position 0, which equal the constant factor of the table. turn: the sines at position 1,
  // nearly the angles by which pairs turn per position.
  const float *scale = m.cos[layer.table], *turn = m.sin[layer.table] + half;
  const float* bias = layer.key.bias + head * layer.dim;
  for (int64_t i = 0; i < half; i++) {
    if (std::abs(turn[i]) * 16384.0f >= 1.0f) continue;
    const int64_t first = m.pairs ? 2 * i : i, second = m.pairs ? first + 1 : first + half;
    key[first] -= scale[i] * bias[first];
    key[second] -= scale[i] * bias[second];
  }
}

// Normalizes and rotates queries and keys, and writes keys and values into the cache. positions
// [rows]: the position of each row.
void write_kv(Pool& pool, const Model& m, const Layer& layer, const List<Span>& spans, const int32_t* positions,
              float* qkv) {
  const Widths widths(m, layer);
  const int64_t half = layer.table < 0 ? 0 : m.rotary[layer.table] / 2;
  const int64_t dim = layer.dim;
  const bool has_keys = layer.key.tiles;
  const float* query_norm = m.whole_norms ? nullptr : layer.query_norm;
  const float* key_norm = m.whole_norms ? nullptr : layer.key_norm;
  // With a soft cap or sinks, adding the same number to all scores would change their softmax.
  const bool biased = m.positions > 1 && has_keys && layer.key.bias && layer.table >= 0 && !layer.key_norm &&
                      m.cap == 0.0f && m.clip == 0.0f && !layer.sinks;
  each_row(pool, rows_of(spans), widths.all, [&](int64_t r) {
    float* row = qkv + r * widths.all;
    const Span& span = span_of(spans, r);
    const int64_t column = span.column + r - span.first;
    assert(0 <= column && column < span.capacity && span.capacity % 16 == 0);
    assert(layer.table < 0 || (0 <= positions[r] && positions[r] < m.positions));
    const float* cos = layer.table < 0 ? nullptr : m.cos[layer.table] + positions[r] * half;
    const float* sin = layer.table < 0 ? nullptr : m.sin[layer.table] + positions[r] * half;
    if (m.whole_norms && layer.query_norm) {
      normalize(m.centered, row, layer.query_norm, row, m.heads * dim, m.eps);
      if (has_keys) normalize(m.centered, row + widths.key, layer.key_norm, row + widths.key, layer.kv * dim, m.eps);
    }
    if (m.clip != 0.0f) {
      for (int64_t i = 0; i < widths.gate; i++) row[i] = std::min(std::max(row[i], -m.clip), m.clip);
    }
    for (int64_t head = 0; head < m.heads; head++) norm_and_rotate(m, layer, row + head * dim, query_norm, cos, sin);
    for (int64_t head = 0; has_keys && head < layer.kv; head++) {
      float* key = row + widths.key + head * dim;
      float* value = row + widths.value + head * dim;
      norm_and_rotate(m, layer, key, key_norm, cos, sin);
      if (biased && span.all.format == Q8_0) leave_out_bias(m, layer, head, key);
      if (layer.value_norm) head_norm(m.centered, value, layer.value_norm, dim, m.eps);
      write_column(span.of(layer, head), column, key, value, dim);
    }
  });
}

// Runs attention for the rows of all spans, whose queries are in qkv.
void attend_all(Pool& pool, const Model& m, const Layer& layer, const List<Span>& spans, const float* qkv,
                const Rows& attended, Workspace& work) {
  const Widths widths(m, layer);
  const int64_t dim = layer.dim, groups = m.heads / layer.kv;
  const float* own_sinks = layer.sinks;
  // A head's queries are split into blocks of up to kTogether queries. Blocks should be large, as each block reads all
  // columns. They are smaller only if there would otherwise be fewer blocks than threads.
  int64_t together = kTogether;
  const auto blocks_of = [&](const Span& span) { return (span.rows * groups + together - 1) / together; };
  const auto all_blocks = [&] {
    int64_t blocks = 0;
    for (const Span& span : spans) blocks += layer.kv * blocks_of(span);
    return blocks;
  };
  while (together > 1 && all_blocks() < pool.threads()) together /= 2;
  work.shares.clear();
  for (const Span& span : spans) work.shares.add(layer.kv * blocks_of(span), 1);
  work.attention.resize(std::max<size_t>(work.attention.size(), pool.threads()));
  pool.run(work.shares.count(), [&](int64_t share, int thread) {
    work.shares.take(share, [&](int64_t number, int64_t part, int64_t) {
      const Span& span = spans[number];
      const int64_t queries = span.rows * groups, blocks = blocks_of(span);
      const int64_t size = (queries + blocks - 1) / blocks;
      const int64_t head = part / blocks, first = part % blocks * size;
      const int64_t count = std::min(size, queries - first);
      const float* from[kTogether];
      float* to[kTogether];
      float sinks[kTogether];
      int64_t rows[kTogether];
      for (int64_t i = 0; i < count; i++) {
        rows[i] = (first + i) / groups;
        assert(rows[i] < span.rows && span.mask->last[rows[i]] <= span.capacity);
        const int64_t query = head * groups + (first + i) % groups;
        const int64_t row = span.first + rows[i], at = query * dim;
        if (own_sinks) sinks[i] = own_sinks[query];
        from[i] = qkv + row * widths.all + at;
        to[i] = writable(attended) + row * attended.stride + at;
      }
      attend(from, rows, count, *span.mask, span.of(layer, head), dim, m.scale, m.cap, own_sinks ? sinks : nullptr,
             work.attention[thread], to);
    });
  });
}

// Adds y W^T to the states x, with a norm and the residual factor as in add_rows.
void add_product(Pool& pool, const Matrix& w, const Rows& y, int64_t rows, const float* norm, const Model& m, float* x,
                 int64_t stride, Workspace& work) {
  if (!norm && m.residual == 1.0f) {
    matmuls(pool, y, rows, {Target{&w, x, stride, true}});
    return;
  }
  float* added = work.added.reserve(rows * stride);
  std::memset(added, 0, rows * stride * sizeof(float));
  matmuls(pool, y, rows, {Target{&w, added, stride, false}});
  add_rows(pool, m, added, rows, norm, x, stride);
}

// Completes the additional inputs of layers: adds a projection of the first states, normalized per
// layer, to the inputs' embeddings.
void complete_inputs(Pool& pool, const Model& m, const Step& step, int64_t rows, int64_t stride, Workspace& work) {
  const int64_t wide = m.layers * m.inputs;
  const Rows states = work.inputs.rows(rows, m.hidden, m.inputs_projection.int8_rows);
  norm_rows(pool, m, step.x, stride, nullptr, states, rows);
  float* projected = work.out.reserve(rows * wide);
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

// Projects a layer's additional inputs, gated by its states, and adds the result to the states.
void add_inputs(Pool& pool, const Model& m, const Layer& layer, int64_t index, const Step& step, int64_t rows,
                int64_t stride, Workspace& work) {
  const Rows states = work.inputs.rows(rows, m.hidden, layer.input_gate.int8_rows);
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

// Multiplies the output of attention by the sigmoid of the output gates.
void gate_outputs(Pool& pool, const Model& m, const Layer& layer, const float* qkv, int64_t rows,
                  const Rows& attended) {
  const Widths widths(m, layer);
  each_row(pool, rows, 16 * widths.key, [&](int64_t r) {
    const float* gates = qkv + r * widths.all + widths.gate;
    float* out = writable(attended) + r * attended.stride;
    for (int64_t i = 0; i < m.heads * layer.dim; i += 16) store(out + i, mul(load(out + i), sigmoid(load(gates + i))));
  });
}

// Multiplies normalized rows with a layer's matrices for queries, keys, values and output gates; returns
// the products, and writes keys and values into the cache.
float* project(Pool& pool, const Model& m, const Layer& layer, const List<Span>& spans, const int32_t* positions,
               const Rows& read, Workspace& work) {
  const Widths widths(m, layer);
  const int64_t rows = rows_of(spans);
  float* qkv = work.qkv.reserve(rows * widths.all);
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
  write_kv(pool, m, layer, spans, positions, qkv);
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
    const Columns all = {int32_t(cache.format), keys_of(cache, layer, slot), values_of(cache, layer, slot)};
    work.spans.push_back({all, cache.capacity, s * step.rows, step.rows, step.lengths[s], &work.masks[s]});
  }
  const float* qkv = project(pool, m, layer, work.spans, step.positions, read, work);
  const Rows attended = work.attended.rows(rows, m.heads * layer.dim, layer.out.int8_rows);
  attend_all(pool, m, layer, work.spans, qkv, attended, work);
  if (layer.output_gate.tiles) gate_outputs(pool, m, layer, qkv, rows, attended);
  return attended;
}

// Finds the parents of a step's rows, and the walk of states from row to row, for layers that follow
// paths.
void find_paths(const Step& step, Workspace& work) {
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
Rows mixer_output(Pool& pool, const Model& m, const Cache& cache, const Step& step, int64_t index, const Rows& read,
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
  if (m.kernel) find_paths(step, work);
  // Consecutive layers with the same window share the masks.
  work.masks.resize(step.slots);
  int64_t window = -1;
  for (int64_t i = step.first; i < step.end; i++) {
    const Layer& layer = m.layer[i];
    if (layer.window != window) {
      window = layer.window;
      for (int64_t s = 0; s < step.slots; s++) {
        build_mask(work.masks[s], step.rows, step.rows, step.lengths[s], step.seen + s * step.seen_slot, step.seen_row,
                   step.positions + s * step.rows, window);
      }
    }
    // Files may mix formats, so rows are rounded to 8 bits if any matrix that reads them needs 8-bit rows.
    const Rows read = work.normed.rows(rows, m.hidden, reads_int8(layer));
    norm_rows(pool, m, step.x, stride, layer.attention_norm, read, rows);
    const Rows attended = mixer_output(pool, m, cache, step, i, read, work);
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

// Returns the rows that attention reads. In each row, the normalized embedding, if there is one, precedes the
// normalized state.
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

// Keeps only the last row of each sequence for attention and the MLP.
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
    build_mask(work.masks[s], 1, 1, span.column, &itself, 1, nullptr, 0);
  }
}

void draft(Pool& pool, const Model& m, const DraftPass& pass) {
  Workspace& work = workspace();
  const Layer& layer = *m.layer;
  work.masks.resize(pass.sequences);
  work.spans.clear();
  int64_t rows = 0;
  for (int64_t s = 0; s < pass.sequences; s++) {
    const DraftRows& own = pass.own[s];
    const int64_t columns = own.earlier + own.rows;
    if (!pass.last) build_mask(work.masks[s], own.rows, columns, own.prefix, own.seen, columns, nullptr, 0);
    const Columns all = {F32, reinterpret_cast<uint8_t*>(own.keys), reinterpret_cast<uint8_t*>(own.values)};
    work.spans.push_back({all, own.capacity, rows, own.rows, own.prefix + own.earlier, &work.masks[s]});
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

}  // namespace

extern const Functions functions;
const Functions functions = {run, draft, replay, logits, guess, multiply_rows, embed};

}  // namespace ISA
}  // namespace medusa
