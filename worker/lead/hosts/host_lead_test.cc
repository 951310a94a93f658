#include "worker/lead/hosts/host_lead.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "worker/lead/hosts/testing/job_on_hosts.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int kSkipped = 3;  // the step with a gradient that is not finite

// Everything that a job has learnt on a host.
struct Learnt {
  uint64_t digest = 0;
  std::string window, published;
  double norm = 0;
};

// A few steps, of which one is skipped; what every host has at their end.
std::vector<Learnt> Train(const JobSpec& spec, int num_hosts, GradientWay way) {
  JobOnHosts job(spec, num_hosts);
  EXPECT_OK(job.PlaceWeights());
  std::vector<Learnt> learnt(num_hosts);
  for (int64_t step = 1; step <= 5; ++step) {
    for (int slot = 0; slot < spec.num_slots; ++slot) {
      std::vector<std::pair<Slot, int>> bad;
      if (step == kSkipped && slot == 1) bad.emplace_back(Slot(slot), 0);
      EXPECT_OK(job.GiveSlot(slot, step, way, bad));
    }
    for (int h = 0; h < num_hosts; ++h) {
      const auto outcome = job.hosts[h]->protocol->outcomes().AwaitCommit(Step(step), kLongWait);
      EXPECT_OK(outcome);
      if (!outcome.ok()) return learnt;
      EXPECT_EQ(outcome->skipped, step == kSkipped);
      if (step == 5) learnt[h].norm = outcome->norm;
    }
  }
  for (int h = 0; h < num_hosts; ++h) {
    const auto digest = job.Digest(h);
    EXPECT_OK(digest);
    if (digest.ok()) learnt[h].digest = digest->second;
    learnt[h].window = job.Window(h);
    learnt[h].published = job.Published(h, 5);
  }
  return learnt;
}

JobSpec Fp32Gradients(JobSpec job) {
  job.gradient_format = Format::kFp32;
  return job;
}

struct Variant {
  std::string name;
  std::function<void(JobSpec&)> change;
};
std::vector<Variant> Variants() {
  return {{"plain", [](JobSpec&) {}},
          {"clipped, replicas compared",
           [](JobSpec& job) {
             job.clip_norm = 0.5;
             job.check_every = 2;
           }},
          {"quantized",
           [](JobSpec& job) {
             job.clip_norm = 0.5;
             job.parameters.push_back({"row", {37, 300}, WeightFormat::kBf16Sr, "", {}, GatherFormat::kFp8Row});
             job.parameters.push_back({"block", {300, 411}, WeightFormat::kFp32, "", {}, GatherFormat::kFp8Block});
             job.parameters.push_back({"mx", {50, 320}, WeightFormat::kFp32, "", {}, GatherFormat::kMx8});
             job.parameters.push_back({"tensor", {9000}, WeightFormat::kBf16, "", {}, GatherFormat::kFp8Tensor});
           }},
          {"owned",  // shards of different sizes, and codes that are gathered as they are stored
           [](JobSpec& job) {
             job.clip_norm = 0.5;
             job.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
             for (const int64_t rows : {30, 97, 250}) {
               job.parameters.push_back({absl::StrCat("muon", rows), {rows, 64}, WeightFormat::kBf16Sr});
               job.parameters.back().group = 1;
             }
             job.parameters.push_back({"int8", {300, 96}, WeightFormat::kInt8Row, "", StateFormat::kDyn8});
           }},
          {"token weights", [](JobSpec& job) { job.token_weights = true; }},
          {"one matrix",  // most shards have nothing
           [](JobSpec& job) {
             job.optimizer = OptimizerHyper::Defaults(OptimizerKind::kMuon);
             job.parameters = {{"muon", {97, 64}, WeightFormat::kBf16Sr}};
           }},
          {"frozen", [](JobSpec& job) {
             job.parameters.push_back({"frozen", {7000}, WeightFormat::kBf16});
             job.parameters.back().frozen = true;
             job.parameters.push_back({"quantized", {70, 200}, WeightFormat::kBf16, "", {}, GatherFormat::kInt8Row});
             job.parameters.back().frozen = true;
           }}};
}

