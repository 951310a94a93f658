// Contract 6 where the system gives no more: a program that cannot get the threads, the address space or the
// descriptors that it needs ends with status 1 and one line that names the limit; one that runs refuses what would need
// a thread, with RESOURCE_EXHAUSTED, and goes on with the rest.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/altered_system.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::AlteredSystem;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Process;
using ::shardmesh::testing::ProcessSpec;
using ::shardmesh::testing::TempFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

struct NoThread : ::testing::Test {
  void SetUp() override { ASSERT_OK_AND_ASSIGN(system, AlteredSystem::Make(folder.File("system"))); }
  // Each program of the service, with the limits of `spec`: status 1 and one line that has all of `words`.
  void ExpectNoneStarts(const ProcessSpec& limits, const std::vector<std::string>& words) {
    const std::vector<std::string> programs[] = {
        {"server/shardmesh-coordinator", "--state", ":memory:", "--listen", "127.0.0.1:0"},
        {"worker/shardmesh-worker", "--local-dir", folder.File("s"), "--join-timeout", "1"},
        {"worker/shardmesh-node", "--workers", "1", "--local-dir", folder.File("n"), "--worker-binary",
         "worker/shardmesh-worker"}};
    for (const std::vector<std::string>& program : programs) {
      ProcessSpec spec = limits;
      spec.command = program;
      spec.log_file = folder.File(absl::StrCat("refused-", ++count));
      ASSERT_OK_AND_ASSIGN(const auto process, Process::Start(spec));
      ASSERT_OK_AND_ASSIGN(const int status, process->Wait(absl::Seconds(30)));
      EXPECT_EQ(status, 1) << program[0];
      const std::string log = process->Log();
      EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
      for (const std::string& word : words) EXPECT_THAT(log, HasSubstr(word)) << program[0];
    }
  }

  TempFolder folder;
  std::unique_ptr<AlteredSystem> system;
  int count = 0;
};

TEST_F(NoThread, TooFewAtTheStart_OneLineSaysSo) {
  ProcessSpec limits;
  limits.environment = system->Environment();
  for (const int threads : {1, 8, 23}) {
    system->AllowThreads(threads);
    ExpectNoneStarts(limits, {"needs", "threads", absl::StrCat("it gets ", threads, ":"), "RLIMIT_NPROC is "});
  }
}

TEST_F(NoThread, TooLittleAddressSpace_OneLineSaysSo) {
  ProcessSpec limits;
  limits.address_space_limit = int64_t{512} << 20;
  ExpectNoneStarts(limits, {"bytes of address space", "RLIMIT_AS is 536870912"});
}

TEST_F(NoThread, TooFewDescriptors_OneLineSaysSo) {
  ProcessSpec limits;
  limits.descriptor_limit = 16;
  ExpectNoneStarts(limits, {"descriptors", "RLIMIT_NOFILE is 16"});
}

TEST_F(NoThread, NoneLeftOfARunningWorker_WhatNeedsOneIsRefused_AndTheRestGoesOn) {
  ClusterOptions options;
  options.workers = 1;
  options.worker_environment = system->Environment();
  ASSERT_OK_AND_ASSIGN(const auto cluster, Cluster::Start(options));
  ASSERT_OK_AND_ASSIGN(Client client, cluster->Connect());
  ASSERT_OK_AND_ASSIGN(const auto job, client.CreateJob(testing::TinyJob("job", "fsdp=1", 1)));
  ASSERT_OK(testing::Initialize(*job));
  ASSERT_OK_AND_ASSIGN(const auto session, job->Connect({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(30)));
  ASSERT_OK(testing::TrainTo(*session, 2));
  system->AllowThreads(1);
  for (int attempt = 0; attempt < 3; ++attempt) {
    EXPECT_THAT(job->Attach({Slot(0)}).status(),
                StatusIs(Code::kResourceExhausted, AllOf(HasSubstr("thread"), HasSubstr("RLIMIT_NPROC"))));
  }
  v1::SaveRequest save;
  save.set_job("job");
  save.set_epoch(job->epoch().value());
  save.set_folder(folder.File("checkpoint"));
  EXPECT_THAT(job->worker(Rank(0)).Save(save, [](const v1::FileProgress&) { return absl::OkStatus(); },
                                        absl::Seconds(20)),
              StatusIs(Code::kResourceExhausted, HasSubstr("RLIMIT_NPROC")));
  const absl::Status refused = testing::Undisturbed(client, testing::TinyJob("late", "fsdp=1", 1), 1).status();
  EXPECT_THAT(refused.message(), AllOf(HasSubstr("could not prepare it"), HasSubstr("RLIMIT_NPROC")));
  ASSERT_OK(testing::TrainTo(*session, 4));
  EXPECT_TRUE(cluster->worker("w0").alive());
  system->AllowAnyThreads();
  testing::Delete(client, "late").IgnoreError();
  EXPECT_OK(testing::Undisturbed(client, testing::TinyJob("again", "fsdp=1", 1), 2));
  ASSERT_OK(testing::TrainTo(*session, 6));
}

}  // namespace
}  // namespace shardmesh
