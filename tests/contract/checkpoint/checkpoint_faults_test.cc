// Checkpoints, and whoever writes or reads them killed, or met by an error, at every change and every reading of a file
// (core/base/fault_point.h): the older checkpoint stays whole, the next save works and leaves nothing of the dead, and
// a job is restored whole or has no weights.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/checkpoint/checkpoint.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/reference.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;
using ::shardmesh::testing::Cluster;
using ::shardmesh::testing::ClusterOptions;
using ::shardmesh::testing::Process;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int kMost = 60;  // operations of one process
// Folder; make, room and write of three files; three syncs; make, write and removal of the secret; folder's sync;
// rename.
constexpr int kBeforeRename = 1 + 3 * 3 + 3 + 3 + 1 + 1;
constexpr int kBeforeRemoval = kBeforeRename + 3;  // the root's sync; rename and sync of what is pruned
constexpr int kKilled = 128 + SIGKILL;
constexpr absl::Duration kLong = absl::Seconds(60);

class CheckpointFaults : public ::testing::Test {
 protected:
  void TearDown() override { Plan(""); }
  void Start(bool retained) {
    ClusterOptions options;
    options.workers = 2;
    options.retained = retained;
    options.heartbeat_timeout = absl::Seconds(20);  // a busy machine starts a process late
    options.worker_program = "tests/testing/faulty_worker";
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
  }
  static JobSpec Spec() { return testing::TinyJob("job", "fsdp=2", 2); }
  void MakeJob() {
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(Spec()));
    ASSERT_OK(testing::Initialize(*job_));
  }
  // Of processes that start afterwards.
  void Plan(const std::string& fault) {
    if (fault.empty()) {
      unsetenv("SHARDMESH_FAULT");
      unsetenv("SHARDMESH_FAULT_ONCE");
    } else {
      setenv("SHARDMESH_FAULT", fault.c_str(), 1);
      setenv("SHARDMESH_FAULT_ONCE", once_.c_str(), 1);
      fs::remove(once_);
    }
  }
  absl::Status TrainOneStep() {
    ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, job_->Attach({Slot(0), Slot(1)}));
    RETURN_IF_ERROR(session->AwaitWeights(kLong));
    return testing::TrainTo(*session, ++step_);
  }
  // Its exit status; what it said is in log_.
  absl::StatusOr<int> RunCheckpointer(const std::string& fault, std::vector<std::string> arguments) {
    Plan(fault);
    arguments.insert(arguments.begin(), {"tests/testing/test_checkpointer", cluster_->coordinator_address()});
    const std::string log = temp_.File(absl::StrCat("log-", ++processes_));
    ASSIGN_OR_RETURN(const auto process, Process::Start({std::move(arguments), log}));
    Plan("");
    const absl::StatusOr<int> status = process->Wait(kLong);
    log_ = process->Log();
    return status;
  }
  // That the newest is one of these steps, whole: with the bits that the job had.
  void ExpectNewest(int64_t either, int64_t other) {
    ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint newest, OpenCheckpoint(root_));
    EXPECT_THAT(newest.manifest.step, AnyOf(either, other));
    ASSERT_OK_AND_ASSIGN(const auto again, RestoreCheckpoint(*client_, root_, {"again", "fsdp=1"}));
    ASSERT_OK_AND_ASSIGN(const v1::DigestReply digest, again->Digest(kLong));
    EXPECT_EQ(digest.digest(), testing::ReferenceOf(Spec(), newest.manifest.step).digest);
    ASSERT_OK(testing::Delete(*client_, "again"));
  }
  // That there are checkpoints alone.
  void ExpectNoLitter() {
    for (const auto& entry : fs::directory_iterator(root_)) {
      EXPECT_OK(OpenCheckpoint(entry.path().string()));
      EXPECT_EQ(entry.path().filename().string().rfind("step-", 0), 0u) << entry.path();
      EXPECT_EQ(std::distance(fs::directory_iterator(entry.path()), {}), 3) << entry.path();
    }
  }
  // A worker that died takes a moment to its next incarnation.
  absl::StatusOr<SavedCheckpoint> SaveSoon() {
    const absl::Time deadline = MonotonicNow() + kLong;
    absl::StatusOr<SavedCheckpoint> saved = SaveCheckpoint(*job_, root_);
    while (absl::StrContains(saved.status().message(), "still preparing") && MonotonicNow() < deadline) {
      testing::Pause(absl::Milliseconds(10));
      saved = SaveCheckpoint(*job_, root_);
    }
    return saved;
  }
  void SaveTheNext() {
    ASSERT_OK(TrainOneStep());
    ASSERT_OK_AND_ASSIGN(const SavedCheckpoint saved, SaveSoon());
    EXPECT_EQ(saved.step, step_);
    ASSERT_OK(Prune(root_, {1, 0}));
    ASSERT_NO_FATAL_FAILURE(ExpectNewest(step_, step_));
    ExpectNoLitter();
  }
  bool HasJob(const std::string& name) {
    v1::DescribeJobRequest request;
    request.set_job(name);
    return client_->coordinator().DescribeJob(request, kLong).ok();
  }
  // Of "again", which somebody began to restore: not there, or without weights, or whole; and it can be had whole.
  void ExpectWholeOrNone() {
    if (HasJob("again")) {
      ASSERT_OK_AND_ASSIGN(const auto job, client_->OpenJob("again"));
      const auto digest = job->Digest(kLong);
      if (digest.ok()) {
        EXPECT_EQ(digest->digest(), testing::ReferenceOf(Spec(), step_).digest);
        return;
      }
      EXPECT_THAT(digest, StatusIs(Code::kFailedPrecondition, HasSubstr("no initial weights")));
    }
    ASSERT_OK_AND_ASSIGN(const auto again, RestoreCheckpoint(*client_, root_, {"again", "fsdp=2", kLong}));
    ASSERT_OK_AND_ASSIGN(const v1::DigestReply digest, again->Digest(kLong));
    EXPECT_EQ(digest.digest(), testing::ReferenceOf(Spec(), step_).digest);
  }
  // A worker that has a fault in its next incarnation, which begins now; all jobs are lost and this one comes back.
  void StartAnew(const std::string& worker, const std::string& fault) {
    Plan(fault);
    cluster_->worker(worker).Kill9();
    ASSERT_OK(cluster_->StartWorker(worker));
    Plan("");
  }
  void RestoreTheJob() {
    ASSERT_OK(testing::Delete(*client_, "job"));
    ASSERT_OK_AND_ASSIGN(job_, RestoreCheckpoint(*client_, root_));
    ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint newest, OpenCheckpoint(root_));
    step_ = newest.manifest.step;
  }

  testing::TempFolder temp_;
  const std::string root_ = temp_.File("checkpoints");
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  int64_t step_ = 0;
  int processes_ = 0;
  std::string log_;
  const std::string once_ = temp_.File("once");  // is there once harm was done
};

