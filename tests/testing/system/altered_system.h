// AlteredSystem: what programs of a test are told by their system, changed while they run: the wall clock is moved,
// and threads are refused. A library that is loaded before all others (altered_system_preload.cc) answers in the
// system's place, also of waits that are under way, as the kernel would.
//
//   ASSERT_OK_AND_ASSIGN(const auto system, AlteredSystem::Make(folder.File("system")));
//   Process::Start({command, log, 0, system->Environment()});
//   system->MoveClock(-absl::Seconds(60));
//
// Thread-safe. Not for programs that are built with the address or thread sanitizer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace shardmesh::testing {

// What the library reads: a file that test and programs map.
struct SystemChanges {
  std::atomic<int64_t> clock_nanos{0};   // that the wall clock is ahead
  std::atomic<int64_t> most_threads{0};  // that a program may have at a time, beside its first; 0: any number
};
static_assert(std::atomic<int64_t>::is_always_lock_free);

inline constexpr char kSystemChangesVariable[] = "SHARDMESH_TEST_SYSTEM";

class AlteredSystem {
 public:
  // `path`: of the file, which is made. Internal: it cannot be.
  static absl::StatusOr<std::unique_ptr<AlteredSystem>> Make(const std::string& path);
  ~AlteredSystem();

  // Of programs, and all that they start.
  std::vector<std::string> Environment() const;

  // How far the wall clock is from the true one.
  void MoveClock(absl::Duration by) { changes_->clock_nanos.store(absl::ToInt64Nanoseconds(by)); }
  // Every further thread is refused (EAGAIN) to a program that has as many, or more, until some of them end. A forked
  // child counts its own.
  void AllowThreads(int64_t most) { changes_->most_threads.store(most); }
  void AllowAnyThreads() { AllowThreads(0); }

 private:
  AlteredSystem(std::string path, SystemChanges* changes) : path_(std::move(path)), changes_(changes) {}

  const std::string path_;
  SystemChanges* const changes_;
};

}  // namespace shardmesh::testing
