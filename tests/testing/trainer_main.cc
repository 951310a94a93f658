// test_trainer COORDINATOR JOB LAST_STEP create[:MESH]|attach[-device]|connect|pull[-connected]|delete SLOT...: a trainer as a process, so
// that a test can kill it or put it on another host. Its gradients are those of training.h; TLS files as
// TlsOfEnvironment() says.
//   create   makes OddJob(JOB, "fsdp=2", 2), gives it its weights, then goes on as connect; create:MESH: on that mesh
//   attach   through shared memory; attach-device: through that of a CUDA device; connect: through gRPC
//   pull     of a job with pulled slots, through shared memory: whichever slots are open. Each takes a moment, and with
//            bucket residency uses all buckets, one after the other, the last one for as long.
//            pull-connected: through gRPC
//   delete   deletes JOB, and nothing else
// Prints "step N" after each step, at the end "digest HEX"; when it pulls "late for slot S of step N: REASON" instead
// of the steps, where another trainer came first; status 1 and the error when there is one. After each step of its own
// slots it rests for SHARDMESH_TEST_REST_MS milliseconds; unset: not at all.
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "core/base/status.h"
#include "tests/testing/system/process.h"
#include "tests/testing/training/training.h"

namespace shardmesh::testing {
namespace {

struct Arguments {
  std::string coordinator, job;
  int64_t last = 0;
  std::string way;
  std::vector<Slot> slots;
};

absl::StatusOr<std::shared_ptr<Job>> FindJob(Client& client, const Arguments& arguments) {
  absl::string_view mesh = arguments.way;
  if (!absl::ConsumePrefix(&mesh, "create")) return client.OpenJob(arguments.job);
  if (!absl::ConsumePrefix(&mesh, ":")) mesh = "fsdp=2";
  ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client.CreateJob(OddJob(arguments.job, std::string(mesh), 2)));
  RETURN_IF_ERROR(Initialize(*job));
  return job;
}

constexpr absl::Duration kComputes = absl::Milliseconds(3);
constexpr absl::Duration kLong = absl::Seconds(60);

absl::Status PullOne(PullingSession& session) {
  ASSIGN_OR_RETURN(const PullingSession::Work work, session.Take(kLong));
  if (!work.slot.has_value()) return absl::OkStatus();
  for (int b = 0; b < static_cast<int>(session.job().plan().buckets().size()); ++b) {
    if (b > 0) RETURN_IF_ERROR(session.Release(b - 1));
    RETURN_IF_ERROR(session.Acquire(b, kLong));
  }
  const int last = static_cast<int>(session.job().plan().buckets().size()) - 1;
  ASSIGN_OR_RETURN(const FinishOptions options, WriteTaken(session, work));
  Pause(kComputes);
  RETURN_IF_ERROR(session.Release(last));
  const absl::StatusOr<SlotResult> result = session.Finish(options);
  if (result.ok() && *result == SlotResult::kAccepted) return absl::OkStatus();
  if (!result.ok() && !absl::IsAborted(result.status())) return result.status();
  std::cout << "late for slot " << work.slot->value() << " of step " << work.step.value() << ": "
            << (result.ok() ? "second result" : result.status().message()) << std::endl;
  return absl::OkStatus();
}

absl::Status Train(Job& job, const Arguments& arguments) {
  const bool connected = arguments.way == "pull-connected";
  if (arguments.way == "pull" || connected) {
    ASSIGN_OR_RETURN(const auto session, connected ? job.ConnectPulling() : job.AttachPulling());
    RETURN_IF_ERROR(session->AwaitWeights(kLong));
    while (session->committed_step().value() < arguments.last) RETURN_IF_ERROR(PullOne(*session));
    return absl::OkStatus();
  }
  const bool attach = absl::StartsWith(arguments.way, "attach");
  ASSIGN_OR_RETURN(const auto session, attach ? job.Attach(arguments.slots) : job.Connect(arguments.slots));
  RETURN_IF_ERROR(session->AwaitWeights(absl::Seconds(20)));
  while (session->committed_step().value() < arguments.last) {
    RETURN_IF_ERROR(TrainTo(*session, session->committed_step().value() + 1));
    std::cout << "step " << session->committed_step().value() << std::endl;
    Pause(absl::Milliseconds(NumberOfEnvironment("SHARDMESH_TEST_REST_MS", 0)));
  }
  return absl::OkStatus();
}

absl::Status Run(const Arguments& arguments) {
  ClientOptions options = TlsOfEnvironment();
  options.device_windows = arguments.way == "attach-device";
  ASSIGN_OR_RETURN(Client client, Client::Connect(arguments.coordinator, options));
  if (arguments.way == "delete") return Delete(client, arguments.job);
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, FindJob(client, arguments));
  RETURN_IF_ERROR(Train(*job, arguments));
  ASSIGN_OR_RETURN(const v1::DigestReply digest, job->Digest(absl::Seconds(20)));
  std::cout << "digest " << std::hex << digest.digest() << std::endl;
  return absl::OkStatus();
}

}  // namespace
}  // namespace shardmesh::testing

int main(int argc, char** argv) {
  if (argc < 5) {
    std::cerr << "usage: test_trainer COORDINATOR JOB LAST_STEP create|attach[-device]|connect|pull[-connected]|delete "
                 "SLOT...\n";
    return 2;
  }
  shardmesh::testing::Arguments arguments{argv[1], argv[2], std::atoll(argv[3]), argv[4], {}};
  for (int i = 5; i < argc; ++i) arguments.slots.push_back(shardmesh::Slot(std::atoi(argv[i])));
  const absl::Status status = shardmesh::testing::Run(arguments);
  if (!status.ok()) std::cout << status << std::endl;
  return status.ok() ? 0 : 1;
}
