// Versions while everything happens at once: a writer, attached and pulling readers, leases that end, readers that are
// stopped and killed, workers that are killed. No reader ever sees two versions mixed, or loses one under a lease; the
// history of all reads of the newest version is linearizable.
//
// SHARDMESH_VERSIONS_SECONDS and SHARDMESH_VERSIONS_SEED set the length and the seed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <functional>
#include <iostream>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/version_reader.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/counting_job.h"
#include "tests/testing/training/grow_only_history.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::CheckVersion;
using ::shardmesh::testing::CountingJob;
using ::shardmesh::testing::kJob;
using ::shardmesh::testing::Process;

class Storm : public testing::CountingCluster {
 protected:
  using Body = std::function<absl::Status(std::mt19937&)>;

  // Repeats `body` on a thread of its own until the end, or its first error.
  void Run(const std::string& name, Body body) {
    threads_.emplace_back([this, name, body, seed = seed_ + static_cast<uint32_t>(threads_.size())] {
      std::mt19937 random(seed);
      while (!stop_.load()) {
        const absl::Status status = body(random);
        if (status.ok()) continue;
        ADD_FAILURE() << name << ": " << status;
        stop_.store(true);
      }
    });
  }

  absl::Status Write() {
    const int64_t step = trainer_->committed() + 1;
    history_.WriteBegins(step);
    RETURN_IF_ERROR(trainer_->Step());
    // The lead may be away; then whether it was published is not known.
    const absl::StatusOr<v1::ListLeasesReply> listed = job_->worker(Rank(0)).ListLeases(kJob, absl::Seconds(2));
    const bool known = listed.ok() && refused_ >= 0;
    history_.WriteEnds(step, known && listed->refused() == refused_);
    refused_ = listed.ok() ? listed->refused() : -1;
    committed_.store(step);
    return absl::OkStatus();
  }

  absl::Status ReadLatest(VersionReader& reader, const std::string& name, std::mt19937& random) {
    const int64_t begin = MonotonicNanos();
    const absl::StatusOr<HeldVersion> version = reader.Take({}, absl::Seconds(20));
    const int64_t end = MonotonicNanos();
    RETURN_IF_ERROR(version.status());
    history_.Read(begin, end, version->step().value(), name);
    const absl::Time until = MonotonicNow() + absl::Milliseconds(random() % 50);
    do {
      RETURN_IF_ERROR(CheckVersion(*version));
    } while (MonotonicNow() < until);
    return absl::OkStatus();
  }

  // Leases the newest version, reads it until the lease ends, is released or renewed for the last time; all reads are
  // of it.
  absl::Status UseLease(std::mt19937& random) {
    v1::AcquireLeaseRequest request;
    request.set_job(kJob);
    request.set_latest(true);
    const absl::Duration ttl = absl::Milliseconds(100 + random() % 400);
    request.set_ttl_ms(absl::ToInt64Milliseconds(ttl));
    request.set_nonce(random() | uint64_t{1} << 40);
    const Rank by(static_cast<int>(random() % 2));
    const absl::Time asked = MonotonicNow();
    const absl::StatusOr<v1::Lease> lease = job_->worker(by).AcquireLease(request, absl::Seconds(5));
    if (absl::IsUnavailable(lease.status()) || absl::IsNotFound(lease.status())) return absl::OkStatus();  // away
    RETURN_IF_ERROR(lease.status());
    ++leases_;
    absl::Time ends = asked + ttl;  // not before
    const bool releases = random() % 2 == 0;
    bool alive = true;
    for (int i = 0; i < 20 && alive; ++i) {
      const absl::StatusOr<int64_t> step = PullLeased(lease->id(), Rank(static_cast<int>(random() % 2)));
      if (step.ok() && *step != lease->step()) {
        return absl::DataLossError(absl::StrCat("a lease of version ", lease->step(), " gave ", *step));
      }
      if (absl::IsDataLoss(step.status())) return step.status();
      if (absl::IsNotFound(step.status()) && MonotonicNow() < ends &&
          absl::StrContains(step.status().message(), "lease")) {
        return absl::DataLossError(absl::StrCat("a lease was lost ", absl::FormatDuration(ends - MonotonicNow()),
                                                " before its end: ", step.status().message()));
      }
      alive = !absl::IsNotFound(step.status());
      if (i == 5) {
        v1::RenewLeaseRequest renew;
        renew.set_job(kJob);
        renew.set_epoch(lease->epoch());
        renew.set_id(lease->id());
        renew.set_nonce(request.nonce());
        renew.set_ttl_ms(request.ttl_ms());
        const absl::Time renewed = MonotonicNow();
        if (job_->worker(by).RenewLease(renew, absl::Seconds(5)).ok()) ends = renewed + ttl;
      }
    }
    if (!alive || !releases) return absl::OkStatus();
    v1::ReleaseLeaseRequest release;
    release.set_job(kJob);
    release.set_epoch(lease->epoch());
    release.set_id(lease->id());
    release.set_nonce(request.nonce());
    job_->worker(by).ReleaseLease(release, absl::Seconds(5)).status().IgnoreError();
    return absl::OkStatus();
  }

