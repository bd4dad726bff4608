// Vectors in plain C++ for every machine: see simd.h. The compiler can vectorize this code.
#pragma once

namespace medusa {
namespace ISA {

// ---- 16 floats in an array

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
inline F set_half(uint16_t a) { return set(half_to_float(a)); }
inline void store_half(uint16_t* p, F a) { for (int i = 0; i < 16; i++) p[i] = float_to_half(a.v[i]); }
inline float bf16_of(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline F load_bf16(const uint16_t* p) { MEDUSA_LANES(bf16_of(p[i])); }
inline F load_i8(const int8_t* p) { MEDUSA_LANES(float(p[i])); }
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

// ---- sums and maxima over lanes: halves are folded onto each other, 16 -> 8 -> 4 -> 2 -> 1

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

// ---- 16 channels

constexpr int kLanes = 16;
constexpr int kBlockRows = 4;

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

using L = F;
inline L load_l(const float* p) { return load(p); }
inline void store_l(float* p, L a) { store(p, a); }
inline L set_l(float a) { return set(a); }
inline L add_l(L a, L b) { return add(a, b); }
inline L mul_l(L a, L b) { return mul(a, b); }
inline L fma_l(L a, L b, L c) { return fma(a, b, c); }
inline L half_l(const uint16_t* p) { return load_half(p); }
inline L bf16_l(const uint16_t* p) { return load_bf16(p); }
inline L u8_l(const uint8_t* p) { MEDUSA_LANES(float(p[i])); }
inline L i8_l(const int8_t* p) { MEDUSA_LANES(float(p[i])); }
inline float power_of(uint8_t e) {
  const uint32_t bits = e ? uint32_t(e) << 23 : 0x400000;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline L half_powers_l(const uint8_t* p) { MEDUSA_LANES(0.5f * power_of(p[i])); }

struct I { int32_t v[16]; };
inline I set_i(int32_t a) {
  I r;
  for (int i = 0; i < 16; i++) r.v[i] = a;
  return r;
}
inline L to_floats(I a) { MEDUSA_LANES(float(a.v[i])); }

constexpr bool kUnsignedBytes = false;

template <int BITS, int COUNT>
inline I dot(I first, const B* weights, const int8_t* x) {
  for (int j = 0; j < COUNT; j++) {
    const uint8_t* bytes = weights[j].v;
    for (int c = 0; c < 16; c++) {
      for (int i = 0; i < 4; i++) {
        const int weight = BITS == 8 ? int(int8_t(bytes[4 * c + i])) : int(bytes[4 * c + i]);
        first.v[c] += weight * x[4 * j + i];
      }
    }
  }
  return first;
}

}  // namespace ISA
}  // namespace medusa
