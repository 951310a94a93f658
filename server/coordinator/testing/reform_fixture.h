// A job that goes on at later epochs, on the coordinator's side. Tests only.
#pragma once

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "server/coordinator/testing/coordinator_fixture.h"

namespace shardmesh {

using Names = std::vector<std::string>;
using Ranks = std::vector<int32_t>;

inline constexpr char kMesh[] = "ddp=2,fsdp=2";  // shards 0 1 0 1

class ReformTest : public CoordinatorTest {
 protected:
  // Job "j", READY at epoch 1 and step 7 on a, b, c, ...; then `spares` join.
  void MakeReady(const std::string& mesh = kMesh, const Names& spares = {}) {
    const auto job = SmallMeshJob("j", mesh);
    for (int rank = 0; rank < job->plan().num_ranks(); ++rank) {
      ASSERT_OK(c_->Join(SmallWorker(std::string(1, static_cast<char>('a' + rank))), now_));
    }
    ASSERT_OK(c_->CreateJob(job, now_));
    ReportReady(7);
    ASSERT_EQ(View("j").state, JobState::kReady);
    for (const std::string& spare : spares) ASSERT_OK(c_->Join(SmallWorker(spare), now_));
    c_->TakeEvents();
  }
  void ReportReady(int64_t step = -1) {
    for (const JobView::Member& member : View("j").members) {
      const std::string& name = member.worker.name;
      const int64_t incarnation = member.worker.incarnation;
      Beat(name, {ReadyReport(Told(name, incarnation), step)}, incarnation);
    }
  }
  // What the worker was told of "j".
  Assignment Told(const std::string& worker, int64_t incarnation = 1) {
    for (const Assignment& assignment : Beat(worker, {}, incarnation)) {
      if (assignment.definition->spec().name == "j") return assignment;
    }
    ADD_FAILURE() << worker << " is told nothing of j";
    return {SmallJob("j", 1), 0, 0, {}, {}};
  }
  Names Members() {
    Names names;
    for (const JobView::Member& member : View("j").members) names.push_back(member.worker.name);
    return names;
  }
  void ExpectReforms(int64_t epoch, const Names& members, const Ranks& was, const std::string& mesh,
                     const std::string& from_mesh = kMesh, int64_t from_epoch = 1) {
    const JobView view = View("j");
    EXPECT_EQ(view.state, JobState::kPreparing) << view.error;
    EXPECT_EQ(view.epoch, epoch);
    EXPECT_EQ(view.definition->spec().mesh.ToString(), mesh);
    EXPECT_EQ(Members(), members);
    for (const JobView::Member& member : view.members) EXPECT_FALSE(member.ready);
    const Assignment told = Told(view.members[0].worker.name, view.members[0].worker.incarnation);
    EXPECT_EQ(told.epoch, epoch);
    EXPECT_EQ(told.definition->plan().hash(), SmallMeshJob("j", mesh)->plan().hash());
    EXPECT_EQ(told.from.epoch, from_epoch);
    EXPECT_EQ(told.from.mesh, from_mesh);
    EXPECT_EQ(told.from.was, was);
  }
  void ExpectReady(int64_t epoch) {
    EXPECT_EQ(View("j").state, JobState::kReady);
    EXPECT_EQ(View("j").epoch, epoch);
    const Assignment told = Told(Members()[0], View("j").members[0].worker.incarnation);
    EXPECT_EQ(told.from.epoch, 0) << "what was held before is needed no more";
    EXPECT_THAT(told.from.was, ::testing::IsEmpty());
    const JobRecord stored = shared_.store->Load()->jobs.at("j");
    EXPECT_EQ(stored.from_epoch, 0);
    EXPECT_EQ(stored.from_mesh, "");
    for (const MemberRecord& member : stored.members) EXPECT_EQ(member.was, -1);
  }
  void ExpectFailed(const std::string& first, const std::string& reason,
                    const std::string& step = "newest known step is 7") {
    EXPECT_EQ(View("j").state, JobState::kFailed);
    EXPECT_THAT(
        View("j").error,
        ::testing::AllOf(::testing::StartsWith(first), ::testing::HasSubstr(reason), ::testing::HasSubstr(step),
                         ::testing::HasSubstr("delete it, and restore its newest checkpoint or create it again")));
  }
  MemberReport Failed(const std::string& worker, int32_t lost) {
    MemberReport report = ReadyReport(Told(worker));
    report.state = MemberReport::State::kFailed;
    report.error = "as it says";
    report.lost_rank = lost;
    return report;
  }
  // Only these are heard until the others are silent for too long.
  void Silence(const Names& living) {
    for (int i = 0; i < 7; ++i) {
      Advance(absl::Milliseconds(500));
      for (const std::string& worker : living) Beat(worker);
    }
  }
};

}  // namespace shardmesh
