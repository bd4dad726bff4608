// Unpacks tiles of weights (formats.h) into bytes with scales and offsets, or into floats.
#pragma once

#include <type_traits>

#include "simd.h"

namespace medusa {
namespace ISA {

// 256 inputs of a tile, or as many as are left, unpacked to bytes.
struct Bytes {
  int units;
  alignas(64) uint8_t q[kChunk / kUnit][8][64];
  alignas(64) float scale[kChunk / 16][kTile];
  alignas(64) float offset[kChunk / 16][kTile];
};

// Weights are prefetched this many bytes ahead of their use.
constexpr int64_t kAhead = 6144;

// The next three functions unpack kLanes channels from `lane` on. The first of them unpacks four
// vectors of nibbles into eight vectors of bytes.
inline void split_nibbles(const uint8_t (*packed)[64], int lane, B* q) {
  const B low = set_b(15);
  MEDUSA_UNROLL for (int j = 0; j < 4; j++) {
    const B both = load_b(packed[j] + 4 * lane);
    q[2 * j] = and_b(both, low);
    q[2 * j + 1] = and_b(right<4>(both), low);
  }
}

// Always inlined: when it was not, GCC's code for formats of five bits was 1.8 times slower with AVX-512.
MEDUSA_INLINE void add_fifth_bits(const uint8_t* plane, int lane, B* q) {
  const B bits = load_b(plane + 4 * lane), fifth = set_b(16);
  q[0] = or_b(q[0], and_b(left<4>(bits), fifth));
  q[1] = or_b(q[1], and_b(left<3>(bits), fifth));
  q[2] = or_b(q[2], and_b(left<2>(bits), fifth));
  q[3] = or_b(q[3], and_b(left<1>(bits), fifth));
  q[4] = or_b(q[4], and_b(bits, fifth));
  q[5] = or_b(q[5], and_b(right<1>(bits), fifth));
  q[6] = or_b(q[6], and_b(right<2>(bits), fifth));
  q[7] = or_b(q[7], and_b(right<3>(bits), fifth));
}

inline void add_upper_pairs(const uint8_t (*planes)[64], int lane, B* q) {
  const B pair = set_b(48);
  MEDUSA_UNROLL for (int p = 0; p < 2; p++) {
    const B bits = load_b(planes[p] + 4 * lane);
    q[4 * p] = or_b(q[4 * p], and_b(left<4>(bits), pair));
    q[4 * p + 1] = or_b(q[4 * p + 1], and_b(left<2>(bits), pair));
    q[4 * p + 2] = or_b(q[4 * p + 2], and_b(bits, pair));
    q[4 * p + 3] = or_b(q[4 * p + 3], and_b(right<2>(bits), pair));
  }
}

// Replaces codes of e2m1 with 16 plus twice their values. The results are bytes of five bits with the
// same zero as in Q5_0.
inline void look_up_e2m1(B* q) {
  alignas(16) static constexpr uint8_t numbers[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
  const B table = table_b(numbers);
  MEDUSA_UNROLL for (int j = 0; j < 8; j++) q[j] = look_up(table, q[j]);
}

// Replaces codes of IQ4_NL and IQ4_XS with their numbers, plus 128 unless SIGNED.
template <bool SIGNED>
inline void look_up_iq4(B* q) {
  constexpr uint8_t sign = SIGNED ? 128 : 0;
  alignas(16) static constexpr uint8_t numbers[16] = {
      1 ^ sign,   24 ^ sign,  45 ^ sign,  63 ^ sign,  79 ^ sign,  93 ^ sign,  106 ^ sign, 118 ^ sign,
      129 ^ sign, 141 ^ sign, 153 ^ sign, 166 ^ sign, 181 ^ sign, 197 ^ sign, 217 ^ sign, 241 ^ sign};
  const B table = table_b(numbers);
  MEDUSA_UNROLL for (int j = 0; j < 8; j++) q[j] = look_up(table, q[j]);
}

template <class Tile>
inline const Tile& block_of(const uint8_t* blocks, uint64_t index) {
  return reinterpret_cast<const Tile*>(blocks)[index];
}

inline L negated(L a) { return mul_l(a, set_l(-1.0f)); }

// Unpacks kLanes channels of a unit, from `lane` on, into vectors q[8] and the scales and offsets of
// its groups. SIGNED: the format's zero is subtracted. `unit` is unsigned, so that unit / 8 is a shift.
template <int FORMAT, bool SIGNED>
MEDUSA_INLINE void unpack_unit(const uint8_t* blocks, uint64_t unit, int lane, B* q, L* scale, L* offset) {
  if constexpr (FORMAT == Q4_0) {
    const auto& t = block_of<TileQ4_0>(blocks, unit);
    split_nibbles(t.q, lane, q);
    scale[0] = half_l(t.d + lane);
  } else if constexpr (FORMAT == Q4_1) {
    const auto& t = block_of<TileQ4_1>(blocks, unit);
    split_nibbles(t.q, lane, q);
    scale[0] = half_l(t.d + lane);
    offset[0] = half_l(t.m + lane);
  } else if constexpr (FORMAT == Q5_0) {
    const auto& t = block_of<TileQ5_0>(blocks, unit);
    split_nibbles(t.q, lane, q);
    add_fifth_bits(t.h, lane, q);
    scale[0] = half_l(t.d + lane);
  } else if constexpr (FORMAT == Q5_1) {
    const auto& t = block_of<TileQ5_1>(blocks, unit);
    split_nibbles(t.q, lane, q);
    add_fifth_bits(t.h, lane, q);
    scale[0] = half_l(t.d + lane);
    offset[0] = half_l(t.m + lane);
  } else if constexpr (FORMAT == Q8_0) {
    const auto& t = block_of<TileQ8_0>(blocks, unit);
    MEDUSA_UNROLL for (int j = 0; j < 8; j++) q[j] = load_b(t.q[j] + 4 * lane);
    scale[0] = half_l(t.d + lane);
  } else if constexpr (FORMAT == MXFP4) {
    const auto& t = block_of<TileMXFP4>(blocks, unit);
    split_nibbles(t.q, lane, q);
    look_up_e2m1(q);
    scale[0] = half_powers_l(t.e + lane);
  } else if constexpr (FORMAT == IQ4_NL) {
    const auto& t = block_of<TileIQ4_NL>(blocks, unit);
    split_nibbles(t.q, lane, q);
    look_up_iq4<SIGNED>(q);
    scale[0] = half_l(t.d + lane);
  } else if constexpr (FORMAT == IQ4_XS) {
    const auto& t = block_of<TileIQ4_XS>(blocks, unit / 8);
    const uint64_t u = unit % 8;
    split_nibbles(t.q[u], lane, q);
    look_up_iq4<SIGNED>(q);
    scale[0] = mul_l(half_l(t.d + lane), i8_l(t.scale[u] + lane));
  } else if constexpr (FORMAT == Q4_K) {
    const auto& t = block_of<TileQ4_K>(blocks, unit / 8);
    const uint64_t u = unit % 8;
    split_nibbles(t.q[u], lane, q);
    scale[0] = mul_l(half_l(t.d + lane), u8_l(t.scale[u] + lane));
    offset[0] = negated(mul_l(half_l(t.dmin + lane), u8_l(t.min[u] + lane)));
  } else if constexpr (FORMAT == Q5_K) {
    const auto& t = block_of<TileQ5_K>(blocks, unit / 8);
    const uint64_t u = unit % 8;
    split_nibbles(t.q[u], lane, q);
    add_fifth_bits(t.h[u], lane, q);
    scale[0] = mul_l(half_l(t.d + lane), u8_l(t.scale[u] + lane));
    offset[0] = negated(mul_l(half_l(t.dmin + lane), u8_l(t.min[u] + lane)));
  } else if constexpr (FORMAT == Q6_K) {
    const auto& t = block_of<TileQ6_K>(blocks, unit / 8);
    const uint64_t u = unit % 8;
    split_nibbles(t.q[u], lane, q);
    add_upper_pairs(t.h[u], lane, q);
    MEDUSA_UNROLL for (int g = 0; g < 2; g++) scale[g] = mul_l(half_l(t.d + lane), i8_l(t.scale[2 * u + g] + lane));
  } else if constexpr (FORMAT == Q3_K) {
    const auto& t = block_of<TileQ3_K>(blocks, unit / 8);
    const uint64_t u = unit % 8;
    split_nibbles(t.q[u], lane, q);
    MEDUSA_UNROLL for (int g = 0; g < 2; g++) scale[g] = mul_l(half_l(t.d + lane), i8_l(t.scale[2 * u + g] + lane));
  } else {
    static_assert(FORMAT == Q2_K);
    const auto& t = block_of<TileQ2_K>(blocks, unit / 8);
    const uint64_t u = unit % 8;
    split_nibbles(t.q[u], lane, q);
    MEDUSA_UNROLL for (int g = 0; g < 2; g++) {
      scale[g] = mul_l(half_l(t.d + lane), u8_l(t.scale[2 * u + g] + lane));
      offset[g] = negated(mul_l(half_l(t.dmin + lane), u8_l(t.min[2 * u + g] + lane)));
    }
  }
  if constexpr (SIGNED && FORMAT != IQ4_NL && FORMAT != IQ4_XS) {
    MEDUSA_UNROLL for (int j = 0; j < 8; j++) q[j] = sub_b(q[j], set_b(info(FORMAT).zero));
  }
}

// The properties of a format that kernels need when they are compiled.
template <int FORMAT>
struct Kind {
  static constexpr int groups = kUnit / info(FORMAT).group;  // per unit
  static constexpr bool has_offset = info(FORMAT).has_offset;
  static constexpr int bits = info(FORMAT).bits;
  // The bits for which `dot` is compiled. If `dot` accepts any unsigned bytes, all formats share its
  // code.
  static constexpr int dot_bits = kUnsignedBytes ? 8 : bits;
  static constexpr bool is_signed = bits == 8 && !kUnsignedBytes;
  // The index in Rows::zero, or -1 if nothing is subtracted.
  static constexpr int zero = has_offset || is_signed             ? -1
                              : FORMAT == Q4_0                    ? 0
                              : FORMAT == Q5_0 || FORMAT == MXFP4 ? 1
                              : bits == 8                         ? 2
                              : FORMAT == Q6_K                    ? 3
                                                                  : 4;
};

// Returns the first block of the 256 inputs from `first` on; `first` is a multiple of 256. The inputs
// are one block in formats with blocks of 256 inputs, and eight blocks in other formats.
inline const uint8_t* chunk_of(int32_t format, const uint8_t* tile, int64_t first) {
  const FormatInfo& f = info(format);
  return tile + first / f.block * f.tile_bytes;
}

constexpr int64_t unit_bytes(int32_t format) { return info(format).tile_bytes * kUnit / info(format).block; }

// Unpacks the units of a chunk. FETCH: units further ahead are prefetched.
template <int FORMAT, bool SIGNED, bool FETCH>
inline void unpack_chunk(const uint8_t* blocks, Bytes& out) {
  constexpr int groups = Kind<FORMAT>::groups;
  constexpr int64_t bytes = unit_bytes(FORMAT);
  for (int u = 0; u < out.units; u++) {
    if (FETCH) prefetch(blocks + u * bytes + kAhead, bytes);
    for (int lane = 0; lane < kTile; lane += kLanes) {
      B q[8];
      L scale[2], offset[2];
      unpack_unit<FORMAT, SIGNED>(blocks, u, lane, q, scale, offset);
      MEDUSA_UNROLL for (int j = 0; j < 8; j++) store_b(out.q[u][j] + 4 * lane, q[j]);
      MEDUSA_UNROLL for (int g = 0; g < groups; g++) {
        store_l(out.scale[groups * u + g] + lane, scale[g]);
        if (Kind<FORMAT>::has_offset) store_l(out.offset[groups * u + g] + lane, offset[g]);
      }
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
    case IQ4_NL: return work(std::integral_constant<int, IQ4_NL>());
    case IQ4_XS: return work(std::integral_constant<int, IQ4_XS>());
  }
}

// 256 inputs of a tile, or as many as are left, unpacked to floats [inputs, 16].
struct Floats {
  int inputs;
  alignas(64) float w[kChunk][kTile];

  // The same operations as those of FloatWeights (matmul.h). The unpacked weights are in a CPU cache already.
  MEDUSA_INLINE L load(int k, int lane) const { return load_l(w[k] + lane); }
  MEDUSA_INLINE void fetch(int) const {}
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

}  // namespace ISA
}  // namespace medusa
