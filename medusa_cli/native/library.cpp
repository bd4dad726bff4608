// The C interface, which chooses an instruction set, keeps the thread pool, and checks arguments
// that could lead to accesses outside the buffers.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif

#include "step.h"

namespace medusa {

// The instruction sets that were compiled.
#if defined(MEDUSA_HAS_AVX2)
namespace avx2 { extern const Functions functions; }
namespace avx512 { extern const Functions functions; }
namespace avx512vnni { extern const Functions functions; }
#endif
#if defined(MEDUSA_HAS_AMX)
namespace avxvnni { extern const Functions functions; }
namespace amx { extern const Functions functions; }
#endif
#if defined(MEDUSA_HAS_NEON)
namespace neon { extern const Functions functions; }
#endif
namespace generic { extern const Functions functions; }

namespace {

struct Choice {
  const char* name;
  const Functions* functions;
};

#if defined(MEDUSA_HAS_AVX2)

// Asks Linux to let this process use AMX, for which Linux saves 8 KB more per thread. Returns false if
// Linux refuses.
bool may_use_amx() {
#if defined(__linux__)
  constexpr long request = 0x1023, amx_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request, amx_data) == 0;
#else
  return false;
#endif
}

struct Features {
  bool avx2 = false, avxvnni = false, avx512 = false, avx512vnni = false, amx = false;

  Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool xsave = c >> 27 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
    if (!xsave) return;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const bool ymm = (low & 6) == 6, zmm = (low & 0xe6) == 0xe6;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = ymm && fma && f16c && (b >> 5 & 1);
    // F, DQ, BW, VL
    avx512 = avx2 && zmm && (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1);
    avx512vnni = avx512 && (c >> 11 & 1);
    const bool registers = (low & 0x60000) == 0x60000;  // the system saves the registers of AMX
    amx = avx512vnni && registers && (d >> 24 & 1) && (d >> 25 & 1) && may_use_amx();
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
    avxvnni = avx2 && (a >> 4 & 1);
  }
};

#elif defined(MEDUSA_HAS_NEON)

// Returns true if this CPU has dot products of bytes, as nearly all ARM CPUs since 2018 and all of Apple's for Macs do.
bool has_dot_products() {
#if defined(__linux__)
  constexpr unsigned long dot_products = 1ul << 20;  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & dot_products;
#elif defined(__APPLE__)
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &value, &size, nullptr, 0) == 0 && value;
#else
  return false;
#endif
}

#endif

// Lists the instruction sets from the fastest to the generic set, which every machine supports.
int choices(Choice* out) {
  int count = 0;
#if defined(MEDUSA_HAS_AVX2)
  const Features has;
#if defined(MEDUSA_HAS_AMX)
  if (has.amx) out[count++] = {"amx", &amx::functions};
#endif
  if (has.avx512vnni) out[count++] = {"avx512vnni", &avx512vnni::functions};
  if (has.avx512) out[count++] = {"avx512", &avx512::functions};
#if defined(MEDUSA_HAS_AMX)
  if (has.avxvnni) out[count++] = {"avxvnni", &avxvnni::functions};
#endif
  if (has.avx2) out[count++] = {"avx2", &avx2::functions};
#elif defined(MEDUSA_HAS_NEON)
  if (has_dot_products()) out[count++] = {"neon", &neon::functions};
#endif
  out[count++] = {"generic", &generic::functions};
  return count;
}

std::mutex running;
Pool* pool = nullptr;
int wanted = 1;
Choice chosen = {nullptr, nullptr};

Pool& threads() {
  if (!pool || pool->threads() != wanted) {
    delete pool;
    // If there is no memory for a new pool, no later call may use the old one.
    pool = nullptr;
    pool = new Pool(wanted);
    wanted = pool->threads();  // the system may allow fewer
  }
  return *pool;
}

const Functions& functions() {
  if (!chosen.functions) {
    Choice all[8];
    choices(all);
    chosen = all[0];
  }
  return *chosen.functions;
}

#if !defined(_WIN32)
// A forked process has only the thread that forked, so the pool must be created again.
void forked() {
  pool = nullptr;
  new (&running) std::mutex;
}
const int registered = pthread_atfork(nullptr, nullptr, forked);
#endif

// The result of functions that found no memory. No exception may leave the C interface. All exceptions
// that can occur, here or in the pool's threads, mean that the system refused memory.
constexpr int kNoMemory = -2;

struct Layout {
  char text[8192] = "";
  int size = 0;

  void add(const char* type, const char* name, size_t number) {
    size += std::snprintf(text + size, sizeof text - size, "%s %s %d\n", type, name, int(number));
    if (size >= int(sizeof text)) std::abort();  // the next line would be written past the end
  }

  Layout() {
#define STRUCT(name)        \
  {                         \
    using Structure = name; \
    add("struct", #name, sizeof(Structure));
#define FIELD(type, name) add(#type, #name, offsetof(Structure, name));
#define ARRAY(type, name, count) add(#type, #name, offsetof(Structure, name));
#define END }
#include "structures.def"
  }
};

bool fits(const Matrix& m) {
  if (m.format < 0 || m.format >= kFormats || m.n < 1 || m.k < 1 || !m.tiles) return false;
  if (m.int8_rows && is_float(m.format)) return false;
  return m.k % info(m.format).block == 0;
}

}  // namespace
}  // namespace medusa

