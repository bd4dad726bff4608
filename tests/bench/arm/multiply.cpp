// Multiplies rows by a random matrix with one thread, twice: multiply SET FORMAT N K ROWS. A hint that no CPU knows
// stands before and after the second time.
#include <cstdlib>
#include <vector>

#define ISA multiply
#include "matmul.h"

using namespace medusa;

extern "C" {
int medusa_use(const char*);
void medusa_threads(int);
int medusa_multiply(const Matrix*, const float*, int64_t, int64_t, float*, int64_t);
}

int main(int, char** words) {
  const int32_t format = std::atoi(words[2]);
  const int64_t n = std::atoi(words[3]), k = std::atoi(words[4]), rows = std::atoi(words[5]);
  medusa_threads(1);
  if (medusa_use(words[1])) return 1;
  const FormatInfo& f = info(format);
  std::vector<uint8_t> tiles(n / kTile * (k / f.block) * f.tile_bytes);
  for (size_t i = 0; i < tiles.size(); i++) tiles[i] = i * 7919 >> 8 & 0x3b;
  std::vector<float> x(rows * k), y(rows * n);
  for (size_t i = 0; i < x.size(); i++) x[i] = float(i % 17) - 8;
  const Matrix m = {format, 1, n, k, tiles.data(), nullptr};
  if (medusa_multiply(&m, x.data(), rows, k, y.data(), n)) return 1;
  __asm__ volatile("hint #100" ::: "memory");
  if (medusa_multiply(&m, x.data(), rows, k, y.data(), n)) return 1;
  __asm__ volatile("hint #100" ::: "memory");
}
