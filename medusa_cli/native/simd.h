// Vectors for one instruction set, which the compiler's flags select. Every operation is
// implemented for each instruction set.
//
// Floats come in vectors of 16 lanes (F), regardless of the width of registers. Lanes are summed in
// a fixed order, so all instruction sets give the same bits. Integer dot products work on LANES
// channels (I, with floats L). They are exact, so their order does not matter.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "formats.h"

#if defined(__AVX512BW__) || defined(__AVX2__)
#include <immintrin.h>
#endif

// Placed before loops over rows whose sums must stay in registers.
#if defined(__clang__)
#define MEDUSA_UNROLL _Pragma("unroll")
#else
#define MEDUSA_UNROLL _Pragma("GCC unroll 16")
#endif

namespace medusa {

// All code that is compiled once for each instruction set must be in this namespace, or be static.
// The linker keeps one copy of other inline functions and of std's templates, for example the
// AVX-512 copy, which would then also run on a machine without AVX-512.
namespace ISA {

template <class T>
struct Allocator : std::allocator<T> {
  template <class U>
  struct rebind {
    using other = Allocator<U>;
  };
  Allocator() = default;
  template <class U>
  Allocator(const Allocator<U>&) {}
};

// A vector with code of its own, as its name includes this namespace.
template <class T>
using List = std::vector<T, Allocator<T>>;

#if defined(__AVX512BW__)

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
inline F load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline F load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline F load_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
// Returns 2^(e - 128) for each byte e: half of the float whose exponent is e. Of e = 0, the power
// before halving is subnormal.
inline F load_half_powers(const uint8_t* p) {
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23);
  return mul(_mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(0x400000))), set(0.5f));
}
// Returns byte `i` (0 .. 3) of each of 16 groups of four bytes.
inline F load_byte_of_4(const uint8_t* p, int i) {
  const __m512i bytes = _mm512_srli_epi32(_mm512_loadu_si512(p), 8 * i);
  return _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(255)));
}
// Returns the lanes of a for which the mask's bit is set, and the other lanes of b.
inline F choose(uint16_t mask, F a, F b) { return _mm512_mask_blend_ps(mask, b, a); }
// Returns the lanes of a for which x >= limit; the other lanes are 0.
inline F zero_below(F x, float limit, F a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GE_OQ), a);
}
// Returns a times 2 to the power of n; n holds whole numbers.
inline F scale2(F a, F n) { return _mm512_scalef_ps(a, n); }
// Stores 16 whole numbers as bytes.
inline void store_i8(int8_t* p, F a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a))); }
inline __m256 fold(F a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
inline __m256 fold_max(F a) { return _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }

#elif defined(__AVX2__)

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
inline F load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline __m256 bf16_of(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F load_bf16(const uint16_t* p) { return {bf16_of(p), bf16_of(p + 8)}; }
inline __m256 u8_of(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline __m256 i8_of(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline F load_u8(const uint8_t* p) { return {u8_of(p), u8_of(p + 8)}; }
inline F load_i8(const int8_t* p) { return {i8_of(p), i8_of(p + 8)}; }
inline __m256 powers_of(const uint8_t* p) {
  const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23);
  return _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x400000)));
}
inline F load_half_powers(const uint8_t* p) { return mul(F{powers_of(p), powers_of(p + 8)}, set(0.5f)); }
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

#else

// ---- 16 floats in an array, which the compiler can vectorize

