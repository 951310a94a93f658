#include "worker/memory/host_capacity.h"

#include <filesystem>
#include <fstream>

#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "worker/memory/shard_storage.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

// Four tensors of 2^40 elements, with as many slots as there can be.
JobSpec LargestJob(const std::string& mesh) {
  JobSpec job = SmallJob(mesh, kMaxSlots);
  job.parameters.clear();
  for (const char* name : {"a", "b", "c", "d"})
    job.parameters.push_back({name, {1 << 20, 1 << 20}, WeightFormat::kFp32});
  return job;
}

TEST(HostCapacityTest, MemoryOf_IsWhatTheSegmentsHave) {
  for (const char* mesh : {"fsdp=1", "fsdp=3", "ddp=2,fsdp=2"}) {
    JobSpec job = MixedJob(mesh, 3);
    job.parameters.push_back({"wide", {2'300'017}, WeightFormat::kBf16});
    TestHost real(job);
    const JobMemory memory = MemoryOf(real.plan, job.num_slots);
    int64_t shards = 0;
    for (int r = 0; r < real.plan.num_ranks(); ++r) {
      ASSERT_OK_AND_ASSIGN(const ShardStorage storage,
                           ShardStorage::Open(*real.memory, "shard", real.plan, real.plan.PlaceOf(Rank(r)).shard));
      shards += storage.num_bytes();
    }
    EXPECT_EQ(memory.shards, shards) << mesh;
    EXPECT_EQ(memory.window, real.host.window().num_bytes());
    EXPECT_EQ(memory.publications, real.host.Allocated().publications);
    EXPECT_EQ(memory.slots, real.host.Allocated().slots);
    EXPECT_GE(memory.control, static_cast<int64_t>(sizeof(ControlBlock)));
    EXPECT_EQ(memory.total(), memory.shards + memory.window + memory.publications + memory.slots + memory.control);
  }
}

TEST(HostCapacityTest, OneByteTooMuchForTheCopies_IsRefusedWithBothSizes) {
  for (const char* mesh : {"fsdp=2", "ddp=2,fsdp=2"}) {
    const JobSpec job = SmallJob(mesh, 3);
    const Plan plan = *Plan::Create(job);
    const int64_t copies = 2 * ShardStorage::NumBytes(plan, 0), total = MemoryOf(plan, 3).total() + copies;
    EXPECT_EQ(CopyBytesOf(plan), copies);
    EXPECT_EQ(CopyBytesOf(plan, 1), copies / 2);  // of several hosts
    EXPECT_OK(CheckCopyFits(job, plan, {total, "a test"}));
    EXPECT_OK(CheckCopyFits(job, plan, {}));
    EXPECT_THAT(CheckCopyFits(job, plan, {total - 1, "a test"}),
                StatusIs(Code::kResourceExhausted,
                         AllOf(HasSubstr("to save job small takes"), HasSubstr("copies of its shards, beside the"),
                               HasSubstr("(a test)"))));
  }
}

// The job itself is in memory of the device.
TEST(HostCapacityTest, CopiesOfAJobOnADevice_AreAllThatTheHostNeeds) {
  const JobSpec job = SmallJob("fsdp=2", 3);
  const Plan plan = *Plan::Create(job);
  const int64_t copies = CopyBytesOf(plan);
  EXPECT_OK(CheckCopyFits(job, plan, {copies, "a test"}, std::nullopt, /*on_device=*/true));
  EXPECT_THAT(CheckCopyFits(job, plan, {copies - 1, "a test"}, std::nullopt, /*on_device=*/true),
              StatusIs(Code::kResourceExhausted,
                       AllOf(HasSubstr("to save or restore job small, which is on a CUDA device, takes"),
                             HasSubstr("(a test)"))));
}

TEST(HostCapacityTest, OneByteTooMuch_IsRefusedTermByTerm) {
  const JobSpec job = SmallJob("ddp=2,fsdp=2", 3);
  const Plan plan = *Plan::Create(job);
  const int64_t total = MemoryOf(plan, 3).total();
  EXPECT_OK(CheckFits(job, plan, {total, "a test"}));
  EXPECT_OK(CheckFits(job, plan, {}));
  EXPECT_THAT(
      CheckFits(job, plan, {total - 1, "a test"}),
      StatusIs(Code::kResourceExhausted,
               AllOf(HasSubstr("job small takes"), HasSubstr("shards of 4 workers"), HasSubstr("parameter window"),
                     HasSubstr("publications"), HasSubstr("windows of 3 slots"), HasSubstr("control block"),
                     HasSubstr("this host has"), HasSubstr("(a test)"), HasSubstr("use fewer slots"))));
}

