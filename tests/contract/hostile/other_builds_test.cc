// A worker beside a coordinator of another build: what it cannot understand is refused by name, and it loses nothing.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/match.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "core/base/sync.h"
#include "core/job/plan.h"
#include "local/testing/temp_folder.h"
#include "proto/convert.h"
#include "proto/protocol_version.h"
#include "proto/shardmesh/v1/coordinator.grpc.pb.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kLong = absl::Seconds(60);

// What a coordinator of another build may say. It answers each Join with `protocol`, and gives all workers `given`.
class OtherCoordinator final : public v1::Coordinator::Service {
 public:
  explicit OtherCoordinator(v1::ProtocolVersion protocol) : protocol_(std::move(protocol)) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~OtherCoordinator() override { server_->Shutdown(); }
  const std::string& address() const { return address_; }

  void Give(v1::Assignment assignment) {
    MutexLock lock(mu_);
    given_.push_back(std::move(assignment));
  }
  // Until a worker says that the job is in that state. DeadlineExceeded: it does not.
  absl::StatusOr<v1::MemberStatus> Await(const std::string& job, v1::MemberState state) {
    const absl::Time deadline = MonotonicNow() + kLong;
    MutexLock lock(mu_);
    while (true) {
      for (const v1::MemberStatus& said : said_) {
        if (said.job() == job && said.state() == state) return said;
      }
      if (MonotonicNow() > deadline) return absl::DeadlineExceededError(absl::StrCat("job ", job, ": no such state"));
      changed_.WaitFor(mu_, absl::Milliseconds(100));
    }
  }

 private:
  grpc::Status Join(grpc::ServerContext*, const v1::JoinRequest*, v1::JoinReply* reply) override {
    *reply->mutable_protocol() = protocol_;
    reply->set_heartbeat_interval_ms(100);
    reply->set_heartbeat_timeout_ms(5000);
    return grpc::Status::OK;
  }
  grpc::Status Heartbeat(grpc::ServerContext*, const v1::HeartbeatRequest* request,
                         v1::HeartbeatReply* reply) override {
    MutexLock lock(mu_);
    said_ = {request->jobs().begin(), request->jobs().end()};
    changed_.SignalAll();
    for (const v1::Assignment& assignment : given_) *reply->add_assignments() = assignment;
    return grpc::Status::OK;
  }

  const v1::ProtocolVersion protocol_;
  std::string address_;
  Mutex mu_;
  CondVar changed_;
  std::vector<v1::Assignment> given_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::MemberStatus> said_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<grpc::Server> server_;
};

v1::ProtocolVersion Version(int major, int minor) {
  v1::ProtocolVersion version;
  version.set_major(major);
  version.set_minor(minor);
  return version;
}

struct OneWorker {
  explicit OneWorker(const std::string& coordinator) {
    auto started = testing::Process::Start({{"worker/shardmesh-worker", "--coordinator", coordinator, "--name", "w0",
                                             "--local-dir", folder.File("s"), "--threads", "1", "--address-file",
                                             folder.File("address")},
                                            folder.File("log")});
    EXPECT_OK(started);
    if (started.ok()) process = *std::move(started);
  }
  // Until its log has the words.
  bool Logs(const std::string& words) const {
    const absl::Time deadline = MonotonicNow() + kLong;
    while (!absl::StrContains(testing::ReadFile(folder.File("log")), words)) {
      if (MonotonicNow() > deadline) return false;
      testing::Pause(absl::Milliseconds(20));
    }
    return true;
  }

  testing::TempFolder folder;
  std::unique_ptr<testing::Process> process;
};

v1::Assignment OneRank(const std::string& job, const OneWorker& worker) {
  const JobSpec spec = testing::OddJob(job, "fsdp=1", 1);
  v1::Assignment assignment;
  *assignment.mutable_spec() = ToProto(spec);
  assignment.set_plan_hash(Plan::Create(spec)->hash());
  assignment.set_epoch(1);
  assignment.set_secret("0123456789abcdef0123456789abcdef");
  v1::Peer& self = *assignment.add_peers();
  self.set_worker("w0");
  self.set_pid(worker.process->pid());
  return assignment;
}

TEST(OtherBuilds, CoordinatorOfAnotherMajorVersion_IsNotJoined) {
  OtherCoordinator coordinator(Version(kProtocolMajor + 1, 7));
  OneWorker worker(coordinator.address());
  EXPECT_TRUE(worker.Logs(absl::StrCat("the coordinator speaks protocol version ", kProtocolMajor + 1, ".7")));
  EXPECT_THAT(worker.process->Log(), AllOf(HasSubstr(absl::StrCat("this program ", kProtocolMajor, ".", kProtocolMinor)),
                                           HasSubstr("install one build on both")));
}

// The later coordinator has formats, and fields, that this worker does not know.
TEST(OtherBuilds, JobOfALaterBuild_FailsByName_AndOthersGoOn) {
  OtherCoordinator coordinator(Version(kProtocolMajor, kProtocolMinor + 7));
  OneWorker worker(coordinator.address());
  v1::Assignment later = OneRank("later", worker);
  later.mutable_spec()->mutable_parameters(0)->set_format(static_cast<v1::Format>(99));
  coordinator.Give(later);
  ASSERT_OK_AND_ASSIGN(const v1::MemberStatus failed, coordinator.Await("later", v1::MEMBER_STATE_FAILED));
  EXPECT_THAT(failed.error(), AllOf(HasSubstr("99"), HasSubstr(absl::StrCat(
                                  "(the coordinator speaks protocol version ", kProtocolMajor, ".", kProtocolMinor + 7,
                                  ", this worker ", kProtocolMajor, ".", kProtocolMinor,
                                  ": if that is why, install one build on both)"))));
  coordinator.Give(OneRank("good", worker));
  EXPECT_OK(coordinator.Await("good", v1::MEMBER_STATE_READY));
  EXPECT_TRUE(worker.process->alive());
}

// A plan that another build computes otherwise is found by its hash before anything is written.
TEST(OtherBuilds, AnotherPlan_FailsByName) {
  OtherCoordinator coordinator(Version(kProtocolMajor, kProtocolMinor));
  OneWorker worker(coordinator.address());
  v1::Assignment assignment = OneRank("other", worker);
  assignment.set_plan_hash("00000000000000000000000000000000");
  coordinator.Give(assignment);
  ASSERT_OK_AND_ASSIGN(const v1::MemberStatus failed, coordinator.Await("other", v1::MEMBER_STATE_FAILED));
  EXPECT_THAT(failed.error(), AllOf(HasSubstr("00000000000000000000000000000000"), Not(HasSubstr("protocol version"))));
}

}  // namespace
}  // namespace shardmesh