  // A reader in another process, that is stopped for a while or killed; whatever it saw was whole.
  absl::Status TormentReader(std::mt19937& random) {
    const std::string log = cluster_->folder().File(absl::StrCat("reader-", ++children_));
    ASSIGN_OR_RETURN(const std::unique_ptr<Process> reader,
                     Process::Start({{"tests/testing/test_reader", cluster_->coordinator_address(), kJob,
                                      absl::StrCat(random() % 1000), "200"},
                                     log}));
    const absl::Time until = MonotonicNow() + absl::Milliseconds(500 + random() % 2000);
    while (MonotonicNow() < until && reader->alive()) {
      testing::Pause(absl::Milliseconds(random() % 300));
      if (random() % 3 != 0) continue;
      reader->Stop();
      testing::Pause(absl::Milliseconds(random() % 600));
      reader->Continue();
    }
    if (!reader->alive()) {
      return absl::DataLossError(absl::StrCat("a reader ended by itself: ", reader->Log()));
    }
    reader->Kill9();
    return absl::OkStatus();
  }

  absl::Status KillWorker(std::mt19937& random) {
    testing::Pause(absl::Milliseconds(300 + random() % 1500));
    const std::string name = random() % 2 == 0 ? "w-0" : "w-1";
    const pid_t pid = cluster_->PidOf(name);
    if (pid <= 0) return absl::OkStatus();
    kill(pid, SIGKILL);
    ++kills_;
    if (cluster_->AwaitNextIncarnation(name, pid, absl::Seconds(20)) == 0) {
      return absl::UnavailableError(absl::StrCat(name, " did not come back"));
    }
    // The node must have the memory of both again before another one may die.
    testing::Pause(absl::Milliseconds(500));
    return absl::OkStatus();
  }

  const uint32_t seed_ = static_cast<uint32_t>(testing::NumberOfEnvironment(
      "SHARDMESH_VERSIONS_SEED", static_cast<int64_t>(std::random_device()() % 1'000'000)));
  testing::GrowOnlyHistory history_;
  int64_t refused_ = 0;
  std::atomic<int64_t> committed_{0}, leases_{0}, kills_{0}, children_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

TEST_F(Storm, ReadersWritersKillsAndExpiry_AreLinearizable) {
  const int64_t seconds = testing::NumberOfEnvironment("SHARDMESH_VERSIONS_SECONDS", 60);
  std::cout << "SHARDMESH_VERSIONS_SEED=" << seed_ << " SHARDMESH_VERSIONS_SECONDS=" << seconds << std::endl;
  Begin(CountingJob(kMaxPublications), /*retained=*/true);
  Run("writer", [this](std::mt19937&) { return Write(); });
  std::vector<std::unique_ptr<VersionReader>> readers;
  for (const auto way : {ReaderOptions::Way::kAttached, ReaderOptions::Way::kPulled}) {
    ASSERT_OK_AND_ASSIGN(readers.emplace_back(), Open(way, absl::Milliseconds(300)));
    const std::string name = readers.back()->attached() ? "attached reader" : "pulling reader";
    Run(name, [this, name, reader = readers.back().get()](std::mt19937& r) { return ReadLatest(*reader, name, r); });
  }
  Run("lease", [this](std::mt19937& random) { return UseLease(random); });
  Run("other process", [this](std::mt19937& random) { return TormentReader(random); });
  Run("other process", [this](std::mt19937& random) { return TormentReader(random); });
  Run("killer", [this](std::mt19937& random) { return KillWorker(random); });
  const absl::Time until = MonotonicNow() + absl::Seconds(seconds);
  while (MonotonicNow() < until && !stop_.load()) testing::Pause(absl::Milliseconds(50));
  stop_.store(true);
  for (std::thread& thread : threads_) thread.join();
  EXPECT_OK(history_.Check());
  std::cout << committed_ << " steps, " << history_.reads() << " reads of the newest, " << leases_ << " leases, "
            << children_ << " readers killed, " << kills_ << " workers killed, " << refused_
            << " versions not published for want of a publication" << std::endl;
  EXPECT_GT(history_.reads(), static_cast<size_t>(10 * seconds));
  EXPECT_GT(leases_, seconds);
  EXPECT_GT(children_, seconds / 5);
  EXPECT_GT(kills_, seconds / 10);
}

}  // namespace
}  // namespace shardmesh
