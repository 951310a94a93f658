// PullingJobs: a service of four workers whose jobs have pulled slots, and what tests of such jobs do with them.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "core/base/matchers.h"
#include "core/base/status.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"

namespace shardmesh::testing {

inline constexpr absl::Duration kPullingTimeout = absl::Seconds(30);

// Of odd sizes, with pulled slots.
inline JobSpec PulledJob(const std::string& name, const std::string& mesh, int slots, int trainers) {
  JobSpec spec = OddJob(name, mesh, slots);
  spec.slot_mode = SlotMode::kPulled;
  spec.num_trainers = trainers;
  return spec;
}

class PullingJobs : public ::testing::Test {
 protected:
  void SetUp() override { Start({}); }
  void Start(ClusterOptions options) {
    cluster_.reset();
    options.workers = 4;
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
  }
  absl::StatusOr<std::shared_ptr<Job>> Create(const JobSpec& spec) {
    ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client_->CreateJob(spec));
    RETURN_IF_ERROR(Initialize(*job));
    return job;
  }
  // A trainer that has the weights, attached or connected.
  static absl::StatusOr<std::unique_ptr<PullingSession>> Join(Job& job, bool connects = false) {
    ASSIGN_OR_RETURN(std::unique_ptr<PullingSession> session, connects ? job.ConnectPulling() : job.AttachPulling());
    RETURN_IF_ERROR(session->AwaitWeights(kPullingTimeout));
    return session;
  }
  // Writes and finishes the slot that was taken.
  static absl::StatusOr<SlotResult> Finish(PullingSession& session, const PullingSession::Work& work) {
    ASSIGN_OR_RETURN(const FinishOptions options, WriteTaken(session, work));
    return session.Finish(options);
  }
  static void ExpectResult(const absl::StatusOr<SlotResult>& result, SlotResult expected) {
    ASSERT_OK(result.status());
    EXPECT_EQ(*result, expected);
  }
  static void ExpectTheReference(Job& job, int64_t step) {
    ASSERT_OK_AND_ASSIGN(const Learnt learnt, Learn(job, step));
    EXPECT_EQ(learnt, ReferenceOf(job.spec(), step));
  }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
};

}  // namespace shardmesh::testing