struct Harm {
  const char* action;
  int status;
};

class WhoSaves : public CheckpointFaults, public ::testing::WithParamInterface<Harm> {};

TEST_P(WhoSaves, AtEachChange_TheOlderOneStays_AndTheNextSaveWorks) {
  ASSERT_NO_FATAL_FAILURE(Start(/*retained=*/false));
  ASSERT_NO_FATAL_FAILURE(MakeJob());
  ASSERT_NO_FATAL_FAILURE(SaveTheNext());
  int harmed = 0;
  for (bool reached = true; reached && harmed < kMost; ++harmed) {
    SCOPED_TRACE(harmed + 1);
    const int64_t before = step_;
    ASSERT_OK(TrainOneStep());
    const std::string fault = absl::StrCat("checkpointer:file-change:", GetParam().action, ":", harmed + 1);
    ASSERT_OK_AND_ASSIGN(const int status, RunCheckpointer(fault, {"save", "job", root_, "1"}));
    reached = fs::exists(once_);
    // An error in the removal of what was pruned is nobody's: the next one removes it.
    EXPECT_THAT(status, AnyOf(harmed < kBeforeRemoval && reached ? GetParam().status : 0, GetParam().status)) << log_;
    if (status == 1) {
      EXPECT_THAT(log_, HasSubstr("RESOURCE_EXHAUSTED: fault injected at file-change"));
    }
    ASSERT_NO_FATAL_FAILURE(ExpectNewest(before, step_));
    const bool there = OpenCheckpoint(root_)->manifest.step == step_;
    EXPECT_EQ(there, harmed >= kBeforeRename);
    if (!reached) {
      EXPECT_EQ(status, 0);
      ExpectNoLitter();
    }
    ASSERT_NO_FATAL_FAILURE(SaveTheNext());
  }
  EXPECT_EQ(harmed, kBeforeRemoval + 4 + 1) << "three files and their folder; then none";
}

