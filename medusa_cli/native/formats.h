// Weights as the library stores them: matrices in tiles of 16 output channels, with the exact bits
// of their file.
//
// A tile's inputs come in blocks; within a block, 32 inputs of the 16 channels form a unit. A unit
// of 8-bit numbers has eight vectors of 64 bytes. Each vector holds four consecutive inputs of
// channel 0, then of channel 1, and so on:
//
//     vector j:  c0: 4j 4j+1 4j+2 4j+3 | c1: 4j .. 4j+3 | .. | c15: 4j .. 4j+3
//
// One integer dot-product instruction multiplies such a vector with four inputs of a row. Four-bit
// numbers are packed into four vectors: the low halves of the bytes of packed vector j are the unit's
// vector 2j, and the high halves are vector 2j + 1. The fifth and sixth bits are stored in planes of
// 64 bytes.
//
//     value of input k in channel c  =  scale[group][c] * (q - zero)   or   scale[group][c] * q + offset[group][c]
//
// The four bits of MXFP4, IQ4_NL and IQ4_XS are the index of q - zero in a table of 16 whole numbers.
// In the table of MXFP4, each number is twice the value that its index has in e2m1. The scales of MXFP4
// are bytes e, which stand for 2^(e - 128).
#pragma once

#include <cstdint>

namespace medusa {

constexpr int kTile = 16;    // channels per tile
constexpr int kUnit = 32;    // inputs per unit, and per group of 8-bit rows
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
  MXFP4 = 13,
  IQ4_NL = 14,
  IQ4_XS = 15,
  kFormats = 16,
};

// The blocks of tiles. Formats with blocks of 256 inputs have an 8-bit scale per group in addition to
// an fp16 scale per block.
// clang-format off
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
struct TileMXFP4 { uint8_t q[4][64], e[16]; };
using TileIQ4_NL = TileQ4_0;
struct TileIQ4_XS { uint8_t q[8][4][64]; int8_t scale[8][16]; uint16_t d[16]; };
// clang-format on

// The properties of a format. group: inputs that share a scale. block: inputs per block, both in a
// tile and in a file. bits: bits per unpacked number, which may be more than in a tile. zero: the
// number to subtract from unpacked numbers if has_offset is false. file_bytes, tile_bytes: the bytes
// of a block in a file and in a tile.
struct FormatInfo {
  int group;
  int block;
  int bits;
  int zero;
  bool has_offset;
  int file_bytes;
  int tile_bytes;
};

// The formats' properties, in the order of Format.
inline constexpr FormatInfo kInfos[kFormats] = {
    {0, 1, 32, 0, false, 4, 4 * kTile},
    {0, 1, 16, 0, false, 2, 2 * kTile},
    {0, 1, 16, 0, false, 2, 2 * kTile},
    {32, 32, 4, 8, false, 18, sizeof(TileQ4_0)},
    {32, 32, 4, 0, true, 20, sizeof(TileQ4_1)},
    {32, 32, 5, 16, false, 22, sizeof(TileQ5_0)},
    {32, 32, 5, 0, true, 24, sizeof(TileQ5_1)},
    {32, 32, 8, 128, false, 34, sizeof(TileQ8_0)},
    {32, 256, 4, 0, true, 144, sizeof(TileQ4_K)},
    {32, 256, 5, 0, true, 176, sizeof(TileQ5_K)},
    {16, 256, 6, 32, false, 210, sizeof(TileQ6_K)},
    {16, 256, 4, 4, false, 110, sizeof(TileQ3_K)},
    {16, 256, 4, 0, true, 84, sizeof(TileQ2_K)},
    {32, 32, 5, 16, false, 17, sizeof(TileMXFP4)},
    {32, 32, 8, 128, false, 18, sizeof(TileIQ4_NL)},
    {32, 256, 8, 128, false, 136, sizeof(TileIQ4_XS)},
};

static constexpr const FormatInfo& info(int32_t format) { return kInfos[format]; }
static constexpr bool is_float(int32_t format) { return format <= BF16; }
// Returns true for the formats of a cache's keys and values.
static constexpr bool holds_columns(int64_t format) { return format == F32 || format == F16 || format == Q8_0; }

// Returns the bytes of a matrix [n, k] in tiles. k must be a whole number of blocks.
int64_t tiled_bytes(int32_t format, int64_t n, int64_t k);

// Packs channels first .. end - 1 of a matrix [n, k], which a file stores row by row. `first` is a
// multiple of 16, and `end` is a multiple of 16 or n.
void pack(int32_t format, const uint8_t* file, int64_t k, int64_t first, int64_t end, uint8_t* tiles);

// Packs a file's row [k] into a channel (0 .. 15) of a tile.
void pack_channel(int32_t format, const uint8_t* row, int64_t k, int channel, uint8_t* tile);

// Copies channel `from` of a matrix of F32, F16 or Q8_0 to channel `to`.
void copy_channel(int32_t format, int64_t k, uint8_t* tiles, int64_t from, int64_t to);

// Rounds a row of k weights to blocks of Q8_0 (34 bytes per 32 weights) or Q4_1 (20 bytes), as
// files store them.
void round_q8_0(const float* weights, int64_t k, uint8_t* file);
void round_q4_1(const float* weights, int64_t k, uint8_t* file);

float half_to_float(uint16_t half);
uint16_t float_to_half(float value);

}  // namespace medusa
