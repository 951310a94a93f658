// Leads of hosts that lose each other at any moment, meet again and go on: no step is lost, and no bit differs. One rank
// may have taken a round in, or have its bytes, that another has not. SHARDMESH_SEED: which moments.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

#include "core/base/clock.h"
#include "worker/lead/hosts/meeting_place.h"
#include "worker/lead/hosts/testing/job_on_hosts.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int64_t kSteps = 8;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kOneOf = 160;  // a meeting takes ten times as long
#else
constexpr int kOneOf = 40;  // calls of the rounds that are broken, and half as many of the others
#endif

// A group that ends, at this rank first, before or behind every so many of its calls on average.
class LossyGroup final : public ExchangeGroup {
 public:
  LossyGroup(std::shared_ptr<LocalHub> hub, int rank, uint32_t seed, int one_of)
      : ExchangeGroup(rank, hub->size(), 1, hub->names()), inner_(hub, rank, 1), random_(seed), one_of_(one_of) {}

  absl::string_view name() const override { return "lossy"; }
  void Abort(absl::string_view reason) override { inner_.Abort(reason); }

 protected:
  absl::Status DoBarrier(const CallHeader&, absl::Duration timeout) override { return inner_.Barrier(timeout); }
  absl::Status DoAllGather(const CallHeader& header, const char* mine, char* all, absl::Duration timeout) override {
    return Lossy([&] { return inner_.AllGather(mine, all, header.bytes, timeout); });
  }
  absl::Status DoAllToAll(const CallHeader& header, const char* mine, char* theirs, absl::Duration timeout) override {
    return inner_.AllToAll(mine, theirs, header.bytes, timeout);
  }
  absl::Status DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) override {
    return inner_.Broadcast(memory, header.bytes, root, timeout);
  }
  absl::Status DoExchange(const CallHeader&, absl::Span<const PeerTransfer> transfers,
                          absl::Duration timeout) override {
    return Lossy([&] { return inner_.Exchange(transfers, timeout); });
  }

 private:
  template <class Call>
  absl::Status Lossy(const Call& call) {
    const auto fate = static_cast<int>(random_() % static_cast<uint32_t>(one_of_));
    if (fate == 0) return Lose();
    const absl::Status status = call();
    return status.ok() && fate == 1 ? Lose() : status;
  }
  absl::Status Lose() {
    inner_.Abort(kMeetsAgain);
    return absl::AbortedError(kMeetsAgain);
  }

  LocalGroup inner_;
  std::mt19937 random_;
  const int one_of_;
};

// Where the leads of one process meet.
class Meetings {
 public:
  Meetings(int num_hosts, RankNames names, uint32_t seed, int one_of)
      : num_hosts_(num_hosts), names_(names), seed_(seed), one_of_(one_of) {}

  absl::StatusOr<HostGroups> Meet(int host, absl::Duration timeout, const std::function<absl::Status()>& goes_on) {
    const absl::Time until = MonotonicNow() + timeout;
    std::string number = absl::StrCat(host, ".", ++numbers_);
    while (MonotonicNow() < until) {
      RETURN_IF_ERROR(goes_on());
      absl::StatusOr<MeetingPlace::Meeting> meeting = place_.Come(host, num_hosts_, number);
      if (absl::IsAborted(meeting.status())) number = absl::StrCat(host, ".", ++numbers_);
      if (meeting.ok() && !meeting->key.empty()) return GroupsOf(meeting->key, host);
      std::this_thread::yield();
    }
    return absl::UnavailableError("not all came");
  }
  HostGroups GroupsOf(const std::string& key, int host) {
    MutexLock lock(mu_);
    std::array<std::shared_ptr<LocalHub>, 3>& hubs = hubs_[key];
    std::array<std::unique_ptr<ExchangeGroup>, 3> groups;
    for (size_t i = 0; i < hubs.size(); ++i) {
      if (hubs[i] == nullptr) hubs[i] = std::make_shared<LocalHub>(num_hosts_, names_);
      groups[i] = std::make_unique<LossyGroup>(hubs[i], host, ++seed_, i == 0 ? one_of_ : 2 * one_of_);
    }
    return {std::move(groups[0]), std::move(groups[1]), std::move(groups[2])};
  }
  int count() {
    MutexLock lock(mu_);
    return static_cast<int>(hubs_.size());
  }

 private:
  const int num_hosts_;
  const RankNames names_;
  MeetingPlace place_;
  std::atomic<int> numbers_{0};
  Mutex mu_;
  uint32_t seed_ ABSL_GUARDED_BY(mu_);
  const int one_of_;
  std::map<std::string, std::array<std::shared_ptr<LocalHub>, 3>> hubs_ ABSL_GUARDED_BY(mu_);
};

struct Learnt {
  uint64_t digest = 0;
  std::vector<std::string> seen;  // windows and the last version
  double norm = 0;
};
bool operator==(const Learnt& a, const Learnt& b) {
  return a.digest == b.digest && a.seen == b.seen && a.norm == b.norm;
}
std::ostream& operator<<(std::ostream& out, const Learnt& learnt) {
  out << "digest " << learnt.digest << " norm " << learnt.norm << " seen";
  for (const std::string& seen : learnt.seen) out << " " << std::hash<std::string>()(seen) % 100000;
  return out;
}