INSTANTIATE_TEST_SUITE_P(, WhoSaves, ::testing::Values(Harm{"kill", kKilled}, Harm{"error", 1}),
                         [](const auto& info) { return std::string(info.param.action); });

class AWorkerThatSaves : public CheckpointFaults, public ::testing::WithParamInterface<Harm> {};

TEST_P(AWorkerThatSaves, AtEachChange_TheOlderOneStays) {
  ASSERT_NO_FATAL_FAILURE(Start(/*retained=*/false));
  ASSERT_NO_FATAL_FAILURE(MakeJob());
  ASSERT_NO_FATAL_FAILURE(SaveTheNext());
  int harmed = 0;
  for (bool whole = false; !whole && harmed < kMost; ++harmed) {
    SCOPED_TRACE(harmed + 1);
    const std::string fault = absl::StrCat("w1:file-change:", GetParam().action, ":", harmed + 1);
    ASSERT_NO_FATAL_FAILURE(StartAnew("w1", fault));
    ASSERT_NO_FATAL_FAILURE(RestoreTheJob());
    const int64_t before = step_;
    ASSERT_OK(TrainOneStep());
    const auto saved = SaveCheckpoint(*job_, root_);
    whole = saved.ok();
    if (!whole) {
      const Code code = GetParam().status == kKilled ? Code::kUnavailable : Code::kResourceExhausted;
      EXPECT_THAT(saved, StatusIs(code, HasSubstr("w1")));
    }
    ExpectNoLitter();  // who saves lives, and takes it away
    EXPECT_EQ(OpenCheckpoint(root_)->manifest.step, whole ? step_ : before);
  }
  EXPECT_EQ(harmed, 5 + 1) << "three parts of the tensor, and the syncs of both files; then none";
  ASSERT_NO_FATAL_FAILURE(StartAnew("w1", ""));
  ASSERT_NO_FATAL_FAILURE(RestoreTheJob());
  ASSERT_NO_FATAL_FAILURE(SaveTheNext());
}

INSTANTIATE_TEST_SUITE_P(, AWorkerThatSaves, ::testing::Values(Harm{"kill", kKilled}, Harm{"error", 1}),
                         [](const auto& info) { return std::string(info.param.action); });

TEST_F(CheckpointFaults, WhoRestores_DiesAtEachReading_TheJobIsWholeOrHasNoWeights) {
  ASSERT_NO_FATAL_FAILURE(Start(/*retained=*/false));
  ASSERT_NO_FATAL_FAILURE(MakeJob());
  ASSERT_NO_FATAL_FAILURE(SaveTheNext());
  for (const auto& [point, times] : std::map<std::string, int>{{"file-read", 3}, {"use-loaded", 2}}) {
    for (const auto& [action, expected] : std::map<std::string, int>{{"kill", kKilled}, {"error", 1}}) {
      for (int n = 1; n <= times + 1; ++n) {
        SCOPED_TRACE(absl::StrCat(point, " ", action, " ", n));
        const std::string fault = absl::StrCat("checkpointer:", point, ":", action, ":", n);
        ASSERT_OK_AND_ASSIGN(const int status, RunCheckpointer(fault, {"restore", "again", root_, "fsdp=2"}));
        EXPECT_EQ(status, n <= times ? expected : 0) << log_;
        if (status == 1) {
          EXPECT_FALSE(HasJob("again"));
        }
        ASSERT_NO_FATAL_FAILURE(ExpectWholeOrNone());
        ASSERT_OK(testing::Delete(*client_, "again"));
      }
    }
  }
}

class AWorkerThatLoads : public CheckpointFaults, public ::testing::WithParamInterface<Harm> {};

TEST_P(AWorkerThatLoads, AtEachReading_LeavesNoJob_AndTheNextOneIsWhole) {
  ASSERT_NO_FATAL_FAILURE(Start(/*retained=*/false));
  ASSERT_NO_FATAL_FAILURE(MakeJob());
  ASSERT_NO_FATAL_FAILURE(SaveTheNext());
  ASSERT_OK(testing::Delete(*client_, "job"));
  int harmed = 0;
  for (bool whole = false; !whole && harmed < kMost; ++harmed) {
    SCOPED_TRACE(harmed + 1);
    ASSERT_NO_FATAL_FAILURE(StartAnew("w1", absl::StrCat("w1:file-read:", GetParam().action, ":", harmed + 1)));
    const auto restored = RestoreCheckpoint(*client_, root_, {"again", "fsdp=2", kLong});
    whole = restored.ok();
    EXPECT_EQ(HasJob("again"), whole) << restored.status();
    if (!whole) {
      EXPECT_THAT(restored.status().code(), AnyOf(Code::kUnavailable, Code::kResourceExhausted)) << restored.status();
      ASSERT_NO_FATAL_FAILURE(StartAnew("w1", ""));
    }
    ASSERT_NO_FATAL_FAILURE(ExpectWholeOrNone());
    ASSERT_OK(testing::Delete(*client_, "again"));
  }
  EXPECT_EQ(harmed, 2 + 3 + 1) << "both files' beginnings, three parts; then none";
}

