#include "pool.h"

#include <algorithm>
#include <cassert>
#include <exception>
#include <new>

namespace medusa {

namespace {

// The number of times that an idle thread looks for a job before it sleeps. About one microsecond passes
// between two jobs of a step, and about 100 microseconds between two steps or two matrices of a drafter.
constexpr int kSpins = 10000;
// The number of times that the caller checks if the job is done before it yields its CPU. A thread that
// has taken a share may be waiting for this CPU.
constexpr int kPolls = 20000;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  // isb waits for some ten nanoseconds, like x86's pause; the instruction yield would return at once.
  asm volatile("isb");
#endif
}

// Returns the share of the job that a ticket stands for. Threads take tickets roughly in turn, and
// tickets that are `threads` apart stand for neighboring shares. So the memory that a thread prefetches
// beyond the end of its share mostly belongs to the thread's next share.
int64_t share_of(int64_t ticket, int64_t shares, int threads) {
  const int64_t lane = ticket % threads, each = shares / threads, rest = shares % threads;
  return lane * each + std::min(lane, rest) + ticket / threads;
}

}  // namespace

Pool::Pool(int threads) {
  workers_.reserve(threads);
  try {
    for (int thread = 1; thread < threads; thread++) {
      workers_.emplace_back([this, thread] { work(thread); });
    }
  } catch (const std::exception&) {
    // The system allows no more threads, or has no memory for them. The threads that started share the work.
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

int Pool::threads() const { return static_cast<int>(workers_.size()) + 1; }

void Pool::start(int64_t shares, Function function, const void* context) {
  assert(0 <= shares && shares <= kMask);
  function_ = function;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  const uint64_t number = (job_.load(std::memory_order_relaxed) >> (2 * kBits)) + 1;
  job_.store(number << (2 * kBits) | uint64_t(shares) << kBits, std::memory_order_seq_cst);
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
  if (failed_.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

bool Pool::take(int thread) {
  bool any = false;
  while (true) {
    uint64_t state = job_.load(std::memory_order_acquire);
    if (int64_t(state & kMask) >= int64_t(state >> kBits & kMask)) return any;
    state = job_.fetch_add(1, std::memory_order_acq_rel);
    const int64_t ticket = state & kMask, shares = state >> kBits & kMask;
    if (ticket >= shares) return any;
    // An exception must not escape from a thread, nor end the job while other threads still work on it.
    try {
      function_(context_, share_of(ticket, shares, threads()), thread);
    } catch (...) {
      failed_.store(true, std::memory_order_relaxed);
    }
    done_.fetch_add(1, std::memory_order_release);
    any = true;
  }
}

void Pool::work(int thread) {
  int spins = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    uint64_t seen = job_.load(std::memory_order_acquire);
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
    uint64_t now = job_.load(std::memory_order_seq_cst);
    return stop_.load(std::memory_order_relaxed) || now >> (2 * kBits) != seen >> (2 * kBits);
  });
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace medusa
