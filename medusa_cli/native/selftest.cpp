// Computes fixed cases with each instruction set of this machine, and compares the bits with those of
// the generic set:
//
//     selftest [DIGEST]     ->     SET DIGEST
//
// All sets, compilers and machines give the same digest. Exits with status 1 if the bits of a case differ, or if a
// set's digest is not DIGEST.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <string>
#include <utility>

// For the sizes of delta nets' structures, which depend on the model.
#define ISA selftest
#include "delta_net.h"

using namespace medusa;

extern "C" {
const char* medusa_instructions();
int medusa_use(const char*);
void medusa_threads(int);
void medusa_pack(int, const uint8_t*, int64_t, int64_t, int64_t, uint8_t*);
int medusa_round(int, const float*, int64_t, int64_t, uint8_t*);
int medusa_multiply(const Matrix*, const float*, int64_t, int64_t, float*, int64_t);
int medusa_embed(const Matrix*, const int64_t*, int64_t, float, float*, int64_t);
int medusa_logits(const Matrix*, const float*, int64_t, int64_t, float*, int64_t, int32_t*);
int medusa_guess(const Matrix*, const Guesses*);
int medusa_run(const Model*, const Cache*, const Step*);
int medusa_draft(const Model*, const DraftPass*);
int medusa_keep(const Model*, const Cache*, int64_t, int64_t, const int64_t*, int64_t);
}

namespace {

void require(int code, const char* call) {
  if (code == 0) return;
  std::fprintf(stderr, "%s returned %d\n", call, code);
  std::exit(1);
}

// Returns the FNV-1a hash of some bytes.
uint64_t hash_of(const void* data, size_t bytes, uint64_t hash = 0xcbf29ce484222325ull) {
  const auto* p = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 0x100000001b3ull;
  return hash;
}

uint64_t hash_of(const std::vector<float>& x, uint64_t hash = 0xcbf29ce484222325ull) {
  return hash_of(x.data(), x.size() * sizeof(float), hash);
}

// Random numbers that are the same on every machine: those of a linear congruential generator, scaled exactly.
struct Noise {
  uint64_t state;

  uint32_t bits() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return uint32_t(state >> 33);
  }
  float number(float size = 1.0f) { return size * (float(bits() >> 7) / float(1 << 23) - 1.0f); }
};

// Numbers and matrices that live until the program ends.
std::deque<std::vector<float>> arena;
std::deque<std::vector<uint8_t>> tiles_arena;
uint64_t seed = 1;

float* floats(int64_t count, float middle = 0.0f, float spread = 0.0f) {
  Noise noise{seed++};
  std::vector<float>& x = arena.emplace_back(count + 32, 0.0f);
  for (int64_t i = 0; i < count; i++) x[i] = middle + noise.number(spread);
  return x.data();
}

float* gain(int64_t n) {
  float* both = floats(2 * padded(n, 32));
  const float* noise = floats(2 * n, 0.0f, 0.25f);
  for (int64_t i = 0; i < n; i++) {
    both[i] = 1.0f + noise[i];
    both[padded(n, 32) + i] = noise[n + i];
  }
  return both;
}

// The byte positions of the 16-bit scales in a block, -1 for none, and how large each of them becomes, compared with a
// weight in a format of floats.
struct Scales {
  int at[2];
  float size[2];
};

Scales scales_of(int format) {
  switch (format) {
    case Q4_0: return {{0, -1}, {1 / 4.0f, 0}};
    case Q4_1: return {{0, 2}, {1 / 8.0f, 1}};
    case Q5_0: return {{0, -1}, {1 / 8.0f, 0}};
    case Q5_1: return {{0, 2}, {1 / 16.0f, 1}};
    case Q8_0: return {{0, -1}, {1 / 64.0f, 0}};
    case Q4_K: return {{0, 2}, {1 / 256.0f, 1 / 32.0f}};
    case Q5_K: return {{0, 2}, {1 / 512.0f, 1 / 32.0f}};
    case Q6_K: return {{208, -1}, {1 / 1024.0f, 0}};
    case Q3_K: return {{108, -1}, {1 / 64.0f, 0}};
    case Q2_K: return {{80, 82}, {1 / 16.0f, 1 / 8.0f}};
    case IQ4_NL: return {{0, -1}, {1 / 64.0f, 0}};
    case IQ4_XS: return {{0, -1}, {1 / 1024.0f, 0}};
    default: return {{-1, -1}, {0, 0}};
  }
}

