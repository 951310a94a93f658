// LocalHost: the members of a job as workers of this process, each with its LocalServer on a real UNIX socket, and
// Trainer, the other end of that socket. Tests only.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "local/memory/segment.h"
#include "local/socket/socket.h"
#include "local/testing/temp_folder.h"
#include "proto/convert.h"
#include "worker/doors/local_server.h"
#include "worker/node/testing/await.h"
#include "worker/process/worker.h"
#include "worker/testing/small_job.h"

namespace shardmesh {

constexpr char kJobSecret[] = "of the members alone";  // of assignments

// A host with `n` workers, each with its socket.
struct LocalHost {
  // `device_of`: the device of worker i, if any. `heartbeat_timeout`: a loaded machine is not a dead worker, and who
  // closes is seen at once anyway.
  explicit LocalHost(int n, const std::function<std::optional<WorkerDevice>(int i)>& device_of = {},
                     absl::Duration heartbeat_timeout = kLong) {
    for (int i = 0; i < n; ++i) {
      WorkerOptions options;
      options.name = absl::StrCat("w", i);
      options.heartbeat_timeout = heartbeat_timeout;
      options.prepare_timeout = kLong;
      options.transfer = [this](const v1::Peer& from, const v1::TransferRequest& request, const TransferSink& sink,
                                absl::Duration) { return Transfer(from, request, sink); };
      if (device_of) options.device = device_of(i);
      workers.push_back(std::make_unique<Worker>(options, NewProcessMemory()));
      servers.push_back(*LocalServer::Start(folder.File(absl::StrCat(i)), *workers[i], clock));
      paths.push_back(servers[i]->path());
    }
  }

  v1::Assignment AssignmentOf(const JobSpec& job, int rank, int64_t epoch = 3) const {
    v1::Assignment assignment;
    *assignment.mutable_spec() = ToProto(job);
    assignment.set_epoch(epoch);
    assignment.set_rank(rank);
    assignment.set_plan_hash(Plan::Create(job)->hash());
    assignment.set_secret(kJobSecret);
    for (size_t r = 0; r < workers.size(); ++r) {
      v1::Peer* peer = assignment.add_peers();
      peer->set_rank(static_cast<int>(r));
      peer->set_worker(absl::StrCat("w", r));
      peer->set_incarnation(100 + r);
      peer->set_local_socket(paths[r]);
      peer->set_pid(getpid());
    }
    return assignment;
  }

  // What worker `from` gives, as it would over gRPC.
  absl::StatusOr<v1::TransferHeader> Transfer(const v1::Peer& from, const v1::TransferRequest& request,
                                              const TransferSink& sink) const {
    for (const auto& worker : workers) {
      if (worker->options().name != from.worker()) continue;
      ASSIGN_OR_RETURN(std::shared_ptr<JobShard> held,
                       worker->FindHeld(request.job(), request.epoch(), request.secret()));
      ASSIGN_OR_RETURN(const auto source, TransferSource::Open(std::move(held), request));
      RETURN_IF_ERROR(sink.begin(source->Begin()));
      while (source->left() > 0) {
        std::string bytes(static_cast<size_t>(std::min<int64_t>(source->left(), 1000)), '\0');
        source->Read(bytes.data(), static_cast<int64_t>(bytes.size()));
        RETURN_IF_ERROR(sink.data(bytes));
      }
      return source->End();
    }
    return absl::UnavailableError("no such worker");
  }

  v1::MemberStatus StatusOf(int i) const {
    const std::vector<v1::MemberStatus> statuses = workers[i]->Statuses();
    return statuses.size() == 1 ? statuses[0] : v1::MemberStatus();
  }

  // Everybody is told, the lead last: peers must ask again.
  void Start(const JobSpec& job) {
    for (int i = static_cast<int>(workers.size()) - 1; i >= 0; --i) workers[i]->Reconcile({AssignmentOf(job, i)});
    for (size_t i = 0; i < workers.size(); ++i) {
      ASSERT_TRUE(Await([&] { return StatusOf(i).state() == v1::MEMBER_STATE_READY; })) << StatusOf(i).DebugString();
    }
  }

