// Threads that do one job together: the caller and its helpers, with a barrier that spins briefly, then yields.
//
//   caller:  run(f) ─ publish job ─▶ f(0) ──── wait for helpers ─▶ return
//   helper:  sleep ──── wake ───────▶ f(i) ─── done ─▶ spin for the next job ─▶ sleep
//
// A team belongs to the thread that first asked for it and ends with that thread. Work is divided by thread number
// only where the result does not depend on the division.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace kvrelay {

class Team {
 public:
  explicit Team(int size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  /// The calling thread's team of `size`, itself included.
  static Team& of(int size);

  /// f(index) on every thread, 0 being the caller. Returns when all have returned.
  void run(const std::function<void(int)>& f);

  /// All threads of the running job wait for each other. Called by all of them, equally often.
  void barrier();

  int size() const { return size_; }

  /// Numbers 0, 1, 2, … handed out to whoever asks first. `restart` before a barrier that precedes the asking.
  int64_t next() { return counter_.fetch_add(1, std::memory_order_relaxed); }
  void restart() { counter_.store(0, std::memory_order_relaxed); }

 private:
  void help(int index);

  const int size_;
  std::vector<std::thread> helpers_;
  const std::function<void(int)>* job_ = nullptr;
  bool ending_ = false;
  alignas(64) std::atomic<uint32_t> job_number_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> barrier_number_{0};
  alignas(64) std::atomic<int64_t> counter_{0};
};

/// [begin, end) of `count` things for thread `index` of `size`.
struct Share {
  int64_t begin, end;
  Share(int64_t count, int index, int size) : begin(count * index / size), end(count * (index + 1) / size) {}
};

}  // namespace kvrelay
