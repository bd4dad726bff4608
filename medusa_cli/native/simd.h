// Vectors for one instruction set, which the compiler's flags select: simd_avx512.h, simd_avx2.h,
// simd_neon.h or simd_generic.h. Each of these files implements the same operations.
//
// Floats come in vectors of 16 lanes (F), regardless of the width of registers. Lanes are summed in
// a fixed order, so all instruction sets give the same bits.
//
// Matmuls of 8-bit rows work on kLanes channels at once, as many as fit in a register. For each
// channel, a vector holds four bytes (B), a float (L) or a 32-bit integer (I). Sums of integers are
// exact, so their order does not matter.
//
//     load_half, load_bf16      16 floats from numbers of 16 bits
//     store_half                stores 16 floats, all in the range of halves, as halves: to nearest, ties to even
//     set_half                  all lanes from one half
//     load_i8                   16 floats from signed bytes
//     load_byte_of_4            byte `i` (0 .. 3) of each of 16 groups of four bytes, as floats
//     choose                    the lanes of a whose bit of the mask is set, else those of b
//     zero_below                the lanes of a for which x >= limit; the other lanes are 0
//     scale2                    a times 2 to the power of n; n holds whole numbers
//     store_i8                  stores 16 whole numbers as bytes
//     right, left               shift bytes or, in some sets, pairs of bytes; callers clear bits of the other byte
//     table_b, look_up          a table of 16 bytes, indexed by bytes below 16
//     half_l, bf16_l, u8_l, i8_l  kLanes floats from fp16 numbers, bf16 numbers, unsigned bytes and signed bytes
//     half_powers_l             2^(e - 128) for each byte e: half of the float whose exponent bits are e; for
//                               e = 0, this float is subnormal
//     dot<BITS, COUNT>          `first` plus the dot products of COUNT vectors of weights of BITS bits with
//                               4 * COUNT inputs of a row
//     kBlockRows                rows that a matmul processes at once: as many as fit in registers next to a
//                               unit of weights
//     kUnsignedBytes            true if `dot` takes unsigned bytes of any size, so that 8-bit weights need no sign
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "formats.h"

// Placed before loops over vectors that must stay in registers.
#if defined(__clang__)
#define MEDUSA_UNROLL _Pragma("unroll")
#else
#define MEDUSA_UNROLL _Pragma("GCC unroll 16")
#endif

// For functions whose vectors must stay in registers. Some of these functions are so long that GCC
// would not inline them.
#define MEDUSA_INLINE __attribute__((always_inline)) inline

// All code that is compiled once for each instruction set must be in the namespace ISA, or be static.
// Of any other inline function, and of std's templates, the linker keeps one copy. This may be the
// AVX-512 copy, which would then also run on a machine without AVX-512.
#if defined(__AVX512BW__)
#include "simd_avx512.h"
#include "simd_x86.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#include "simd_x86.h"
#elif defined(MEDUSA_NEON)
#include "simd_neon.h"
#else
#include "simd_generic.h"
#endif

namespace medusa {
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

// A std::vector whose code the linker does not share between instruction sets, because the name of its
// type includes the namespace ISA.
template <class T>
using List = std::vector<T, Allocator<T>>;

// Returns e to the power of a, for a <= 88; if a is below -87, returns 0. Over all floats, the largest
// error is 1.27 units in the last place.
//
// The method and its constants are those of expf in the Cephes library: x = n log(2) + f, where log(2) is
// split into a number of few bits and a small rest, and a polynomial of f is multiplied by 2^n.
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

// Prefetches `bytes` bytes from an address on into the second-level cache, so that a tile's next units
// arrive from memory while the current unit is multiplied. Prefetching into the first-level cache would
// make passes slower.
MEDUSA_INLINE void prefetch(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

}  // namespace ISA
}  // namespace medusa