TEST(HostCapacityTest, TheLargestJobs_DoNotOverflow) {
  const JobSpec job = LargestJob("fsdp=4");
  const Plan plan = *Plan::Create(job);
  const JobMemory memory = MemoryOf(plan, job.num_slots);
  const int64_t elements = int64_t{1} << 42;
  EXPECT_GE(memory.shards, elements * 12);
  // A spare chunk and a progress word for each range, guards for each chunk, and where streams begin.
  const int64_t ranges = elements / kRangeElements, chunks = elements / kChunkElements;
  EXPECT_LE(memory.shards, elements * 12 + ranges * (kChunkElements * 12 + 64) + chunks * 16 + 4 * 3 * (4 << 20));
  EXPECT_GE(memory.slots, elements * 4 * kMaxSlots);
  EXPECT_LT(memory.slots, elements * 4 * (kMaxSlots + 1));
  EXPECT_THAT(CheckFits(job, plan, {int64_t{1} << 45, "32 TiB"}),
              StatusIs(Code::kResourceExhausted, HasSubstr("takes 2.11 PiB")));
  const JobSpec many = LargestJob("ddp=1048576");
  const Plan wide = *Plan::Create(many);
  EXPECT_EQ(MemoryOf(wide, many.num_slots).shards, kMax);
  EXPECT_EQ(MemoryOf(wide, many.num_slots).total(), kMax);
  EXPECT_THAT(CheckFits(many, wide, {kMax - 1, "a test"}), StatusIs(Code::kResourceExhausted, HasSubstr("EiB")));
}

struct ReadHostCapacityTest : ::testing::Test {
  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root.File(path)).parent_path());
    std::ofstream(root.File(path)) << text << "\n";
  }
  void ExpectRead(int64_t bytes, const std::string& source) {
    const HostCapacity capacity = ReadHostCapacity(root.path());
    EXPECT_EQ(capacity.bytes, bytes);
    EXPECT_THAT(capacity.source, EndsWith(source));
  }
  const testing::TempFolder root;
};

// Of window and slots the buckets that may be in use, however many there are; and sums.
TEST(HostCapacityTest, BucketResidency_CountsTheBucketsInUse) {
  JobSpec job = SmallJob("fsdp=2", 3);
  job.parameters.clear();
  for (int i = 0; i < 20; ++i) job.parameters.push_back({"p" + std::to_string(i), {1024}, WeightFormat::kFp32});
  const JobMemory full = MemoryOf(*Plan::Create(job), 3);
  job.residency = Residency::kBucket;
  job.prefetch_buckets = 2;
  const Plan plan = *Plan::Create(job);
  ASSERT_EQ(plan.buckets().size(), 20u);
  const JobMemory memory = MemoryOf(plan, 3);
  EXPECT_EQ(memory.window, 3 * 3 * 4096);
  EXPECT_EQ(memory.slots, 3 * (3 * 4096 + 20 * 4096)) << "with a mailbox of twenty pages each";
  EXPECT_EQ(memory.sums, 2 * (20 * 512 * 4 + StreamOffset(29)));
  EXPECT_EQ(memory.publications, full.publications);
  EXPECT_GT(memory.control, full.control);
  EXPECT_EQ(memory.total(),
            memory.window + memory.slots + memory.sums + memory.publications + memory.control + memory.shards);
  EXPECT_THAT(CheckFits(job, plan, {memory.total() - 1, "a test"}),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("for summed gradients; this host has")));
  job.prefetch_buckets = 1000;  // more than there is
  EXPECT_EQ(MemoryOf(*Plan::Create(job), 3).window, full.window);
  EXPECT_EQ(MemoryOf(*Plan::Create(job), 3).slots, full.slots);
}

