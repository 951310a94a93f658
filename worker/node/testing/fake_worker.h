// The memory of a fake_worker, and what it says of its lives. Tests only.
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

struct FakeLife {
  pid_t pid = 0;
  int life = 0;
  int64_t last_incarnation = 0;
  std::string last_address, arguments;
};

// Of a worker, the first life first. A line that is still being written is not there yet.
inline std::vector<FakeLife> FakeLives(const std::string& local_dir, const std::string& worker) {
  std::vector<FakeLife> lives;
  std::ifstream file(local_dir + "/" + worker + ".lives");
  FakeLife life;
  while (file >> life.pid >> life.life >> life.last_incarnation >> life.last_address >> life.arguments &&
         file.peek() == '\n') {
    lives.push_back(life);
  }
  return lives;
}

}  // namespace shardmesh
