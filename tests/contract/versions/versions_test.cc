// Versions: every reader sees whole committed versions in their order, and keeps what it holds for as long as it holds
// it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/cpp/version_reader.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/counting_job.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::CheckVersion;
using ::shardmesh::testing::CountingJob;
using ::shardmesh::testing::kElements;
using ::shardmesh::testing::kJob;
using ::shardmesh::testing::kLong;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;
using Versions = testing::CountingCluster;

TEST_F(Versions, AttachedAndPulledReadersSeeTheSame) {
  Begin(CountingJob(/*publications=*/6));
  for (const auto way : {ReaderOptions::Way::kAttached, ReaderOptions::Way::kPulled}) {
    SCOPED_TRACE(static_cast<int>(way));
    const int64_t now = trainer_->committed();
    ASSERT_OK_AND_ASSIGN(const auto reader, Open(way));
    EXPECT_EQ(reader->attached(), way == ReaderOptions::Way::kAttached);
    ASSERT_OK_AND_ASSIGN(const HeldVersion latest, reader->Take({}, kLong));
    EXPECT_EQ(latest.step(), Step(now));
    ASSERT_OK(trainer_->To(now + 20));
    EXPECT_OK(CheckVersion(latest));  // kept, while twenty others were committed
    ASSERT_OK_AND_ASSIGN(const HeldVersion exact, reader->Take({VersionChoice::kExact, Step(now + 20)}, kLong));
    EXPECT_OK(CheckVersion(exact));
    EXPECT_THAT(reader->Take({VersionChoice::kExact, Step(now + 2)}, kLong),
                StatusIs(Code::kOutOfRange, HasSubstr(absl::StrCat("published: "))));
    EXPECT_THAT(reader->Take({VersionChoice::kAtLeast, Step(now + 21)}, absl::Milliseconds(50)),
                StatusIs(Code::kDeadlineExceeded, HasSubstr(absl::StrCat(">= ", now + 21))));
    std::thread later([&] { EXPECT_OK(trainer_->To(now + 22)); });
    const absl::StatusOr<HeldVersion> awaited = reader->Take({VersionChoice::kAtLeast, Step(now + 22)}, kLong);
    later.join();
    ASSERT_OK(awaited);
    EXPECT_EQ(awaited->step(), Step(now + 22));
    EXPECT_OK(CheckVersion(*awaited));
  }
}

TEST_F(Versions, FollowSeesOneAfterTheOther) {
  Begin(CountingJob());
  ASSERT_OK_AND_ASSIGN(const auto reader, Open(ReaderOptions::Way::kAny));
  EXPECT_TRUE(reader->attached());
  std::vector<int64_t> seen;
  const absl::Status ended = Follow(*reader, {}, [&](const HeldVersion& version) -> absl::Status {
    RETURN_IF_ERROR(CheckVersion(version));
    seen.push_back(version.step().value());
    if (seen.size() == 4) return absl::CancelledError("enough");
    return trainer_->Step();
  });
  EXPECT_THAT(ended, StatusIs(Code::kCancelled, HasSubstr("enough")));
  EXPECT_THAT(seen, ElementsAre(0, 1, 2, 3));
}

TEST_F(Versions, AReaderThatIsStoppedEndsItsWaitOrItsPull) {
  Begin(CountingJob());
  for (const auto way : {ReaderOptions::Way::kAttached, ReaderOptions::Way::kPulled}) {
    SCOPED_TRACE(static_cast<int>(way));
    const int64_t now = trainer_->committed();
    const auto stop = std::make_shared<std::atomic<bool>>(false);
    ReaderOptions options;
    options.way = way;
    options.stop = stop;
    ASSERT_OK_AND_ASSIGN(const auto reader, VersionReader::Open(*client_, kJob, options));
    EXPECT_OK(reader->Take({}, kLong).status());
    std::thread later([&] {
      stop->store(true);
      EXPECT_OK(trainer_->Step());  // a pulled one ends when bytes come
    });
    EXPECT_THAT(reader->Take({VersionChoice::kAtLeast, Step(now + 1)}, kLong),
                StatusIs(Code::kCancelled, HasSubstr("stopped")));
    later.join();
    stop->store(false);
    EXPECT_OK(reader->Take({VersionChoice::kAtLeast, Step(now + 1)}, kLong).status());
  }
}

