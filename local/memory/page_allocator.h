// PageAllocator: memory for containers as large as a model: pages of their own, which go back to the system with the
// container. malloc may keep what is freed (rpc/base/main_support.h), and keeps what lies at the end of a thread's
// heap.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace shardmesh {

template <typename T>
struct PageAllocator {
  using value_type = T;

  PageAllocator() = default;
  template <typename U>
  PageAllocator(const PageAllocator<U>&) {}  // NOLINT(google-explicit-constructor): what allocators have

  T* allocate(size_t count) {
    void* const pages = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T*>(pages);
  }
  void deallocate(T* pages, size_t count) { munmap(pages, count * sizeof(T)); }

  friend bool operator==(const PageAllocator&, const PageAllocator&) { return true; }
  friend bool operator!=(const PageAllocator&, const PageAllocator&) { return false; }
};

}  // namespace shardmesh