INSTANTIATE_TEST_SUITE_P(, AWorkerThatLoads, ::testing::Values(Harm{"kill", kKilled}, Harm{"error", 1}),
                         [](const auto& info) { return std::string(info.param.action); });

// Workers whose memory a node has: their job lives on.
class ARetainedWorker : public CheckpointFaults {
 protected:
  void StartWithFault(const std::string& fault) {
    job_ = nullptr;
    client_ = nullptr;
    cluster_ = nullptr;
    step_ = 0;
    fs::remove_all(root_);
    Plan(fault);
    ASSERT_NO_FATAL_FAILURE(Start(/*retained=*/true));
    ASSERT_NO_FATAL_FAILURE(MakeJob());
    Plan("");
  }
};

TEST_F(ARetainedWorker, ThatSaves_DiesAtEachChange_TheJobTrainsOn_AndTheNextSaveWorks) {
  for (int n = 1; n <= 5; ++n) {
    SCOPED_TRACE(n);
    ASSERT_NO_FATAL_FAILURE(StartWithFault(absl::StrCat("w-1:file-change:kill:", 5 + n)));  // of the second one
    ASSERT_NO_FATAL_FAILURE(SaveTheNext());
    ASSERT_OK(TrainOneStep());
    EXPECT_THAT(SaveCheckpoint(*job_, root_), StatusIs(Code::kUnavailable, HasSubstr("w-1")));
    EXPECT_TRUE(fs::exists(once_)) << "the point was not reached";
    EXPECT_EQ(OpenCheckpoint(root_)->manifest.step, step_ - 1);
    ExpectNoLitter();
    ASSERT_NO_FATAL_FAILURE(SaveTheNext());
  }
}

TEST_F(ARetainedWorker, ThatLoads_DiesAtEachReading_TheJobIsWholeOrHasNoWeights) {
  for (int n = 1; n <= 5; ++n) {
    SCOPED_TRACE(n);
    ASSERT_NO_FATAL_FAILURE(StartWithFault(absl::StrCat("w-1:file-read:kill:", n)));
    ASSERT_OK(TrainOneStep());
    ASSERT_OK(SaveCheckpoint(*job_, root_));
    ASSERT_OK(testing::Delete(*client_, "job"));
    const auto restored = RestoreCheckpoint(*client_, root_, {"again", "fsdp=2", kLong});
    EXPECT_TRUE(fs::exists(once_)) << "the point was not reached";
    EXPECT_EQ(HasJob("again"), restored.ok()) << restored.status();
    if (n <= 2) {
      EXPECT_OK(restored) << "it had not answered: it is asked again";
    }
    ASSERT_NO_FATAL_FAILURE(ExpectWholeOrNone());
  }
}

// What it loaded lies in memory that its next incarnation has, too.
TEST_F(ARetainedWorker, ThatDiesAsTheJobBeginsWithWhatItLoaded_GoesOnWithIt) {
  for (const char* point : {"command-seen", "executed"}) {
    SCOPED_TRACE(point);
    // The fourth command: the first three are the other job's first, its step and its digest.
    ASSERT_NO_FATAL_FAILURE(StartWithFault(absl::StrCat("w-1:", point, ":kill:4")));
    ASSERT_OK(TrainOneStep());
    ASSERT_OK(SaveCheckpoint(*job_, root_));
    ASSERT_OK(testing::Delete(*client_, "job"));
    EXPECT_FALSE(fs::exists(once_));
    ASSERT_OK_AND_ASSIGN(const auto restored, RestoreCheckpoint(*client_, root_, {"again", "fsdp=2", kLong}));
    EXPECT_TRUE(fs::exists(once_)) << "the point was not reached";
    ASSERT_OK_AND_ASSIGN(const v1::DigestReply digest, restored->Digest(kLong));
    EXPECT_EQ(digest.digest(), testing::ReferenceOf(Spec(), step_).digest);
  }
}

}  // namespace
}  // namespace shardmesh
