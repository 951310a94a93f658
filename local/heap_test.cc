#include "local/heap.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstring>
#include <memory>

namespace shardmesh {
namespace {

constexpr size_t kBytes = size_t{64} << 20;

// Bytes of this process that lie in memory.
size_t InMemory() {
  FILE* const file = fopen("/proc/self/statm", "r");
  size_t size = 0, resident = 0;
  const int found = fscanf(file, "%zu %zu", &size, &resident);
  fclose(file);
  return found == 2 ? resident * 4096 : 0;
}

TEST(Heap, WhatIsFreedAndKept_IsGivenBack) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "SKIPPED: the sanitizer's allocator keeps what was freed in its own way";
#endif
  ASSERT_EQ(mallopt(M_MMAP_THRESHOLD, 1 << 30), 1);
  ASSERT_EQ(mallopt(M_TRIM_THRESHOLD, 1 << 30), 1);
  {
    const auto message = std::make_unique<char[]>(kBytes);
    std::memset(message.get(), 1, kBytes);
  }
  const size_t kept = InMemory();
  ASSERT_GT(kept, kBytes) << "freed memory was not kept";
  GiveBackFreedHeap();
  EXPECT_LT(InMemory(), kept - kBytes / 2);
}

}  // namespace
}  // namespace shardmesh