// Some steps, of which one is skipped; buckets of each host's own choice are held.
void Train(JobOnHosts& job, GradientWay way, std::vector<Learnt>& learnt) {
  ASSERT_OK(job.PlaceWeights());
  learnt.assign(job.num_hosts(), {});
  const int buckets = static_cast<int>(job.plan.buckets().size());
  for (int64_t step = 1; step <= kSteps; ++step) {
    for (int h = 0; h < job.num_hosts() && job.plan.bucketed(); ++h) {
      const int bucket = static_cast<int>(step + h) % buckets, before = static_cast<int>(step + h - 1) % buckets;
      const StepBuckets words = job.hosts[h]->protocol->buckets();
      ASSERT_OK(words.Acquire(bucket));
      ASSERT_OK(words.Await(bucket, kLongWait));
      if (step > 1) words.Release(before);
    }
    for (int slot = 0; slot < job.job.num_slots; ++slot) {
      std::vector<std::pair<Slot, int>> bad;
      if (step == 3 && slot == 1 && !job.plan.bucketed()) bad.emplace_back(Slot(slot), 0);
      ASSERT_OK(job.GiveSlot(slot, step, way, bad));
    }
    for (int h = 0; h < job.num_hosts(); ++h) {
      ASSERT_OK_AND_ASSIGN(const StepOutcome outcome,
                           job.hosts[h]->protocol->outcomes().AwaitCommit(Step(step), kLongWait));
      learnt[h].norm = outcome.norm;
    }
    for (int h = 0; h < job.num_hosts() && !job.plan.bucketed(); ++h) learnt[h].seen.push_back(job.Window(h));
  }
  for (int h = 0; h < job.num_hosts(); ++h) {
    ASSERT_OK_AND_ASSIGN(const auto digest, job.Digest(h));
    learnt[h].digest = digest.second;
    if (job.job.publish_every == kPublishOnDemand) {
      ASSERT_OK(job.Publish(h).status());
    }
    ASSERT_OK(job.AwaitVersion(h, Step(kSteps)));
    learnt[h].seen.push_back(job.Published(h, kSteps));
  }
}

struct Case {
  const char* name;
  std::function<void(JobSpec&)> change;
};
std::vector<Case> Cases() {
  return {{"clipped", [](JobSpec& job) { job.clip_norm = 0.5; }},
          {"quantized",
           [](JobSpec& job) {
             job.parameters.push_back({"row", {37, 300}, WeightFormat::kBf16Sr, "", {}, GatherFormat::kFp8Row});
             job.clip_norm = 0.5;
           }},
          {"plain, replicas compared", [](JobSpec& job) { job.check_every = 2; }},
          {"token weights", [](JobSpec& job) { job.token_weights = true; }},
          {"buckets",
           [](JobSpec& job) {
             job.residency = Residency::kBucket;
             job.prefetch_buckets = 100;
             job.clip_norm = 0.5;
             job.parameters.push_back({"row", {37, 300}, WeightFormat::kBf16Sr, "", {}, GatherFormat::kFp8Row});
           }},
          {"buckets, on demand", [](JobSpec& job) {
             job.residency = Residency::kBucket;
             job.prefetch_buckets = 100;
             job.publish_every = kPublishOnDemand;
           }}};
}

struct Shape {
  const char* mesh;
  int hosts;
};
class HostMeetAgain : public ::testing::TestWithParam<Shape> {};

TEST_P(HostMeetAgain, LostAtAnyMoment_TheSameBits) {
  const char* const set = std::getenv("SHARDMESH_SEED");
  const uint32_t seed = set != nullptr ? static_cast<uint32_t>(std::atoi(set)) : std::random_device()();
  std::printf("SHARDMESH_SEED=%u\n", seed);
  int meetings = 0;
  for (const Case& variant : Cases()) {
    JobSpec spec = MixedJob(GetParam().mesh, 3);
    spec.gradient_format = Format::kFp32;
    spec.publish_every = 1;
    variant.change(spec);
    for (const GradientWay way : {GradientWay::kAttached, GradientWay::kPushed}) {
      std::vector<Learnt> expected, learnt;
      {
        JobOnHosts undisturbed(spec, GetParam().hosts);
        ASSERT_NO_FATAL_FAILURE(Train(undisturbed, way, expected)) << variant.name;
      }
      const RankNames names{0, static_cast<int>(spec.mesh.NumRanks()) / GetParam().hosts};
      Meetings place(GetParam().hosts, names, seed, kOneOf);
      std::vector<std::atomic<bool>> apart(GetParam().hosts);
      {
        JobOnHosts job(spec, GetParam().hosts, [&](int host) {
          HostLeadOptions options{kLongWait, kLongWait};
          options.apart = &apart[host];
          options.meet_again = [&, host](absl::Duration timeout, const std::function<absl::Status()>& goes_on) {
            EXPECT_TRUE(apart[host].load());
            return place.Meet(host, timeout, goes_on);
          };
          return JobOnHosts::Connected{std::move(options), place.GroupsOf("first", host)};
        });
        ASSERT_NO_FATAL_FAILURE(Train(job, way, learnt)) << variant.name;
      }
      EXPECT_EQ(learnt, expected) << variant.name << ", way " << static_cast<int>(way);
      for (const std::atomic<bool>& still : apart) EXPECT_FALSE(still.load()) << variant.name;
      meetings += place.count() - 1;
    }
  }
  std::printf("%d meetings\n", meetings);
  EXPECT_GE(meetings, 20);
}

INSTANTIATE_TEST_SUITE_P(Meshes, HostMeetAgain,
                         ::testing::Values(Shape{"fsdp=2", 2}, Shape{"ddp=2", 2}, Shape{"ddp=2,fsdp=2", 2},
                                           Shape{"fsdp=3", 3}));

}  // namespace
}  // namespace shardmesh
