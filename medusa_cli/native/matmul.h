// Matmuls of rows with matrices in tiles.
//
// A share of a matmul is some tiles of 16 channels for all rows. For 8-bit rows, a tile is unpacked
// into bytes with scales; for rows of floats, a quantized tile is unpacked into floats. With few 8-bit
// rows, or with weights that are floats, each block of rows reads the tile again and stores nothing.
// Otherwise, 256 inputs of the tile are unpacked and stored, and blocks of rows are multiplied with them:
//
//                 256 inputs                 16 channels
//     row 0   [ x x x x . . . ]            [ w w w w . . ]
//     row 1   [ x x x x . . . ]     x      [ w w w w . . ]  = one tile
//
// A row's result is one sum in a fixed order, which does not depend on other rows.
#pragma once

#include <algorithm>
#include <cassert>

#include "amx.h"
#include "structures.h"
#include "unpack.h"

namespace medusa {

namespace ISA {

// Rows as matmuls read them: floats [rows, stride] and, if a matrix needs them, 8-bit numbers in
// groups of 32 inputs, where x ~ scale * q. For the zeros and offsets of weights, the sum of each
// group is computed in advance.
struct Rows {
  const float* x;
  int64_t stride;    // of x and q, a multiple of 32
  int8_t* q;
  float* scale;      // [rows, stride / 32]
  float* offset32;   // scale * sum of a group
  float* offset16;   // [rows, stride / 16], for half groups
  int32_t* zero[5];  // -zero * sum: of groups [rows, stride / 32] for zeros 8, 16, 128; of half groups for 32, 4

