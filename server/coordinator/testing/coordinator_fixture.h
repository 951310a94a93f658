// A coordinator over a store that outlives it, and a clock that a test moves. Tests only.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "core/base/matchers.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/testing/small_jobs.h"

namespace shardmesh {

// A memory store that outlives coordinators and can be told to fail.
class SharedStore final : public Store {
 public:
  struct Shared {
    std::unique_ptr<Store> store = NewMemoryStore();
    bool broken = false;
    int writes = 0;
  };
  explicit SharedStore(Shared& shared) : shared_(shared) {}
  absl::Status Write(const StoreBatch& batch) override {
    if (shared_.broken) return absl::UnavailableError("disk full");
    ++shared_.writes;
    return shared_.store->Write(batch);
  }
  absl::StatusOr<StoreContents> Load() override { return shared_.store->Load(); }

 private:
  Shared& shared_;
};

class CoordinatorTest : public ::testing::Test {
 protected:
  CoordinatorTest() {
    options_.new_secret = [] { return std::string(); };
    Restart();
  }
  void Restart() {
    auto created = Coordinator::Create(options_, std::make_unique<SharedStore>(shared_), now_);
    ASSERT_OK(created);
    c_ = *std::move(created);
  }
  void Advance(absl::Duration by) {
    for (const absl::Time until = now_ + by; now_ < until;) {
      now_ += absl::Milliseconds(500);
      ASSERT_OK(c_->Tick(now_));
    }
  }
  std::vector<Assignment> Beat(const std::string& name, const std::vector<MemberReport>& reports = {},
                               int64_t incarnation = 1) {
    auto assignments = c_->Heartbeat(name, incarnation, reports, now_, traits_);
    EXPECT_OK(assignments);
    return assignments.ok() ? *assignments : std::vector<Assignment>();
  }
  JobView View(const std::string& job) {
    auto view = c_->DescribeJob(job, now_);
    EXPECT_OK(view);
    return view.ok() ? *view : JobView();
  }
  // Two workers of one host hold job "j" of two ranks, ready.
  void MakeReadyJob() {
    ASSERT_OK(c_->Join(SmallWorker("a"), now_));
    ASSERT_OK(c_->Join(SmallWorker("b"), now_));
    ASSERT_OK(c_->CreateJob(SmallJob("j", 2), now_));
    for (const char* worker : {"a", "b"}) Beat(worker, {ReadyReport(Beat(worker)[0])});
    ASSERT_EQ(View("j").state, JobState::kReady);
  }

  CoordinatorOptions options_;
  WorkerTraits traits_;  // that all workers say they have
  SharedStore::Shared shared_;
  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  std::unique_ptr<Coordinator> c_;
};

}  // namespace shardmesh