using namespace medusa;

extern "C" {

// Returns the names of this machine's instruction sets, fastest first, separated by commas.
const char* medusa_instructions() {
  struct Names {
    char text[96] = "";
  };
  // Built only once, because several threads may ask at the same time.
  static const Names names = [] {
    Names joined;
    Choice all[8];
    const int count = choices(all);
    for (int i = 0; i < count; i++) {
      if (i) std::strcat(joined.text, ",");
      std::strcat(joined.text, all[i].name);
    }
    return joined;
  }();
  return names.text;
}

// Selects an instruction set by its name; returns 0, or -1 if this machine lacks it.
int medusa_use(const char* name) {
  std::lock_guard<std::mutex> lock(running);
  Choice all[8];
  const int count = choices(all);
  for (int i = 0; i < count; i++) {
    if (!std::strcmp(all[i].name, name)) {
      chosen = all[i];
      return 0;
    }
  }
  return -1;
}

void medusa_threads(int count) {
  std::lock_guard<std::mutex> lock(running);
  wanted = count < 1 ? 1 : count;
}

// Returns the structures' layout as this library was compiled: one line per structure with its size, and one line per
// field with the field's type and offset.
const char* medusa_layout() {
  static const Layout layout;
  return layout.text;
}

// The next two functions return the inputs per block of a format, and the bytes of a block in a file. They return -1
// for an unknown format.
int64_t medusa_block(int format) { return format < 0 || format >= kFormats ? -1 : info(format).block; }

int64_t medusa_file_bytes(int format) { return format < 0 || format >= kFormats ? -1 : info(format).file_bytes; }

int64_t medusa_tiled_bytes(int format, int64_t n, int64_t k) { return tiled_bytes(format, n, k); }

void medusa_pack(int format, const uint8_t* file, int64_t k, int64_t first, int64_t end, uint8_t* tiles) {
  pack(format, file, k, first, end, tiles);
}

// Rounds rows [n, k] of floats to blocks of Q8_0 or Q4_1, as files store them.
int medusa_round(int format, const float* weights, int64_t n, int64_t k, uint8_t* file) {
  if ((format != Q8_0 && format != Q4_1) || k % 32) return -1;
  const int64_t bytes = k / 32 * info(format).file_bytes;
  for (int64_t row = 0; row < n; row++) {
    if (format == Q8_0) round_q8_0(weights + row * k, k, file + row * bytes);
    else round_q4_1(weights + row * k, k, file + row * bytes);
  }
  return 0;
}

bool is_whole(const Cache& cache) {
  if (cache.capacity % 16 || !holds_columns(cache.format)) return false;
  for (int64_t slot = 0; slot < cache.slots; slot++) {
    if (cache.parts[slot] < 0 || cache.parts[slot] >= cache.slots) return false;
  }
  return true;
}

// The functions below return 0, -1 for arguments that do not fit, or kNoMemory.

int medusa_run(const Model* model, const Cache* cache, const Step* step) try {
  std::lock_guard<std::mutex> lock(running);
  if (step->rows < 1 || step->slots < 1 || step->first_slot < 0) return -1;
  if (step->first_slot + step->slots > cache->slots || !is_whole(*cache)) return -1;
  if (step->first < 0 || step->end > model->layers || step->first > step->end) return -1;
  for (int64_t s = 0; s < step->slots; s++) {
    if (step->lengths[s] < 0 || step->lengths[s] + step->rows > cache->capacity) return -1;
  }
  for (int64_t r = 0; r < step->slots * step->rows; r++) {
    if (step->positions[r] < 0 || step->positions[r] >= model->positions) return -1;
  }
  if (model->delta_layers && !step->keeps && step->rows > cache->pending_rows) return -1;
  functions().run(threads(), *model, *cache, *step);
  return 0;
} catch (...) {
  return kNoMemory;
}

int medusa_draft(const Model* model, const DraftPass* pass) try {
  std::lock_guard<std::mutex> lock(running);
  int64_t rows = 0;
  for (int64_t s = 0; s < pass->sequences; s++) {
    const DraftRows& own = pass->own[s];
    if (own.rows < 1 || own.prefix < 0 || own.earlier < 0 || own.capacity % 16) return -1;
    if (own.prefix + own.earlier + own.rows > own.capacity || (!pass->last && !own.seen)) return -1;
    rows += own.rows;
  }
  for (int64_t r = 0; r < rows; r++) {
    if (pass->positions[r] < 0 || pass->positions[r] >= model->positions) return -1;
  }
  if (rows) functions().draft(threads(), *model, *pass);
  return 0;
} catch (...) {
  return kNoMemory;
}

int medusa_logits(const Matrix* head, const float* states, int64_t rows, int64_t stride, float* out, int64_t ldy,
                  int32_t* best) try {
  std::lock_guard<std::mutex> lock(running);
  if (!fits(*head) || rows < 0 || stride < head->k || ldy < padded(head->n, kTile)) return -1;
  if (rows) functions().logits(threads(), *head, states, rows, stride, out, ldy, best);
  return 0;
} catch (...) {
  return kNoMemory;
}

int medusa_guess(const Matrix* matrix, const Guesses* guesses) try {
  std::lock_guard<std::mutex> lock(running);
  const Guesses& g = *guesses;
  if (!fits(*matrix) || g.rows < 1 || g.stride < 1 || g.stride > matrix->k) return -1;
  if (g.width < 1 || g.width > matrix->n) return -1;
  functions().guess(threads(), *matrix, g);
  return 0;
} catch (...) {
  return kNoMemory;
}

int medusa_multiply(const Matrix* matrix, const float* x, int64_t rows, int64_t ldx, float* y, int64_t ldy) try {
  std::lock_guard<std::mutex> lock(running);
  if (!fits(*matrix) || rows < 0 || ldy < padded(matrix->n, kTile)) return -1;
  if (rows) functions().multiply(threads(), *matrix, x, rows, ldx, y, ldy);
  return 0;
} catch (...) {
  return kNoMemory;
}

int medusa_embed(const Matrix* matrix, const int64_t* ids, int64_t count, float scale, float* out, int64_t ldo) try {
  std::lock_guard<std::mutex> lock(running);
  if (!fits(*matrix) || ldo < matrix->k) return -1;
  for (int64_t i = 0; i < count; i++) {
    if (ids[i] < 0 || ids[i] >= matrix->n) return -1;
  }
  functions().embed(threads(), *matrix, ids, count, scale, out, ldo);
  return 0;
} catch (...) {
  return kNoMemory;
}

// Runs a level of drafts: looks up its tokens' embeddings, runs the layer, and guesses the next tokens.
int medusa_level(const Model* model, const DraftLevel* level) {
  const DraftLevel& l = *level;
  const int64_t hidden = model->hidden;
  int64_t rows = 0;
  for (int64_t s = 0; s < l.sequences; s++) {
    if (l.own[s].rows < 1) return -1;
    rows += l.own[s].rows;
  }
  for (int64_t r = 0; r < rows; r++) {
    if (l.parents[r] < 0 || l.parents[r] >= l.above_rows) return -1;
    std::memcpy(l.x + r * hidden, l.above + l.parents[r] * hidden, hidden * sizeof(float));
  }
  if (l.embedding) {
    const int code = medusa_embed(l.embedding, l.tokens, rows, l.embedding_scale, l.embedded, hidden);
    if (code) return code;
  }
  const DraftPass pass = {l.own, l.sequences, 0, l.positions, l.x, l.embedded};
  const int code = medusa_draft(model, &pass);
  if (code) return code;
  Guesses guesses = l.guesses;
  guesses.states = l.x;
  guesses.rows = rows;
  guesses.stride = hidden;
  return medusa_guess(l.head, &guesses);
}

// Moves the columns length + path[i] of a slot to length + i, and advances running states along the
// path. The path must ascend.
int medusa_keep(const Model* model, const Cache* cache, int64_t slot, int64_t length, const int64_t* path,
                int64_t count) try {
  std::lock_guard<std::mutex> lock(running);
  if (slot < 0 || slot >= cache->slots || length < 0 || !is_whole(*cache)) return -1;
  for (int64_t i = 0; i < count; i++) {
    if (path[i] < i || length + path[i] >= cache->capacity || (i && path[i] <= path[i - 1])) return -1;
  }
  if (model->delta_layers && count) {
    if (path[count - 1] >= cache->pending_rows) return -1;
    functions().replay(threads(), *model, *cache, slot, path, count);
  }
  for (int64_t l = 0; l < model->layers; l++) {
    const Layer& layer = model->layer[l];
    if (layer.mixer == DELTA_NET) continue;
    if (layer.mixer == ATTENTION && !layer.key.tiles) continue;  // it uses another layer's columns
    const int32_t format = int32_t(cache->format);
    const int64_t width = key_numbers(format, layer.dim);
    const int64_t key_size = key_bytes(format, layer.dim), value_size = value_bytes(format, layer.dim);
    for (int64_t i = 0; i < count; i++) {
      const int64_t from = length + path[i], to = length + i;
      if (from == to) continue;
      if (layer.mixer == SHORT_CONV) {
        float* inputs = inputs_of(*model, *cache, layer, slot);
        std::memcpy(inputs + to * model->hidden, inputs + from * model->hidden, model->hidden * sizeof(float));
        continue;
      }
      for (int64_t head = 0; head < layer.kv; head++) {
        uint8_t* keys = keys_of(*cache, layer, slot) + head * cache->capacity * key_size;
        uint8_t* values = values_of(*cache, layer, slot) + head * cache->capacity * value_size;
        copy_channel(format, width, keys, from, to);
        std::memcpy(values + to * value_size, values + from * value_size, value_size);
      }
    }
  }
  return 0;
} catch (...) {
  return kNoMemory;
}

}  // extern "C"
