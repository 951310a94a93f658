// A reader in a process of its own, for tests that kill and stop it: maps one version after the other of a job whose
// weights are all equal to the step (counting_job.h), and looks at each for a while.
// Usage: test_reader COORDINATOR JOB SEED TTL_MS. Prints "STEP" for each; ends with 3 when a version was not whole,
// with 4 on another error than a version that did not come.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "absl/status/status.h"
#include "client/cpp/version_reader.h"
#include "core/base/clock.h"

namespace shardmesh {
namespace {

bool IsWhole(const HeldVersion& version) {
  const auto view = version.parameter("w");
  if (!view.ok()) return false;
  const auto* const values = static_cast<const float*>(view->data);
  for (int64_t i = 0; i < view->num_elements; ++i) {
    if (values[i] != static_cast<float>(version.step().value())) return false;
  }
  return true;
}

int Read(const char* coordinator, const char* job, unsigned seed, int ttl_ms) {
  auto client = Client::Connect(coordinator);
  if (!client.ok()) return 4;
  ReaderOptions options;
  options.way = ReaderOptions::Way::kAttached;
  options.ttl = absl::Milliseconds(ttl_ms);
  auto reader = VersionReader::Open(*client, job, options);
  if (!reader.ok()) {
    std::fprintf(stderr, "%s\n", reader.status().ToString().c_str());
    return 4;
  }
  std::mt19937 random(seed);
  FollowOptions follow;
  follow.timeout = absl::Seconds(60);
  const absl::Status ended = Follow(**reader, follow, [&](const HeldVersion& version) {
    const absl::Time until = MonotonicNow() + absl::Milliseconds(random() % 200);
    std::printf("%lld\n", static_cast<long long>(version.step().value()));
    std::fflush(stdout);
    do {
      if (!IsWhole(version)) return absl::DataLossError("not whole");
    } while (MonotonicNow() < until);
    return absl::OkStatus();
  });
  std::fprintf(stderr, "%s\n", ended.ToString().c_str());
  return absl::IsDataLoss(ended) ? 3 : 4;
}

}  // namespace

int RunReader(int argc, char** argv) {
  if (argc != 5) return 2;
  return Read(argv[1], argv[2], static_cast<unsigned>(std::atoi(argv[3])), std::atoi(argv[4]));
}

}  // namespace shardmesh

int main(int argc, char** argv) { return shardmesh::RunReader(argc, argv); }