TEST_F(Versions, AReadersNamesHaveItsRules) {
  Begin(CountingJob());
  ReaderOptions options;
  options.names.root_wrappers = {"module"};
  ASSERT_OK_AND_ASSIGN(const auto reader, VersionReader::Open(*client_, kJob, options));
  ASSERT_OK_AND_ASSIGN(const HeldVersion version, reader->Take({}, kLong));
  EXPECT_OK(version.parameter("module.w").status());
}

TEST_F(Versions, LeasesOutliveStepsAndEndInTypedErrors) {
  Begin(CountingJob());
  ASSERT_OK(trainer_->To(3));
  ASSERT_OK_AND_ASSIGN(const v1::Lease lease, Lease(3, absl::Seconds(60)));
  EXPECT_EQ(lease.step(), 3);
  ASSERT_OK(trainer_->To(9));
  for (const Rank from : {Rank(0), Rank(1)}) EXPECT_EQ(PullLeased(lease.id(), from).value_or(-1), 3);
  EXPECT_THAT(PullLeased(lease.id() + 1, Rank(0)), StatusIs(Code::kNotFound, HasSubstr("acquire a new one")));
  EXPECT_THAT(Lease(4, absl::Seconds(60), 2), StatusIs(Code::kOutOfRange, HasSubstr("version 4 is not there")));

  v1::RenewLeaseRequest renew;
  renew.set_job(kJob);
  renew.set_epoch(lease.epoch());
  renew.set_id(lease.id());
  renew.set_nonce(1);  // Lease()'s
  renew.set_ttl_ms(100);
  ASSERT_OK(job_->worker(Rank(1)).RenewLease(renew, kLong));
  EXPECT_THAT(job_->worker(Rank(0)).RenewLease(renew, kLong),
              StatusIs(Code::kNotFound, HasSubstr("")));  // it did not grant it
  renew.set_epoch(lease.epoch() + 1);
  EXPECT_THAT(job_->worker(Rank(1)).RenewLease(renew, kLong), StatusIs(Code::kAborted, HasSubstr("")));
  renew.set_epoch(lease.epoch());
  const absl::Time until = MonotonicNow() + kLong;
  while (PullLeased(lease.id(), Rank(0)).ok() && MonotonicNow() < until) testing::Pause(absl::Milliseconds(20));
  EXPECT_THAT(job_->worker(Rank(1)).RenewLease(renew, kLong), StatusIs(Code::kNotFound, HasSubstr("it has ended")));
  EXPECT_THAT(PullLeased(lease.id(), Rank(1)), StatusIs(Code::kNotFound, HasSubstr("")));
  // It counts for a moment yet, kLeaseGrace; then its publication goes to the next versions.
  absl::StatusOr<v1::Lease> gone = Lease(3, absl::Milliseconds(100), 3);
  for (uint64_t nonce = 4; gone.ok() && MonotonicNow() < until; ++nonce) {
    testing::Pause(absl::Milliseconds(250));
    ASSERT_OK(trainer_->To(trainer_->committed() + 4));
    gone = Lease(3, absl::Milliseconds(100), nonce);
  }
  EXPECT_THAT(gone, StatusIs(Code::kOutOfRange, HasSubstr("version 3 is not there")));
}

// Everybody may list leases; an id alone ends none.
TEST_F(Versions, ALeaseOfAnotherReader_IsNotReleasedByItsId) {
  Begin(CountingJob());
  ASSERT_OK(trainer_->To(3));
  ASSERT_OK_AND_ASSIGN(const v1::Lease lease, Lease(3, absl::Seconds(60), 7));
  const v1::ListLeasesReply listed = Listed();
  ASSERT_EQ(listed.holders_size(), 1);
  v1::ReleaseLeaseRequest release;
  release.set_job(kJob);
  release.set_epoch(listed.epoch());
  release.set_id(listed.holders(0).lease());
  v1::RenewLeaseRequest renew;
  renew.set_job(kJob);
  renew.set_epoch(listed.epoch());
  renew.set_id(listed.holders(0).lease());
  renew.set_ttl_ms(24 * 3600 * 1000);
  for (const uint64_t nonce : {uint64_t{0}, uint64_t{1}, lease.id()}) {
    release.set_nonce(nonce);
    renew.set_nonce(nonce);
    EXPECT_THAT(job_->worker(Rank(1)).ReleaseLease(release, kLong),
                StatusIs(Code::kPermissionDenied, HasSubstr("another nonce")));
    EXPECT_THAT(job_->worker(Rank(1)).RenewLease(renew, kLong),
                StatusIs(Code::kPermissionDenied, HasSubstr("another nonce")));
  }
  ASSERT_OK(trainer_->To(9));
  EXPECT_EQ(PullLeased(lease.id(), Rank(0)).value_or(-1), 3);
  release.set_nonce(7);
  EXPECT_OK(job_->worker(Rank(1)).ReleaseLease(release, kLong));
  EXPECT_THAT(PullLeased(lease.id(), Rank(0)), StatusIs(Code::kNotFound, HasSubstr("")));
}

