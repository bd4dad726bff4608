// Vectors of AVX2, with or without AVX-VNNI: see simd.h.
#pragma once

#include <immintrin.h>

namespace medusa {
namespace ISA {

// ---- 16 floats in two registers

struct F { __m256 a, b; };
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline F round(F x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline __m256 half_of(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline F load_half(const uint16_t* p) { return {half_of(p), half_of(p + 8)}; }
inline F set_half(uint16_t x) { return set(_cvtsh_ss(x)); }
inline void store_half(uint16_t* p, F x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256 bf16_of(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F load_bf16(const uint16_t* p) { return {bf16_of(p), bf16_of(p + 8)}; }
inline __m256 i8_of(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline F load_i8(const int8_t* p) { return {i8_of(p), i8_of(p + 8)}; }
inline __m256 byte_of_4(const uint8_t* p, int i) {
  const __m256i bytes = _mm256_srl_epi32(_mm256_loadu_si256((const __m256i*)p), _mm_cvtsi32_si128(8 * i));
  return _mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(255)));
}
inline F load_byte_of_4(const uint8_t* p, int i) { return {byte_of_4(p, i), byte_of_4(p + 32, i)}; }
inline __m256 lanes_of(int mask) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask), bits), bits));
}
inline F choose(uint16_t mask, F x, F y) {
  return {_mm256_blendv_ps(y.a, x.a, lanes_of(mask)), _mm256_blendv_ps(y.b, x.b, lanes_of(mask >> 8))};
}
inline F zero_below(F x, float limit, F y) {
  const __m256 l = _mm256_set1_ps(limit);
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, l, _CMP_GE_OQ), y.a), _mm256_and_ps(_mm256_cmp_ps(x.b, l, _CMP_GE_OQ), y.b)};
}
inline __m256 power2(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F scale2(F x, F n) { return {_mm256_mul_ps(x.a, power2(n.a)), _mm256_mul_ps(x.b, power2(n.b))}; }
inline void store_i8(int8_t* p, F x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  const __m256i in_order = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1));
  _mm_storeu_si128((__m128i*)p, bytes);
}
inline __m256 fold(F x) { return _mm256_add_ps(x.a, x.b); }
inline __m256 fold_max(F x) { return _mm256_max_ps(x.a, x.b); }

// ---- 8 channels

constexpr int kLanes = 8;
constexpr int kBlockRows = 4;

using B = __m256i;
inline B load_b(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store_b(uint8_t* p, B a) { _mm256_storeu_si256((__m256i*)p, a); }
inline B set_b(uint8_t a) { return _mm256_set1_epi8(char(a)); }
inline B and_b(B a, B b) { return _mm256_and_si256(a, b); }
inline B or_b(B a, B b) { return _mm256_or_si256(a, b); }
inline B sub_b(B a, B b) { return _mm256_sub_epi8(a, b); }
template <int N> inline B right(B a) { return _mm256_srli_epi16(a, N); }
template <int N> inline B left(B a) { return _mm256_slli_epi16(a, N); }
inline B table_b(const uint8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
inline B look_up(B table, B a) { return _mm256_shuffle_epi8(table, a); }

using L = __m256;
inline L load_l(const float* p) { return _mm256_loadu_ps(p); }
inline void store_l(float* p, L a) { _mm256_storeu_ps(p, a); }
inline L set_l(float a) { return _mm256_set1_ps(a); }
inline L add_l(L a, L b) { return _mm256_add_ps(a, b); }
inline L mul_l(L a, L b) { return _mm256_mul_ps(a, b); }
inline L fma_l(L a, L b, L c) { return _mm256_fmadd_ps(a, b, c); }
inline L half_l(const uint16_t* p) { return half_of(p); }
inline L bf16_l(const uint16_t* p) { return bf16_of(p); }
inline L u8_l(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline L i8_l(const int8_t* p) { return i8_of(p); }
inline L half_powers_l(const uint8_t* p) {
  const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23);
  return mul_l(_mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x400000))), set_l(0.5f));
}

using I = __m256i;
inline I set_i(int32_t a) { return _mm256_set1_epi32(a); }
inline L to_floats(I a) { return _mm256_cvtepi32_ps(a); }
#if defined(__AVXVNNI__)
inline I add_products(I total, B weights, const int8_t* x) {
  int32_t inputs;
  std::memcpy(&inputs, x, 4);
  return _mm256_dpbusd_avx_epi32(total, weights, set_i(inputs));
}
#else
inline I pairs_of(B w, I x) { return _mm256_maddubs_epi16(w, x); }
inline I add_16(I a, I b) { return _mm256_add_epi16(a, b); }
inline I add_32(I a, I b) { return _mm256_add_epi32(a, b); }
inline I fold_16(I a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
inline I signed_pairs_of(B w, I x) { return _mm256_maddubs_epi16(_mm256_sign_epi8(w, w), _mm256_sign_epi8(x, w)); }
#endif

}  // namespace ISA
}  // namespace medusa
