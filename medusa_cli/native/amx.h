// Products of 8-bit rows with weights by AMX. One instruction multiplies up to 16 rows of 32 inputs
// with a unit of weights for 16 channels:
//
//     rows [16, 32]  x  weights [32, 16]  =  products [16, 16] of 32-bit integers
//
// AMX registers are loaded from memory and stored to memory. Nothing is rounded, so the products equal
// those of other instructions.
#pragma once

#include "simd.h"

#if defined(__AMX_INT8__)

namespace medusa {
namespace ISA {

// The maximum number of rows in an AMX register.
constexpr int kAmxRows = 16;

// The number of rows of each register and the bytes of a row, in the layout of ldtilecfg.
struct alignas(64) AmxShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Prepares this thread's registers for blocks of 16 rows and, unless `last` is 0, a last block of `last` rows:
//
//     0: products of 16 rows    1: 16 rows    2: weights of a unit    3: products of the last rows    4: the last rows
inline void shape_registers(int last) {
  AmxShapes shapes;
  const int rows[] = {kAmxRows, kAmxRows, kUnit / 4, last, last};
  const int bytes[] = {4 * kTile, kUnit, 4 * kTile, 4 * kTile, kUnit};
  for (int i = 0; i < (last ? 5 : 3); i++) {
    shapes.rows[i] = uint8_t(rows[i]);
    shapes.bytes[i] = uint16_t(bytes[i]);
  }
  asm volatile("ldtilecfg %0" ::"m"(shapes));
}

// Empties this thread's registers, so that the system need not save them.
inline void release_registers() { asm volatile("tilerelease"); }

// Multiplies rows, which are `stride` bytes apart, with a unit of weights [8, 16, 4]. LAST: the rows
// are those of the last block. SIGNED: the weights are signed bytes. The code is assembly, because
// GCC 12 does not know that its own AMX functions read and write memory.
template <bool LAST, bool SIGNED>
inline void multiply_unit(const int8_t* rows, int64_t stride, const uint8_t* weights, int32_t (*products)[kTile]) {
  // clang-format off
#define MEDUSA_MULTIPLY(PRODUCTS, ROWS, INSTRUCTION)                       \
  asm volatile(                                                            \
      "tilezero %%tmm" PRODUCTS "\n\t"                                     \
      "tileloadd (%0,%1,1), %%tmm" ROWS "\n\t"                             \
      "tileloadd (%2,%3,1), %%tmm2\n\t"                                    \
      INSTRUCTION " %%tmm2, %%tmm" ROWS ", %%tmm" PRODUCTS "\n\t"          \
      "tilestored %%tmm" PRODUCTS ", (%4,%3,1)"                            \
      ::"r"(rows), "r"(stride), "r"(weights), "r"(int64_t(64)), "r"(products) \
      : "memory")
  // clang-format on
  if constexpr (LAST && SIGNED) MEDUSA_MULTIPLY("3", "4", "tdpbssd");
  else if constexpr (LAST) MEDUSA_MULTIPLY("3", "4", "tdpbsud");
  else if constexpr (SIGNED) MEDUSA_MULTIPLY("0", "1", "tdpbssd");
  else MEDUSA_MULTIPLY("0", "1", "tdpbsud");
#undef MEDUSA_MULTIPLY
}

}  // namespace ISA
}  // namespace medusa

#endif