struct Shape {
  const char* mesh;
  int hosts;
};
class HostLeadMeshTest : public ::testing::TestWithParam<Shape> {};

TEST_P(HostLeadMeshTest, TheSameBitsAsOnOneHost) {
  for (const Variant& variant : Variants()) {
    JobSpec job = Fp32Gradients(MixedJob(GetParam().mesh, 3));
    variant.change(job);
    const Learnt one = Train(job, 1, GradientWay::kAttached)[0];
    EXPECT_NE(one.published, "not published");
    for (const GradientWay way : {GradientWay::kAttached, GradientWay::kPushed}) {
      const std::vector<Learnt> several = Train(job, GetParam().hosts, way);
      for (size_t h = 0; h < several.size(); ++h) {
        EXPECT_EQ(several[h].digest, one.digest) << variant.name << " host " << h;
        EXPECT_EQ(several[h].norm, one.norm) << variant.name << " host " << h;
        EXPECT_TRUE(several[h].window == one.window) << variant.name << " host " << h << ": the window differs";
        EXPECT_TRUE(several[h].published == one.published) << variant.name << " host " << h << ": the version differs";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, HostLeadMeshTest,
                         ::testing::Values(Shape{"fsdp=2", 2}, Shape{"ddp=2", 2}, Shape{"ddp=2,fsdp=2", 2},
                                           Shape{"fsdp=2,ddp=2", 2}, Shape{"ddp=2,fsdp=2", 4}, Shape{"fsdp=3", 3},
                                           Shape{"fsdp=4", 2}));

// What hosts have of a job with bucket residency at the end of a training: each trainer holds buckets of its own choice
// on its host, some steps are published and some are not.
std::vector<Learnt> TrainBuckets(const JobSpec& spec, int num_hosts, GradientWay way) {
  JobOnHosts job(spec, num_hosts);
  EXPECT_OK(job.PlaceWeights());
  const int buckets = static_cast<int>(job.plan.buckets().size());
  std::vector<Learnt> learnt(num_hosts);
  for (int64_t step = 1; step <= 4; ++step) {
    for (int h = 0; h < num_hosts; ++h) {  // one bucket more on each host, and another one dropped
      const int bucket = static_cast<int>(step + h) % buckets, before = static_cast<int>(step + h - 1) % buckets;
      StepProtocol& protocol = *job.hosts[h]->protocol;
      EXPECT_OK(protocol.buckets().Acquire(bucket));
      EXPECT_OK(protocol.buckets().Await(bucket, kLongWait));
      if (step > 1) protocol.buckets().Release(before);
    }
    for (int slot = 0; slot < spec.num_slots; ++slot) EXPECT_OK(job.GiveSlot(slot, step, way));
    EXPECT_OK(job.AwaitStep(step));
  }
  for (int h = 0; h < num_hosts; ++h) {
    const auto digest = job.Digest(h);
    EXPECT_OK(digest);
    if (digest.ok()) learnt[h].digest = digest->second;
    const auto published = job.Publish(h);
    EXPECT_OK(published);
    if (published.ok()) {
      EXPECT_EQ(*published, Step(4));
    }
    learnt[h].published = job.Published(h, 4);
    const int held = (4 + h) % buckets;
    EXPECT_TRUE(job.hosts[h]->protocol->buckets().Holds(held));
    const Bucket& bucket = job.plan.buckets()[held];
    const int64_t bytes = bucket.CodeOffset(bucket.end(job.plan.num_shards() - 1));
    EXPECT_TRUE(job.Window(h).substr(bucket.weight_offset, bytes) ==
                learnt[h].published.substr(bucket.weight_offset, bytes))
        << "host " << h << ": bucket " << held << " of the window is not the published one";
  }
  return learnt;
}

TEST_P(HostLeadMeshTest, BucketResidency_TheSameBitsAsOnOneHost) {
  for (const int publish_every : {kPublishOnDemand, 1, 2}) {
    JobSpec job = Fp32Gradients(MixedJob(GetParam().mesh, 3));
    job.residency = Residency::kBucket;
    job.publish_every = publish_every;
    job.clip_norm = publish_every == 1 ? 0.5 : 0;
    job.prefetch_buckets = 100;  // one thread gives all slots
    job.parameters.push_back({"row", {37, 300}, WeightFormat::kBf16Sr, "", {}, GatherFormat::kFp8Row});
    job.parameters.push_back({"frozen", {7000}, WeightFormat::kBf16});
    job.parameters.back().frozen = true;
    const Learnt one = TrainBuckets(job, 1, GradientWay::kAttached)[0];
    for (const GradientWay way : {GradientWay::kAttached, GradientWay::kPushed}) {
      const std::vector<Learnt> several = TrainBuckets(job, GetParam().hosts, way);
      for (size_t h = 0; h < several.size(); ++h) {
        EXPECT_EQ(several[h].digest, one.digest) << publish_every << " way " << static_cast<int>(way) << " host " << h;
        EXPECT_TRUE(several[h].published == one.published) << publish_every << " host " << h << ": the version differs";
      }
    }
  }
}

// Pages of gradients are given back on every host once they are summed, and those of weights that nobody uses.
TEST(HostLead, BucketResidency_GivesPagesBackOnEveryHost) {
  JobSpec job = Fp32Gradients(MixedJob("fsdp=2", 2));
  job.residency = Residency::kBucket;
  job.prefetch_buckets = 100;
  JobOnHosts hosts(job, 2);
  ASSERT_OK(hosts.PlaceWeights());
  ASSERT_OK(hosts.hosts[1]->protocol->buckets().Acquire(1));
  ASSERT_OK(hosts.hosts[1]->protocol->buckets().Await(1, kLongWait));
  for (int64_t step = 1; step <= 3; ++step) {
    for (int slot : {0, 1}) ASSERT_OK(hosts.GiveSlot(slot, step, GradientWay::kAttached));
    ASSERT_OK(hosts.AwaitStep(step));
  }
  EXPECT_FALSE(hosts.hosts[0]->protocol->buckets().Holds(1));
  EXPECT_TRUE(hosts.hosts[1]->protocol->buckets().Holds(1));
  for (int h : {0, 1}) {
    EXPECT_LE(hosts.hosts[h]->host.Resident().slots, 2 * 64 * 1024) << "host " << h;
    const int64_t held = h == 0 ? 0 : hosts.plan.WeightPageBytes(1);
    EXPECT_LE(hosts.hosts[h]->host.window().ResidentBytes(), held + 64 * 1024) << "host " << h;
  }
}

// Shards that were read from a checkpoint, here from another job's storage, on every host.
TEST_P(HostLeadMeshTest, Restored_GoesOnWithTheSameBits) {
  JobSpec spec = Fp32Gradients(MixedJob(GetParam().mesh, 3));
  spec.parameters.push_back({"row", {37, 300}, WeightFormat::kBf16Sr, "", {}, GatherFormat::kFp8Row});
  JobOnHosts first(spec, GetParam().hosts), second(spec, GetParam().hosts);
  ASSERT_OK(first.PlaceWeights());
  const auto step = [&](JobOnHosts& job, int64_t step) {
    for (int slot = 0; slot < spec.num_slots; ++slot) ASSERT_OK(job.GiveSlot(slot, step, GradientWay::kAttached));
    ASSERT_OK(job.AwaitStep(step));
  };
  for (int64_t s = 1; s <= 2; ++s) step(first, s);
  const int per_host = second.hosts[0]->ranks.per_host;
  ASSERT_EQ(first.hosts[0]->protocol->control()->parity.load(), 0);  // as a new job's
  for (int r = 0; r < second.plan.num_ranks(); ++r) {
    const ShardStorage& from = *first.HostOf(r).storages[r % per_host];
    ShardStorage& to = *second.HostOf(r).storages[r % per_host];
    ASSERT_OK(second.HostOf(r).engines[r % per_host]->Load(9, Step(2), [&]() -> absl::Status {
      for (int range = 0; range < static_cast<int>(from.ranges().size()); ++range) {
        for (int stream = 0; stream < kStreams; ++stream) {
          std::memcpy(to.StreamBegin(range, stream), from.StreamBegin(range, stream),
                      static_cast<size_t>(from.StreamBytes(range, stream)));
        }
      }
      return absl::OkStatus();
    }));
  }
  for (int r = 0; r < second.plan.num_ranks(); ++r) {
    EXPECT_EQ(second.hosts[0]->protocol->committed_step().value(), kNoStep);
    ASSERT_OK(second.HostOf(r).engines[r % per_host]->UseLoaded(9));
  }
  ASSERT_OK(second.AwaitStep(2));
  for (int h = 0; h < GetParam().hosts; ++h) {
    EXPECT_TRUE(second.Window(h) == first.Window(h)) << "host " << h;
    EXPECT_TRUE(second.Published(h, 2) == first.Window(h)) << "host " << h;
  }
  step(first, 3);
  step(second, 3);
  for (int h = 0; h < GetParam().hosts; ++h) {
    ASSERT_OK_AND_ASSIGN(const auto one, first.Digest(h));
    ASSERT_OK_AND_ASSIGN(const auto other, second.Digest(h));
    EXPECT_EQ(one, other);
    EXPECT_TRUE(second.Window(h) == first.Window(h)) << "host " << h;
  }
}

// Of another host's publication that is held, none is published; every host says so to who asked there.
TEST(HostLead, PublishOnDemand_OnAllHostsOrOnNone) {
  JobSpec spec = Fp32Gradients(MixedJob("fsdp=2", 1));
  spec.publish_every = kPublishOnDemand;
  spec.publications = 1;
  JobOnHosts job(spec, 2);
  ASSERT_OK(job.PlaceWeights());
  EXPECT_EQ(job.Published(0, 0), "not published");
  ASSERT_OK_AND_ASSIGN(const Step first, job.Publish(0));
  EXPECT_EQ(first, Step(0));
  for (int h : {0, 1}) EXPECT_TRUE(job.Published(h, 0) == job.Window(h)) << "host " << h;
  ASSERT_OK_AND_ASSIGN(const Step again, job.Publish(1));  // it is there already
  EXPECT_EQ(again, Step(0));
  ASSERT_OK(job.GiveSlot(0, 1, GradientWay::kAttached));
  ASSERT_OK(job.AwaitStep(1));
  const auto pinned = job.hosts[1]->protocol->publications().Pin(Step(0));
  ASSERT_TRUE(pinned.has_value());
  EXPECT_THAT(job.Publish(0), StatusIs(Code::kResourceExhausted, HasSubstr("publication")));
  EXPECT_NE(job.Published(0, 0), "not published");  // kept
  job.hosts[1]->protocol->publications().Unpin(*pinned);
  ASSERT_OK_AND_ASSIGN(const Step second, job.Publish(0));
  EXPECT_EQ(second, Step(1));
  for (int h : {0, 1}) EXPECT_TRUE(job.Published(h, 1) == job.Window(h)) << "host " << h;
}

// Until so many buckets' gradient shards have crossed for a step, or kLongWait.
bool AwaitShards(JobOnHosts& job, int64_t step, int buckets) {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(kLongWait);
  for (auto& host : job.hosts) {
    const auto crossed = [&] {
      const auto spans = host->trace.Spans();
      return std::count_if(spans.begin(), spans.end(), [&](const TraceSpan& span) {
        return span.step == step && absl::string_view(span.name) == "gradients";
      });
    };
    while (crossed() < buckets) {
      if (MonotonicNanos() > deadline) return false;
      std::this_thread::yield();
    }
  }
  return true;
}

// A slot's gradient shards cross while others are still written, of some buckets or of all: no bit is another.
TEST(HostLead, PiecesThatCrossEarly_ChangeNoBit) {
  const JobSpec spec = Fp32Gradients(MixedJob("ddp=2,fsdp=2", 3));
  const auto all = static_cast<int>(Plan::Create(spec)->buckets().size());
  ASSERT_GT(all, 2);
  std::vector<uint64_t> digests;
  for (const int early : {0, 1, all}) {
    JobOnHosts job(spec, 2);
    ASSERT_OK(job.PlaceWeights());
    for (int64_t step = 1; step <= 3; ++step) {
      for (int slot : {1, 0, 2}) {
        if (slot == 2) {
          ASSERT_TRUE(AwaitShards(job, step, early));
          ASSERT_EQ(job.hosts[0]->protocol->committed_step(), Step(step - 1));
        }
        const auto way = (slot + step) % 2 == 0 ? GradientWay::kAttached : GradientWay::kPushed;
        ASSERT_OK(job.GiveSlot(slot, step, way));
      }
      ASSERT_OK(job.AwaitStep(step));
    }
    for (int h : {0, 1}) {
      ASSERT_OK_AND_ASSIGN(const auto digest, job.Digest(h));
      digests.push_back(digest.second);
    }
  }
  EXPECT_THAT(digests, ::testing::Each(digests[0]));
}

// Where a core is its own, waiting takes it: without, what two idle leads take in a minute is far less.
TEST(HostLead, Spin_LooksAtTheNotifier) {
  struct Clock : Mail {
    void Poll() override {
      timespec used;
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
      busy_nanos.store(int64_t{used.tv_sec} * 1'000'000'000 + used.tv_nsec);
    }
    std::atomic<int64_t> busy_nanos{0};
  };
  Clock clock;
  const std::atomic<int64_t>& busy_nanos = clock.busy_nanos;
  HostLeadOptions options{kLongWait, kLongWait};
  options.spin = absl::Seconds(1);
  options.mail = &clock;
  JobOnHosts job(SmallJob("fsdp=2", 1), 2, options);
  ASSERT_OK(job.PlaceWeights());
  std::atomic<uint32_t> never{0};
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(kLongWait);
  while (busy_nanos.load() < 300'000'000 && MonotonicNanos() < deadline) FutexWait(never, 0, absl::Milliseconds(10));
  EXPECT_GE(busy_nanos.load(), 300'000'000);
  ASSERT_OK(job.GiveSlot(0, 1, GradientWay::kAttached));
  EXPECT_OK(job.AwaitStep(1));
}

struct Flip {
  const char* mesh;
  int hosts, check_every;
  int host, local;  // whose memory
  int64_t found;    // the step that cannot be committed any more, at the latest
};

// In a state of a member's, after step 5; every host then names it.
TEST(HostLead, FlippedBit_IsNamedOnAllHosts) {
  for (const Flip& flip :
       {Flip{"ddp=2", 2, 4, 1, 0, 9}, Flip{"ddp=2,fsdp=2", 2, 4, 1, 1, 9}, Flip{"ddp=3", 3, 4, 0, 0, 9},
        Flip{"fsdp=2", 2, 1, 1, 0, 6}, Flip{"fsdp=4", 2, 1, 0, 1, 6}}) {
    JobSpec spec = Fp32Gradients(MixedJob(flip.mesh, 2));
    spec.check_every = flip.check_every;
    JobOnHosts job(spec, flip.hosts);
    ASSERT_OK(job.PlaceWeights());
    absl::Status status;
    int64_t step = 0;
    while (status.ok() && step < 12) {
      ++step;
      if (step == 6) {
        auto& of_host = *job.hosts[flip.host];
        const int parity = of_host.protocol->control()->parity.load();
        static_cast<uint8_t*>(of_host.storages[flip.local]->state(0, 0, parity, 0).codes)[3] ^= 1;
      }
      for (int slot = 0; slot < spec.num_slots; ++slot) job.GiveSlot(slot, step, GradientWay::kAttached).IgnoreError();
      for (auto& host : job.hosts)
        status.Update(host->protocol->outcomes().AwaitCommit(Step(step), kLongWait).status());
    }
    EXPECT_LE(step, flip.found) << flip.mesh;
    const int rank = flip.host * job.plan.num_ranks() / flip.hosts + flip.local;
    for (auto& host : job.hosts) {
      const absl::Status health = host->protocol->members().Health();
      const std::string named = absl::StrCat("(rank ", rank, ",");
      // Of two replicas either may be the one.
      if (flip.check_every == 1 || flip.hosts == 3) {
        EXPECT_THAT(health, StatusIs(Code::kDataLoss, HasSubstr(named))) << flip.mesh;
      } else {
        EXPECT_THAT(health, StatusIs(Code::kDataLoss, AllOf(HasSubstr("(rank "), HasSubstr("the same shard as"))));
      }
    }
  }
}

}  // namespace
}  // namespace shardmesh
