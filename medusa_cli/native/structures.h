// The structures of structures.def.
#pragma once

#include <cstdint>

namespace medusa {

// How a layer mixes rows.
enum Mixer : int64_t { ATTENTION = 0, SHORT_CONV = 1, DELTA_NET = 2 };

enum ActivationKind : int64_t { SILU = 0, GELU_TANH = 1, SQUARED_RELU = 2, CLAMPED_SWIGLU = 3, XIELU = 4 };

// Types that name the use of a field: a norm's gain, another vector of a layer, and a model's property that is 0 or 1.
using Gain = const float*;
using Vector = const float*;
using Flag = int64_t;

#define STRUCT(name) struct name {
#define FIELD(type, name) type name;
#define ARRAY(type, name, count) type name[count];
// clang-format off
#define END };
// clang-format on
#include "structures.def"

}  // namespace medusa
