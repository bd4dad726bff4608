// Matmuls of rows with matrices in tiles.
//
// A share of a matmul is some tiles of 16 channels for all rows. A tile is unpacked into bytes with
// scales for 8-bit rows, or into floats for rows of floats. Each block of a few 8-bit rows unpacks
// the tile by itself, unit by unit, and stores nothing. For many 8-bit rows and for rows of floats,
// 256 inputs of the tile are unpacked and stored, and blocks of rows are multiplied with them:
//
//                 256 inputs                 16 channels
//     row 0   [ x x x x . . . ]            [ w w w w . . ]
//     row 1   [ x x x x . . . ]     x      [ w w w w . . ]  = one tile
//
// A row's result is one sum in a fixed order, which does not depend on other rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "simd.h"

namespace medusa {

// A matrix [n, k] in tiles with an optional bias [n padded to 16]. int8_rows: the rows that it is
// multiplied with are rounded to 8 bits.
struct Matrix {
  int32_t format;
  int32_t int8_rows;
  int64_t n;
  int64_t k;
  const uint8_t* tiles;
  const float* bias;
};

namespace ISA {

// Rows as matmuls read them: floats [rows, stride] and, if a matrix needs them, 8-bit numbers in
// groups of 32 inputs, where x ~ scale * q. The sums of each group are precomputed for the zeros
// and offsets of weights.
struct Rows {
  const float* x;
  int64_t stride;    // of x and q, a multiple of 32
  int8_t* q;
  float* scale;      // [rows, stride / 32]
  float* offset32;   // scale * sum of a group
  float* offset16;   // [rows, stride / 16], for half groups
  int32_t* zero[5];  // -zero * sum: zeros 8, 16, 128 for groups [rows, stride / 32], 32, 4 for half groups

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

// Groups of inputs below this size are rounded to zero: the inverse of a smaller one may be infinite.
constexpr float kLeastSize = 1e-30f;

// Rounds inputs first .. end - 1 (multiples of 32) of one row to 8 bits.
inline void round_row(const Rows& row, int64_t first, int64_t end) {
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

// 256 inputs of a tile, or the rest of k, unpacked to bytes.
struct Bytes {
  int units;
  alignas(64) uint8_t q[kChunk / kUnit][8][64];
  alignas(64) float scale[kChunk / 16][kTile];
  alignas(64) float offset[kChunk / 16][kTile];
};

// The number of bytes ahead of its use at which a weight is prefetched.
constexpr int64_t kAhead = 6144;

// Unpacks four vectors of nibbles into eight vectors of bytes.
inline void split_nibbles(const uint8_t (*packed)[64], B* q) {
  const B low = set_b(15);
  for (int j = 0; j < 4; j++) {
    const B both = load_b(packed[j]);
    q[2 * j] = and_b(both, low);
    q[2 * j + 1] = and_b(right<4>(both), low);
  }
}

inline void add_fifth_bits(const uint8_t* plane, B* q) {
  const B bits = load_b(plane), fifth = set_b(16);
  q[0] = or_b(q[0], and_b(left<4>(bits), fifth));
  q[1] = or_b(q[1], and_b(left<3>(bits), fifth));
  q[2] = or_b(q[2], and_b(left<2>(bits), fifth));
  q[3] = or_b(q[3], and_b(left<1>(bits), fifth));
  q[4] = or_b(q[4], and_b(bits, fifth));
  q[5] = or_b(q[5], and_b(right<1>(bits), fifth));
  q[6] = or_b(q[6], and_b(right<2>(bits), fifth));
  q[7] = or_b(q[7], and_b(right<3>(bits), fifth));
}

inline void add_upper_pairs(const uint8_t (*planes)[64], B* q) {
  const B pair = set_b(48);
  for (int p = 0; p < 2; p++) {
    const B bits = load_b(planes[p]);
    q[4 * p] = or_b(q[4 * p], and_b(left<4>(bits), pair));
    q[4 * p + 1] = or_b(q[4 * p + 1], and_b(left<2>(bits), pair));
    q[4 * p + 2] = or_b(q[4 * p + 2], and_b(bits, pair));
    q[4 * p + 3] = or_b(q[4 * p + 3], and_b(right<2>(bits), pair));
  }
}

// Replaces codes of e2m1 by twice their values plus 16: bytes of five bits, whose zero is that of
// Q5_0.
inline void look_up_e2m1(B* q) {
  alignas(16) static constexpr uint8_t numbers[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
  const B table = table_b(numbers);
  for (int j = 0; j < 8; j++) q[j] = look_up(table, q[j]);
}

template <class Tile>
inline const Tile& block_of(const uint8_t* blocks, int64_t index) {
  return reinterpret_cast<const Tile*>(blocks)[index];
}

inline F negated(F a) { return mul(a, set(-1.0f)); }

// Unpacks a unit into its vectors q[8] and the scales and offsets of its groups. SIGNED: a format's
// zero is subtracted. Always inlined, so that the vectors stay in registers: GCC finds some formats
// too long.
template <int FORMAT, bool SIGNED>
__attribute__((always_inline)) inline void unpack_unit(const uint8_t* blocks, int64_t unit, B* q, F* scale, F* offset) {
  if constexpr (FORMAT == Q4_0) {
    const auto& t = block_of<TileQ4_0>(blocks, unit);
    split_nibbles(t.q, q);
    scale[0] = load_half(t.d);
  } else if constexpr (FORMAT == Q4_1) {
    const auto& t = block_of<TileQ4_1>(blocks, unit);
    split_nibbles(t.q, q);
    scale[0] = load_half(t.d);
    offset[0] = load_half(t.m);
  } else if constexpr (FORMAT == Q5_0) {
    const auto& t = block_of<TileQ5_0>(blocks, unit);
    split_nibbles(t.q, q);
    add_fifth_bits(t.h, q);
    scale[0] = load_half(t.d);
  } else if constexpr (FORMAT == Q5_1) {
    const auto& t = block_of<TileQ5_1>(blocks, unit);
    split_nibbles(t.q, q);
    add_fifth_bits(t.h, q);
    scale[0] = load_half(t.d);
    offset[0] = load_half(t.m);
  } else if constexpr (FORMAT == Q8_0) {
    const auto& t = block_of<TileQ8_0>(blocks, unit);
    for (int j = 0; j < 8; j++) q[j] = load_b(t.q[j]);
    scale[0] = load_half(t.d);
  } else if constexpr (FORMAT == Q4_K) {
    const auto& t = block_of<TileQ4_K>(blocks, unit / 8);
    const int u = unit % 8;
    split_nibbles(t.q[u], q);
    scale[0] = mul(load_half(t.d), load_u8(t.scale[u]));
    offset[0] = negated(mul(load_half(t.dmin), load_u8(t.min[u])));
  } else if constexpr (FORMAT == Q5_K) {
    const auto& t = block_of<TileQ5_K>(blocks, unit / 8);
    const int u = unit % 8;
    split_nibbles(t.q[u], q);
    add_fifth_bits(t.h[u], q);
    scale[0] = mul(load_half(t.d), load_u8(t.scale[u]));
    offset[0] = negated(mul(load_half(t.dmin), load_u8(t.min[u])));
  } else if constexpr (FORMAT == Q6_K) {
    const auto& t = block_of<TileQ6_K>(blocks, unit / 8);
    const int u = unit % 8;
    split_nibbles(t.q[u], q);
    add_upper_pairs(t.h[u], q);
    for (int g = 0; g < 2; g++) scale[g] = mul(load_half(t.d), load_i8(t.scale[2 * u + g]));
  } else if constexpr (FORMAT == Q3_K) {
    const auto& t = block_of<TileQ3_K>(blocks, unit / 8);
    const int u = unit % 8;
    split_nibbles(t.q[u], q);
    for (int g = 0; g < 2; g++) scale[g] = mul(load_half(t.d), load_i8(t.scale[2 * u + g]));
  } else if constexpr (FORMAT == MXFP4) {
    const auto& t = block_of<TileMXFP4>(blocks, unit);
    split_nibbles(t.q, q);
    look_up_e2m1(q);
    scale[0] = load_half_powers(t.e);
  } else {
    static_assert(FORMAT == Q2_K);
    const auto& t = block_of<TileQ2_K>(blocks, unit / 8);
    const int u = unit % 8;
    split_nibbles(t.q[u], q);
    for (int g = 0; g < 2; g++) {
      scale[g] = mul(load_half(t.d), load_u8(t.scale[2 * u + g]));
      offset[g] = negated(mul(load_half(t.dmin), load_u8(t.min[2 * u + g])));
    }
  }
  if constexpr (SIGNED) {
    for (int j = 0; j < 8; j++) q[j] = sub_b(q[j], set_b(info(FORMAT).zero));
  }
}

// The properties of a format for which kernels are compiled.
template <int FORMAT>
struct Kind {
  static constexpr int groups = kUnit / info(FORMAT).group;  // per unit
  static constexpr bool has_offset = info(FORMAT).has_offset;
  static constexpr int bits = FORMAT == MXFP4 ? 5 : info(FORMAT).bits;  // MXFP4's 4 bits stand for numbers of 5
  // The bits for which `dot` is compiled; if it accepts any unsigned bytes, all formats share its
  // code.
  static constexpr int dot_bits = UNSIGNED_BYTES ? 8 : bits;
  static constexpr bool is_signed = FORMAT == Q8_0 && !UNSIGNED_BYTES;
  // The index in Rows::zero, or -1 if nothing is subtracted.
  static constexpr int zero = has_offset || is_signed ? -1
                            : FORMAT == Q4_0 ? 0 : FORMAT == Q5_0 || FORMAT == MXFP4 ? 1
                            : FORMAT == Q8_0 ? 2 : FORMAT == Q6_K ? 3 : 4;
};

// Returns the first block of the 256 inputs from `first` on, which is a multiple of 256. Formats
// with blocks of 256 inputs have one block there, and the others have eight.
inline const uint8_t* chunk_of(int32_t format, const uint8_t* tile, int64_t first) {
  const FormatInfo& f = info(format);
  return tile + first / f.block * f.tile_bytes;
}

constexpr int64_t unit_bytes(int32_t format) { return info(format).tile_bytes * kUnit / info(format).block; }

// FETCH: units further ahead are prefetched.
template <int FORMAT, bool SIGNED, bool FETCH>
inline void unpack_chunk(const uint8_t* blocks, Bytes& out) {
  constexpr int groups = Kind<FORMAT>::groups;
  constexpr int64_t bytes = unit_bytes(FORMAT);
  for (int u = 0; u < out.units; u++) {
    B q[8];
    F scale[2], offset[2];
    if (FETCH) prefetch(blocks + u * bytes + kAhead, bytes);
    unpack_unit<FORMAT, SIGNED>(blocks, u, q, scale, offset);
    for (int j = 0; j < 8; j++) store_b(out.q[u][j], q[j]);
    for (int g = 0; g < groups; g++) {
      store(out.scale[groups * u + g], scale[g]);
      if (Kind<FORMAT>::has_offset) store(out.offset[groups * u + g], offset[g]);
    }
  }
}

// Calls work(std::integral_constant<int, format>) for a quantized format.
template <class Work>
inline void with_format(int32_t format, const Work& work) {
  switch (format) {
    case Q4_0: return work(std::integral_constant<int, Q4_0>());
    case Q4_1: return work(std::integral_constant<int, Q4_1>());
    case Q5_0: return work(std::integral_constant<int, Q5_0>());
    case Q5_1: return work(std::integral_constant<int, Q5_1>());
    case Q8_0: return work(std::integral_constant<int, Q8_0>());
    case Q4_K: return work(std::integral_constant<int, Q4_K>());
    case Q5_K: return work(std::integral_constant<int, Q5_K>());
    case Q6_K: return work(std::integral_constant<int, Q6_K>());
    case Q3_K: return work(std::integral_constant<int, Q3_K>());
    case Q2_K: return work(std::integral_constant<int, Q2_K>());
    case MXFP4: return work(std::integral_constant<int, MXFP4>());
  }
}

// 256 inputs of a tile, or the rest of k, as floats [inputs, 16].
struct Floats {
  int inputs;
  alignas(64) float w[kChunk][kTile];
};

inline void to_floats(int32_t format, const uint8_t* tile, int64_t first, Bytes& bytes, Floats& out) {
  if (is_float(format)) {
    const uint8_t* from = tile + first * info(format).tile_bytes;
    for (int k = 0; k < out.inputs; k++) {
      const auto* halves = reinterpret_cast<const uint16_t*>(from) + k * kTile;
      F value;
      if (format == F32) value = load(reinterpret_cast<const float*>(from) + k * kTile);
      else if (format == F16) value = load_half(halves);
      else value = load_bf16(halves);
      store(out.w[k], value);
    }
    return;
  }
  const FormatInfo& f = info(format);
  bytes.units = out.inputs / kUnit;
  with_format(format, [&](auto kind) {
    unpack_chunk<decltype(kind)::value, false, true>(chunk_of(format, tile, first), bytes);
  });
  for (int k = 0; k < out.inputs; k++) {
    const uint8_t* four = bytes.q[k / kUnit][k % kUnit / 4];
    F q = load_byte_of_4(four, k % 4);
    if (!f.has_offset) q = sub(q, set(float(f.zero)));
    const int g = k / f.group;
    F value = mul(load(bytes.scale[g]), q);
    if (f.has_offset) value = add(value, load(bytes.offset[g]));
    store(out.w[k], value);
  }
}

// A kernel's inputs: 8-bit rows, beginning at some row and input.
struct Inputs {
  const int8_t* q;
  const float* scale;
  const float* offset;
  const int32_t* zero;
  int64_t stride;  // of q
  int64_t units;   // per row of scale; offset and zero have as many, or twice as many
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

// Adds the dot products of R rows with one unit of weights to the sums of LANES channels. u: the
// unit's index in the inputs.
template <int FORMAT, int R>
inline void add_unit(const I* weights, const L* scale, const L* offset, const Inputs& x, int64_t u, L* total) {
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
  for (int lane = 0; lane < kTile; lane += LANES) {
    L total[R];
    MEDUSA_UNROLL for (int r = 0; r < R; r++) total[r] = load_l(sums + r * kTile + lane);
    for (int u = 0; u < w.units; u++) {
      I weights[8];
      L scale[2], offset[2];
      MEDUSA_UNROLL for (int j = 0; j < 8; j++) weights[j] = load_i(w.q[u][j] + 4 * lane);
      MEDUSA_UNROLL for (int g = 0; g < groups; g++) {
        scale[g] = load_l(w.scale[groups * u + g] + lane);
        offset[g] = load_l(w.offset[groups * u + g] + lane);
      }
      add_unit<FORMAT, R>(weights, scale, offset, x, u, total);
    }
    MEDUSA_UNROLL for (int r = 0; r < R; r++) store_l(sums + r * kTile + lane, total[r]);
  }
}

// Sets sums [R, 16] to the dot products of R rows with a whole tile, which is unpacked on the way.
template <int FORMAT, int R>
inline void multiply_packed(const uint8_t* tile, int64_t units, const Inputs& x, float* sums) {
  constexpr int64_t bytes = unit_bytes(FORMAT);
  L total[kTile / LANES][R];
  MEDUSA_UNROLL for (int part = 0; part < kTile / LANES; part++) {
    MEDUSA_UNROLL for (int r = 0; r < R; r++) total[part][r] = set_l(0.0f);
  }
  for (int64_t u = 0; u < units; u++) {
    B q[8];
    F scale[2], offset[2];
    prefetch(tile + u * bytes + kAhead, bytes);
    unpack_unit<FORMAT, Kind<FORMAT>::is_signed>(tile, u, q, scale, offset);
    MEDUSA_UNROLL for (int part = 0; part < kTile / LANES; part++) {
      I weights[8];
      L scales[2], offsets[2];
      MEDUSA_UNROLL for (int j = 0; j < 8; j++) weights[j] = part_of(q[j], part);
      MEDUSA_UNROLL for (int g = 0; g < Kind<FORMAT>::groups; g++) {
        scales[g] = part_of(scale[g], part);
        if (Kind<FORMAT>::has_offset) offsets[g] = part_of(offset[g], part);
      }
      add_unit<FORMAT, R>(weights, scales, offsets, x, u, total[part]);
    }
  }
  MEDUSA_UNROLL for (int part = 0; part < kTile / LANES; part++) {
    MEDUSA_UNROLL for (int r = 0; r < R; r++) store_l(sums + r * kTile + part * LANES, total[part][r]);
  }
}

// Adds the dot products of R rows with unpacked floats to sums [R, 16]. Even and odd inputs are
// summed separately before they are added.
template <int R>
inline void add_floats(const Floats& w, const float* x, int64_t stride, float* sums) {
  for (int lane = 0; lane < kTile; lane += LANES) {
    L even[R], odd[R];
    MEDUSA_UNROLL for (int r = 0; r < R; r++) even[r] = odd[r] = set_l(0.0f);
    int k = 0;
    for (; k + 1 < w.inputs; k += 2) {
      const L w0 = load_l(w.w[k] + lane), w1 = load_l(w.w[k + 1] + lane);
      MEDUSA_UNROLL for (int r = 0; r < R; r++) {
        even[r] = fma_l(set_l(x[r * stride + k]), w0, even[r]);
        odd[r] = fma_l(set_l(x[r * stride + k + 1]), w1, odd[r]);
      }
    }
    if (k < w.inputs) {
      MEDUSA_UNROLL for (int r = 0; r < R; r++) even[r] = fma_l(set_l(x[r * stride + k]), load_l(w.w[k] + lane), even[r]);
    }
    MEDUSA_UNROLL for (int r = 0; r < R; r++) {
      const L before = load_l(sums + r * kTile + lane);
      store_l(sums + r * kTile + lane, add_l(before, add_l(even[r], odd[r])));
    }
  }
}

// Calls work(std::integral_constant<int, count>) for a count of at most MOST; none for 0.
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

// Rows whose sums stay in a CPU cache while a tile's chunks are processed.
constexpr int64_t kPanel = 64;

// Up to this many rows, a tile is unpacked anew for each block of rows: storing the unpacked tile
// would cost more, for any number of rows if blocks have eight.
constexpr int64_t kFewRows = ROWS == 8 ? kPanel : 2 * ROWS;

#if defined(__AMX_INT8__)

// The number of units whose products are under way while those of another are added.
constexpr int kUnderWay = 2;

// Adds the dot products of R <= 16 rows with unpacked bytes to sums [R, 16]. The bytes are signed if
// there are no offsets. LAST: as in multiply_unit. Per unit, `bytes` bytes from `ahead` on are
// prefetched: all of them at once would hold up other reads.
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

// From this many rows on, AMX is faster: a unit costs it nearly as much for one row as for 16.
constexpr int64_t kLeastAmxRows = 9;

inline bool uses_amx(int32_t format, int64_t rows) { return info(format).group == kUnit && rows >= kLeastAmxRows; }

// Does what multiply_bytes does, for formats with one group per unit.
template <int FORMAT>
inline void multiply_bytes_amx(const uint8_t* tile, int64_t k, const Rows& x, int64_t rows, Bytes& room, float* sums) {
  constexpr bool has_offset = Kind<FORMAT>::has_offset;
  std::memset(sums, 0, rows * kTile * sizeof(float));
  for (int64_t first = 0; first < k; first += kChunk) {
    const uint8_t* blocks = chunk_of(FORMAT, tile, first);
    room.units = static_cast<int>(std::min<int64_t>(kChunk, k - first) / kUnit);
    unpack_chunk<FORMAT, !has_offset, false>(blocks, room);
    by_blocks<kAmxRows>(rows, [&](auto r, int64_t row) {
      constexpr int R = decltype(r)::value;
      const int64_t bytes = row ? 0 : unit_bytes(FORMAT);
      const Inputs inputs = inputs_of<FORMAT>(x, row, first);
      add_bytes_amx<has_offset, R, (R < kAmxRows)>(room, inputs, blocks + kAhead, bytes, sums + row * kTile);
    });
  }
}

#endif

// Sets sums [rows, 16] to the dot products of 8-bit rows with a tile of k inputs.
template <int FORMAT>
inline void multiply_bytes(const uint8_t* tile, int64_t k, const Rows& x, int64_t rows, Bytes& room, float* sums) {
#if defined(__AMX_INT8__)
  if constexpr (Kind<FORMAT>::groups == 1) {
    if (uses_amx(FORMAT, rows)) return multiply_bytes_amx<FORMAT>(tile, k, x, rows, room, sums);
  }
#endif
  if (kFewRows == kPanel || rows <= kFewRows) {
    by_blocks<ROWS>(rows, [&](auto r, int64_t row) {
      constexpr int R = decltype(r)::value;
      multiply_packed<FORMAT, R>(tile, k / kUnit, inputs_of<FORMAT>(x, row, 0), sums + row * kTile);
    });
    return;
  }
  std::memset(sums, 0, rows * kTile * sizeof(float));
  for (int64_t first = 0; first < k; first += kChunk) {
    room.units = static_cast<int>(std::min<int64_t>(kChunk, k - first) / kUnit);
    unpack_chunk<FORMAT, Kind<FORMAT>::is_signed, true>(chunk_of(FORMAT, tile, first), room);
    by_blocks<ROWS>(rows, [&](auto r, int64_t row) {
      constexpr int R = decltype(r)::value;
      add_bytes<FORMAT, R>(room, inputs_of<FORMAT>(x, row, first), sums + row * kTile);
    });
  }
}

// Sets sums [rows, 16] to the dot products of rows of floats with a tile.
inline void multiply_floats(const Matrix& m, const uint8_t* tile, const Rows& x, int64_t rows, Bytes& bytes,
                            Floats& room, float* sums) {
  std::memset(sums, 0, rows * kTile * sizeof(float));
  for (int64_t first = 0; first < m.k; first += kChunk) {
    room.inputs = static_cast<int>(std::min<int64_t>(kChunk, m.k - first));
    to_floats(m.format, tile, first, bytes, room);
    by_blocks<ROWS>(rows, [&](auto r, int64_t row) {
      const float* from = x.x + row * x.stride + first;
      add_floats<decltype(r)::value>(room, from, x.stride, sums + row * kTile);
    });
  }
}

// Computes y [rows, ldy] = x W^T + bias, or adds it to y, for the channels of tiles
// first .. end - 1. y begins at channel 16 * first.
inline void multiply(const Matrix& m, const Rows& x, int64_t rows, int64_t first, int64_t end, float* y, int64_t ldy,
                     bool add_to) {
  alignas(64) float sums[kPanel][kTile];
  Bytes bytes;
  Floats floats;
  const FormatInfo& f = info(m.format);
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
        with_format(m.format, [&](auto kind) {
          multiply_bytes<decltype(kind)::value>(tile, m.k, panel, count, bytes, sums[0]);
        });
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
