// A pool of threads that share the work of a decoder's steps.
//
// A job is split into many small shares, which threads take from one counter. A thread that the
// system interrupts delays only the share that it has taken. Idle threads spin some 10,000 times
// and then sleep. If they spun for longer while other programs run, they would take the CPU from a
// thread that works.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace medusa {

class Pool {
 public:
  // Starts `threads` - 1 threads, or as many as the system allows.
  explicit Pool(int threads);
  ~Pool();

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const;

  // Calls work(share, thread) for each share 0 .. shares - 1 and returns when all calls have
  // returned. Throws std::bad_alloc afterwards if a call found no memory.
  template <class Work>
  void run(int64_t shares, const Work& work) {
    if (shares <= 1 || threads() == 1) {
      for (int64_t share = 0; share < shares; share++) work(share, 0);
      return;
    }
    start(shares, [](const void* context, int64_t share, int thread) {
      (*static_cast<const Work*>(context))(share, thread);
    }, &work);
  }

 private:
  using Function = void (*)(const void* context, int64_t share, int thread);

  void start(int64_t shares, Function function, const void* context);
  void work(int thread);
  // Takes shares until none is left; returns false if there was none to take.
  bool take(int thread);
  void sleep(uint64_t seen);

  // `job_` holds the job's number (16 bits), its number of shares (24 bits) and the next ticket (24
  // bits). So one atomic addition takes a ticket and shows if there is a share for the ticket, and a
  // late thread never mistakes one job for another.
  static constexpr int kBits = 24;
  static constexpr int64_t kMask = (int64_t(1) << kBits) - 1;

  alignas(64) std::atomic<uint64_t> job_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false}, failed_{false};
  Function function_ = nullptr;
  const void* context_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace medusa
