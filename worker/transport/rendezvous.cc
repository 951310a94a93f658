#include "worker/transport/rendezvous.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(10);  // between looks at a folder

absl::Status NotThere(const std::string& key, absl::Duration timeout) {
  return absl::DeadlineExceededError(
      absl::StrCat("nobody wrote '", key, "' within ", absl::FormatDuration(timeout), "; has every rank started?"));
}

}  // namespace

absl::Status MemoryRendezvous::Set(const std::string& key, absl::string_view value) {
  MutexLock lock(mu_);
  if (values_.size() >= most_keys_ && values_.count(key) == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", most_keys_, " keys already; '", key, "' is too many"));
  }
  values_[key] = std::string(value);
  changed_.SignalAll();
  return absl::OkStatus();
}

absl::StatusOr<std::string> MemoryRendezvous::Get(const std::string& key, absl::Duration timeout) {
  const absl::Time until = MonotonicNow() + timeout;
  MutexLock lock(mu_);
  while (true) {
    if (const auto found = values_.find(key); found != values_.end()) return found->second;
    const absl::Duration left = until - MonotonicNow();
    if (left <= absl::ZeroDuration()) return NotThere(key, timeout);
    changed_.WaitFor(mu_, left);
  }
}

std::string FolderRendezvous::PathOf(const std::string& key) const {
  std::string name = key;
  for (char& c : name) c = c == '/' ? '+' : c;
  return absl::StrCat(folder_, "/", name);
}

absl::Status FolderRendezvous::Set(const std::string& key, absl::string_view value) {
  // A reader sees the whole value or none.
  const std::string path = PathOf(key), part = absl::StrCat(path, ".", getpid(), ".part");
  std::ofstream file(part, std::ios::binary);
  file.write(value.data(), static_cast<std::streamsize>(value.size()));
  file.close();
  if (!file || std::rename(part.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> FolderRendezvous::Get(const std::string& key, absl::Duration timeout) {
  const absl::Time until = MonotonicNow() + timeout;
  while (true) {
    if (std::ifstream file(PathOf(key), std::ios::binary); file) {
      std::ostringstream value;
      value << file.rdbuf();
      return value.str();
    }
    if (MonotonicNow() >= until) return NotThere(key, timeout);
    absl::SleepFor(kLook);
  }
}

}  // namespace shardmesh
