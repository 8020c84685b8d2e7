#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <mutex>
#include <thread>

namespace {

constexpr int64_t SPIN_NANOSECONDS = 60000;  // the next piece of a step comes within that
constexpr int JOBS_BETWEEN_LOOKS = 64;
constexpr int JOBS_WITHOUT_SPINNING = 512;
constexpr int FEW_PREEMPTIONS = 1;  // between two looks; a neighbour that wants the core causes more

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

template <typename Done>
bool spin_until(Done done) {
  const int64_t end = now() + SPIN_NANOSECONDS;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      pause();
    }
  } while (now() < end);
  return done();
}

// A word that somebody waits for, and how many do so asleep.
class Signal {
 public:
  uint32_t value() const { return word_.load(std::memory_order_acquire); }

  void change(uint32_t by) {
    word_.fetch_add(by);
    if (asleep_.load() > 0) wake_all(word_);
  }

  void wait_while(uint32_t value, bool may_spin) {
    if (may_spin && spin_until([&] { return this->value() != value; })) return;
    asleep_.fetch_add(1);
    while (this->value() == value) sleep_while(word_, value);
    asleep_.fetch_sub(1);
  }

 private:
  std::atomic<uint32_t> word_{0}, asleep_{0};
};

// Spinning pays where a thread has its core for itself. Where it does not, the kernel takes the core away from it: that
// is counted, and then the thread sleeps for a while instead.
class Spinning {
 public:
  bool pays() {
    if (++jobs_ < until_) return !is_contended_;
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    is_contended_ = usage.ru_nivcsw - preemptions_ > FEW_PREEMPTIONS;
    preemptions_ = usage.ru_nivcsw;
    jobs_ = 0;
    until_ = is_contended_ ? JOBS_WITHOUT_SPINNING : JOBS_BETWEEN_LOOKS;
    return !is_contended_;
  }

 private:
  bool is_contended_ = false;
  int jobs_ = 0, until_ = JOBS_BETWEEN_LOOKS;
  long preemptions_ = 0;
};

struct Job {
  void (*piece)(void*, int64_t, int64_t);
  void* context;
  int64_t items, grain;
  std::atomic<int64_t> next{0};

  void work() {
    for (int64_t first; (first = next.fetch_add(grain, std::memory_order_relaxed)) < items;)
      piece(context, first, std::min(first + grain, items));
  }
};

class Pool {
 public:
  // False where another thread is sharing out already.
  bool run(Job& job, int threads) {
    std::unique_lock<std::mutex> only(in_use_, std::try_to_lock);
    if (!only) return false;
    for (; num_helpers_ < threads - 1; ++num_helpers_) std::thread([this] { help(); }).detach();
    job_ = &job;
    inside_.store(OPEN + uint32_t(threads - 1));
    offered_.change(1);
    job.work();
    // Nobody enters from here on; who is inside finishes a piece.
    uint32_t inside = inside_.fetch_and(~OPEN & ~ROOM) & ~OPEN & ~ROOM;
    const bool may_spin = spinning_.pays();
    while (inside) {
      const uint32_t left = left_.value();
      inside = inside_.load() & ~OPEN & ~ROOM;
      if (inside) left_.wait_while(left, may_spin);
    }
    return true;
  }

 private:
  // Of `inside_`: whether a job is open, for how many more helpers (the low bits), and above both how many are inside.
  static constexpr uint32_t ROOM = 0xff, OPEN = 0x100, ONE = 0x200;

  void help() {
    Spinning spinning;
    uint32_t seen = 0;
    for (;;) {
      offered_.wait_while(seen, spinning.pays());
      seen = offered_.value();
      if (!enter()) continue;
      job_->work();
      inside_.fetch_sub(ONE);
      left_.change(1);
    }
  }

  bool enter() {
    uint32_t inside = inside_.load();
    do {
      if (!(inside & OPEN) || !(inside & ROOM)) return false;
    } while (!inside_.compare_exchange_weak(inside, inside + ONE - 1));
    return true;
  }

  std::mutex in_use_;
  Spinning spinning_;
  int num_helpers_ = 0;
  Job* job_ = nullptr;
  std::atomic<uint32_t> inside_{0};
  Signal offered_, left_;
};

// Never taken apart: helpers wait in it until the process ends. A forked child has no helpers and gets its own pool.
Pool* pool = nullptr;
std::once_flag made;

Pool& the_pool() {
  std::call_once(made, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool;
}

}  // namespace

namespace hpu {

void share_out(int threads, int64_t items, int64_t grain, void (*piece)(void*, int64_t, int64_t), void* context) {
  Job job{piece, context, items, grain};
  if (!the_pool().run(job, std::min(threads, 0xff))) job.work();
}

}  // namespace hpu