TEST_F(Versions, BadRequestsAreRefused) {
  Begin(CountingJob());
  EXPECT_THAT(Lease(-1, absl::Seconds(1)), StatusIs(Code::kInvalidArgument, HasSubstr("exact is -1")));
  EXPECT_THAT(Lease(0, absl::Milliseconds(99)), StatusIs(Code::kInvalidArgument, HasSubstr("ttl_ms is 99")));
  EXPECT_THAT(Lease(0, absl::Hours(25)), StatusIs(Code::kInvalidArgument, HasSubstr("ttl_ms is 90000000")));
  EXPECT_THAT(Lease(0, absl::Seconds(1), 0), StatusIs(Code::kInvalidArgument, HasSubstr("nonce")));
  v1::AcquireLeaseRequest none;
  none.set_job(kJob);
  EXPECT_THAT(job_->worker(Rank(0)).AcquireLease(none, kLong), StatusIs(Code::kInvalidArgument, HasSubstr("")));
  none.set_job("other");
  none.set_latest(true);
  none.set_ttl_ms(1000);
  none.set_nonce(1);
  EXPECT_THAT(job_->worker(Rank(0)).AcquireLease(none, kLong), StatusIs(Code::kNotFound, HasSubstr("")));
  EXPECT_THAT(PullLeased(0, Rank(0)), StatusIs(Code::kInvalidArgument, HasSubstr("id is 0")));
  EXPECT_THAT(Open(ReaderOptions::Way::kAttached, absl::Milliseconds(1)),
              StatusIs(Code::kInvalidArgument, HasSubstr("reader_ttl_ms is 1")));
}

// Readers that hold every publication stop publishing, not training; on demand that is an error with a name.
TEST_F(Versions, HeldTooMuch_NothingIsPublishedAndTrainingGoesOn) {
  Begin(CountingJob(2));
  ASSERT_OK(trainer_->To(1));
  ASSERT_OK_AND_ASSIGN(const auto reader, Open(ReaderOptions::Way::kAttached, absl::Milliseconds(100)));
  ASSERT_OK_AND_ASSIGN(const HeldVersion first, reader->Take({VersionChoice::kExact, Step(0)}, kLong));
  ASSERT_OK(trainer_->To(4));
  EXPECT_OK(CheckVersion(first));
  EXPECT_EQ(Listed().refused(), 3);
  EXPECT_THAT(job_->worker(Rank(0)).Publish(kJob, kLong),
              StatusIs(Code::kResourceExhausted, HasSubstr("version 0 (mapped by readers)")));
  ASSERT_EQ(Listed().holders_size(), 1);
  EXPECT_EQ(Listed().holders(0).pid(), getpid());
  {
    const HeldVersion released = [&] {
      HeldVersion gone = *reader->Take({VersionChoice::kExact, Step(0)}, kLong);
      return gone;
    }();
    EXPECT_OK(CheckVersion(released));
  }
}

TEST_F(Versions, OnDemand) {
  Begin(CountingJob(2, kPublishOnDemand));
  ASSERT_OK_AND_ASSIGN(const auto reader, Open(ReaderOptions::Way::kAttached));
  ASSERT_OK(trainer_->To(3));
  EXPECT_THAT(reader->Take({}, absl::Milliseconds(20)), StatusIs(Code::kDeadlineExceeded, HasSubstr("there: none")));
  for (int repeat = 0; repeat < 2; ++repeat) {
    ASSERT_OK_AND_ASSIGN(const v1::PublishReply published, job_->worker(Rank(repeat)).Publish(kJob, kLong));
    EXPECT_EQ(published.step(), 3);
  }
  ASSERT_OK(trainer_->To(5));
  ASSERT_OK_AND_ASSIGN(const HeldVersion version, reader->Take({}, kLong));
  EXPECT_EQ(version.step(), Step(3));
  EXPECT_OK(CheckVersion(version));
  ASSERT_OK_AND_ASSIGN(const v1::PublishReply next, job_->worker(Rank(1)).Publish(kJob, kLong));
  EXPECT_EQ(next.step(), 5);
  ASSERT_OK_AND_ASSIGN(const HeldVersion newer, reader->Take({VersionChoice::kAtLeast, Step(4)}, kLong));
  EXPECT_OK(CheckVersion(newer));
  ASSERT_OK(trainer_->To(6));
  EXPECT_THAT(job_->worker(Rank(1)).Publish(kJob, kLong), StatusIs(Code::kResourceExhausted, HasSubstr("")));
}

