// What the operating system has to be asked for.
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define KVR_EXPORT extern "C" __attribute__((visibility("default")))

/// Once per process, before anything else. False if this machine will not run what this library was compiled for.
KVR_EXPORT bool kvr_start() {
#if defined(__AMX_BF16__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // the kernel grants the 8 KiB of tile state on request
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return true;
#endif
}

/// Ask for huge pages behind memory that has not been touched yet. Advice: nothing depends on it.
KVR_EXPORT void kvr_prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  constexpr intptr_t kPage = 2 << 20;
  const intptr_t begin = ((intptr_t)data + kPage - 1) / kPage * kPage, end = ((intptr_t)data + bytes) / kPage * kPage;
  if (end > begin) madvise((void*)begin, (size_t)(end - begin), MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}
