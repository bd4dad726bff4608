#include "pool.h"

namespace medusa {

namespace {

// About one microsecond passes between two jobs of a step, and about 100 between two steps or two
// matrices of a drafter.
constexpr int kSpins = 10000;
// The number of polls before the caller yields its CPU: a share that was taken may belong to a
// thread that is waiting for that CPU.
constexpr int kPolls = 20000;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads) {
  for (int thread = 1; thread < threads; thread++) {
    workers_.emplace_back([this, thread] { work(thread); });
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::start(int64_t shares, Function function, const void* context) {
  function_ = function;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  uint64_t job = (ticket_.load(std::memory_order_relaxed) >> (2 * kBits)) + 1;
  ticket_.store(job << (2 * kBits) | uint64_t(shares) << kBits, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst)) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  take(0);
  for (int polls = 0; done_.load(std::memory_order_acquire) < shares; polls++) {
    if (polls < kPolls) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

bool Pool::take(int thread) {
  bool any = false;
  while (true) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (int64_t(ticket & kMask) >= int64_t(ticket >> kBits & kMask)) return any;
    ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    int64_t share = ticket & kMask;
    if (share >= int64_t(ticket >> kBits & kMask)) return any;
    function_(context_, share, thread);
    done_.fetch_add(1, std::memory_order_release);
    any = true;
  }
}

void Pool::work(int thread) {
  int spins = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    if (take(thread)) {
      spins = 0;
    } else if (++spins < kSpins) {
      pause();
    } else {
      sleep(seen);
      spins = 0;
    }
  }
}

void Pool::sleep(uint64_t seen) {
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  wake_.wait(lock, [&] {
    uint64_t now = ticket_.load(std::memory_order_seq_cst);
    return stop_.load(std::memory_order_relaxed) || now >> (2 * kBits) != seen >> (2 * kBits);
  });
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace medusa