// Returns a random matrix in tiles. Some scales are subnormal, and some scales of MXFP4 are the three smallest.
Matrix matrix(int format, int64_t n, int64_t k, bool int8_rows, bool bias = false) {
  const FormatInfo& f = info(format);
  Noise noise{seed++};
  const float size = 2.0f / std::sqrt(float(k));
  std::vector<uint8_t> file(n * (k / f.block) * f.file_bytes);
  for (auto& byte : file) byte = uint8_t(noise.bits());
  const Scales scales = scales_of(format);
  for (int64_t block = 0; block < n * (k / f.block); block++) {
    uint8_t* at = &file[block * f.file_bytes];
    const float fine = block % 37 ? size : 1e-5f;
    const float number = noise.number(fine);
    const uint16_t half = float_to_half(number);
    if (format == F32) std::memcpy(at, &number, 4);
    if (format == F16) std::memcpy(at, &half, 2);
    if (format == BF16) std::memcpy(at, reinterpret_cast<const uint8_t*>(&number) + 2, 2);
    if (format == MXFP4) at[0] = uint8_t(block % 37 ? 118 + noise.bits() % 6 : block / 37 % 3);
    for (int i = 0; i < 2; i++) {
      const uint16_t scale = float_to_half(noise.number(fine * scales.size[i]));
      if (scales.at[i] >= 0) std::memcpy(at + scales.at[i], &scale, 2);
    }
  }
  std::vector<uint8_t>& tiles = tiles_arena.emplace_back(tiled_bytes(format, n, k));
  medusa_pack(format, file.data(), k, 0, n, tiles.data());
  const float* added = bias ? floats(padded(n, kTile), 0.0f, 1.0f) : nullptr;
  return {format, int8_rows && !is_float(format), n, k, tiles.data(), added};
}

// Returns rows with groups of zeros, of numbers near zero, of large numbers, and of ties in rounding.
float* rows(int64_t count, int64_t k) {
  float* x = floats(count * k, 0.0f, 1.0f);
  for (int64_t i = 0; i < count * k; i++) {
    const int64_t group = i / 32 % 23;
    if (group == 3) x[i] = 0.0f;
    if (group == 7) x[i] *= 1e-31f;
    if (group == 11) x[i] *= 1e6f;
    if (group == 13) x[i] = i % 32 ? float(i % 253 - 126) / 2 : 127.0f;
  }
  return x;
}

struct Case {
  std::string name;
  std::function<uint64_t()> hash;
};

// Multiplies 1 to 20 rows, and 70 rows, which are more than a panel holds. Exits if a row's bits depend on the number
// of rows.
uint64_t products(const Matrix& m, const float* x) {
  const int64_t wide = padded(m.n, kTile), most = 70;
  std::vector<float> all(most * wide), some(most * wide);
  require(medusa_multiply(&m, x, most, m.k, all.data(), wide), "medusa_multiply");
  for (int64_t count = 1; count <= 20; count++) {
    const int64_t first = most - count;
    require(medusa_multiply(&m, x + first * m.k, count, m.k, some.data(), wide), "medusa_multiply");
    if (std::memcmp(some.data(), &all[first * wide], count * wide * sizeof(float)) == 0) continue;
    std::fprintf(stderr, "format %d: %d rows alone have other bits\n", int(m.format), int(count));
    std::exit(1);
  }
  return hash_of(all);
}

void add_matrices(std::vector<Case>& cases) {
  for (int format = 0; format < kFormats; format++) {
    const std::string name = "format " + std::to_string(format);
    const int64_t n = 84, k = info(format).block == 256 ? 768 : 544;
    const Matrix m = matrix(format, n, k, false, true);
    const float* x = rows(70, k);
    cases.push_back({name + ", rows of floats", [=] { return products(m, x); }});
    if (!is_float(format)) {
      Matrix quantized = m;
      quantized.int8_rows = 1;
      cases.push_back({name + ", 8-bit rows", [=] { return products(quantized, x); }});
    }
    cases.push_back({name + ", embed", [=] {
      const int64_t ids[] = {0, 5, 17, 83};
      std::vector<float> y(4 * k);
      require(medusa_embed(&m, ids, 4, 0.7f, y.data(), k), "medusa_embed");
      return hash_of(y);
    }});
  }
  const Matrix head = matrix(Q6_K, 500, 256, true);
  const float* x = rows(5, 256);
  const float* norm = gain(256);
  cases.push_back({"logits", [=] {
    std::vector<float> y(5 * 512);
    std::vector<int32_t> best(5);
    require(medusa_logits(&head, x, 5, 256, y.data(), 512, best.data()), "medusa_logits");
    return hash_of(best.data(), 5 * sizeof(int32_t), hash_of(y));
  }});
  // With a temperature, scores would depend on the system's logarithm, whose last bit may differ.
  cases.push_back({"guess", [=] {
    std::vector<int64_t> ids(50);
    std::vector<float> scores(50);
    const Guesses guesses = {x, 5, 256, norm, 1e-6f, 0.0f, 10, ids.data(), scores.data(), nullptr};
    require(medusa_guess(&head, &guesses), "medusa_guess");
    const std::vector<int32_t> narrow(ids.begin(), ids.end());
    return hash_of(narrow.data(), 50 * sizeof(int32_t), hash_of(scores));
  }});
  cases.push_back({"round", [=] {
    std::vector<uint8_t> file(2 * 5 * 8 * 34);
    require(medusa_round(Q8_0, x, 5, 256, file.data()), "medusa_round");
    require(medusa_round(Q4_1, x, 5, 256, &file[5 * 8 * 34]), "medusa_round");
    return hash_of(file.data(), file.size());
  }});
}