// gRPC tells a worker 10.01 s as 10.1 s.
TEST_F(Versions, ACallThatWaitsInVain_IsToldInTimeForWhat) {
  Begin(CountingJob(2, kPublishOnDemand));
  constexpr absl::Duration kTime = absl::Milliseconds(10'010);
  const auto told = StatusIs(Code::kDeadlineExceeded, HasSubstr("the job publishes on demand"));
  std::thread leases([&] {
    v1::AcquireLeaseRequest lease;
    lease.set_job(kJob);
    lease.set_latest(true);
    lease.set_ttl_ms(1000);
    lease.set_nonce(1);
    EXPECT_THAT(job_->worker(Rank(1)).AcquireLease(lease, kTime), told);
  });
  v1::PullRequest pull;
  pull.set_job(kJob);
  pull.set_latest(true);
  const auto nothing = [](const auto&) { return absl::OkStatus(); };
  EXPECT_THAT(job_->worker(Rank(0)).Pull(pull, nothing, nothing, kTime).status(), told);
  leases.join();
}

// One memory for all: nothing of it is counted twice.
TEST_F(Versions, ManyAttachedReadersOfOneVersion_TakeOnePublication) {
  Begin(CountingJob());
  ASSERT_OK(trainer_->To(2));
  std::vector<std::unique_ptr<VersionReader>> readers;
  std::vector<HeldVersion> held;
  for (int i = 0; i < 64; ++i) {
    ASSERT_OK_AND_ASSIGN(readers.emplace_back(), Open(ReaderOptions::Way::kAttached));
    ASSERT_OK_AND_ASSIGN(held.emplace_back(), readers.back()->Take({VersionChoice::kExact, Step(2)}, kLong));
  }
  ASSERT_OK(trainer_->To(8));
  for (const HeldVersion& version : held) EXPECT_OK(CheckVersion(version));
  const v1::ListLeasesReply listed = Listed();
  EXPECT_EQ(listed.holders_size(), 64);
  EXPECT_EQ(listed.refused(), 0);
  ASSERT_OK_AND_ASSIGN(const v1::GetStatusReply status, job_->worker(Rank(0)).GetStatus(kLong));
  EXPECT_EQ(status.jobs(0).held_publications(), 1);
  EXPECT_LE(status.jobs(0).publication_resident_bytes(), 3 * (kElements * 4 + (1 << 20)));
  held.clear();
  EXPECT_EQ(Listed().holders_size(), 0);
}

TEST_F(Versions, ADeletedJobsVersionStaysWhileItIsHeld) {
  Begin(CountingJob());
  ASSERT_OK(trainer_->To(2));
  ASSERT_OK_AND_ASSIGN(const auto reader, Open(ReaderOptions::Way::kAttached));
  ASSERT_OK_AND_ASSIGN(const HeldVersion version, reader->Take({}, kLong));
  trainer_.reset();
  ASSERT_OK(testing::Delete(*client_, kJob));
  EXPECT_OK(CheckVersion(version));
  const absl::Status next = reader->Take({VersionChoice::kAtLeast, Step(3)}, kLong).status();
  EXPECT_THAT(next, StatusIs(Code::kNotFound, HasSubstr(kJob)));
  EXPECT_OK(CheckVersion(version));
}

// As when a trainer goes back to an older state: the same name, plan and steps, other weights.
class VersionsOfAJobMadeAgain : public Versions {
 protected:
  void Train(int64_t step) {
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(CountingJob()));
    ASSERT_OK(job_->Initialize({{"w", std::vector<float>(kElements, 0)}}, kLong));
    ASSERT_OK_AND_ASSIGN(trainer_, testing::Trainer::Start(*job_));
    ASSERT_OK(trainer_->To(step));
  }
  void MakeAgain(int64_t step) {
    old_ = job_;
    trainer_.reset();
    ASSERT_OK(testing::Delete(*client_, kJob));
    Train(step);
  }
  std::shared_ptr<Job> old_;
};

