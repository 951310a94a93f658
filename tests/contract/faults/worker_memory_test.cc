// What a worker holds beside its shard and the windows: nothing that is as large as a model.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;

constexpr int64_t kElements = int64_t{24} << 20;  // a pushed shard lies in malloc's heap, not in pages of its own
constexpr int64_t kPieceBytes = kElements * int64_t{sizeof(float)} / 2;  // of initial weights, to each worker
constexpr int64_t kMessageBytes = int64_t{40} << 20;  // of messages, for the next ones (rpc/base/main_support.h)

// Memory that is no file and not shared.
int64_t PrivateBytes(pid_t pid) {
  for (const absl::string_view line : absl::StrSplit(testing::ReadFile(absl::StrCat("/proc/", pid, "/status")), '\n')) {
    int64_t kibibytes = 0;
    if (!absl::StartsWith(line, "RssAnon:")) continue;
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.size() > 1 && absl::SimpleAtoi(words[1], &kibibytes)) return kibibytes * 1024;
  }
  return -1;
}

TEST(WorkerMemory, OfInitialWeightsThatArePlaced_NothingIsKept) {
  static_assert(kMessageBytes < kPieceBytes);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "SKIPPED: the sanitizer's allocator keeps what was freed in its own way";
#endif
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = testing::OddJob("large", "fsdp=2", 1);
  spec.parameters = {{"w", {kElements / 1024, 1024}, WeightFormat::kFp32}};
  const pid_t worker = cluster->worker("w1").pid();
  const int64_t before = PrivateBytes(worker);
  ASSERT_GT(before, 0);
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Attach({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(60)));
  ASSERT_OK(testing::TrainTo(*session, 1));
  int64_t grown = 0;
  for (const absl::Time deadline = MonotonicNow() + absl::Seconds(20); MonotonicNow() < deadline;) {
    grown = PrivateBytes(worker) - before;
    if (grown < kMessageBytes) break;
    testing::Pause(absl::Milliseconds(20));
  }
  EXPECT_LT(grown, kMessageBytes);
}

}  // namespace
}  // namespace shardmesh
