#include "team.h"

#include <sched.h>

namespace kvrelay {

namespace {

constexpr int kSpins = 2000;        // about 30 µs: longer than a barrier takes when every thread has a core
constexpr int kIdleSpins = 4000;    // between jobs, before a helper goes to sleep

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Team::Team(int size) : size_(size) {
  for (int i = 1; i < size; i++) helpers_.emplace_back([this, i] { help(i); });
}

Team::~Team() {
  ending_ = true;
  job_number_.fetch_add(1, std::memory_order_release);
  job_number_.notify_all();
  for (auto& helper : helpers_) helper.join();
}

Team& Team::of(int size) {
  thread_local std::unique_ptr<Team> team;
  if (!team || team->size() != size) {
    team.reset();
    team = std::make_unique<Team>(size);
  }
  return *team;
}

void Team::run(const std::function<void(int)>& f) {
  if (size_ == 1) {
    f(0);
    return;
  }
  job_ = &f;
  job_number_.fetch_add(1, std::memory_order_release);
  job_number_.notify_all();
  f(0);
  barrier();
}

void Team::help(int index) {
  uint32_t seen = 0;
  while (true) {
    for (int i = 0; i < kIdleSpins && job_number_.load(std::memory_order_acquire) == seen; i++) relax();
    job_number_.wait(seen, std::memory_order_acquire);
    seen = job_number_.load(std::memory_order_acquire);
    if (ending_) return;
    (*job_)(index);
    barrier();
  }
}

void Team::barrier() {
  if (size_ == 1) return;
  const uint32_t number = barrier_number_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    barrier_number_.store(number + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; barrier_number_.load(std::memory_order_acquire) == number; spins++) {
    if (spins < kSpins) relax();
    else sched_yield();
  }
}

}  // namespace kvrelay
