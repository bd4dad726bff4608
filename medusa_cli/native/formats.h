// Weights as the library holds them: matrices in tiles of 16 output channels, in the exact bits of their file.
//
// A tile's inputs come in blocks; within a block, 32 inputs of the 16 channels are one unit. A unit of 8-bit numbers is
// eight vectors of 64 bytes, each with four consecutive inputs of channel 0, then of channel 1, ..:
//
//     vector j:  c0: 4j 4j+1 4j+2 4j+3 | c1: 4j .. 4j+3 | .. | c15: 4j .. 4j+3
//
// which is what one integer dot product instruction multiplies with four inputs of a row. Four-bit numbers are packed
// in four vectors: the low halves of vector j are the unit's vector 2j, the high halves 2j + 1. The fifth and sixth bits
// are planes of 64 bytes.
//
//     value of input k in channel c  =  scale[group][c] * (q - zero)   or   scale[group][c] * q + offset[group][c]
#pragma once

#include <cstdint>

namespace medusa {

constexpr int kTile = 16;    // channels of a tile
constexpr int kUnit = 32;    // inputs of a unit, and of a group of 8-bit rows
constexpr int kChunk = 256;  // inputs that are unpacked at once

enum Format : int32_t {
  F32 = 0,
  F16 = 1,
  BF16 = 2,
  Q4_0 = 3,
  Q4_1 = 4,
  Q5_0 = 5,
  Q5_1 = 6,
  Q8_0 = 7,
  Q4_K = 8,
  Q5_K = 9,
  Q6_K = 10,
  Q3_K = 11,
  Q2_K = 12,
  kFormats = 13,
};

// The facts of a quantized format. group: inputs that share a scale. block: inputs of a block of the tile and of
// the file. bits: of an unpacked number (the stored width may be larger). zero: subtracted from it, where has_offset is
// false. file_bytes: of a block of the file; tile_bytes: of a block of a tile.
struct FormatInfo {
  int group;
  int block;
  int bits;
  int zero;
  bool has_offset;
  int file_bytes;
  int tile_bytes;
};

const FormatInfo& info(int32_t format);
inline bool is_float(int32_t format) { return format <= BF16; }
inline int float_bytes(int32_t format) { return format == F32 ? 4 : 2; }

// Bytes of a matrix [n, k] in tiles. k is a whole number of blocks where the format has blocks.
int64_t tiled_bytes(int32_t format, int64_t n, int64_t k);

// Packs channels first .. end - 1 (multiples of 16, or end = n) of a matrix [n, k] as a file holds it, row by row.
void pack(int32_t format, const uint8_t* file, int64_t n, int64_t k, int64_t first, int64_t end, uint8_t* tiles);

// Blocks of tiles. Formats of 256 inputs have 8-bit scales of groups beside one fp16 scale of all.
struct TileQ4_0 { uint8_t q[4][64]; uint16_t d[16]; };
struct TileQ4_1 { uint8_t q[4][64]; uint16_t d[16], m[16]; };
struct TileQ5_0 { uint8_t q[4][64], h[64]; uint16_t d[16]; };
struct TileQ5_1 { uint8_t q[4][64], h[64]; uint16_t d[16], m[16]; };
struct TileQ8_0 { uint8_t q[8][64]; uint16_t d[16]; };
struct TileQ4_K { uint8_t q[8][4][64], scale[8][16], min[8][16]; uint16_t d[16], dmin[16]; };
struct TileQ5_K { uint8_t q[8][4][64], h[8][64], scale[8][16], min[8][16]; uint16_t d[16], dmin[16]; };
struct TileQ6_K { uint8_t q[8][4][64], h[8][2][64]; int8_t scale[16][16]; uint16_t d[16]; };
struct TileQ3_K { uint8_t q[8][4][64]; int8_t scale[16][16]; uint16_t d[16]; };
struct TileQ2_K { uint8_t q[8][4][64], scale[16][16], min[16][16]; uint16_t d[16], dmin[16]; };

// Rounds a row of k weights to a file's blocks of Q8_0 (34 bytes a 32 weights) or Q4_1 (20 bytes).
void round_q8_0(const float* weights, int64_t k, uint8_t* file);
void round_q4_1(const float* weights, int64_t k, uint8_t* file);

float half_to_float(uint16_t half);
uint16_t float_to_half(float value);

}  // namespace medusa
