// The memory that a worker reports is what the plan's arithmetic says (docs/architecture.md, "Memory"), and what the
// kernel sees mapped: weights and states of the shard with their spare chunks, one parameter window, two publications,
// a gradient window for each slot.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/matchers.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"
#include "worker/shard_storage.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;

constexpr int64_t kKiB = 1 << 10, kMiB = 1 << 20;
constexpr int64_t kStateBytes = 8;  // two moments in fp32
// Streams start at different multiples of 68 KiB modulo 2 MiB; the window is stream 3, publications 4 and 5, slots
// from 6.
constexpr int64_t Stagger(int stream) { return stream * 68 * kKiB % (2 * kMiB); }
constexpr int64_t kAlignment = 3 * (2 * kMiB + Stagger(2));  // of a shard's three streams, at most

int64_t Pages(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

struct Terms {
  int64_t shard = 0, window = 0, publications = 0, slots = 0;
};

// From sizes alone: one bucket for each format here. `rows`: of the one tensor that is gathered as fp8_row.
Terms Arithmetic(const Plan& plan, int num_slots, int64_t rows) {
  Terms terms;
  int64_t window = 0, gradients = 0;
  for (const Bucket& bucket : plan.buckets()) {
    const int64_t stored = BytesPerElement(bucket.format()) + kStateBytes;
    const int64_t ranges = (bucket.shard_elements + kRangeElements - 1) / kRangeElements;
    terms.shard += (bucket.shard_elements + ranges * kChunkElements) * stored;  // one spare chunk for each range
    window += Pages(bucket.coded() ? bucket.num_elements + (rows * 4 + 15) / 16 * 16
                                   : bucket.num_elements * BytesPerElement(bucket.format()));
    gradients += Pages(bucket.num_elements * 2);
  }
  terms.window = window + Stagger(3);
  terms.publications = 2 * window + Stagger(4) + Stagger(5);
  for (int slot = 0; slot < num_slots; ++slot) terms.slots += gradients + Stagger(6 + slot);
  return terms;
}

// Bytes of the job's segments in a process's address space.
int64_t MappedBytes(pid_t pid) {
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  std::string line;
  int64_t bytes = 0;
  while (std::getline(maps, line)) {
    if (!absl::StrContains(line, "memfd:shardmesh-mem")) continue;
    uint64_t begin = 0, end = 0;
    char dash;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    bytes += static_cast<int64_t>(end - begin);
  }
  return bytes;
}

void ExpectTerms(const std::string& mesh, int64_t large) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 4}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = testing::TinyJob("mem", mesh, 3, large);
  spec.parameters.push_back({"v", {large / 2 + 1}, WeightFormat::kBf16Sr, ""});
  const int64_t rows = large / 640 + 1;
  spec.parameters.push_back({"q", {rows, 64}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kFp8Row});
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  const Terms terms = Arithmetic(job->plan(), spec.num_slots, rows);
  for (int rank = 0; rank < job->plan().num_ranks(); ++rank) {
    ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job->worker(Rank(rank)).GetStatus(absl::Seconds(10)));
    ASSERT_EQ(status.jobs_size(), 1);
    const v1::GetStatusReply::Job& said = status.jobs(0);
    EXPECT_EQ(said.window_bytes(), terms.window);
    EXPECT_EQ(said.publication_bytes(), terms.publications);
    EXPECT_EQ(said.slot_bytes(), terms.slots);
    EXPECT_GE(said.shard_bytes(), terms.shard);
    EXPECT_LE(said.shard_bytes(), terms.shard + kAlignment);
    const int64_t total = said.shard_bytes() + said.window_bytes() + said.publication_bytes() + said.slot_bytes();
    const int64_t mapped = MappedBytes(cluster->worker(job->members()[rank].worker()).pid());
    EXPECT_GT(mapped, total);  // the control page
    EXPECT_LT(mapped, total + kMiB);
  }
}

TEST(Memory, SmallJob) { ExpectTerms("fsdp=4", 10'000); }
TEST(Memory, LargerJob) { ExpectTerms("ddp=2,fsdp=2", 5'000'003); }
TEST(Memory, OneWorker) { ExpectTerms("fsdp=1", 3'000'000); }

}  // namespace
}  // namespace shardmesh
