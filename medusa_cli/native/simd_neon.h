// Vectors of NEON with dot products (ARMv8.2 dotprod): see simd.h.
#pragma once

#include <arm_neon.h>

namespace medusa {
namespace ISA {

// ---- 16 floats in four registers

struct F { float32x4_t v[4]; };
#define MEDUSA_LANES(expression) F r; MEDUSA_UNROLL for (int i = 0; i < 4; i++) r.v[i] = (expression); return r
inline F load(const float* p) { MEDUSA_LANES(vld1q_f32(p + 4 * i)); }
inline void store(float* p, F a) {
  MEDUSA_UNROLL for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
inline F set(float a) { MEDUSA_LANES(vdupq_n_f32(a)); }
inline F add(F a, F b) { MEDUSA_LANES(vaddq_f32(a.v[i], b.v[i])); }
inline F sub(F a, F b) { MEDUSA_LANES(vsubq_f32(a.v[i], b.v[i])); }
inline F mul(F a, F b) { MEDUSA_LANES(vmulq_f32(a.v[i], b.v[i])); }
inline F div(F a, F b) { MEDUSA_LANES(vdivq_f32(a.v[i], b.v[i])); }
inline F fma(F a, F b, F c) { MEDUSA_LANES(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
// If both operands are zeros or one is NaN, the maximum of x86 is the second operand. The maximum of
// NEON would be +0 or NaN, so lanes are compared and selected instead.
inline float32x4_t greater(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t less(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline F max(F a, F b) { MEDUSA_LANES(greater(a.v[i], b.v[i])); }
inline F min(F a, F b) { MEDUSA_LANES(less(a.v[i], b.v[i])); }
inline F abs(F a) { MEDUSA_LANES(vabsq_f32(a.v[i])); }
inline F round(F a) { MEDUSA_LANES(vrndnq_f32(a.v[i])); }
inline float32x4_t half_of(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline F load_half(const uint16_t* p) { MEDUSA_LANES(half_of(p + 4 * i)); }
inline F set_half(uint16_t a) { return set(vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(a))), 0)); }
inline void store_half(uint16_t* p, F a) {
  MEDUSA_UNROLL for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
inline float32x4_t bf16_of(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline F load_bf16(const uint16_t* p) { MEDUSA_LANES(bf16_of(p + 4 * i)); }
inline F load_i8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))};
  F r;
  MEDUSA_UNROLL for (int i = 0; i < 2; i++) {
    r.v[2 * i] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves[i])));
    r.v[2 * i + 1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(halves[i])));
  }
  return r;
}
inline F load_byte_of_4(const uint8_t* p, int byte) {
  const int32x4_t right = vdupq_n_s32(-8 * byte);
  const uint32x4_t low = vdupq_n_u32(255);
  MEDUSA_LANES(vcvtq_f32_u32(vandq_u32(vshlq_u32(vreinterpretq_u32_u8(vld1q_u8(p + 16 * i)), right), low)));
}
inline uint32x4_t lanes_of(int mask) {
  const uint32x4_t bits = {1, 2, 4, 8};
  return vtstq_u32(vdupq_n_u32(uint32_t(mask)), bits);
}
inline F choose(uint16_t mask, F a, F b) { MEDUSA_LANES(vbslq_f32(lanes_of(mask >> (4 * i)), a.v[i], b.v[i])); }
inline F zero_below(F x, float limit, F a) {
  const float32x4_t least = vdupq_n_f32(limit), zero = vdupq_n_f32(0.0f);
  MEDUSA_LANES(vbslq_f32(vcgeq_f32(x.v[i], least), a.v[i], zero));
}
inline float32x4_t power2(float32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
inline F scale2(F a, F n) { MEDUSA_LANES(vmulq_f32(a.v[i], power2(n.v[i]))); }
inline int16x8_t words_of(float32x4_t a, float32x4_t b) {
  return vcombine_s16(vqmovn_s32(vcvtq_s32_f32(a)), vqmovn_s32(vcvtq_s32_f32(b)));
}
inline void store_i8(int8_t* p, F a) {
  const int8x8_t low = vqmovn_s16(words_of(a.v[0], a.v[1])), high = vqmovn_s16(words_of(a.v[2], a.v[3]));
  vst1q_s8(p, vcombine_s8(low, high));
}

// ---- sums and maxima over lanes: halves are folded onto each other, 16 -> 8 -> 4 -> 2 -> 1

inline float sum(F a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float largest(F a) {
  const float32x4_t four = greater(greater(a.v[0], a.v[2]), greater(a.v[1], a.v[3]));
  const float32x4_t two = greater(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(greater(two, vdupq_laneq_f32(two, 1)), 0);
}

// ---- 4 channels

constexpr int kLanes = 4;
constexpr int kBlockRows = 8;

using B = uint8x16_t;
inline B load_b(const uint8_t* p) { return vld1q_u8(p); }
inline void store_b(uint8_t* p, B a) { vst1q_u8(p, a); }
inline B set_b(uint8_t a) { return vdupq_n_u8(a); }
inline B and_b(B a, B b) { return vandq_u8(a, b); }
inline B or_b(B a, B b) { return vorrq_u8(a, b); }
inline B sub_b(B a, B b) { return vsubq_u8(a, b); }
template <int N> inline B right(B a) { return vshrq_n_u8(a, N); }
template <int N> inline B left(B a) { return vshlq_n_u8(a, N); }
inline B table_b(const uint8_t* p) { return vld1q_u8(p); }
inline B look_up(B table, B a) { return vqtbl1q_u8(table, a); }

using L = float32x4_t;
inline L load_l(const float* p) { return vld1q_f32(p); }
inline void store_l(float* p, L a) { vst1q_f32(p, a); }
inline L set_l(float a) { return vdupq_n_f32(a); }
inline L add_l(L a, L b) { return vaddq_f32(a, b); }
inline L mul_l(L a, L b) { return vmulq_f32(a, b); }
inline L fma_l(L a, L b, L c) { return vfmaq_f32(c, a, b); }
inline L half_l(const uint16_t* p) { return half_of(p); }
inline L bf16_l(const uint16_t* p) { return bf16_of(p); }
inline uint8x8_t four_bytes(const void* p) {
  uint32_t bytes;
  std::memcpy(&bytes, p, 4);
  return vcreate_u8(bytes);
}
inline uint32x4_t wide_of(const uint8_t* p) { return vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p)))); }
inline L u8_l(const uint8_t* p) { return vcvtq_f32_u32(wide_of(p)); }
inline L i8_l(const int8_t* p) {
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p))))));
}
inline L half_powers_l(const uint8_t* p) {
  const uint32x4_t bits = vmaxq_u32(vshlq_n_u32(wide_of(p), 23), vdupq_n_u32(0x400000));
  return vmulq_n_f32(vreinterpretq_f32_u32(bits), 0.5f);
}

using I = int32x4_t;
inline I set_i(int32_t a) { return vdupq_n_s32(a); }
inline L to_floats(I a) { return vcvtq_f32_s32(a); }

// Weights of at most 6 bits are below 128 and need no sign. 8-bit weights are signed.
constexpr bool kUnsignedBytes = false;

// Four inputs form a lane of a register. The instruction multiplies each channel's weights with this lane.
template <int LANE>
inline I add_products(I total, B weights, int8x16_t inputs) {
  return vdotq_laneq_s32(total, vreinterpretq_s8_u8(weights), inputs, LANE);
}

template <int BITS, int COUNT>
inline I dot(I first, const B* weights, const int8_t* x) {
  static_assert(COUNT % 4 == 0);
  I total = first;
  MEDUSA_UNROLL for (int j = 0; j < COUNT; j += 4) {
    const int8x16_t inputs = vld1q_s8(x + 4 * j);
    total = add_products<0>(total, weights[j], inputs);
    total = add_products<1>(total, weights[j + 1], inputs);
    total = add_products<2>(total, weights[j + 2], inputs);
    total = add_products<3>(total, weights[j + 3], inputs);
  }
  return total;
}

}  // namespace ISA
}  // namespace medusa
