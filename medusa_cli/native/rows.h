// The operations on all rows of a pass, shared among threads: norms, rounding, matmuls and MLPs.
#pragma once

#include <algorithm>
#include <memory>

#include "ops.h"

namespace medusa {
namespace ISA {

// Threads share a norm, or another operation between matmuls, if it has this many floats or more.
// With fewer, sharing takes longer than the operation.
constexpr int64_t kManyNumbers = 1 << 14;
// The minimum number of multiplications per share, and the number of shares per thread.
constexpr int64_t kLeastWork = 1 << 15;
constexpr int64_t kSharesPerThread = 8;

// A buffer that grows as needed and that later steps reuse.
template <class T>
class Buffer {
 public:
  T* reserve(int64_t count) {
    assert(count >= 0);
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

// Rows of floats and buffers for their 8-bit numbers.
class RowBuffer {
 public:
  // Returns `count` rows of k floats.
  Rows rows(int64_t count, int64_t k, bool int8) {
    Rows r = {};
    r.stride = padded(k, kUnit);
    float* x = floats_.reserve(count * r.stride);
    for (int64_t i = 0; i < count && r.stride > k; i++) {
      std::memset(x + i * r.stride + k, 0, (r.stride - k) * sizeof(float));
    }
    r.x = x;
    if (int8) {
      const int64_t groups = count * (r.stride / 32);
      r.q = bytes_.reserve(count * r.stride);
      r.scale = scales_.reserve(4 * groups);
      r.offset32 = r.scale + groups;
      r.offset16 = r.offset32 + groups;
      r.zero[0] = zeros_.reserve(7 * groups);
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

inline float* writable(const Rows& rows) { return const_cast<float*>(rows.x); }

// Calls work(row) for each row of `numbers` floats, in threads if there is enough work.
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

inline void round_rows(Pool& pool, const Rows& rows, int64_t count) {
  if (!rows.q) return;
  each_row(pool, count, rows.stride, [&](int64_t r) { round_row(rows.from(r), 0, rows.stride); });
}

// Normalizes k floats of each row in place. Then rounds the rows as round_rows does.
inline void norm_in_place(Pool& pool, const Model& m, const Rows& rows, int64_t count, const float* gain, int64_t k) {
  each_row(pool, count, rows.stride, [&](int64_t r) {
    float* row = writable(rows) + r * rows.stride;
    normalize(m.centered, row, gain, row, k, m.eps);
    if (rows.q) round_row(rows.from(r), 0, rows.stride);
  });
}

// Normalizes states [count, stride] into rows, or copies them if there is no norm. Then rounds the
// rows if they have buffers for 8-bit numbers.
inline void norm_rows(Pool& pool, const Model& m, const float* x, int64_t stride, const float* gain, const Rows& rows,
                      int64_t count) {
  each_row(pool, count, stride, [&](int64_t r) {
    float* row = writable(rows) + r * rows.stride;
    if (gain) normalize(m.centered, x + r * stride, gain, row, m.hidden, m.eps);
    else std::memcpy(row, x + r * stride, m.hidden * sizeof(float));
    if (rows.q) round_row(rows.from(r), 0, rows.stride);
  });
}

// Adds the output [rows, stride] of attention or the MLP, times the model's residual factor, to the
// states x. If the layer has a norm for the output, the norm is applied first.
inline void add_rows(Pool& pool, const Model& m, float* added, int64_t rows, const float* norm, float* x,
                     int64_t stride) {
  each_row(pool, rows, stride, [&](int64_t r) {
    float* row = added + r * stride;
    if (norm) normalize(m.centered, row, norm, row, m.hidden, m.eps);
    float* state = x + r * stride;
    const F factor = set(m.residual);
    for (int64_t i = 0; i < m.hidden; i += 16) store(state + i, add(load(state + i), mul(factor, load(row + i))));
  });
}

// One matmul of a job; y begins at the matrix's first channel.
struct Target {
  const Matrix* matrix;
  float* y;
  int64_t ldy;
  bool add;
};

inline int64_t tiles_of(const Matrix& m) { return (m.n + kTile - 1) / kTile; }

inline int64_t tiles_of_share(const Pool& pool, int64_t tiles, int64_t k, int64_t rows) {
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
    assert(targets[i].ldy >= padded(m.n, kTile));
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

// Splits several jobs into shares for threads.
class Shares {
 public:
  void clear() { jobs_.clear(); }

  // Adds a job of `parts` parts, of which `together` parts form a share.
  void add(int64_t parts, int64_t together) {
    const int64_t first = count();
    jobs_.push_back({first, first + (parts + together - 1) / together, parts, together});
  }

  int64_t count() const { return jobs_.empty() ? 0 : jobs_.back().end; }

  // Calls work(job, first part, last part + 1) for a share.
  template <class Work>
  void take(int64_t share, const Work& work) const {
    const auto job =
        std::upper_bound(jobs_.begin(), jobs_.end(), share, [](int64_t s, const Job& j) { return s < j.end; });
    assert(job != jobs_.end());
    const int64_t first = (share - job->first) * job->together;
    work(job - jobs_.begin(), first, std::min(job->parts, first + job->together));
  }

 private:
  struct Job {
    int64_t first, end, parts, together;
  };
  List<Job> jobs_;
};

// An MLP and the rows that go through it.
struct Mlp {
  Matrix gate, up, down;
  int64_t first, rows;
};

// Computes act(gate) * up, or act(up) without a gate, for pairs of tiles. Each pair is rounded as soon
// as it is computed, since its 32 channels form a group of inputs of the next matmul.
inline void gated(Pool& pool, const List<Mlp>& mlps, const Activation& activation, const Rows& x, const Rows& inner,
                  Shares& shares, Buffer<float>& buffer) {
  int64_t most = 0;
  shares.clear();
  for (const Mlp& mlp : mlps) {
    const int64_t pairs = (tiles_of(mlp.up) + 1) / 2;
    shares.add(pairs, (tiles_of_share(pool, 2 * pairs, 2 * mlp.up.k, mlp.rows) + 1) / 2);
    most = std::max(most, mlp.rows);
  }
  const int64_t size = 2 * most * 2 * kTile;
  float* gates = buffer.reserve(pool.threads() * size);
  pool.run(shares.count(), [&](int64_t share, int thread) {
    shares.take(share, [&](int64_t job, int64_t first_pair, int64_t last_pair) {
      const Mlp& mlp = mlps[job];
      const bool has_gate = mlp.gate.tiles;
      const Matrix& activated = has_gate ? mlp.gate : mlp.up;
      const Rows own = x.from(mlp.first);
      float* gate = gates + thread * size;
      float* up = gate + mlp.rows * 2 * kTile;
      for (int64_t pair = first_pair; pair < last_pair; pair++) {
        const int64_t first = 2 * pair, end = std::min(first + 2, tiles_of(mlp.up));
        ISA::multiply(activated, own, mlp.rows, first, end, gate, 2 * kTile, false);
        if (has_gate) ISA::multiply(mlp.up, own, mlp.rows, first, end, up, 2 * kTile, false);
        for (int64_t r = 0; r < mlp.rows; r++) {
          float* out = writable(inner) + (mlp.first + r) * inner.stride + first * kTile;
          for (int64_t i = 0; i < (end - first) * kTile; i += 16) {
            const int64_t at = r * 2 * kTile + i;
            const F value = load(gate + at);
            store(out + i, has_gate ? gate_by(activation, value, load(up + at)) : activate(activation, value));
          }
        }
        // Rows are rounded in a second loop: right after a row's activations, its rounding would wait for them.
        for (int64_t r = 0; inner.q && r < mlp.rows; r++) {
          round_row(inner.from(mlp.first + r), first * kTile, first * kTile + kUnit);
        }
      }
    });
  });
}

}  // namespace ISA
}  // namespace medusa
