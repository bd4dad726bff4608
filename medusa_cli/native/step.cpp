// One pass over a decoder's layers, compiled once for each instruction set.
#include "step.h"

#include <memory>
#include <vector>

#include "attention.h"
#include "ops.h"

namespace medusa {
namespace ISA {

namespace {

// Numbers from which on threads share the operations between matmuls; fewer take less time than handing them out.
constexpr int64_t kManyNumbers = 1 << 14;
// Multiplications that make a share worth taking, and shares for each thread.
constexpr int64_t kLeastWork = 1 << 15;
constexpr int64_t kSharesPerThread = 8;

// A buffer that grows and is used again by the next step.
template <class T>
class Buffer {
 public:
  T* room(int64_t count) {
    if (count > size_) {
      memory_.reset(new T[count + 64 / sizeof(T)]);
      size_ = count;
    }
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return reinterpret_cast<T*>((address + 63) / 64 * 64);
  }

 private:
  std::unique_ptr<T[]> memory_;
  int64_t size_ = 0;
};

// Rows of floats with room for their 8 bits.
class RowBuffer {
 public:
  // Returns rows of k numbers; x: where the floats are if not in this buffer, [count, stride].
  Rows rows(int64_t count, int64_t k, bool int8, const float* x = nullptr, int64_t stride = 0) {
    Rows r = {};
    r.stride = x ? stride : padded(k, kUnit);
    if (!x) {
      float* own = floats_.room(count * r.stride);
      for (int64_t i = 0; i < count && r.stride > k; i++) {
        std::memset(own + i * r.stride + k, 0, (r.stride - k) * sizeof(float));
      }
      x = own;
    }
    r.x = x;
    if (int8) {
      const int64_t groups = count * (r.stride / 32);
      r.q = bytes_.room(count * r.stride);
      r.scale = scales_.room(4 * groups);
      r.offset32 = r.scale + groups;
      r.offset16 = r.offset32 + groups;
      r.zero[0] = zeros_.room(7 * groups);
      for (int i = 1; i < 4; i++) r.zero[i] = r.zero[i - 1] + groups;
      r.zero[4] = r.zero[3] + 2 * groups;
    }
    return r;
  }