  Rows from(int64_t row) const {
    const int64_t groups = row * (stride / 32), halves = row * (stride / 16);
    Rows r = *this;
    r.x += row * stride;
    if (q) {
      r.q += row * stride;
      r.scale += groups;
      r.offset32 += groups;
      r.offset16 += halves;
      for (int i = 0; i < 5; i++) r.zero[i] += i < 3 ? groups : halves;
    }
    return r;
  }
};

constexpr int kZeros[5] = {8, 16, 128, 32, 4};

// If the absolute values of all inputs of a group are below this number, the group is rounded to zeros,
// because 127 divided by such a value may be infinite.
constexpr float kLeastSize = 1e-30f;

// Rounds inputs first .. end - 1 of one row to 8 bits. `first` and `end` are multiples of 32.
inline void round_row(const Rows& row, int64_t first, int64_t end) {
  assert(row.q && first % kUnit == 0 && end % kUnit == 0 && 0 <= first && end <= row.stride);
  for (int64_t g = first / 32; g < end / 32; g++) {
    const float* x = row.x + 32 * g;
    const F a = load(x), b = load(x + 16);
    const float size = largest(max(abs(a), abs(b)));
    const bool is_zero = size < kLeastSize;
    const float inverse = is_zero ? 0.0f : 127.0f / size;
    const float scale = is_zero ? 0.0f : size / 127.0f;
    const F qa = round(mul(a, set(inverse))), qb = round(mul(b, set(inverse)));
    int8_t* q = row.q + 32 * g;
    store_i8(q, qa);
    store_i8(q + 16, qb);
    // Sums of 16 integers below 128 are exact in floats.
    const float sums[2] = {sum(qa), sum(qb)};
    const float whole = sums[0] + sums[1];
    row.scale[g] = scale;
    row.offset32[g] = scale * whole;
    for (int i = 0; i < 3; i++) row.zero[i][g] = -kZeros[i] * int32_t(whole);
    for (int half = 0; half < 2; half++) {
      row.offset16[2 * g + half] = scale * sums[half];
      for (int i = 3; i < 5; i++) row.zero[i][2 * g + half] = -kZeros[i] * int32_t(sums[half]);
    }
  }
}

// The inputs of the functions below: 8-bit rows, from a given row and a given input on.
struct Inputs {
  const int8_t* q;
  const float* scale;
  const float* offset;
  const int32_t* zero;
  int64_t stride;  // of q
  int64_t units;   // numbers per row of scale; a row of offset or zero has as many, or twice as many
};

template <int FORMAT>
inline Inputs inputs_of(const Rows& x, int64_t row, int64_t first) {
  using K = Kind<FORMAT>;
  const int64_t units = x.stride / kUnit;
  const int64_t at = row * units + first / kUnit;
  const float* offset = K::groups == 1 ? x.offset32 : x.offset16;
  const int32_t* zero = x.zero[K::zero < 0 ? 0 : K::zero];
  return {x.q + row * x.stride + first, x.scale + at, offset + at * K::groups, zero + at * K::groups, x.stride, units};
}

// Adds the dot products of R rows with one unit of weights to the sums of kLanes channels. u: the
// unit's index in the inputs.
template <int FORMAT, int R>
MEDUSA_INLINE void add_unit(const B* weights, const L* scale, const L* offset, const Inputs& x, int64_t u, L* total) {
  using K = Kind<FORMAT>;
  constexpr int vectors = 8 / K::groups;
  MEDUSA_UNROLL for (int g = 0; g < K::groups; g++) {
    MEDUSA_UNROLL for (int r = 0; r < R; r++) {
      const int64_t at = (r * x.units + u) * K::groups + g;
      const I first = set_i(K::zero < 0 ? 0 : x.zero[at]);
      const int8_t* inputs = x.q + r * x.stride + u * kUnit + g * kUnit / K::groups;
      const I sum = dot<K::dot_bits, vectors>(first, weights + g * vectors, inputs);
      total[r] = fma_l(to_floats(sum), mul_l(scale[g], set_l(x.scale[r * x.units + u])), total[r]);
      if (K::has_offset) total[r] = fma_l(offset[g], set_l(x.offset[at]), total[r]);
    }
  }
}

// Adds the dot products of R rows with unpacked bytes to sums [R, 16].
template <int FORMAT, int R>
inline void add_bytes(const Bytes& w, const Inputs& x, float* sums) {
  constexpr int groups = Kind<FORMAT>::groups;
  for (int lane = 0; lane < kTile; lane += kLanes) {
    L total[R];
    MEDUSA_UNROLL for (int r = 0; r < R; r++) total[r] = load_l(sums + r * kTile + lane);
    for (int u = 0; u < w.units; u++) {
      B weights[8];
      L scale[2], offset[2];
      MEDUSA_UNROLL for (int j = 0; j < 8; j++) weights[j] = load_b(w.q[u][j] + 4 * lane);
      MEDUSA_UNROLL for (int g = 0; g < groups; g++) {
        scale[g] = load_l(w.scale[groups * u + g] + lane);
        offset[g] = load_l(w.offset[groups * u + g] + lane);
      }
      add_unit<FORMAT, R>(weights, scale, offset, x, u, total);
    }
    MEDUSA_UNROLL for (int r = 0; r < R; r++) store_l(sums + r * kTile + lane, total[r]);
  }
}

// The number of vectors of sums that fit in registers next to the weights of a unit: 4 in 16
// registers, 8 in 32 registers.
constexpr int kHeldSums = kBlockRows;

// Adds the dot products of R rows with units first .. end - 1 of a tile, for PARTS * kLanes channels
// from `lane` on, to sums [R, 16]. If `first` is 0, the sums begin at 0. As many bytes are prefetched
// as are read.
template <int FORMAT, int R, int PARTS>
inline void add_packed(const uint8_t* tile, int64_t first, int64_t end, int lane, const Inputs& x, float* sums) {
  constexpr int64_t bytes = unit_bytes(FORMAT);
  const uint8_t* ahead = tile + bytes * lane / kTile + kAhead;
  L total[PARTS][R];
  MEDUSA_UNROLL for (int part = 0; part < PARTS; part++) {
    MEDUSA_UNROLL for (int r = 0; r < R; r++) {
      total[part][r] = first ? load_l(sums + r * kTile + lane + part * kLanes) : set_l(0.0f);
    }
  }
  for (int64_t u = first; u < end; u++) {
    prefetch(ahead + u * bytes, bytes * PARTS * kLanes / kTile);
    MEDUSA_UNROLL for (int part = 0; part < PARTS; part++) {
      B weights[8];
      L scale[2], offset[2];
      unpack_unit<FORMAT, Kind<FORMAT>::is_signed>(tile, u, lane + part * kLanes, weights, scale, offset);
      add_unit<FORMAT, R>(weights, scale, offset, x, u, total[part]);
    }
  }
  MEDUSA_UNROLL for (int part = 0; part < PARTS; part++) {
    MEDUSA_UNROLL for (int r = 0; r < R; r++) store_l(sums + r * kTile + lane + part * kLanes, total[part][r]);
  }
}

// Sets sums [R, 16] to the dot products of R rows with a whole tile, which is unpacked unit by unit. If
// registers cannot hold the sums of all channels, groups of channels take turns after every 256 inputs.
template <int FORMAT, int R>
inline void multiply_packed(const uint8_t* tile, int64_t units, const Inputs& x, float* sums) {
  constexpr int all = kTile / kLanes;
  constexpr int fit = R < kHeldSums ? kHeldSums / R : 1;
  constexpr int parts = fit < all ? fit : all;
  const int64_t together = parts == all ? units : kChunk / kUnit;
  for (int64_t first = 0; first < units; first += together) {
    const int64_t end = std::min(units, first + together);
    for (int lane = 0; lane < kTile; lane += parts * kLanes) {
      add_packed<FORMAT, R, parts>(tile, first, end, lane, x, sums);
    }
  }
}

// 256 inputs of a tile in a format of floats, or as many as are left, from address `p` on.
template <int FORMAT>
struct FloatWeights {
  const uint8_t* p;
  int inputs;