// Makes rotary tables by repeated rotations, by angles with rational sines and cosines: the results of std::sin may
// differ between systems.
void add_rotary(Model& m, int64_t half) {
  float* cos = floats(m.positions * half);
  float* sin = floats(m.positions * half);
  for (int64_t i = 0; i < half; i++) {
    const double t = 1.0 / double(1 + 3 * i);
    const double c = (1 - t * t) / (1 + t * t), s = 2 * t / (1 + t * t);
    double x = 1, y = 0;
    for (int64_t p = 0; p < m.positions; p++) {
      cos[p * half + i] = float(x);
      sin[p * half + i] = float(y);
      const double turned = x * c - y * s;
      y = x * s + y * c;
      x = turned;
    }
  }
  m.cos[0] = cos;
  m.sin[0] = sin;
  m.rotary[0] = 2 * half;
}

enum Family { PLAIN, CENTERED, MIXTURE, HYBRID, kFamilies };
const char* const kFamilyNames[] = {"plain", "layer norms", "mixture", "hybrid"};

constexpr int64_t kHidden = 256, kHeads = 4, kKeyHeads = 2, kDim = 64, kInner = 512, kSlots = 2, kCapacity = 128;

// A small model of a family, with its cache. Its matrices have all quantized formats in turn.
struct Tiny {
  Model m = {};
  Cache cache = {};
  std::vector<Layer> layers;
  std::vector<uint8_t> keys, values;
  std::vector<float> inputs, states, pending;
  static constexpr int64_t parts[kSlots] = {0, 1};
  int next_format = Q4_0;
  bool int8_rows;

  Matrix next(int64_t n, int64_t k, bool bias = false) {
    const Matrix made = matrix(next_format, n, k, int8_rows, bias);
    next_format = next_format + 1 < kFormats ? next_format + 1 : int(Q4_0);
    return made;
  }

  Tiny(Family family, bool int8, int32_t columns = F32) : int8_rows(int8) {
    m.layers = family == HYBRID ? 3 : 2;
    m.hidden = kHidden, m.heads = kHeads, m.vocab = 512, m.positions = 256;
    m.eps = 1e-5f, m.scale = 0.125f, m.residual = family == MIXTURE ? 0.75f : 1.0f;
    m.centered = m.parallel = m.pairs = family == CENTERED;
    m.cap = family == CENTERED ? 30.0f : 0.0f;
    m.clip = family == PLAIN ? 8.0f : 0.0f;
    m.top_experts = 2, m.normalized = 1, m.sigmoid = int8, m.expert_scale = 1.5f;
    m.kernel = 4, m.key_heads = 2, m.value_heads = 4, m.key_dim = m.value_dim = 64;
    m.delta_layers = family == HYBRID;
    m.norm = gain(kHidden);
    add_rotary(m, kDim / 2);
    layers.assign(m.layers, Layer{});
    for (int64_t i = 0; i < m.layers; i++) fill(layers[i], family, i);
    m.layer = layers.data();
    const int64_t key_size = kKeyHeads * key_bytes(columns, kDim), value_size = kKeyHeads * value_bytes(columns, kDim);
    keys.resize(m.layers * kSlots * key_size * kCapacity);
    values.resize(m.layers * kSlots * value_size * kCapacity);
    inputs.resize(m.layers * kSlots * kCapacity * kHidden);
    const int64_t rows = 16;
    states.resize(kSlots * ISA::DeltaState(m).all);
    pending.resize(kSlots * rows * ISA::DeltaRow(m).all);
    cache = {keys.data(), values.data(), inputs.data(), states.data(), pending.data(), parts,
             kSlots,      kCapacity,     rows,          columns,       key_size,       value_size};
  }