 private:
  Buffer<float> floats_, scales_;
  Buffer<int8_t> bytes_;
  Buffer<int32_t> zeros_;
};

// The buffers of passes. One pass runs at a time.
struct Workspace {
  RowBuffer normed, attended, inner, given;
  Buffer<float> qkv, added, gates, best;
  Buffer<int64_t> best_index;
  std::vector<AttentionRoom> rooms;
  std::vector<Sight> sights;
};

Workspace& workspace() {
  static Workspace* shared = new Workspace;
  return *shared;
}

float* writable(const Rows& rows) { return const_cast<float*>(rows.x); }

// Calls work(row) for each row of `numbers` numbers, by threads if there is enough work.
template <class Work>
void each_row(Pool& pool, int64_t rows, int64_t numbers, const Work& work) {
  if (rows * numbers < kManyNumbers) {
    for (int64_t r = 0; r < rows; r++) work(r);
    return;
  }
  const int64_t together = std::max<int64_t>(1, rows / (kSharesPerThread * pool.threads()));
  pool.run((rows + together - 1) / together, [&](int64_t share, int) {
    const int64_t end = std::min(rows, (share + 1) * together);
    for (int64_t r = share * together; r < end; r++) work(r);
  });
}

void round_rows(Pool& pool, const Rows& rows, int64_t count) {
  if (!rows.q) return;
  each_row(pool, count, rows.stride, [&](int64_t r) { round_row(rows.from(r), 0, rows.stride); });
}

// Normalises states [count, stride] into rows, and rounds these.
void norm_rows(Pool& pool, const float* x, int64_t stride, const float* gain, int64_t hidden, float eps,
               const Rows& rows, int64_t count) {
  each_row(pool, count, stride, [&](int64_t r) {
    rms_norm(x + r * stride, gain, writable(rows) + r * rows.stride, hidden, eps);
    if (rows.q) round_row(rows.from(r), 0, rows.stride);
  });
}

// One matmul of a job: y begins at the matrix's first channel.
struct Target {
  const Matrix* matrix;
  float* y;
  int64_t ldy;
  bool add;
};

int64_t tiles_of(const Matrix& m) { return (m.n + kTile - 1) / kTile; }

int64_t tiles_of_share(const Pool& pool, int64_t tiles, int64_t k, int64_t rows) {
  const int64_t even = tiles / (kSharesPerThread * pool.threads());
  const int64_t worth = kLeastWork / (kTile * k * rows);
  return std::max<int64_t>(1, std::max(even, worth));
}

// Multiplies the same rows with several matrices in one job.
template <int N>
void matmuls(Pool& pool, const Rows& x, int64_t rows, const Target (&targets)[N]) {
  int64_t first_share[N + 1] = {0}, together[N];
  for (int i = 0; i < N; i++) {
    const Matrix& m = *targets[i].matrix;
    together[i] = tiles_of_share(pool, tiles_of(m), m.k, rows);
    first_share[i + 1] = first_share[i] + (tiles_of(m) + together[i] - 1) / together[i];
  }
  pool.run(first_share[N], [&](int64_t share, int) {
    int i = 0;
    while (share >= first_share[i + 1]) i++;
    const Target& target = targets[i];
    const int64_t first = (share - first_share[i]) * together[i];
    const int64_t end = std::min(tiles_of(*target.matrix), first + together[i]);
    ISA::multiply(*target.matrix, x, rows, first, end, target.y + first * kTile, target.ldy, target.add);
  });
}

// Computes act(gate) * up by pairs of tiles, and rounds them at once: 32 channels are a group of the next matmul.
void gated(Pool& pool, const Layer& layer, int64_t activation, const Rows& x, int64_t rows, const Rows& inner,
           Workspace& work) {
  const int64_t pairs = (tiles_of(layer.gate) + 1) / 2;
  const int64_t together = (tiles_of_share(pool, 2 * pairs, 2 * layer.gate.k, rows) + 1) / 2;
  const int64_t room = 2 * rows * 2 * kTile;
  float* gates = work.gates.room(pool.threads() * room);
  pool.run((pairs + together - 1) / together, [&](int64_t share, int thread) {
    float* gate = gates + thread * room;
    float* up = gate + rows * 2 * kTile;
    const int64_t last = std::min(pairs, (share + 1) * together);
    for (int64_t pair = share * together; pair < last; pair++) {
      const int64_t first = 2 * pair, end = std::min(first + 2, tiles_of(layer.gate));
      ISA::multiply(layer.gate, x, rows, first, end, gate, 2 * kTile, false);
      ISA::multiply(layer.up, x, rows, first, end, up, 2 * kTile, false);
      for (int64_t r = 0; r < rows; r++) {
        float* out = writable(inner) + r * inner.stride + first * kTile;
        for (int64_t i = 0; i < (end - first) * kTile; i += 16) {
          const int64_t at = r * 2 * kTile + i;
          store(out + i, mul(activate(static_cast<int32_t>(activation), load(gate + at)), load(up + at)));
        }
        if (inner.q) round_row(inner.from(r), first * kTile, first * kTile + kUnit);
      }
    }
  });
}

// Where a layer's queries, keys and values of one row lie.
struct Widths {
  int64_t key, value, all;
  explicit Widths(const Model& m)
      : key(padded(m.heads * m.dim, kTile)),
        value(key + padded(m.kv * m.dim, kTile)),
        all(value + padded(m.kv * m.dim, kTile)) {}
};

float* keys_of(const Model& m, const Cache& cache, int64_t layer, int64_t slot, int64_t head) {
  return cache.keys + ((layer * cache.slots + slot) * m.kv + head) * cache.capacity * m.dim;
}

float* values_of(const Model& m, const Cache& cache, int64_t layer, int64_t slot, int64_t head) {
  return cache.values + ((layer * cache.slots + slot) * m.kv + head) * cache.capacity * padded(m.dim, 16);
}

// Normalises and turns queries and keys, and writes keys and values into the cache.
void place(Pool& pool, const Model& m, const Cache& cache, const Step& step, int64_t index, float* qkv) {
  const Layer& layer = m.layer[index];
  const Widths widths(m);
  const int64_t half = m.rotary / 2, wide = padded(m.dim, 16);
  each_row(pool, step.slots * step.rows, widths.all, [&](int64_t r) {
    float* row = qkv + r * widths.all;
    const int64_t slot = step.first_slot + r / step.rows;
    const int64_t column = step.lengths[r / step.rows] + r % step.rows;
    const float* cos = m.cos[layer.table] + step.positions[r] * half;
    const float* sin = m.sin[layer.table] + step.positions[r] * half;
    for (int64_t head = 0; head < m.heads; head++) {
      float* query = row + head * m.dim;
      if (layer.query_norm) head_norm(query, layer.query_norm, m.dim, m.eps);
      rotate(query, cos, sin, half);
    }
    for (int64_t head = 0; head < m.kv; head++) {
      float* key = row + widths.key + head * m.dim;
      if (layer.key_norm) head_norm(key, layer.key_norm, m.dim, m.eps);
      rotate(key, cos, sin, half);
      float* keys = keys_of(m, cache, index, slot, head) + column / 16 * 16 * m.dim + column % 16;
      for (int64_t d = 0; d < m.dim; d++) keys[16 * d] = key[d];
      float* values = values_of(m, cache, index, slot, head) + column * wide;
      std::memcpy(values, row + widths.value + head * m.dim, m.dim * sizeof(float));
    }
  });
}

void attend_all(Pool& pool, const Model& m, const Cache& cache, const Step& step, int64_t index, const float* qkv,
                const std::vector<Sight>& sights, const Rows& attended, Workspace& work) {
  const Widths widths(m);
  const int64_t groups = m.heads / m.kv, queries = step.rows * groups;
  // As many blocks as threads can share, of as many queries as read keys together.
  const int64_t parts = step.slots * m.kv;
  int64_t together = QUERIES;
  while (together > 1 && parts * ((queries + together - 1) / together) < 2 * pool.threads()) together /= 2;
  const int64_t blocks = (queries + together - 1) / together;
  work.rooms.resize(std::max<size_t>(work.rooms.size(), pool.threads()));
  pool.run(parts * blocks, [&](int64_t share, int thread) {
    const int64_t part = share / blocks, block = share % blocks, slot = part / m.kv, head = part % m.kv;
    const int64_t first = block * together, count = std::min(together, queries - first);
    const float* from[QUERIES];
    float* to[QUERIES];
    int64_t rows[QUERIES];
    for (int64_t i = 0; i < count; i++) {
      rows[i] = (first + i) / groups;
      const int64_t row = slot * step.rows + rows[i], at = (head * groups + (first + i) % groups) * m.dim;
      from[i] = qkv + row * widths.all + at;
      to[i] = writable(attended) + row * attended.stride + at;
    }
    const int64_t in_cache = step.first_slot + slot;
    attend(from, rows, static_cast<int>(count), sights[slot], keys_of(m, cache, index, in_cache, head),
           values_of(m, cache, index, in_cache, head), m.dim, padded(m.dim, 16), m.scale, work.rooms[thread], to);
  });
}

// Adds y W^T to the states x, through a norm where the layer has one after it.
void add_product(Pool& pool, const Matrix& m, const Rows& y, int64_t rows, const float* norm, const Model& model,
                 float* x, int64_t stride, Workspace& work) {
  if (!norm) {
    matmuls(pool, y, rows, {Target{&m, x, stride, true}});
    return;
  }
  float* added = work.added.room(rows * stride);
  std::memset(added, 0, rows * stride * sizeof(float));
  matmuls(pool, y, rows, {Target{&m, added, stride, false}});
  each_row(pool, rows, stride, [&](int64_t r) {
    float* row = added + r * stride;
    rms_norm(row, norm, row, model.hidden, model.eps);
    float* state = x + r * stride;
    for (int64_t i = 0; i < model.hidden; i += 16) store(state + i, add(load(state + i), load(row + i)));
  });
}

void run(Pool& pool, const Model& m, const Cache& cache, const Step& step) {
  Workspace& work = workspace();
  const Widths widths(m);
  const int64_t rows = step.slots * step.rows, stride = padded(m.hidden, kUnit);
  float* qkv = work.qkv.room(rows * widths.all);
  // Layers of one window share what their rows see.
  work.sights.resize(step.slots);
  int64_t window = -1;
  for (int64_t i = step.first; i < step.end; i++) {
    const Layer& layer = m.layer[i];
    if (layer.window != window) {
      window = layer.window;
      for (int64_t s = 0; s < step.slots; s++) {
        look(work.sights[s], step.rows, step.lengths[s], step.seen + s * step.seen_slot, step.seen_row,
             step.positions + s * step.rows, window);
      }
    }
    const Rows read = work.normed.rows(rows, m.hidden, layer.query.int8_rows);
    norm_rows(pool, step.x, stride, layer.attention_norm, m.hidden, m.eps, read, rows);
    matmuls(pool, read, rows, {
      Target{&layer.query, qkv, widths.all, false},
      Target{&layer.key, qkv + widths.key, widths.all, false},
      Target{&layer.value, qkv + widths.value, widths.all, false},
    });
    place(pool, m, cache, step, i, qkv);
    const Rows attended = work.attended.rows(rows, m.heads * m.dim, layer.out.int8_rows);
    attend_all(pool, m, cache, step, i, qkv, work.sights, attended, work);
    round_rows(pool, attended, rows);
    add_product(pool, layer.out, attended, rows, layer.attention_out_norm, m, step.x, stride, work);

    const Rows seen = work.normed.rows(rows, m.hidden, layer.gate.int8_rows);
    norm_rows(pool, step.x, stride, layer.mlp_norm, m.hidden, m.eps, seen, rows);
    const Rows inner = work.inner.rows(rows, m.inner, layer.down.int8_rows);
    gated(pool, layer, m.activation, seen, rows, inner, work);
    add_product(pool, layer.down, inner, rows, layer.mlp_out_norm, m, step.x, stride, work);

    if (i + 1 == m.layers) {
      each_row(pool, rows, stride, [&](int64_t r) {
        float* state = step.x + r * stride;
        rms_norm(state, m.norm, state, m.hidden, m.eps);
      });
    }
    for (int64_t t = 0; t < step.taps; t++) {
      if (step.tap_layers[t] == i) std::memcpy(step.tapped + t * rows * stride, step.x, rows * stride * sizeof(float));
    }
  }
}

void multiply_rows(Pool& pool, const Matrix& m, const float* x, int64_t rows, int64_t ldx, float* y, int64_t ldy) {
  Workspace& work = workspace();
  // Rows of any stride are copied into whole groups.
  const Rows given = work.given.rows(rows, m.k, m.int8_rows);
  for (int64_t r = 0; r < rows; r++) {
    float* row = writable(given) + r * given.stride;
    const int64_t known = std::min(m.k, ldx);
    std::memcpy(row, x + r * ldx, known * sizeof(float));
    std::memset(row + known, 0, (given.stride - known) * sizeof(float));
  }
  round_rows(pool, given, rows);
  matmuls(pool, given, rows, {Target{&m, y, ldy, false}});
}

// The best channel of each row, the first of equals.
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

void embed(Pool& pool, const Matrix& m, const int64_t* ids, int64_t count, float scale, float* out, int64_t ldo) {
  const int64_t tile_bytes = m.k / info(m.format).block * info(m.format).tile_bytes;
  each_row(pool, count, 16 * m.k, [&](int64_t r) {
    Bytes bytes;
    Floats floats;
    const uint8_t* tile = m.tiles + ids[r] / kTile * tile_bytes;
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
const Functions functions = {run, logits, multiply_rows, embed};

}  // namespace ISA
}  // namespace medusa