  // Returns the weights of input k for kLanes channels from `lane` on.
  MEDUSA_INLINE L load(int k, int lane) const {
    const int64_t at = k * kTile + lane;
    if constexpr (FORMAT == F32) return load_l(reinterpret_cast<const float*>(p) + at);
    else if constexpr (FORMAT == F16) return half_l(reinterpret_cast<const uint16_t*>(p) + at);
    else return bf16_l(reinterpret_cast<const uint16_t*>(p) + at);
  }

  // Prefetches the weights of two inputs.
  MEDUSA_INLINE void fetch(int k) const {
    constexpr int64_t bytes = info(FORMAT).tile_bytes;
    prefetch(p + k * bytes + kAhead, 2 * bytes);
  }
};

// Adds the dot products of R rows with weights (FloatWeights or Floats) to sums [R, 16]. The products of
// even inputs and those of odd inputs are summed separately before the two sums are added.
template <int R, class Weights>
inline void add_floats(const Weights& weights, const float* x, int64_t stride, float* sums) {
  for (int lane = 0; lane < kTile; lane += kLanes) {
    L even[R], odd[R];
    MEDUSA_UNROLL for (int r = 0; r < R; r++) even[r] = odd[r] = set_l(0.0f);
    int k = 0;
    for (; k + 1 < weights.inputs; k += 2) {
      weights.fetch(k);
      const L w0 = weights.load(k, lane), w1 = weights.load(k + 1, lane);
      MEDUSA_UNROLL for (int r = 0; r < R; r++) {
        even[r] = fma_l(set_l(x[r * stride + k]), w0, even[r]);
        odd[r] = fma_l(set_l(x[r * stride + k + 1]), w1, odd[r]);
      }
    }
    if (k < weights.inputs) {
      MEDUSA_UNROLL for (int r = 0; r < R; r++) {
        even[r] = fma_l(set_l(x[r * stride + k]), weights.load(k, lane), even[r]);
      }
    }
    MEDUSA_UNROLL for (int r = 0; r < R; r++) {
      const L before = load_l(sums + r * kTile + lane);
      store_l(sums + r * kTile + lane, add_l(before, add_l(even[r], odd[r])));
    }
  }
}

// Calls work(std::integral_constant<int, count>) for a count of at most MOST; does nothing for 0.
template <int MOST, class Work>
inline void with_count(int64_t count, const Work& work) {
  if constexpr (MOST > 0) {
    if (count == MOST) work(std::integral_constant<int, MOST>());
    else with_count<MOST - 1>(count, work);
  }
}

// Calls work(std::integral_constant<int, R>, first row) for each block of R <= MOST rows.
template <int MOST, class Work>
inline void by_blocks(int64_t rows, const Work& work) {
  int64_t row = 0;
  for (; rows - row >= MOST; row += MOST) work(std::integral_constant<int, MOST>(), row);
  with_count<MOST - 1>(rows - row, [&](auto r) { work(r, row); });
}

// The number of rows whose sums stay in a CPU cache while a tile's chunks are processed.
constexpr int64_t kPanel = 64;

// Up to this many rows, a tile is unpacked again for each block of rows, because storing the unpacked
// tile would take longer. If blocks have eight rows and all channels, this holds for any number of rows.
constexpr int64_t kFewRows = kBlockRows < 8 ? kBlockRows : kLanes < kTile ? 2 * kBlockRows : kPanel;

#if defined(__AMX_INT8__)

// The number of units whose products are being computed while the products of an earlier unit are added.
constexpr int kUnderWay = 2;

// Adds the dot products of R <= 16 rows with unpacked bytes to sums [R, 16]. The bytes are signed if
// there are no offsets. LAST: as in multiply_unit. With each unit, the next `bytes` bytes from `ahead`
// on are prefetched. To prefetch the bytes of all units at once would delay other reads.
template <bool HAS_OFFSET, int R, bool LAST>
inline void add_bytes_amx(const Bytes& w, const Inputs& x, const uint8_t* ahead, int64_t bytes, float* sums) {
  alignas(64) int32_t products[kUnderWay + 1][R][kTile];
  L total[R];
  MEDUSA_UNROLL for (int r = 0; r < R; r++) total[r] = load_l(sums + r * kTile);
  for (int next = 0; next < w.units + kUnderWay; next++) {
    if (next < w.units) {
      multiply_unit<LAST, !HAS_OFFSET>(x.q + next * kUnit, x.stride, w.q[next][0], products[next % (kUnderWay + 1)]);
    }
    const int u = next - kUnderWay;
    if (u < 0) continue;
    prefetch(ahead + u * bytes, bytes);
    const L scale = load_l(w.scale[u]), offset = load_l(w.offset[u]);
    MEDUSA_UNROLL for (int r = 0; r < R; r++) {
      const int64_t at = r * x.units + u;
      const L sum = to_floats(_mm512_load_si512(products[u % (kUnderWay + 1)][r]));
      total[r] = fma_l(sum, mul_l(scale, set_l(x.scale[at])), total[r]);
      if (HAS_OFFSET) total[r] = fma_l(offset, set_l(x.offset[at]), total[r]);
    }
  }
  MEDUSA_UNROLL for (int r = 0; r < R; r++) store_l(sums + r * kTile, total[r]);
}

// From this many rows on, AMX is faster than other instructions. With AMX, a unit takes nearly as long
// for one row as for 16.
constexpr int64_t kLeastAmxRows = 9;

inline bool uses_amx(int32_t format, int64_t rows) { return info(format).group == kUnit && rows >= kLeastAmxRows; }

// Does by AMX what multiply_bytes does, for formats with one group per unit.
template <int FORMAT>
inline void multiply_bytes_amx(const uint8_t* tile, int64_t k, const Rows& x, int64_t rows, Bytes& unpacked,
                               float* sums) {
  constexpr bool has_offset = Kind<FORMAT>::has_offset;
  std::memset(sums, 0, rows * kTile * sizeof(float));
  for (int64_t first = 0; first < k; first += kChunk) {
    const uint8_t* blocks = chunk_of(FORMAT, tile, first);
    unpacked.units = static_cast<int>(std::min<int64_t>(kChunk, k - first) / kUnit);
    unpack_chunk<FORMAT, !has_offset, false>(blocks, unpacked);
    by_blocks<kAmxRows>(rows, [&](auto r, int64_t row) {
      constexpr int R = decltype(r)::value;
      const int64_t bytes = row ? 0 : unit_bytes(FORMAT);
      const Inputs inputs = inputs_of<FORMAT>(x, row, first);
      add_bytes_amx<has_offset, R, (R < kAmxRows)>(unpacked, inputs, blocks + kAhead, bytes, sums + row * kTile);
    });
  }
}

#endif

// Sets sums [rows, 16] to the dot products of 8-bit rows with a tile of k inputs.
template <int FORMAT>
inline void multiply_bytes(const uint8_t* tile, int64_t k, const Rows& x, int64_t rows, Bytes& unpacked, float* sums) {
#if defined(__AMX_INT8__)
  if constexpr (Kind<FORMAT>::groups == 1) {
    if (uses_amx(FORMAT, rows)) return multiply_bytes_amx<FORMAT>(tile, k, x, rows, unpacked, sums);
  }
#endif
  if (kFewRows == kPanel || rows <= kFewRows) {
    by_blocks<kBlockRows>(rows, [&](auto r, int64_t row) {
      constexpr int R = decltype(r)::value;
      multiply_packed<FORMAT, R>(tile, k / kUnit, inputs_of<FORMAT>(x, row, 0), sums + row * kTile);
    });
    return;
  }
  std::memset(sums, 0, rows * kTile * sizeof(float));
  for (int64_t first = 0; first < k; first += kChunk) {
    unpacked.units = static_cast<int>(std::min<int64_t>(kChunk, k - first) / kUnit);
    unpack_chunk<FORMAT, Kind<FORMAT>::is_signed, true>(chunk_of(FORMAT, tile, first), unpacked);
    by_blocks<kBlockRows>(rows, [&](auto r, int64_t row) {
      constexpr int R = decltype(r)::value;
      add_bytes<FORMAT, R>(unpacked, inputs_of<FORMAT>(x, row, first), sums + row * kTile);
    });
  }
}

// Sets sums [rows, 16] to the dot products of rows of floats with a tile.
inline void multiply_floats(const Matrix& m, const uint8_t* tile, const Rows& x, int64_t rows, Bytes& bytes,
                            Floats& unpacked, float* sums) {
  std::memset(sums, 0, rows * kTile * sizeof(float));
  for (int64_t first = 0; first < m.k; first += kChunk) {
    const int inputs = static_cast<int>(std::min<int64_t>(kChunk, m.k - first));
    const auto add = [&](const auto& weights) {
      by_blocks<kBlockRows>(rows, [&](auto r, int64_t row) {
        const float* from = x.x + row * x.stride + first;
        add_floats<decltype(r)::value>(weights, from, x.stride, sums + row * kTile);
      });
    };
    const uint8_t* p = tile + first * info(m.format).tile_bytes;  // of a format of floats
    if (m.format == F32) add(FloatWeights<F32>{p, inputs});
    else if (m.format == F16) add(FloatWeights<F16>{p, inputs});
    else if (m.format == BF16) add(FloatWeights<BF16>{p, inputs});
    else {
      unpacked.inputs = inputs;
      to_floats(m.format, tile, first, bytes, unpacked);
      add(unpacked);
    }
  }
}

// Sets y [rows, ldy] to x W^T + bias, or adds x W^T + bias to y if `add_to` is true, for the channels of
// tiles first .. end - 1. y begins at channel 16 * first.
inline void multiply(const Matrix& m, const Rows& x, int64_t rows, int64_t first, int64_t end, float* y, int64_t ldy,
                     bool add_to) {
  alignas(64) float sums[kPanel][kTile];
  Bytes bytes;
  Floats floats;
  const FormatInfo& f = info(m.format);
  assert(m.tiles && m.k % f.block == 0 && 0 <= first && first <= end && (end - 1) * kTile < m.n);
  assert(x.stride % kUnit == 0 && x.stride >= m.k && ldy >= (end - first) * kTile);
  assert(!m.int8_rows || (x.q && !is_float(m.format)));
  const int64_t tile_bytes = m.k / f.block * f.tile_bytes;
  for (int64_t row = 0; row < rows; row += kPanel) {
    const int64_t count = std::min(kPanel, rows - row);
    const Rows panel = x.from(row);
#if defined(__AMX_INT8__)
    const bool amx = m.int8_rows && uses_amx(m.format, count);
    if (amx) shape_registers(count % kAmxRows);
#endif
    for (int64_t t = first; t < end; t++) {
      const uint8_t* tile = m.tiles + t * tile_bytes;
      if (m.int8_rows) {
        with_format(m.format,
                    [&](auto kind) { multiply_bytes<decltype(kind)::value>(tile, m.k, panel, count, bytes, sums[0]); });
      } else {
        multiply_floats(m, tile, panel, count, bytes, floats, sums[0]);
      }
      float* out = y + row * ldy + (t - first) * kTile;
      const F bias = m.bias ? load(m.bias + t * kTile) : set(0.0f);
      for (int64_t r = 0; r < count; r++, out += ldy) {
        const F value = add(load(sums[r]), bias);
        store(out, add_to ? add(load(out), value) : value);
      }
    }
#if defined(__AMX_INT8__)
    if (amx) release_registers();
#endif
  }
}

}  // namespace ISA
}  // namespace medusa