  void PlaceWeights() {
    for (auto& worker : workers) {
      std::shared_ptr<JobShard> shard = *worker->Find("small");
      const int64_t bytes = shard->plan().InitialShardBytes(shard->place().shard);
      ASSERT_OK(shard->run().engine.StageInitial(InitialShard(bytes / 4, 1.0f), 5));
    }
    ASSERT_OK((*workers[0]->Find("small"))->protocol().outcomes().AwaitCommit(Step(0), kLong));
  }

  absl::Status HealthOf(int i) const {
    absl::StatusOr<std::shared_ptr<JobShard>> shard = workers[i]->Find("small");
    return shard.ok() ? (*shard)->Health() : shard.status();
  }

  const testing::TempFolder folder;
  RealClock clock;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::unique_ptr<LocalServer>> servers;  // they use the workers
  std::vector<std::string> paths;
};

// A trainer's end of the socket protocol.
struct Trainer {
  static absl::StatusOr<Trainer> Attach(const std::string& path, const std::string& token) {
    ASSIGN_OR_RETURN(LocalSocket socket, LocalSocket::Connect(path));
    v1::LocalHello hello;
    hello.mutable_trainer()->set_token(token);
    RETURN_IF_ERROR(socket.Send(hello.SerializeAsString(), {}, kLong));
    ASSIGN_OR_RETURN(LocalMessage message, socket.Receive(kLong));
    v1::LocalWelcome welcome;
    if (!welcome.ParseFromString(message.bytes)) return absl::InternalError("no welcome");
    if (welcome.code() != 0) return absl::Status(static_cast<absl::StatusCode>(welcome.code()), welcome.message());
    Trainer trainer{std::move(socket), welcome, {}};
    for (int i = 0; i < welcome.segments_size(); ++i) {
      ASSIGN_OR_RETURN(Segment segment,
                       Segment::Map(std::move(message.descriptors[i]), welcome.segments(i).num_bytes(),
                                    welcome.segments(i).data_offset(),
                                    i == 0 ? Segment::Access::kReadOnly : Segment::Access::kReadWrite));
      trainer.segments.push_back(std::move(segment));
    }
    return trainer;
  }
  static absl::StatusOr<Trainer> Attach(LocalHost& host, int worker, std::vector<int> slots) {
    ASSIGN_OR_RETURN(auto shard, host.workers[worker]->Find("small"));
    ASSIGN_OR_RETURN(const std::string token, host.servers[worker]->Grant(shard, std::move(slots)));
    return Attach(host.paths[worker], token);
  }

  absl::Status Send(const v1::StepRequest& request) {
    v1::TrainerRequest message;
    *message.mutable_step() = request;
    return socket.Send(message.SerializeAsString(), {}, kLong);
  }
  absl::StatusOr<v1::StepReply> Reply() {
    while (true) {
      ASSIGN_OR_RETURN(LocalMessage message, socket.Receive(kLong));
      v1::TrainerReply reply;
      if (!reply.ParseFromString(message.bytes)) return absl::InternalError("no reply");
      if (reply.alive()) continue;
      if (reply.code() != 0) return absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.message());
      return reply.step();
    }
  }
  absl::StatusOr<v1::StepReply> Step(const v1::StepRequest& request) {
    RETURN_IF_ERROR(Send(request));
    return Reply();
  }

  LocalSocket socket;
  v1::LocalWelcome welcome;
  std::vector<Segment> segments;  // the window, then a gradient window for each slot
};

inline v1::StepRequest Request(std::vector<int> slots, int64_t step) {
  v1::StepRequest request;
  request.set_epoch(3);
  request.set_step(step);
  for (int slot : slots) request.add_slots(slot);
  return request;
}

}  // namespace shardmesh