TEST_F(VersionsOfAJobMadeAgain, ReadersLeaveTheOldOnesBehind) {
  Begin(CountingJob());
  ASSERT_OK(trainer_->To(8));
  std::vector<std::unique_ptr<VersionReader>> readers;
  std::vector<HeldVersion> held;
  for (const auto way : {ReaderOptions::Way::kAttached, ReaderOptions::Way::kPulled}) {
    ASSERT_OK_AND_ASSIGN(readers.emplace_back(), Open(way));
    ASSERT_OK_AND_ASSIGN(held.emplace_back(), readers.back()->Take({}, kLong));
  }
  MakeAgain(3);
  old_->AwaitClosed(kLong);
  EXPECT_THAT(old_->Pull({VersionChoice::kAtLeast, Step(5)}, kLong), StatusIs(Code::kAborted, HasSubstr("epoch")));
  for (size_t i = 0; i < readers.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_THAT(readers[i]->Take({VersionChoice::kAtLeast, Step(5)}, absl::Milliseconds(100)),
                StatusIs(Code::kDeadlineExceeded, HasSubstr(">= 5")));
    ASSERT_OK_AND_ASSIGN(const HeldVersion newer,
                         readers[i]->Take({VersionChoice::kNewer, held[i].step(), held[i].epoch()}, kLong));
    EXPECT_EQ(newer.step(), Step(3));
    EXPECT_GT(newer.epoch(), held[i].epoch());
    EXPECT_OK(CheckVersion(held[i]));
  }
  ASSERT_OK(trainer_->To(5));
  for (const auto& reader : readers) {
    ASSERT_OK_AND_ASSIGN(const HeldVersion five, reader->Take({VersionChoice::kAtLeast, Step(5)}, kLong));
    EXPECT_EQ(five.epoch(), job_->epoch());
  }
}

TEST_F(VersionsOfAJobMadeAgain, ALeaseOfBeforeLastsUntilItsEnd) {
  Begin(CountingJob());
  ASSERT_OK(trainer_->To(8));
  ASSERT_OK_AND_ASSIGN(const v1::Lease lease, Lease(8, absl::Seconds(60)));
  MakeAgain(3);
  EXPECT_EQ(PullLeased(lease.id(), Rank(1)).value_or(-1), 8);
  const v1::ListLeasesReply listed = job_->worker(Rank(1)).ListLeases(kJob, kLong).value_or(v1::ListLeasesReply());
  ASSERT_EQ(listed.holders_size(), 1);
  EXPECT_EQ(listed.holders(0).epoch(), lease.epoch());
  EXPECT_GT(listed.epoch(), lease.epoch());
  v1::RenewLeaseRequest renew;
  renew.set_job(kJob);
  renew.set_epoch(lease.epoch());
  renew.set_id(lease.id());
  renew.set_nonce(1);  // Lease()'s
  renew.set_ttl_ms(60'000);
  EXPECT_THAT(job_->worker(Rank(1)).RenewLease(renew, kLong),
              StatusIs(Code::kFailedPrecondition, HasSubstr("behind")));
  ASSERT_OK(trainer_->To(10));
  EXPECT_EQ(PullLeased(lease.id(), Rank(1)).value_or(-1), 8);
}

TEST_F(Versions, AReaderOfAFailedJobKeepsWhatIsThere) {
  Begin(CountingJob());
  ASSERT_OK(trainer_->To(2));
  ASSERT_OK_AND_ASSIGN(const auto reader, Open(ReaderOptions::Way::kAttached));
  cluster_->worker("w1").Kill9();
  const absl::Status waited = reader->Take({VersionChoice::kAtLeast, Step(3)}, absl::Seconds(30)).status();
  EXPECT_THAT(waited, StatusIs(Code::kUnavailable, HasSubstr("w1")));
  ASSERT_OK_AND_ASSIGN(const HeldVersion version, reader->Take({}, kLong));
  EXPECT_EQ(version.step(), Step(2));
  EXPECT_OK(CheckVersion(version));
}

}  // namespace
}  // namespace shardmesh
