// Mutex, MutexLock, CondVar: std::mutex with clang's thread-safety annotations.
//
// Why our own: the distribution's absl::Mutex is not built for the thread sanitizer and gives false reports under it,
// and a bare std::mutex cannot be checked at compile time. Build with --config=clang to have the annotations checked.
// Members of a class are grouped: constant after construction; self-synchronized; GUARDED_BY(mu_). A private method
// that needs the lock ends in Locked and says REQUIRES(mu_).
#pragma once

#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"

namespace shardmesh {

class ABSL_LOCKABLE Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mu_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mu_.unlock(); }
  void AssertHeld() ABSL_ASSERT_EXCLUSIVE_LOCK() {}

 private:
  friend class CondVar;
  std::mutex mu_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mu) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) : mu_(mu) { mu_.Lock(); }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mu_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mu_;
};

// Waits may wake spuriously: always wait in a loop over the condition. There is no wait without a time limit, on
// purpose.
class CondVar {
 public:
  // Returns false when `timeout` passed without a signal. REQUIRES: mu held; it is held again on return.
  bool WaitFor(Mutex& mu, absl::Duration timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    std::unique_lock<std::mutex> lock(mu.mu_, std::adopt_lock);
#ifdef __SANITIZE_THREAD__
    // The thread sanitizer of g++ 12 does not see pthread_cond_clockwait and would report false races.
    const auto until = std::chrono::system_clock::now() + absl::ToChronoNanoseconds(timeout);
#else
    const auto until = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout);
#endif
    const bool signalled = cv_.wait_until(lock, until) == std::cv_status::no_timeout;
    lock.release();
    return signalled;
  }
  void Signal() { cv_.notify_one(); }
  void SignalAll() { cv_.notify_all(); }

 private:
  std::condition_variable cv_;
};

}  // namespace shardmesh
