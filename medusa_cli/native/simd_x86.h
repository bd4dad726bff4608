// The operations that AVX2 and AVX-512 share: sums and maxima over lanes, and dot products. Their code
// uses the functions of simd_avx2.h or simd_avx512.h.
#pragma once

namespace medusa {
namespace ISA {

// ---- sums and maxima over lanes: halves are folded onto each other, 16 -> 8 -> 4 -> 2 -> 1

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

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

// One instruction adds four products of an unsigned byte and a signed byte to a 32-bit sum, so 8-bit
// weights can be unsigned, too.
constexpr bool kUnsignedBytes = true;

template <int BITS, int COUNT>
inline I dot(I first, const B* weights, const int8_t* x) {
  I total = first;
  MEDUSA_UNROLL for (int j = 0; j < COUNT; j++) total = add_products(total, weights[j], x + 4 * j);
  return total;
}

#else

constexpr bool kUnsignedBytes = false;

// The instruction adds two products to a sum of 16 bits. As inputs are at most 127, 16 bits can hold
// the total of 8 such sums for 4-bit weights (8 * 2 * 15 * 127 = 30,480), of 4 for 5-bit weights, of 2
// for 6-bit weights, and of 1 for 8-bit weights. The sign of an 8-bit weight is moved to the row's input.
template <int BITS, int COUNT>
inline I dot(I first, const B* weights, const int8_t* x) {
  constexpr int fit = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
  constexpr int together = fit < COUNT ? fit : COUNT;
  I total = first;
  MEDUSA_UNROLL for (int j = 0; j < COUNT; j += together) {
    I words;
    MEDUSA_UNROLL for (int i = 0; i < together; i++) {
      int32_t four;
      std::memcpy(&four, x + 4 * (j + i), 4);
      const I inputs = set_i(four);
      const I pairs = BITS == 8 ? signed_pairs_of(weights[j + i], inputs) : pairs_of(weights[j + i], inputs);
      words = i ? add_16(words, pairs) : pairs;
    }
    total = add_32(total, fold_16(words));
  }
  return total;
}

#endif

}  // namespace ISA
}  // namespace medusa
