// Vectors of AVX-512, with or without VNNI: see simd.h.
#pragma once

#include <immintrin.h>

namespace medusa {
namespace ISA {

// ---- 16 floats in one register

using F = __m512;
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline F set(float a) { return _mm512_set1_ps(a); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F set_half(uint16_t a) { return set(_cvtsh_ss(a)); }
inline void store_half(uint16_t* p, F a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
inline F load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline F load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline F load_byte_of_4(const uint8_t* p, int i) {
  const __m512i bytes = _mm512_srli_epi32(_mm512_loadu_si512(p), 8 * i);
  return _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(255)));
}
inline F choose(uint16_t mask, F a, F b) { return _mm512_mask_blend_ps(mask, b, a); }
inline F zero_below(F x, float limit, F a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GE_OQ), a);
}
inline F scale2(F a, F n) { return _mm512_scalef_ps(a, n); }
inline void store_i8(int8_t* p, F a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a))); }
inline __m256 fold(F a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
inline __m256 fold_max(F a) { return _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }

// ---- 16 channels

constexpr int kLanes = 16;
constexpr int kBlockRows = 8;

using B = __m512i;
inline B load_b(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_b(uint8_t* p, B a) { _mm512_storeu_si512(p, a); }
inline B set_b(uint8_t a) { return _mm512_set1_epi8(char(a)); }
inline B and_b(B a, B b) { return _mm512_and_si512(a, b); }
inline B or_b(B a, B b) { return _mm512_or_si512(a, b); }
inline B sub_b(B a, B b) { return _mm512_sub_epi8(a, b); }
template <int N> inline B right(B a) { return _mm512_srli_epi16(a, N); }
template <int N> inline B left(B a) { return _mm512_slli_epi16(a, N); }
inline B table_b(const uint8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
inline B look_up(B table, B a) { return _mm512_shuffle_epi8(table, a); }

using L = __m512;
inline L load_l(const float* p) { return _mm512_loadu_ps(p); }
inline void store_l(float* p, L a) { _mm512_storeu_ps(p, a); }
inline L set_l(float a) { return _mm512_set1_ps(a); }
inline L add_l(L a, L b) { return _mm512_add_ps(a, b); }
inline L mul_l(L a, L b) { return _mm512_mul_ps(a, b); }
inline L fma_l(L a, L b, L c) { return _mm512_fmadd_ps(a, b, c); }
inline L half_l(const uint16_t* p) { return load_half(p); }
inline L bf16_l(const uint16_t* p) { return load_bf16(p); }
inline L u8_l(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline L i8_l(const int8_t* p) { return load_i8(p); }
inline L half_powers_l(const uint8_t* p) {
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23);
  return mul_l(_mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(0x400000))), set_l(0.5f));
}

using I = __m512i;
inline I set_i(int32_t a) { return _mm512_set1_epi32(a); }
inline L to_floats(I a) { return _mm512_cvtepi32_ps(a); }
#if defined(__AVX512VNNI__)
// Adds the products of four weights per channel with four inputs. The instruction itself reads the
// inputs and repeats them for all channels. With the intrinsic, GCC would add a second instruction.
inline I add_products(I total, B weights, const int8_t* x) {
  using Four = int32_t __attribute__((may_alias));
  const Four& inputs = *reinterpret_cast<const Four*>(x);
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(total) : "v"(weights), "m"(inputs));
  return total;
}
#else
inline I pairs_of(B w, I x) { return _mm512_maddubs_epi16(w, x); }
inline I add_16(I a, I b) { return _mm512_add_epi16(a, b); }
inline I add_32(I a, I b) { return _mm512_add_epi32(a, b); }
inline I fold_16(I a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
inline I signed_pairs_of(B w, I x) {
  const I zero = _mm512_setzero_si512();
  return _mm512_maddubs_epi16(_mm512_abs_epi8(w), _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), zero, x));
}
#endif

}  // namespace ISA
}  // namespace medusa