  void fill(Layer& l, Family family, int64_t i) {
    l.kv = kKeyHeads, l.dim = kDim, l.scalar = family == MIXTURE ? 0.5f : 1.0f;
    l.attention_norm = gain(kHidden), l.mlp_norm = gain(kHidden);
    const int64_t mixers[] = {SHORT_CONV, DELTA_NET, ATTENTION};
    l.mixer = family == HYBRID ? mixers[i] : ATTENTION;
    l.place = family == HYBRID ? 0 : i;
    if (l.mixer == ATTENTION) {
      l.query = next(kHeads * kDim, kHidden, true), l.key = next(kKeyHeads * kDim, kHidden, true);
      l.value = next(kKeyHeads * kDim, kHidden, true), l.out = next(kHidden, kHeads * kDim);
      l.window = family == CENTERED && i ? 16 : 0;
      if (family == PLAIN) l.query_norm = gain(kDim), l.key_norm = gain(kDim);
      if (family == PLAIN) l.attention_out_norm = gain(kHidden), l.mlp_out_norm = gain(kHidden);
      if (family == MIXTURE) l.sinks = floats(kHeads, 0.0f, 2.0f);
      if (family == HYBRID) l.output_gate = next(kHeads * kDim, kHidden);
    } else {
      const bool delta = l.mixer == DELTA_NET;
      const int64_t inner = m.value_heads * m.value_dim;
      const int64_t channels = delta ? ISA::DeltaRow(m).channels() : kHidden;
      l.input = next(delta ? channels : 3 * kHidden, kHidden);
      l.conv = floats(m.kernel * channels, 0.1f, 0.5f);
      l.out = next(kHidden, delta ? inner : kHidden);
      if (delta) {
        l.beta = next(m.value_heads, kHidden), l.decay = next(m.value_heads, kHidden);
        l.output_gate = next(inner, kHidden);
        l.decay_log = floats(16, -1.0f, 1.0f), l.decay_bias = floats(16, 0.0f, 1.0f);
        l.state_norm = gain(m.value_dim);
      }
    }
    if (family == MIXTURE) {
      l.experts = 8, l.router = matrix(F32, 8, kHidden, false);
      l.gate = next(8 * kInner, kHidden), l.up = next(8 * kInner, kHidden), l.down = next(8 * kHidden, kInner);
      l.shared_gate = next(kInner, kHidden), l.shared_up = next(kInner, kHidden), l.shared_down = next(kHidden, kInner);
      l.activation = {CLAMPED_SWIGLU, 1.702f, 0, 0, 7.0f};
    } else {
      if (family != CENTERED) l.gate = next(kInner, kHidden);
      l.up = next(kInner, kHidden), l.down = next(kHidden, kInner);
      const int64_t kinds[] = {SILU, SQUARED_RELU, XIELU};
      l.activation = {family == CENTERED ? int64_t(GELU_TANH) : kinds[i], 0.8f, 0.7f, 0.5f, 0};
    }
  }

  // Runs rows in both slots: a chain, or a tree in which the parent of row r is row (r - 1) / 2.
  uint64_t step(int64_t length, int64_t count, bool tree, const float* start) {
    std::vector<uint8_t> seen(count * count);
    std::vector<int32_t> positions(kSlots * count);
    const int64_t lengths[kSlots] = {length, length};
    for (int64_t r = 0; r < count; r++) {
      int32_t depth = 0;
      for (int64_t at = r; at >= 0; at = at == 0 ? -1 : tree ? (at - 1) / 2 : at - 1) {
        seen[r * count + at] = 1;
        depth += at != 0;
      }
      for (int64_t s = 0; s < kSlots; s++) positions[s * count + r] = int32_t(length) + depth;
    }
    const int64_t size = kSlots * count * kHidden, tap = 0;
    std::vector<float> x(start, start + size), tapped(size);
    const Step step = {0, kSlots,   count, lengths,  positions.data(), seen.data(), 0,    count,
                       0, m.layers, !tree, x.data(), nullptr,          1,           &tap, tapped.data()};
    require(medusa_run(&m, &cache, &step), "medusa_run");
    for (const float value : x) {
      if (!std::isfinite(value)) std::fprintf(stderr, "a state is not finite\n"), std::exit(1);
    }
    return hash_of(x, hash_of(tapped));
  }

