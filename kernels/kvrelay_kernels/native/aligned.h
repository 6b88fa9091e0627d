// Arrays that begin on a cache line: a vector that straddles two lines costs two accesses.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace kvrelay {

constexpr size_t kLineBytes = 64;

template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(kLineBytes))); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(kLineBytes)); }
  bool operator==(const LineAllocator&) const { return true; }
};

template <class T>
using Aligned = std::vector<T, LineAllocator<T>>;

}  // namespace kvrelay
