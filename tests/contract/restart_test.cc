// Workers whose memory a keeper has, killed at random moments of a training: trainers only see a pause, no step is lost,
// and no bit differs. Prints the table of pauses. SHARDMESH_RESTART_KILLS: how many, SHARDMESH_SEED: which moments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/matchers.h"
#include "core/status.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Learnt;

constexpr int kWorkers = 2;
constexpr absl::Duration kLong = absl::Seconds(60);
constexpr int kMaxQuietMillis = 30;  // from the last recovery to the next kill

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

// Two trainers of one job, one of each kind, until a common step.
class Training {
 public:
  absl::Status Start(Client& client, const JobSpec& spec) {
    ASSIGN_OR_RETURN(job_, client.CreateJob(spec));
    RETURN_IF_ERROR(testing::Initialize(*job_));
    ASSIGN_OR_RETURN(sessions_[0], job_->Attach({Slot(0)}));
    ASSIGN_OR_RETURN(sessions_[1], job_->Connect({Slot(1)}));
    for (auto& session : sessions_) RETURN_IF_ERROR(session->AwaitWeights(kLong));
    for (int i = 0; i < 2; ++i) threads_[i] = std::thread([this, i] { statuses_[i] = Train(*sessions_[i]); });
    return absl::OkStatus();
  }
  ~Training() { End().status().IgnoreError(); }

  Job& job() { return *job_; }
  int64_t committed() const { return committed_.load(); }
  // Waits until a later step than `step` is committed, for the time since then. DeadlineExceeded.
  absl::Status AwaitBeyond(int64_t step) const {
    const absl::Time deadline = absl::Now() + kLong;
    while (committed() <= step && absl::Now() < deadline && !failed_.load()) poll(nullptr, 0, 1);
    if (failed_.load()) return absl::AbortedError("a trainer ended");
    return committed() > step ? absl::OkStatus() : absl::DeadlineExceededError(absl::StrCat("no step after ", step));
  }
  // Some steps more, and the last one.
  absl::StatusOr<int64_t> End() {
    last_.store(std::min(last_.load(), committed() + 20));
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
    for (const absl::Status& status : statuses_) RETURN_IF_ERROR(status);
    return last_.load();
  }

 private:
  absl::Status Train(Session& session) {
    while (session.committed_step().value() < last_.load()) {
      const int64_t step = session.committed_step().value() + 1;
      const absl::Status trained = testing::TrainTo(session, step, kLong);
      if (!trained.ok()) {
        failed_.store(true);
        return trained;
      }
      if (session.committed_step().value() != step) return absl::InternalError("a step was passed over");
      int64_t before = committed_.load();
      while (before < step && !committed_.compare_exchange_weak(before, step)) {
      }
    }
    return absl::OkStatus();
  }

  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> sessions_[2];
  std::thread threads_[2];
  absl::Status statuses_[2];
  std::atomic<int64_t> committed_{0}, last_{std::numeric_limits<int64_t>::max() / 2};
  std::atomic<bool> failed_{false};
};

void PrintRow(const std::string& who, std::vector<absl::Duration> pauses) {
  if (pauses.empty()) return;
  std::sort(pauses.begin(), pauses.end());
  const auto at = [&](double part) {
    return absl::ToDoubleMilliseconds(pauses[static_cast<size_t>(part * static_cast<double>(pauses.size() - 1))]);
  };
  std::printf("%-18s %5zu %9.0f ms %9.0f ms %9.0f ms\n", who.c_str(), pauses.size(), at(0.5), at(0.95), at(1));
}

TEST(Restart, KilledAtRandomMoments_NoStepIsLost_AndTheBitsAreTheSame) {
  const int64_t kills = FromEnvironment("SHARDMESH_RESTART_KILLS", 200);
  const auto seed = static_cast<uint32_t>(FromEnvironment("SHARDMESH_SEED", std::random_device()()));
  std::printf("SHARDMESH_SEED=%u SHARDMESH_RESTART_KILLS=%ld\n", seed, static_cast<long>(kills));
  std::mt19937 random(seed);
  ClusterOptions options;
  options.workers = kWorkers;
  options.kept = true;
  options.heartbeat_timeout = absl::Seconds(20);  // a busy machine starts a process late
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(options));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  JobSpec spec = testing::OddJob("job", "fsdp=2", 2);
  spec.clip_norm = 0.5;
  Training training;
  ASSERT_OK(training.Start(client, spec));
  std::vector<absl::Duration> pauses[kWorkers];
  for (int64_t k = 0; k < kills; ++k) {
    ASSERT_OK(training.AwaitBeyond(training.committed() + 1)) << "before kill " << k;
    poll(nullptr, 0, static_cast<int>(random() % kMaxQuietMillis));
    const int victim = static_cast<int>(random() % kWorkers);
    const pid_t pid = cluster->PidOf(absl::StrCat("w-", victim));
    ASSERT_GT(pid, 0) << "kill " << k;
    const absl::Time begin = absl::Now();
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    // One step may have been under way to its commit.
    ASSERT_OK(training.AwaitBeyond(training.committed() + 1)) << "after kill " << k << " of w-" << victim;
    pauses[victim].push_back(absl::Now() - begin);
  }
  ASSERT_OK_AND_ASSIGN(const int64_t last, training.End());
  ASSERT_OK_AND_ASSIGN(const Learnt learnt, testing::Learn(training.job(), last));
  std::printf("%-18s %5s %12s %12s %12s    (%ld steps)\n", "killed", "times", "median", "95 %", "worst",
              static_cast<long>(last));
  for (int w = 0; w < kWorkers; ++w) PrintRow(absl::StrCat("w-", w, w == 0 ? " (lead)" : ""), pauses[w]);
  ASSERT_OK(testing::Delete(client, "job"));
  spec.name = "undisturbed";
  ASSERT_OK_AND_ASSIGN(const Learnt undisturbed, testing::Undisturbed(client, spec, last));
  EXPECT_EQ(learnt, undisturbed);
}

}  // namespace
}  // namespace shardmesh
