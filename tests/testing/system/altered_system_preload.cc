// The library of altered_system.h: functions of the C library that tell the wall clock's time, that wait until a time
// of that clock, and that make threads. Everything else is the C library's own.
//
// A wait until a wall time ends when the moved clock shows that time. So that a wait under way learns of a move, it
// ends and begins again every few milliseconds; a condition's wait returns then, as it may at any time.
//
// A thread counts from pthread_create until it ends, a moment before the kernel lets go of it. So whoever has joined a
// thread may make another in its place.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>

#include "tests/testing/system/altered_system.h"

namespace {

using shardmesh::testing::SystemChanges;

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kSliceNanos = 20'000'000;

template <typename Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}
// Of functions that have an older version for programs of long ago.
template <typename Function>
Function* NextOf(const char* name, const char* version) {
  return reinterpret_cast<Function*>(dlvsym(RTLD_NEXT, name, version));
}

const SystemChanges* Map() {
  const char* const path = getenv(shardmesh::testing::kSystemChangesVariable);
  const int file = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return nullptr;
  void* const memory = mmap(nullptr, sizeof(SystemChanges), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  return memory == MAP_FAILED ? nullptr : static_cast<const SystemChanges*>(memory);
}

const SystemChanges* Changes() {
  static const SystemChanges* const changes = Map();
  return changes;
}

int64_t Offset() { return Changes() == nullptr ? 0 : Changes()->clock_nanos.load(); }

int64_t NanosOf(const timespec& time) { return int64_t{time.tv_sec} * kSecond + time.tv_nsec; }

timespec TimespecOf(int64_t nanos) {
  timespec time;
  time.tv_sec = nanos / kSecond;
  time.tv_nsec = nanos % kSecond;
  if (time.tv_nsec < 0) {
    time.tv_nsec += kSecond;
    --time.tv_sec;
  }
  return time;
}

bool IsWall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

int64_t TrueNow() {
  static auto* const next = Next<int(clockid_t, timespec*)>("clock_gettime");
  timespec now;
  next(CLOCK_REALTIME, &now);
  return NanosOf(now);
}

// The end of the next slice of a wait until `until`, on the true clock; `last`: it is the whole rest.
timespec SliceEnd(const timespec& until, bool& last) {
  const int64_t end = NanosOf(until) - Offset(), slice = TrueNow() + kSliceNanos;
  last = end <= slice;
  return TimespecOf(std::min(end, slice));
}

// glibc's pthread_cond_t says of which clock its waits are.
bool OfWallClock(const pthread_cond_t* condition) { return (condition->__data.__wrefs & 2) == 0; }

template <typename Wait>
int WaitForCondition(const timespec* until, const Wait& wait) {
  bool last;
  const timespec end = SliceEnd(*until, last);
  const int result = wait(&end);
  return result == ETIMEDOUT && !last ? 0 : result;
}

// How many threads live, beside the program's first.
struct ThreadCount {
  static const ThreadCount& Get() {
    static const ThreadCount count;
    return count;
  }
  // A thread that has this calls End when it ends: it returns, calls pthread_exit, or is cancelled.
  void BeginThread() const { pthread_setspecific(key, live); }

  std::atomic<int64_t>* const live = new std::atomic<int64_t>(0);

 private:
  ThreadCount() {
    if (pthread_key_create(&key, End) != 0 || pthread_atfork(nullptr, nullptr, InChild) != 0) abort();
  }
  static void End(void* live) { static_cast<std::atomic<int64_t>*>(live)->fetch_sub(1); }
  // The thread that forked is the child's first, and its only one.
  static void InChild() {
    pthread_setspecific(Get().key, nullptr);
    Get().live->store(0);
  }

  pthread_key_t key;
};

struct ThreadWork {
  void* (*start)(void*);
  void* argument;
};

void* RunCounted(void* given) {
  auto* const work = static_cast<ThreadWork*>(given);
  const ThreadWork copy = *work;
  delete work;
  ThreadCount::Get().BeginThread();
  return copy.start(copy.argument);
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  static auto* const next = Next<int(clockid_t, timespec*)>("clock_gettime");
  const int result = next(clock, time);
  if (result == 0 && IsWall(clock)) *time = TimespecOf(NanosOf(*time) + Offset());
  return result;
}

int gettimeofday(timeval* __restrict time, void* __restrict zone) noexcept {
  static auto* const next = Next<int(timeval*, void*)>("gettimeofday");
  const int result = next(time, zone);
  if (result != 0) return result;
  const timespec moved = TimespecOf(int64_t{time->tv_sec} * kSecond + int64_t{time->tv_usec} * 1000 + Offset());
  time->tv_sec = moved.tv_sec;
  time->tv_usec = moved.tv_nsec / 1000;
  return result;
}

time_t time(time_t* out) noexcept {
  const time_t now = TimespecOf(TrueNow() + Offset()).tv_sec;
  if (out != nullptr) *out = now;
  return now;
}

int pthread_cond_timedwait(pthread_cond_t* __restrict condition, pthread_mutex_t* __restrict mutex,
                           const timespec* __restrict until) {
  static auto* const next =
      NextOf<int(pthread_cond_t*, pthread_mutex_t*, const timespec*)>("pthread_cond_timedwait", "GLIBC_2.3.2");
  if (!OfWallClock(condition)) return next(condition, mutex, until);
  return WaitForCondition(until, [&](const timespec* end) { return next(condition, mutex, end); });
}

int pthread_cond_clockwait(pthread_cond_t* __restrict condition, pthread_mutex_t* __restrict mutex, clockid_t clock,
                           const timespec* __restrict until) {
  static auto* const next =
      Next<int(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*)>("pthread_cond_clockwait");
  if (!IsWall(clock)) return next(condition, mutex, clock, until);
  return WaitForCondition(until, [&](const timespec* end) { return next(condition, mutex, clock, end); });
}

int sem_timedwait(sem_t* __restrict semaphore, const timespec* __restrict until) {
  static auto* const next = Next<int(sem_t*, const timespec*)>("sem_timedwait");
  while (true) {
    bool last;
    const timespec end = SliceEnd(*until, last);
    const int result = next(semaphore, &end);
    if (result == 0 || errno != ETIMEDOUT || last) return result;
  }
}

int sem_clockwait(sem_t* __restrict semaphore, clockid_t clock, const timespec* __restrict until) {
  static auto* const next = Next<int(sem_t*, clockid_t, const timespec*)>("sem_clockwait");
  return IsWall(clock) ? sem_timedwait(semaphore, until) : next(semaphore, clock, until);
}

// Futexes are waited for by their number: there is no function for them.
long syscall(long number, ...) noexcept {
  static auto* const next = Next<long(long, ...)>("syscall");
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  const auto call = [&](long fourth) {
    return next(number, arguments[0], arguments[1], arguments[2], fourth, arguments[4], arguments[5]);
  };
  constexpr long kUntilWallTime = FUTEX_WAIT_BITSET | FUTEX_CLOCK_REALTIME;
  const auto* const until = reinterpret_cast<const timespec*>(arguments[3]);
  if (number != SYS_futex || (arguments[1] & ~FUTEX_PRIVATE_FLAG) != kUntilWallTime || until == nullptr) {
    return call(arguments[3]);
  }
  while (true) {
    bool last;
    const timespec end = SliceEnd(*until, last);
    const long result = call(reinterpret_cast<long>(&end));
    if (result == 0 || errno != ETIMEDOUT || last) return result;
  }
}

int pthread_create(pthread_t* __restrict thread, const pthread_attr_t* __restrict attributes, void* (*start)(void*),
                   void* __restrict argument) noexcept {
  static auto* const next =
      Next<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
  const int64_t most = Changes() == nullptr ? 0 : Changes()->most_threads.load();
  const ThreadCount& count = ThreadCount::Get();
  if (count.live->fetch_add(1) >= most && most > 0) {
    count.live->fetch_sub(1);
    return EAGAIN;
  }
  auto* const work = new ThreadWork{start, argument};
  const int result = next(thread, attributes, RunCounted, work);
  if (result == 0) return 0;
  delete work;
  count.live->fetch_sub(1);
  return result;
}

}  // extern "C"