struct F { float v[16]; };
#define MEDUSA_LANES(expression) F r; for (int i = 0; i < 16; i++) r.v[i] = (expression); return r
inline F load(const float* p) { MEDUSA_LANES(p[i]); }
inline void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
inline F set(float a) { MEDUSA_LANES(a); }
inline F add(F a, F b) { MEDUSA_LANES(a.v[i] + b.v[i]); }
inline F sub(F a, F b) { MEDUSA_LANES(a.v[i] - b.v[i]); }
inline F mul(F a, F b) { MEDUSA_LANES(a.v[i] * b.v[i]); }
inline F div(F a, F b) { MEDUSA_LANES(a.v[i] / b.v[i]); }
inline F fma(F a, F b, F c) { MEDUSA_LANES(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
inline F max(F a, F b) { MEDUSA_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F min(F a, F b) { MEDUSA_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F abs(F a) { MEDUSA_LANES(__builtin_fabsf(a.v[i])); }
inline F round(F a) { MEDUSA_LANES(__builtin_nearbyintf(a.v[i])); }
inline F load_half(const uint16_t* p) { MEDUSA_LANES(half_to_float(p[i])); }
inline float bf16_of(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline F load_bf16(const uint16_t* p) { MEDUSA_LANES(bf16_of(p[i])); }
inline F load_u8(const uint8_t* p) { MEDUSA_LANES(float(p[i])); }
inline F load_i8(const int8_t* p) { MEDUSA_LANES(float(p[i])); }
inline float power_of(uint8_t e) {
  const uint32_t bits = e ? uint32_t(e) << 23 : 0x400000;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline F load_half_powers(const uint8_t* p) { MEDUSA_LANES(0.5f * power_of(p[i])); }
inline F load_byte_of_4(const uint8_t* p, int byte) { MEDUSA_LANES(float(p[4 * i + byte])); }
inline F choose(uint16_t mask, F a, F b) { MEDUSA_LANES(mask >> i & 1 ? a.v[i] : b.v[i]); }
inline F zero_below(F x, float limit, F a) { MEDUSA_LANES(x.v[i] >= limit ? a.v[i] : 0.0f); }
inline float power2(float n) {
  const uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline F scale2(F a, F n) { MEDUSA_LANES(a.v[i] * power2(n.v[i])); }
inline void store_i8(int8_t* p, F a) { for (int i = 0; i < 16; i++) p[i] = int8_t(a.v[i]); }

#endif

// ---- sums and maxima over lanes: halves are folded onto each other, 16 -> 8 -> 4 -> 2 -> 1

#if defined(__AVX2__)
inline float sum(F a) {
  const __m256 eight = fold(a);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(F a) {
  const __m256 eight = fold_max(a);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#else
inline float sum(F a) {
  for (int half = 8; half; half /= 2) {
    for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
  }
  return a.v[0];
}
inline float largest(F a) {
  for (int half = 8; half; half /= 2) {
    for (int i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  }
  return a.v[0];
}
#endif

// Returns e to the power of a for a <= 88; 0 below -87.
inline F exp(F a) {
  const F x = max(a, set(-87.0f));
  const F n = round(mul(x, set(1.44269504f)));
  F f = fma(n, set(-0.693359375f), x);
  f = fma(n, set(2.12194440e-4f), f);
  F p = set(1.9875691500e-4f);
  p = fma(p, f, set(1.3981999507e-3f));
  p = fma(p, f, set(8.3334519073e-3f));
  p = fma(p, f, set(4.1665795894e-2f));
  p = fma(p, f, set(1.6666665459e-1f));
  p = fma(p, f, set(5.0000001201e-1f));
  p = fma(mul(p, f), f, add(f, set(1.0f)));
  return zero_below(a, -87.0f, scale2(p, n));
}

// ---- 64 bytes: a vector of four inputs for 16 channels

#if defined(__AVX512BW__)
using B = __m512i;
inline B load_b(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_b(uint8_t* p, B a) { _mm512_storeu_si512(p, a); }
inline B set_b(uint8_t a) { return _mm512_set1_epi8(char(a)); }
inline B and_b(B a, B b) { return _mm512_and_si512(a, b); }
inline B or_b(B a, B b) { return _mm512_or_si512(a, b); }
inline B sub_b(B a, B b) { return _mm512_sub_epi8(a, b); }
// Shifts pairs of bytes; the caller must mask the bits that come from the other byte.
template <int N> inline B right(B a) { return _mm512_srli_epi16(a, N); }
template <int N> inline B left(B a) { return _mm512_slli_epi16(a, N); }
// A table of 16 bytes, which `look_up` indexes by bytes below 16.
inline B table_b(const uint8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
inline B look_up(B table, B a) { return _mm512_shuffle_epi8(table, a); }
#elif defined(__AVX2__)
struct B { __m256i a, b; };
inline B load_b(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline void store_b(uint8_t* p, B x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)(p + 32), x.b);
}
inline B set_b(uint8_t x) { return {_mm256_set1_epi8(char(x)), _mm256_set1_epi8(char(x))}; }
inline B and_b(B x, B y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline B or_b(B x, B y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline B sub_b(B x, B y) { return {_mm256_sub_epi8(x.a, y.a), _mm256_sub_epi8(x.b, y.b)}; }
template <int N> inline B right(B x) { return {_mm256_srli_epi16(x.a, N), _mm256_srli_epi16(x.b, N)}; }
template <int N> inline B left(B x) { return {_mm256_slli_epi16(x.a, N), _mm256_slli_epi16(x.b, N)}; }
inline B table_b(const uint8_t* p) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return {table, table};
}
inline B look_up(B table, B x) { return {_mm256_shuffle_epi8(table.a, x.a), _mm256_shuffle_epi8(table.b, x.b)}; }
#else
struct B { uint8_t v[64]; };
#define MEDUSA_BYTES(expression) B r; for (int i = 0; i < 64; i++) r.v[i] = uint8_t(expression); return r
inline B load_b(const uint8_t* p) { MEDUSA_BYTES(p[i]); }
inline void store_b(uint8_t* p, B a) { std::memcpy(p, a.v, 64); }
inline B set_b(uint8_t a) { MEDUSA_BYTES(a); }
inline B and_b(B a, B b) { MEDUSA_BYTES(a.v[i] & b.v[i]); }
inline B or_b(B a, B b) { MEDUSA_BYTES(a.v[i] | b.v[i]); }
inline B sub_b(B a, B b) { MEDUSA_BYTES(a.v[i] - b.v[i]); }
template <int N> inline B right(B a) { MEDUSA_BYTES(a.v[i] >> N); }
template <int N> inline B left(B a) { MEDUSA_BYTES(a.v[i] << N); }
inline B table_b(const uint8_t* p) { MEDUSA_BYTES(p[i % 16]); }
inline B look_up(B table, B a) { MEDUSA_BYTES(table.v[a.v[i]]); }
#endif

// Prefetches `bytes` bytes from an address on into the second cache, so that a tile's next units
// arrive from memory while the current one is multiplied. Into the first cache, passes take longer.
inline void prefetch(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// ---- integer dot products over LANES channels

#if defined(__AVX512BW__)
constexpr int LANES = 16;
using I = __m512i;
using L = __m512;
inline I load_i(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline I set_i(int32_t a) { return _mm512_set1_epi32(a); }
inline L load_l(const float* p) { return _mm512_loadu_ps(p); }
inline void store_l(float* p, L a) { _mm512_storeu_ps(p, a); }
inline L set_l(float a) { return _mm512_set1_ps(a); }
inline L add_l(L a, L b) { return _mm512_add_ps(a, b); }
inline L mul_l(L a, L b) { return _mm512_mul_ps(a, b); }
inline L fma_l(L a, L b, L c) { return _mm512_fmadd_ps(a, b, c); }
inline L to_floats(I a) { return _mm512_cvtepi32_ps(a); }
inline I four_inputs(const int8_t* x) {
  int32_t bytes;
  std::memcpy(&bytes, x, 4);
  return _mm512_set1_epi32(bytes);
}
#elif defined(__AVX2__)
constexpr int LANES = 8;
using I = __m256i;
using L = __m256;
inline I load_i(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline I set_i(int32_t a) { return _mm256_set1_epi32(a); }
inline L load_l(const float* p) { return _mm256_loadu_ps(p); }
inline void store_l(float* p, L a) { _mm256_storeu_ps(p, a); }
inline L set_l(float a) { return _mm256_set1_ps(a); }
inline L add_l(L a, L b) { return _mm256_add_ps(a, b); }
inline L mul_l(L a, L b) { return _mm256_mul_ps(a, b); }
inline L fma_l(L a, L b, L c) { return _mm256_fmadd_ps(a, b, c); }
inline L to_floats(I a) { return _mm256_cvtepi32_ps(a); }
inline I four_inputs(const int8_t* x) {
  int32_t bytes;
  std::memcpy(&bytes, x, 4);
  return _mm256_set1_epi32(bytes);
}
#else
constexpr int LANES = 16;
struct I { int32_t v[16]; };
using L = F;
inline L load_l(const float* p) { return load(p); }
inline void store_l(float* p, L a) { store(p, a); }
inline L set_l(float a) { return set(a); }
inline L add_l(L a, L b) { return add(a, b); }
inline L mul_l(L a, L b) { return mul(a, b); }
inline L fma_l(L a, L b, L c) { return fma(a, b, c); }
inline L to_floats(I a) { MEDUSA_LANES(float(a.v[i])); }
inline I set_i(int32_t a) {
  I r;
  for (int i = 0; i < 16; i++) r.v[i] = a;
  return r;
}
inline I load_i(const uint8_t* p) {
  I r;
  std::memcpy(r.v, p, 64);
  return r;
}
#endif

// Returns the LANES channels from LANES * part on.
#if defined(__AVX512BW__)
inline I part_of(B a, int) { return a; }
inline L part_of(F a, int) { return a; }
#elif defined(__AVX2__)
inline I part_of(B x, int part) { return part ? x.b : x.a; }
inline L part_of(F x, int part) { return part ? x.b : x.a; }
#else
inline I part_of(B a, int) {
  I r;
  std::memcpy(r.v, a.v, 64);
  return r;
}
inline L part_of(F a, int) { return a; }
#endif

// Rows that a matmul processes at once: as many as registers can hold besides a unit of weights.
#if defined(__AVX512BW__)
constexpr int ROWS = 8;
#else
constexpr int ROWS = 4;
#endif

// Weights need no sign if an instruction adds four products of unsigned and signed bytes to 32
// bits.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool UNSIGNED_BYTES = true;
#else
constexpr bool UNSIGNED_BYTES = false;
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

// Returns `first` plus the dot products of COUNT vectors of weights with 4 * COUNT inputs of a row.
template <int BITS, int COUNT>
inline I dot(I first, const I* weights, const int8_t* x) {
  I total = first;
  MEDUSA_UNROLL for (int j = 0; j < COUNT; j++) {
#if defined(__AVX512VNNI__)
    // The instruction reads and repeats the inputs itself; for the intrinsic, GCC adds a second
    // instruction.
    using Four = int32_t __attribute__((may_alias));
    const Four& inputs = *reinterpret_cast<const Four*>(x + 4 * j);
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(total) : "v"(weights[j]), "m"(inputs));
#else
    total = _mm256_dpbusd_avx_epi32(total, weights[j], four_inputs(x + 4 * j));
#endif
  }
  return total;
}

#elif defined(__AVX2__)

#if defined(__AVX512BW__)
inline I pairs_of(I w, I x) { return _mm512_maddubs_epi16(w, x); }
inline I add_16(I a, I b) { return _mm512_add_epi16(a, b); }
inline I add_32(I a, I b) { return _mm512_add_epi32(a, b); }
inline I fold_16(I a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
inline I signed_pairs_of(I w, I x) {
  const I zero = _mm512_setzero_si512();
  return _mm512_maddubs_epi16(_mm512_abs_epi8(w), _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), zero, x));
}
#else
inline I pairs_of(I w, I x) { return _mm256_maddubs_epi16(w, x); }
inline I add_16(I a, I b) { return _mm256_add_epi16(a, b); }
inline I add_32(I a, I b) { return _mm256_add_epi32(a, b); }
inline I fold_16(I a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
inline I signed_pairs_of(I w, I x) { return _mm256_maddubs_epi16(_mm256_sign_epi8(w, w), _mm256_sign_epi8(x, w)); }
#endif

// Sums of two products have 16 bits. With inputs of at most 127, 8 such sums can be added for 4-bit
// weights (8 * 2 * 15 * 127 = 30,480), 4 for 5 bits, 2 for 6 bits, and 1 for 8 bits. The sign of an
// 8-bit weight is moved to the row's input.
template <int BITS, int COUNT>
inline I dot(I first, const I* weights, const int8_t* x) {
  constexpr int fit = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
  constexpr int together = fit < COUNT ? fit : COUNT;
  I total = first;
  MEDUSA_UNROLL for (int j = 0; j < COUNT; j += together) {
    I words;
    MEDUSA_UNROLL for (int i = 0; i < together; i++) {
      const I inputs = four_inputs(x + 4 * (j + i));
      const I pairs = BITS == 8 ? signed_pairs_of(weights[j + i], inputs) : pairs_of(weights[j + i], inputs);
      words = i ? add_16(words, pairs) : pairs;
    }
    total = add_32(total, fold_16(words));
  }
  return total;
}

#else

template <int BITS, int COUNT>
inline I dot(I first, const I* weights, const int8_t* x) {
  for (int j = 0; j < COUNT; j++) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(weights + j);
    for (int c = 0; c < 16; c++) {
      for (int i = 0; i < 4; i++) {
        const int weight = BITS == 8 ? int(int8_t(bytes[4 * c + i])) : int(bytes[4 * c + i]);
        first.v[c] += weight * x[4 * j + i];
      }
    }
  }
  return first;
}
#endif

}  // namespace ISA
}  // namespace medusa
