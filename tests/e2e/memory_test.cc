// The memory that a worker reports is what the plan's arithmetic says (docs/architecture.md, "Memory"), and what the
// kernel sees mapped: weights and states of the shard with their spare chunks, one parameter window, three
// publications, a gradient window for each slot, and behind it a mailbox; with bucket residency the buckets in use.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "local/memory/mailbox.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"
#include "worker/memory/host_capacity.h"
#include "worker/memory/shard_storage.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;

constexpr int64_t kKiB = 1 << 10, kMiB = 1 << 20;
constexpr int64_t kStateBytes = 8;  // two moments in fp32
// Streams start at different multiples of 68 KiB modulo 2 MiB; the window is stream 3, publications 4 to 11, slots
// from 6.
constexpr int64_t Stagger(int stream) { return stream * 68 * kKiB % (2 * kMiB); }
constexpr int64_t kAlignment = 3 * (2 * kMiB + Stagger(2));  // of a shard's three streams, at most

constexpr int64_t kMailbox = sizeof(Mailbox);  // behind a slot's gradients; a little less than four pages

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
    const int64_t last = bucket.shard_elements - (ranges - 1) * kRangeElements;
    const int64_t spares = (ranges - 1) * kChunkElements + std::min(kChunkElements, last);  // one for each range
    terms.shard += (bucket.shard_elements + spares) * stored;
    window += Pages(bucket.quantized() ? bucket.num_elements + (rows * 4 + 15) / 16 * 16
                                       : bucket.num_elements * BytesPerElement(bucket.format()));
    gradients += Pages(bucket.num_elements * 2);
  }
  terms.window = window + Stagger(3);
  terms.publications = 3 * window + Stagger(4) + Stagger(5) + Stagger(6);
  for (int slot = 0; slot < num_slots; ++slot)
    terms.slots += gradients + Stagger(4 + kMaxPublications + slot) + kMailbox;
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
    EXPECT_GT(mapped, total);  // the control block
    EXPECT_LT(mapped, total + kMiB);
  }
}

// Matrices that Muon steps lie whole at their owners, each with a spare chunk of its own, and the owner of some has the
// scratch of the largest: 8 bytes for each of its elements and each square of its short side, 4 for 256 elements. Rows
// of int8 weights are not cut.
TEST(Memory, MuonAndInt8Rows) {
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start({.workers = 2}));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  constexpr int64_t kRows = 1024, kColumns = 1536, kMatrix = kRows * kColumns, kInt8 = 1000, kWidth = 4864;
  JobSpec spec = testing::TinyJob("muon", "fsdp=2", 1);
  spec.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
  spec.parameters = {};
  for (const char* name : {"a", "b"}) {
    spec.parameters.push_back({name, {kRows, kColumns}, WeightFormat::kBf16Sr});
    spec.parameters.back().group = 1;
  }
  spec.parameters.push_back({"int8", {kInt8, kWidth}, WeightFormat::kInt8Row});
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  const int64_t scratch = 8 * kMatrix + 8 * kRows * kRows + kMatrix / 256 * 4;
  const int64_t matrix = (kMatrix + kChunkElements) * (2 + 4);
  const int64_t half = kInt8 * kWidth / 2, ranges = (half + kRangeElements - 1) / (kRangeElements / kWidth * kWidth);
  const int64_t rows = (half + ranges * kWidth) * (1 + 8) + (kInt8 / 2 + ranges) * 4;
  const int64_t window = Pages(2 * kMatrix * 2) + Pages(kInt8 * kWidth + kInt8 * 4);
  const int64_t gradients = Pages(2 * kMatrix * 2) + Pages(kInt8 * kWidth * 2);
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job->worker(Rank(rank)).GetStatus(absl::Seconds(10)));
    const v1::GetStatusReply::Job& said = status.jobs(0);
    EXPECT_EQ(said.window_bytes(), window + Stagger(3));
    EXPECT_EQ(said.publication_bytes(), 3 * window + Stagger(4) + Stagger(5) + Stagger(6));
    EXPECT_EQ(said.slot_bytes(), gradients + Stagger(4 + kMaxPublications) + kMailbox);
    EXPECT_GE(said.shard_bytes(), scratch + matrix + rows);
    EXPECT_LE(said.shard_bytes(), scratch + matrix + rows + 2 * kAlignment) << "codes, scales and two states";
  }
}

// What the kernel holds of a job's segments, by what their names end in, in a process that has mapped them.
int64_t HeldBytes(pid_t pid, const std::string& what) {
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"))) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (!absl::StrContains(target, absl::StrCat("memfd:shardmesh-mem-", what))) continue;
    struct stat info;
    if (stat(entry.path().c_str(), &info) == 0) bytes += int64_t{info.st_blocks} * 512;
  }
  return bytes;
}

