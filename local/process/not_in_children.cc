#include "local/process/not_in_children.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "core/base/sync.h"

namespace shardmesh {

// Of a list, since what runs in a forked child may not allocate.
struct NotInChildren::Entry {
  int fd = -1;
  void* memory = nullptr;
  size_t bytes = 0;
  Entry* next = nullptr;
  Entry** before = nullptr;  // what points here

  static Entry*& First() {
    static Entry* first = nullptr;
    return first;
  }
  static Mutex& Lock() {
    static Mutex& mu = *new Mutex();  // never destroyed: a fork may come at any time
    return mu;
  }
  // Held over fork(): the child finds a whole list, and the lock its own.
  static void BeforeFork() ABSL_NO_THREAD_SAFETY_ANALYSIS { Lock().Lock(); }
  static void InParent() ABSL_NO_THREAD_SAFETY_ANALYSIS { Lock().Unlock(); }
  static void InChild() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (Entry* entry = First(); entry != nullptr; entry = entry->next) {
      HangUp(entry->fd);
      if (entry->memory == nullptr) continue;
      mmap(entry->memory, entry->bytes, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    }
    Lock().Unlock();
  }

  // Without a descriptor for a moment there is nothing to put in its place: then its number is free.
  static void HangUp(int fd) {
    if (fd < 0) return;
    int ends[2];
    close(fd);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return;
    close(ends[ends[0] == fd ? 1 : 0]);
    const int left = ends[0] == fd ? ends[0] : ends[1];
    if (left == fd) return;
    dup3(left, fd, O_CLOEXEC);
    close(left);
  }

  void Enter() {
    static const int registered = pthread_atfork(BeforeFork, InParent, InChild);
    static_cast<void>(registered);
    MutexLock lock(Lock());
    next = First();
    before = &First();
    if (next != nullptr) next->before = &next;
    First() = this;
  }
  void Leave() {
    MutexLock lock(Lock());
    *before = next;
    if (next != nullptr) next->before = before;
  }
};

NotInChildren::NotInChildren() = default;

NotInChildren::NotInChildren(int fd, void* memory, size_t bytes) : entry_(std::make_unique<Entry>()) {
  entry_->fd = fd;
  entry_->memory = memory;
  entry_->bytes = bytes;
  entry_->Enter();
}

NotInChildren::NotInChildren(NotInChildren&& other) noexcept : entry_(std::move(other.entry_)) {}

NotInChildren& NotInChildren::operator=(NotInChildren&& other) noexcept {
  if (this != &other) {
    Forget();
    entry_ = std::move(other.entry_);
  }
  return *this;
}

NotInChildren::~NotInChildren() { Forget(); }

void NotInChildren::Forget() {
  if (entry_ != nullptr) entry_->Leave();
  entry_.reset();
}

}  // namespace shardmesh
