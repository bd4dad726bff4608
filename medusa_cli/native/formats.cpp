#include "formats.h"

#include <cmath>
#include <cstring>

namespace medusa {

namespace {

uint16_t read16(const uint8_t* bytes) {
  uint16_t value;
  std::memcpy(&value, bytes, 2);
  return value;
}

uint32_t read32(const uint8_t* bytes) {
  uint32_t value;
  std::memcpy(&value, bytes, 4);
  return value;
}

// Packs the low 4 bits of a unit's 32 numbers for channel c into the unit's vectors.
void put_nibbles(const uint8_t* numbers, int c, uint8_t (*q)[64]) {
  for (int j = 0; j < 4; j++) {
    for (int i = 0; i < 4; i++) {
      q[j][4 * c + i] = (numbers[8 * j + i] & 15) | (numbers[8 * j + 4 + i] & 15) << 4;
    }
  }
}

// Bit j of byte 4c + i of the plane is the fifth bit of input 4j + i.
void put_fifth_bits(const uint8_t* numbers, int c, uint8_t* plane) {
  for (int i = 0; i < 4; i++) {
    uint8_t bits = 0;
    for (int j = 0; j < 8; j++) bits |= (numbers[4 * j + i] >> 4 & 1) << j;
    plane[4 * c + i] = bits;
  }
}

// Bits 2j and 2j + 1 of byte 4c + i of plane p are bits 4 and 5 of input 16p + 4j + i.
void put_upper_pairs(const uint8_t* numbers, int c, uint8_t (*planes)[64]) {
  for (int p = 0; p < 2; p++) {
    for (int i = 0; i < 4; i++) {
      uint8_t bits = 0;
      for (int j = 0; j < 4; j++) bits |= (numbers[16 * p + 4 * j + i] >> 4 & 3) << (2 * j);
      planes[p][4 * c + i] = bits;
    }
  }
}

void put_bytes(const uint8_t* numbers, int c, uint8_t (*q)[64]) {
  for (int j = 0; j < 8; j++) {
    std::memcpy(&q[j][4 * c], numbers + 4 * j, 4);
  }
}

// The low halves of 16 bytes are inputs 0 .. 15, and the high halves are inputs 16 .. 31.
void split_halves(const uint8_t* bytes, uint8_t* numbers) {
  for (int k = 0; k < 16; k++) {
    numbers[k] = bytes[k] & 15;
    numbers[k + 16] = bytes[k] >> 4;
  }
}

void add_fifth_bits(uint32_t bits, uint8_t* numbers) {
  for (int k = 0; k < 32; k++) numbers[k] |= (bits >> k & 1) << 4;
}

// Reads the 6-bit scale and min of one group. Q4_K and Q5_K store the scales and mins of eight groups
// in 12 bytes.
void read_scales(const uint8_t* bytes, int group, uint8_t* scale, uint8_t* min) {
  if (group < 4) {
    *scale = bytes[group] & 63;
    *min = bytes[group + 4] & 63;
  } else {
    *scale = (bytes[group + 4] & 15) | (bytes[group - 4] >> 6) << 4;
    *min = (bytes[group + 4] >> 4) | (bytes[group] >> 6) << 4;
  }
}

// Packs one block of channel c.
void put_block(int32_t format, const uint8_t* file, int c, uint8_t* out) {
  uint8_t numbers[256];
  switch (format) {
    case Q4_0:
    case IQ4_NL: {
      auto* tile = reinterpret_cast<TileQ4_0*>(out);
      split_halves(file + 2, numbers);
      put_nibbles(numbers, c, tile->q);
      tile->d[c] = read16(file);
      break;
    }
    case Q4_1: {
      auto* tile = reinterpret_cast<TileQ4_1*>(out);
      split_halves(file + 4, numbers);
      put_nibbles(numbers, c, tile->q);
      tile->d[c] = read16(file);
      tile->m[c] = read16(file + 2);
      break;
    }
    case Q5_0: {
      auto* tile = reinterpret_cast<TileQ5_0*>(out);
      split_halves(file + 6, numbers);
      add_fifth_bits(read32(file + 2), numbers);
      put_nibbles(numbers, c, tile->q);
      put_fifth_bits(numbers, c, tile->h);
      tile->d[c] = read16(file);
      break;
    }
    case Q5_1: {
      auto* tile = reinterpret_cast<TileQ5_1*>(out);
      split_halves(file + 8, numbers);
      add_fifth_bits(read32(file + 4), numbers);
      put_nibbles(numbers, c, tile->q);
      put_fifth_bits(numbers, c, tile->h);
      tile->d[c] = read16(file);
      tile->m[c] = read16(file + 2);
      break;
    }
    case Q8_0: {
      auto* tile = reinterpret_cast<TileQ8_0*>(out);
      for (int k = 0; k < 32; k++) numbers[k] = file[2 + k] ^ 0x80;
      put_bytes(numbers, c, tile->q);
      tile->d[c] = read16(file);
      break;
    }
    case Q4_K:
    case Q5_K: {
      const bool five = format == Q5_K;
      const uint8_t* low = file + (five ? 48 : 16);
      for (int k = 0; k < 256; k++) {
        const int pair = k / 64, in_pair = k % 64;
        const uint8_t byte = low[32 * pair + in_pair % 32];
        numbers[k] = in_pair < 32 ? byte & 15 : byte >> 4;
        if (five) numbers[k] |= (file[16 + k % 32] >> (k / 32) & 1) << 4;
      }
      for (int group = 0; group < 8; group++) {
        uint8_t scale, min;
        read_scales(file + 4, group, &scale, &min);
        if (five) {
          auto* tile = reinterpret_cast<TileQ5_K*>(out);
          put_nibbles(numbers + 32 * group, c, tile->q[group]);
          put_fifth_bits(numbers + 32 * group, c, tile->h[group]);
          tile->scale[group][c] = scale;
          tile->min[group][c] = min;
          tile->d[c] = read16(file);
          tile->dmin[c] = read16(file + 2);
        } else {
          auto* tile = reinterpret_cast<TileQ4_K*>(out);
          put_nibbles(numbers + 32 * group, c, tile->q[group]);
          tile->scale[group][c] = scale;
          tile->min[group][c] = min;
          tile->d[c] = read16(file);
          tile->dmin[c] = read16(file + 2);
        }
      }
      break;
    }
    case Q6_K: {
      auto* tile = reinterpret_cast<TileQ6_K*>(out);
      for (int k = 0; k < 256; k++) {
        const int half = k / 128, quarter = k % 128 / 32, i = k % 32;
        const uint8_t byte = file[64 * half + 32 * (quarter % 2) + i];
        const uint8_t low = quarter < 2 ? byte & 15 : byte >> 4;
        numbers[k] = low | (file[128 + 32 * half + i] >> (2 * quarter) & 3) << 4;
      }
      for (int unit = 0; unit < 8; unit++) {
        put_nibbles(numbers + 32 * unit, c, tile->q[unit]);
        put_upper_pairs(numbers + 32 * unit, c, tile->h[unit]);
      }
      for (int group = 0; group < 16; group++) tile->scale[group][c] = static_cast<int8_t>(file[192 + group]);
      tile->d[c] = read16(file + 208);
      break;
    }
    case Q3_K: {
      auto* tile = reinterpret_cast<TileQ3_K*>(out);
      for (int k = 0; k < 256; k++) {
        const int half = k / 128, quarter = k % 128 / 32, i = k % 32;
        const uint8_t low = file[32 + 32 * half + i] >> (2 * quarter) & 3;
        numbers[k] = low | (file[i] >> (k / 32) & 1) << 2;
      }
      for (int unit = 0; unit < 8; unit++) put_nibbles(numbers + 32 * unit, c, tile->q[unit]);
      const uint8_t* scales = file + 96;
      for (int group = 0; group < 16; group++) {
        const uint8_t low = group < 8 ? scales[group] & 15 : scales[group - 8] >> 4;
        const uint8_t high = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        tile->scale[group][c] = static_cast<int8_t>((low | high << 4) - 32);
      }
      tile->d[c] = read16(file + 108);
      break;
    }
    case Q2_K: {
      auto* tile = reinterpret_cast<TileQ2_K*>(out);
      for (int k = 0; k < 256; k++) {
        const int half = k / 128, quarter = k % 128 / 32, i = k % 32;
        numbers[k] = file[16 + 32 * half + i] >> (2 * quarter) & 3;
      }
      for (int unit = 0; unit < 8; unit++) put_nibbles(numbers + 32 * unit, c, tile->q[unit]);
      for (int group = 0; group < 16; group++) {
        tile->scale[group][c] = file[group] & 15;
        tile->min[group][c] = file[group] >> 4;
      }
      tile->d[c] = read16(file + 80);
      tile->dmin[c] = read16(file + 82);
      break;
    }
    case MXFP4: {
      auto* tile = reinterpret_cast<TileMXFP4*>(out);
      split_halves(file + 1, numbers);
      put_nibbles(numbers, c, tile->q);
      tile->e[c] = file[0];
      break;
    }
    case IQ4_XS: {
      auto* tile = reinterpret_cast<TileIQ4_XS*>(out);
      for (int group = 0; group < 8; group++) {
        split_halves(file + 8 + 16 * group, numbers);
        put_nibbles(numbers, c, tile->q[group]);
        const uint8_t low = file[4 + group / 2] >> (4 * (group % 2)) & 15;
        const uint8_t high = read16(file + 2) >> (2 * group) & 3;
        tile->scale[group][c] = static_cast<int8_t>((low | high << 4) - 32);
      }
      tile->d[c] = read16(file);
      break;
    }
  }
}

}  // namespace

int64_t tiled_bytes(int32_t format, int64_t n, int64_t k) {
  const FormatInfo& f = info(format);
  return (n + kTile - 1) / kTile * (k / f.block) * f.tile_bytes;
}

void pack_channel(int32_t format, const uint8_t* row, int64_t k, int channel, uint8_t* tile) {
  const FormatInfo& f = info(format);
  if (is_float(format)) {
    for (int64_t i = 0; i < k; i++) {
      std::memcpy(tile + i * f.tile_bytes + channel * f.file_bytes, row + i * f.file_bytes, f.file_bytes);
    }
    return;
  }
  for (int64_t b = 0; b < k / f.block; b++) put_block(format, row + b * f.file_bytes, channel, tile + b * f.tile_bytes);
}

void pack(int32_t format, const uint8_t* file, int64_t k, int64_t first, int64_t end, uint8_t* tiles) {
  const FormatInfo& f = info(format);
  const int64_t blocks = k / f.block;
  const int64_t row_bytes = blocks * f.file_bytes;
  const int64_t tile_bytes = blocks * f.tile_bytes;
  for (int64_t channel = first; channel < end; channel++) {
    pack_channel(format, file + channel * row_bytes, k, channel % kTile, tiles + channel / kTile * tile_bytes);
  }
}

void copy_channel(int32_t format, int64_t k, uint8_t* tiles, int64_t from, int64_t to) {
  const FormatInfo& f = info(format);
  const int64_t tile_bytes = k / f.block * f.tile_bytes;
  const uint8_t* source = tiles + from / kTile * tile_bytes;
  uint8_t* target = tiles + to / kTile * tile_bytes;
  // The bytes of a channel that lie together: those of one float, or of four numbers of a block.
  const int64_t size = is_float(format) ? f.file_bytes : 4;
  const int64_t vectors = is_float(format) ? 1 : kUnit / 4;
  for (int64_t block = 0; block < k / f.block; block++, source += f.tile_bytes, target += f.tile_bytes) {
    for (int64_t j = 0; j < vectors; j++) {
      const int64_t at = j * size * kTile;
      std::memcpy(target + at + to % kTile * size, source + at + from % kTile * size, size);
    }
    if (is_float(format)) continue;
    reinterpret_cast<TileQ8_0*>(target)->d[to % kTile] = reinterpret_cast<const TileQ8_0*>(source)->d[from % kTile];
  }
}

// Returns the integer nearest to a number, limited to [least, most]; `most` for NaN. Compilers vectorize this code,
// but would compile std::nearbyint, std::fmin and std::fmax to calls.
static inline float round_within(float x, float least, float most) {
  const float below = x < most ? x : most;
  const float inside = below > least ? below : least;
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: floats of this size have no fraction
  return (inside + kShift) - kShift;
}

void round_q8_0(const float* weights, int64_t k, uint8_t* file) {
  for (int64_t b = 0; b < k / 32; b++, weights += 32, file += 34) {
    float largest = 0;
    for (int i = 0; i < 32; i++) {
      const float size = std::fabs(weights[i]);
      largest = size > largest ? size : largest;
    }
    const uint16_t d = float_to_half(largest / 127);
    const float scale = half_to_float(d);
    std::memcpy(file, &d, 2);
    if (!(scale > 0)) {
      std::memset(file + 2, 0, 32);
      continue;
    }
    for (int i = 0; i < 32; i++) {
      file[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(round_within(weights[i] / scale, -127, 127)));
    }
  }
}

void round_q4_1(const float* weights, int64_t k, uint8_t* file) {
  for (int64_t b = 0; b < k / 32; b++, weights += 32, file += 20) {
    float low = weights[0], high = weights[0];
    for (int i = 1; i < 32; i++) {
      low = weights[i] < low ? weights[i] : low;
      high = weights[i] > high ? weights[i] : high;
    }
    const uint16_t d = float_to_half((high - low) / 15), m = float_to_half(low);
    const float scale = half_to_float(d), offset = half_to_float(m);
    std::memcpy(file, &d, 2);
    std::memcpy(file + 2, &m, 2);
    uint8_t levels[32] = {};
    if (scale > 0) {
      for (int i = 0; i < 32; i++) {
        levels[i] = static_cast<uint8_t>(static_cast<int>(round_within((weights[i] - offset) / scale, 0, 15)));
      }
    }
    for (int i = 0; i < 16; i++) file[4 + i] = levels[i] | levels[i + 16] << 4;
  }
}

float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half >> 15) << 31;
  const uint32_t exponent = half >> 10 & 31;
  const uint32_t fraction = half & 1023;
  float value;
  if (exponent == 0) {
    value = std::ldexp(float(fraction), -24);
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t float_to_half(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (!(size < 65520.0f)) return sign | 0x7c00 | (std::isnan(value) ? 0x200 : 0);
  if (size == 0) return sign;
  int exponent;
  std::frexp(size, &exponent);
  // The exponent of the last bit of an fp16 number of this size, or of the last bit of subnormals.
  const int unit = std::fmax(exponent - 11, -24);
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, -unit)));
  // If rounding carries into the exponent, the exponent becomes one larger, as it should.
  return sign | static_cast<uint16_t>(unit == -24 ? units : units + (uint32_t(unit + 24) << 10));
}

}  // namespace medusa
