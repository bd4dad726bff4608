// The operations between matmuls: norms, rotary embeddings and activations.
#pragma once

#include "step.h"

namespace medusa {

namespace ISA {

// Computes y = x / rms(x) * gain over n floats. x, gain and y are padded with zeros to a multiple
// of 16.
inline void rms_norm(const float* x, const float* gain, float* y, int64_t n, float eps) {
  F squares = set(0.0f);
  for (int64_t i = 0; i < n; i += 16) {
    const F v = load(x + i);
    squares = fma(v, v, squares);
  }
  const F factor = set(1.0f / std::sqrt(sum(squares) / float(n) + eps));
  for (int64_t i = 0; i < n; i += 16) store(y + i, mul(mul(load(x + i), factor), load(gain + i)));
}

// Does the same as rms_norm, but first subtracts the mean, and finally adds a bias. gain [2, n padded
// to 32]: the gain, then the bias.
inline void layer_norm(const float* x, const float* gain, float* y, int64_t n, float eps) {
  const float* bias = gain + (n + 31) / 32 * 32;
  F total = set(0.0f), squares = set(0.0f);
  for (int64_t i = 0; i < n; i += 16) total = add(total, load(x + i));
  const F mean = set(sum(total) / float(n));
  for (int64_t i = 0; i < n; i += 16) {
    F v = sub(load(x + i), mean);
    if (n - i < 16) v = choose(static_cast<uint16_t>((1u << (n - i)) - 1), v, set(0.0f));
    squares = fma(v, v, squares);
    store(y + i, v);
  }
  const F factor = set(1.0f / std::sqrt(sum(squares) / float(n) + eps));
  for (int64_t i = 0; i < n; i += 16) store(y + i, add(mul(mul(load(y + i), factor), load(gain + i)), load(bias + i)));
}

inline void normalize(bool centered, const float* x, const float* gain, float* y, int64_t n, float eps) {
  centered ? layer_norm(x, gain, y, n, eps) : rms_norm(x, gain, y, n, eps);
}

// Normalizes the `dim` floats of one head in place. dim need not be a multiple of 16, and other
// heads may follow directly.
inline void head_norm(bool centered, float* x, const float* gain, int64_t dim, float eps) {
  alignas(64) float padded[1024] = {};
  std::memcpy(padded, x, dim * sizeof(float));
  normalize(centered, padded, gain, padded, dim, eps);
  std::memcpy(x, padded, dim * sizeof(float));
}

// Rotates the first 2 * half floats of a head. Float i of the first half forms a pair with float i of
// the second half.
inline void rotate(float* __restrict x, const float* __restrict cos, const float* __restrict sin, int64_t half) {
  float* __restrict second = x + half;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = second[i];
    x[i] = a * cos[i] - b * sin[i];
    second[i] = b * cos[i] + a * sin[i];
  }
}

// Does the same as `rotate`, but with pairs of adjacent floats.
inline void rotate_pairs(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

inline F sigmoid(F x) { return div(set(1.0f), add(set(1.0f), exp(sub(set(0.0f), max(x, set(-80.0f)))))); }

inline F silu(F x) { return div(x, add(set(1.0f), exp(sub(set(0.0f), max(x, set(-80.0f)))))); }

// Returns 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3).
inline F gelu_tanh(F x) {
  const F cube = mul(mul(x, x), x);
  const F u = mul(set(0.7978845608f), fma(set(0.044715f), cube, x));
  const F e = exp(mul(set(-2.0f), max(u, set(-40.0f))));
  return div(x, add(set(1.0f), e));
}

inline F squared_relu(F x) {
  const F positive = max(x, set(0.0f));
  return mul(positive, positive);
}

// Returns (alpha x + beta) x if x is above 0, else alpha_below (exp(x) - 1 - x) + beta x.
inline F xielu(const Activation& own, F x) {
  const F above = max(x, set(0.0f)), below = min(x, set(0.0f));
  const F curve = sub(sub(exp(below), set(1.0f)), below);
  const F bent = fma(mul(set(own.alpha), above), above, mul(set(own.alpha_below), curve));
  return fma(set(own.beta), x, bent);
}

inline F activate(const Activation& own, F x) {
  if (own.kind == SILU) return silu(x);
  if (own.kind == GELU_TANH) return gelu_tanh(x);
  return own.kind == SQUARED_RELU ? squared_relu(x) : xielu(own, x);
}

// Returns g sigmoid(alpha g) (u + 1), where g is min(gate, limit) and u is `up` within -limit .. limit.
inline F clamped_swiglu(const Activation& own, F gate, F up) {
  const F limit = set(own.limit);
  const F g = min(gate, limit), u = max(min(up, limit), set(-own.limit));
  return mul(mul(g, sigmoid(mul(set(own.alpha), g))), add(u, set(1.0f)));
}

// Returns act(gate) * up.
inline F gate_by(const Activation& own, F gate, F up) {
  return own.kind == CLAMPED_SWIGLU ? clamped_swiglu(own, gate, up) : mul(activate(own, gate), up);
}

}  // namespace ISA
}  // namespace medusa