// Two trainers with a slot each, and buckets of one size.
struct BucketMemory : ::testing::Test {
  static constexpr int kBuckets = 8;
  static constexpr int64_t kElements = 256 << 10, kWeights = kElements * 4, kGradients = kElements * 2;

  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster, Cluster::Start({.workers = 2}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
    JobSpec spec = testing::TinyJob("mem", "fsdp=2", 2, kElements);
    for (int b = 1; b < kBuckets; ++b) {
      spec.parameters.push_back({absl::StrCat("w", b), {kElements}, WeightFormat::kFp32});
    }
    spec.bucket_elements = kElements;
    spec.residency = Residency::kBucket;
    ASSERT_OK_AND_ASSIGN(job, client.CreateJob(spec));
    ASSERT_EQ(job->plan().buckets().size(), size_t{kBuckets});
    ASSERT_OK(testing::Initialize(*job));
    for (int s : {0, 1}) {
      ASSERT_OK_AND_ASSIGN(auto session, job->Attach({Slot(s)}));
      ASSERT_OK(session->AwaitWeights(absl::Seconds(10)));
      trainers.push_back(std::move(session));
    }
    pid = cluster->worker(job->members()[1].worker()).pid();
  }

  void Acquire(int trainer, int b) {
    if (b < 0 || b >= kBuckets) return;
    ASSERT_OK(trainers[trainer]->Acquire(b, absl::Seconds(10)));
  }
  void Release(int trainer, int b) {
    if (b < 0 || b >= kBuckets) return;
    ASSERT_OK(trainers[trainer]->Release(b));
  }

  // The second trainer is one bucket behind.
  void Forward() {
    for (int b = 0; b < kBuckets; ++b) {
      const bool last = b + 1 == kBuckets;
      Acquire(0, b);
      Release(0, b - 1);
      Acquire(1, b - 1);
      Release(1, b - 2);
      Acquire(0, b + 1);  // before it came, what nobody uses was dropped
      const int64_t used = (b > 0 ? 1 : 0) + 1 + (last ? 0 : 1);
      const int64_t held = HeldBytes(pid, "window");
      EXPECT_GE(held, used * kWeights) << "bucket " << b;
      EXPECT_LE(held, used * kWeights * 103 / 100 + (last ? kWeights : 0)) << "bucket " << b;
      window_most = std::max(window_most, held);
      Release(0, b + 1);
    }
    Release(0, kBuckets - 1);
    Release(1, kBuckets - 2);
  }

  void Backward(Step step) {
    for (int b = 0; b < kBuckets; ++b) {
      for (const auto& trainer : trainers) {
        ASSERT_OK(testing::WriteBucketGradients(*trainer, step, b));
        slots_most = std::max(slots_most, HeldBytes(pid, "slot-"));
        ASSERT_OK(trainer->DeclareBucket(b, absl::Seconds(10)));
      }
    }
  }

  std::unique_ptr<Cluster> cluster;
  std::shared_ptr<Job> job;
  std::vector<std::unique_ptr<Session>> trainers;
  pid_t pid = 0;
  int64_t window_most = 0, slots_most = 0;
};

// Two buckets of each in the window and in its slot, at most, at any moment; and of the window what is in use.
TEST_F(BucketMemory, HoldsTwoBucketsOfEachTrainerAndSlot) {
  for (int64_t step = 1; step <= 3; ++step) {
    ASSERT_NO_FATAL_FAILURE(Forward());
    ASSERT_NO_FATAL_FAILURE(Backward(Step(step)));
    std::thread other([&] { EXPECT_OK(trainers[1]->Step().status()); });
    EXPECT_OK(trainers[0]->Step().status());
    other.join();
    EXPECT_LE(HeldBytes(pid, "slot-"), 2 * Pages(kMailbox)) << "more than the mailboxes";
  }
  EXPECT_GE(window_most, 3 * kWeights);
  EXPECT_GE(slots_most, 2 * kGradients);
  EXPECT_LE(slots_most, 2 * 2 * kGradients * 103 / 100);
  ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job->worker(Rank(1)).GetStatus(absl::Seconds(10)));
  EXPECT_LE(status.jobs(0).slot_resident_bytes(), 2 * Pages(kMailbox));
  EXPECT_EQ(status.jobs(0).sum_bytes(), kBuckets * kElements / 2 * 4 + Stagger(29));
  const JobMemory memory = MemoryOf(job->plan(), 2);  // what is asked of the host before it is built
  EXPECT_EQ(memory.window, 2 * 2 * kWeights);
  EXPECT_EQ(memory.slots, 2 * (2 * kGradients + Pages(kMailbox)));
  EXPECT_EQ(memory.sums, 2 * status.jobs(0).sum_bytes());
}

TEST(Memory, SmallJob) { ExpectTerms("fsdp=4", 10'000); }
TEST(Memory, LargerJob) { ExpectTerms("ddp=2,fsdp=2", 5'000'003); }
TEST(Memory, OneWorker) { ExpectTerms("fsdp=1", 3'000'000); }

}  // namespace
}  // namespace shardmesh