// Weights are there by bucket, gradients by slot.
TEST(HostCapacityTest, BucketResidencyWithPulledSlots_CountsWholeSlots) {
  JobSpec job = SmallJob("fsdp=2", 3);
  job.parameters.clear();
  for (int i = 0; i < 20; ++i) job.parameters.push_back({"p" + std::to_string(i), {1024}, WeightFormat::kFp32});
  job.slot_mode = SlotMode::kPulled;
  job.num_trainers = 4;
  const JobMemory full = MemoryOf(*Plan::Create(job), job);
  job.residency = Residency::kBucket;
  const Plan plan = *Plan::Create(job);
  const JobMemory memory = MemoryOf(plan, job);
  EXPECT_EQ(memory.window, 4 * 2 * 4096);
  EXPECT_EQ(memory.slots, full.slots);
  EXPECT_EQ(memory.sums, full.sums);
  EXPECT_GT(memory.control, full.control);
  EXPECT_THAT(CheckFits(job, plan, {memory.total() - 1, "a test"}),
              StatusIs(Code::kResourceExhausted,
                       AllOf(HasSubstr("for the windows of 4 trainers"), HasSubstr("gradients, assigned slots, or"))));
}

// The lead of each host keeps the tables of all others.
TEST(HostCapacityTest, SeveralHosts_CountTheMaximaOfTheOthers) {
  JobSpec job = SmallJob("fsdp=4", 1);
  job.parameters.push_back({"row", {1000, 64}, WeightFormat::kBf16Sr, "", {}, GatherFormat::kFp8Row});
  const Plan plan = *Plan::Create(job);
  ASSERT_EQ(plan.scales().num_maxima, 1000);
  const int64_t one = HostMemory::SizesOf(plan, 1).control;
  EXPECT_EQ(MemoryOf(plan, 1).control, one);
  EXPECT_EQ(MemoryOf(plan, 1, 4).control, one);
  EXPECT_EQ(MemoryOf(plan, 1, 2).control, one + 1000 * 4);
  EXPECT_EQ(MemoryOf(plan, 1, 1).control, one + 3 * 1000 * 4);
}

TEST_F(ReadHostCapacityTest, NothingIsKnown_NoLimit) { ExpectRead(kMax, "no limit is known"); }

TEST_F(ReadHostCapacityTest, Version2_TheLeastOfTheGroupAndThoseAroundIt) {
  Write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:        2 kB");
  ExpectRead(1'024'000, "physical memory");
  Write("proc/self/cgroup", "0::/outer/inner");
  ExpectRead(1'024'000, "physical memory");
  Write("sys/fs/cgroup/outer/inner/memory.max", "max");
  ExpectRead(1'024'000, "physical memory");
  Write("sys/fs/cgroup/outer/memory.max", "700000");
  ExpectRead(700'000, "/sys/fs/cgroup/outer/memory.max");
  Write("sys/fs/cgroup/outer/inner/memory.max", "800000");
  ExpectRead(700'000, "/sys/fs/cgroup/outer/memory.max");
  Write("sys/fs/cgroup/outer/inner/memory.max", "600000");
  ExpectRead(600'000, "/sys/fs/cgroup/outer/inner/memory.max");
  Write("sys/fs/cgroup/memory.max", "500000");  // as a container sees its own
  ExpectRead(500'000, "/sys/fs/cgroup/memory.max");
}

TEST_F(ReadHostCapacityTest, Version1_OfTheMemoryHierarchy) {
  Write("proc/meminfo", "MemTotal:       1000 kB");
  Write("proc/self/cgroup", "9:cpu,cpuacct:/a\n4:hugetlb,memory:/job\n0::/");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  Write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1");
  ExpectRead(1'024'000, "physical memory");
  Write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "900000");
  ExpectRead(900'000, "/sys/fs/cgroup/memory/job/memory.limit_in_bytes");
}

TEST_F(ReadHostCapacityTest, OddLines_AreNoLimit) {
  Write("proc/meminfo", "no numbers");
  Write("proc/self/cgroup", "\n::\n0::relative\n0::\n:memory:\n0::/../../x");
  Write("sys/fs/cgroup/memory.max", "many");
  ExpectRead(kMax, "no limit is known");
}

TEST(HostCapacityTest, ThisHost_HasALimit) {
  EXPECT_GT(ReadHostCapacity().bytes, 1 << 20);
  EXPECT_LT(ReadHostCapacity().bytes, int64_t{1} << 50);
}

}  // namespace
}  // namespace shardmesh
