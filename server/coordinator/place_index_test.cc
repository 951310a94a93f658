#include "server/coordinator/place_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "server/coordinator/state.h"
#include "server/coordinator/testing/coordinator_fixture.h"

namespace shardmesh {
namespace {

using Row = std::tuple<std::string, Place::Kind, int32_t, int64_t>;  // a place, by the job's name

constexpr int kWorkers = 6, kJobs = 4;

// Jobs that transactions change at random, some of which fail or are given up.
class PlaceIndexTest : public ::testing::Test {
 protected:
  int Pick(int n) { return static_cast<int>(random_() % n); }
  std::string JobName() { return absl::StrCat("j", Pick(kJobs)); }

  std::vector<MemberRecord> Members() {
    std::vector<MemberRecord> members;
    for (int i = 0; i < kWorkers; ++i) {
      if (Pick(3) == 0) members.push_back({SmallWorker(absl::StrCat("w", i), 1 + Pick(2)), false, Pick(4) - 1});
    }
    return members;
  }

  Job NewJob(const std::string& name) {
    Job job;
    job.record.name = name;
    job.defined = job.definition = definition_;
    job.record.members = Members();
    return job;
  }

  void Change(Transaction& transaction) {
    const std::string name = JobName();
    if (state_.jobs.count(name) == 0) return transaction.PutJob(NewJob(name));
    switch (Pick(6)) {
      case 0:
        return transaction.DeleteJob(name);
      case 1:
        return transaction.PutJob(NewJob(name));
      case 2:
        transaction.MutableJob(name).record.others = Members();
        return;
      case 3: {
        auto next = std::make_shared<NextMesh>();
        next->members = Members();
        next->departing = Members();
        transaction.MutableJob(name).next = Pick(2) == 0 ? nullptr : next;
        return;
      }
      case 4:
        transaction.MutableJob(name).record.committed_step = Pick(100);
        return;
      default: {
        Job& job = transaction.MutableJob(name);  // and later again, through the same reference
        job.record.members = Members();
        if (Pick(2) == 0) Check();
        job.record.members = Members();
      }
    }
  }

  std::vector<Row> Scan(const std::string& worker) {
    std::vector<Row> rows;
    const auto add = [&](const std::string& job, const auto& list, Place::Kind kind) {
      for (size_t i = 0; i < list.size(); ++i) {
        const WorkerIdentity& member = list[i].worker;
        if (member.name == worker) rows.emplace_back(job, kind, static_cast<int32_t>(i), member.incarnation);
      }
    };
    for (const auto& [name, job] : state_.jobs) {
      add(name, job.record.members, Place::kMember);
      add(name, job.record.others, Place::kOther);
      if (job.next == nullptr) continue;
      add(name, job.next->members, Place::kNext);
      add(name, job.next->departing, Place::kDeparting);
    }
    return rows;
  }

  void Check() {
    for (int i = 0; i < kWorkers; ++i) {
      const std::string worker = absl::StrCat("w", i);
      std::vector<Row> rows;
      for (const Place& place : state_.places.Of(state_.jobs, worker)) {
        ASSERT_EQ(place.job, &state_.jobs.at(place.job->record.name));
        rows.emplace_back(place.job->record.name, place.kind, place.index, place.incarnation);
      }
      EXPECT_EQ(rows, Scan(worker));
    }
    for (const auto& [name, job] : state_.jobs) {
      const Told& told = state_.places.ToldOf(state_.jobs, job);
      ASSERT_EQ(told.peers.size(), job.record.members.size());
      for (size_t rank = 0; rank < told.peers.size(); ++rank) {
        EXPECT_TRUE(told.peers[rank] == job.record.members[rank].worker);
        EXPECT_EQ(told.was[rank], job.record.members[rank].was);
      }
    }
  }

  std::mt19937_64 random_;
  const std::shared_ptr<const JobDefinition> definition_ = SmallJob("j", 2);
  SharedStore::Shared shared_;
  SharedStore store_{shared_};
  CoordinatorState state_;
  std::vector<std::string> events_;
};

TEST_F(PlaceIndexTest, RandomTransactions_ItHasWhatAScanFinds) {
  uint64_t seed = std::random_device{}();
  if (const char* given = getenv("SHARDMESH_SEED"); given != nullptr) {
    ASSERT_TRUE(absl::SimpleAtoi(given, &seed));
  }
  SCOPED_TRACE(absl::StrCat("SHARDMESH_SEED=", seed));
  random_.seed(seed);
  for (int round = 0; round < 3000 && !HasFailure(); ++round) {
    {
      Transaction transaction(state_, store_, events_);
      for (int i = Pick(4); i >= 0; --i) {
        Change(transaction);
        if (Pick(2) == 0) Check();
      }
      shared_.broken = Pick(4) == 0;
      if (Pick(4) != 0) transaction.Commit().IgnoreError();
    }
    Check();
  }
}

// One list for all members, and again for the next question.
TEST_F(PlaceIndexTest, WhatMembersAreTold_IsMadeOnce) {
  {
    Transaction transaction(state_, store_, events_);
    Job job = NewJob("j");
    job.record.members = {{SmallWorker("a"), false, -1}, {SmallWorker("b"), false, -1}};
    transaction.PutJob(std::move(job));
    ASSERT_OK(transaction.Commit());
  }
  const SharedList<WorkerIdentity> peers = state_.places.ToldOf(state_.jobs, state_.jobs.at("j")).peers;
  {
    Transaction transaction(state_, store_, events_);
    transaction.MutableJob("j").record.committed_step = 5;
    ASSERT_OK(transaction.Commit());
  }
  EXPECT_TRUE(state_.places.ToldOf(state_.jobs, state_.jobs.at("j")).peers.SharesWith(peers));
}

}  // namespace
}  // namespace shardmesh
