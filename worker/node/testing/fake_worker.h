// The memory of a fake_worker, and what it says of its incarnations. Tests only.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace shardmesh {

inline constexpr char kFakeWorker[] = "worker/node/fake_worker";
inline constexpr int64_t kFakeBytes = 1 << 16;
inline constexpr int64_t kFakeOffset = 64;

struct FakeIncarnation {
  pid_t pid = 0;
  int incarnation = 0;
  int64_t last_incarnation = 0;
  std::string last_address, arguments;
};

// Of a worker, the first incarnation first. A line that is still being written is not there yet.
inline std::vector<FakeIncarnation> FakeIncarnations(const std::string& local_dir, const std::string& worker) {
  std::vector<FakeIncarnation> incarnations;
  std::ifstream file(local_dir + "/" + worker + ".incarnations");
  FakeIncarnation incarnation;
  while (file >> incarnation.pid >> incarnation.incarnation >> incarnation.last_incarnation >>
             incarnation.last_address >> incarnation.arguments &&
         file.peek() == '\n') {
    incarnations.push_back(incarnation);
  }
  return incarnations;
}

}  // namespace shardmesh