  // Runs a prompt, a tree of which a path is kept, and another step.
  uint64_t answer(const float* start) {
    for (auto* buffer : {&keys, &values}) buffer->assign(buffer->size(), 0);
    for (auto* buffer : {&inputs, &states, &pending}) buffer->assign(buffer->size(), 0.0f);
    uint64_t hash = step(0, 37, false, start);
    hash = hash * 31 + step(37, 11, true, start + 1);
    const int64_t path[] = {0, 2, 5};
    for (int64_t slot = 0; slot < kSlots; slot++) {
      require(medusa_keep(&m, &cache, slot, 37, path, 3), "medusa_keep");
    }
    hash = hash * 31 + step(40, 1, false, start + 2);
    hash = hash_of(values.data(), values.size(), hash_of(keys.data(), keys.size(), hash));
    return hash_of(states, hash_of(inputs, hash));
  }
};

// Runs a drafter's layer over six rows, each of which sees the rows up to itself.
uint64_t draft(Tiny& tiny, const float* start) {
  const int64_t count = 6, capacity = 32;
  std::vector<float> keys(kKeyHeads * kDim * capacity), values(keys.size());
  std::vector<float> x(start, start + count * kHidden);
  std::vector<uint8_t> seen(count * count);
  std::vector<int32_t> positions(count);
  for (int64_t r = 0; r < count; r++) {
    positions[r] = int32_t(r);
    for (int64_t c = 0; c <= r; c++) seen[r * count + c] = 1;
  }
  const DraftRows own = {keys.data(), values.data(), capacity, 0, 0, count, seen.data()};
  const DraftPass pass = {&own, 1, 0, positions.data(), x.data(), start + 7};
  require(medusa_draft(&tiny.m, &pass), "medusa_draft");
  return hash_of(values, hash_of(keys, hash_of(x)));
}

void add_models(std::vector<Case>& cases) {
  const float* start = rows(kSlots * 40, kHidden);
  for (int family = 0; family < kFamilies; family++) {
    for (const bool int8 : {false, true}) {
      auto* tiny = new Tiny(Family(family), int8);
      const std::string rows_name = int8 ? ", 8-bit rows" : ", rows of floats";
      cases.push_back({kFamilyNames[family] + rows_name, [=] { return tiny->answer(start); }});
    }
  }
  for (const int32_t columns : {F16, Q8_0}) {
    for (const Family family : {PLAIN, CENTERED, MIXTURE}) {
      auto* tiny = new Tiny(family, true, columns);
      const std::string columns_name = columns == F16 ? ", F16 columns" : ", Q8_0 columns";
      cases.push_back({kFamilyNames[family] + columns_name, [=] { return tiny->answer(start); }});
    }
  }
  auto* drafter = new Tiny(PLAIN, true);
  Layer& l = drafter->layers[0];
  drafter->m.layers = 1;
  l.input_norm = gain(kHidden);
  l.query = drafter->next(kHeads * kDim, 2 * kHidden), l.key = drafter->next(kKeyHeads * kDim, 2 * kHidden);
  l.value = drafter->next(kKeyHeads * kDim, 2 * kHidden);
  cases.push_back({"draft", [=] { return draft(*drafter, start); }});
}

std::vector<uint64_t> hashes_of(const std::string& set, const std::vector<Case>& cases) {
  require(medusa_use(set.c_str()), "medusa_use");
  std::vector<uint64_t> hashes;
  for (const Case& one : cases) hashes.push_back(one.hash());
  return hashes;
}

}  // namespace

int main(int count, char** words) {
  medusa_threads(2);
  std::vector<Case> cases;
  add_matrices(cases);
  add_models(cases);
  const std::vector<uint64_t> generic = hashes_of("generic", cases);
  bool equal = true;
  std::string sets = medusa_instructions();
  for (size_t first = 0, end; first < sets.size(); first = end + 1) {
    end = std::min(sets.find(',', first), sets.size());
    const std::string set = sets.substr(first, end - first);
    const std::vector<uint64_t> hashes = hashes_of(set, cases);
    for (size_t i = 0; i < cases.size(); i++) {
      if (hashes[i] == generic[i]) continue;
      std::printf("%s: %s differs from generic\n", set.c_str(), cases[i].name.c_str());
      equal = false;
    }
    char digest[17];
    const uint64_t hash = hash_of(hashes.data(), hashes.size() * sizeof(uint64_t));
    std::snprintf(digest, sizeof digest, "%016llx", static_cast<unsigned long long>(hash));
    std::printf("%s %s\n", set.c_str(), digest);
    if (count > 1 && std::strcmp(words[1], digest) != 0) {
      std::printf("%s: the digest should be %s\n", set.c_str(), words[1]);
      equal = false;
    }
  }
  return equal ? 0 : 1;
}
