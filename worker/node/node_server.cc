#include "worker/node/node_server.h"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/descriptor/descriptor_error.h"
#include "local/memory/futex.h"
#include "local/process/process_end.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSendTimeout = absl::Seconds(1);  // an answer fits the socket of a worker that waits for it
constexpr int kPollMs = 1000;                              // ends are seen at once; this bounds every wait
constexpr int kMaxRefused = 64;  // that have not asked yet; more are closed without an answer
constexpr int kNoDescriptorMs = 100;

bool Ready(int fd, short events) {
  pollfd entry = {fd, events, 0};
  return poll(&entry, 1, 0) == 1;
}

// Leaves the child to be reaped by its owner.
std::optional<int> WaitStatus(int pidfd) {
  siginfo_t info = {};
  if (waitid(P_PIDFD, pidfd, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return std::nullopt;
  return info.si_code == CLD_EXITED ? W_EXITCODE(info.si_status, 0) : info.si_status;
}

absl::Status SendReply(LocalSocket& socket, const absl::StatusOr<v1::NodeReply>& answer, int fd) {
  v1::NodeReply reply;
  if (answer.ok()) reply = *answer;
  reply.set_code(static_cast<int>(answer.status().code()));
  reply.set_message(std::string(answer.status().message().substr(0, 4096)));
  // Never empty: a message of no bytes is the end of a connection. Done is code 0, which is not written.
  std::string bytes = reply.SerializeAsString();
  if (bytes.empty()) bytes = std::string("\x08\x00", 2);
  const std::vector<int> descriptors = fd < 0 ? std::vector<int>() : std::vector<int>{fd};
  return socket.Send(bytes, descriptors, kSendTimeout);
}

}  // namespace

absl::StatusOr<std::unique_ptr<NodeServer>> NodeServer::Start(const std::string& path, NodeEvents events) {
  ASSIGN_OR_RETURN(LocalListener listener, LocalListener::Listen(path));
  UniqueFd wake(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake.valid()) return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", DescriptorError(errno)));
  return std::unique_ptr<NodeServer>(new NodeServer(std::move(listener), std::move(wake), std::move(events)));
}

NodeServer::NodeServer(LocalListener listener, UniqueFd wake, NodeEvents events)
    : events_(std::move(events)), listener_(std::move(listener)), wake_(std::move(wake)) {
  thread_ = std::thread([this] { Loop(); });
}

NodeServer::~NodeServer() {
  stop_.store(true);
  Wake();
  thread_.join();
}

void NodeServer::Wake() {
  const uint64_t one = 1;
  if (write(wake_.get(), &one, sizeof(one)) < 0) return;  // full: it is awake
}

absl::Status NodeServer::Watch(const std::string& worker, pid_t pid) {
  {
    MutexLock lock(mu_);
    Watched& watched = watched_[pid];
    if (!watched.pidfd.valid()) watched.pidfd = OpenProcess(pid);
    if (!watched.pidfd.valid()) {
      const int error = errno;
      watched_.erase(pid);
      return absl::ResourceExhaustedError(absl::StrCat("cannot watch process ", pid, ": ", strerror(error)));
    }
    watched.workers.insert(worker);
  }
  Wake();
  return absl::OkStatus();
}

void NodeServer::Signal(pid_t pid, int signal) {
  MutexLock lock(mu_);
  const auto it = watched_.find(pid);
  if (it != watched_.end()) syscall(SYS_pidfd_send_signal, it->second.pidfd.get(), signal, nullptr, 0);
}

void NodeServer::Loop() {
  while (!stop_.load()) {
    AwaitWork();
    TellEnds();
    reachable_.Look(MonotonicNow());
    AcceptOne();
    for (Connection& connection : connections_) {
      if (!connection.over && Ready(connection.socket.fd(), POLLIN)) AnswerOne(connection);
    }
    connections_.remove_if([](const Connection& connection) { return connection.over; });
  }
}

// Until there is something to do, or for a while.
void NodeServer::AwaitWork() {
  std::vector<pollfd> entries = {{wake_.get(), POLLIN, 0}};
  if (accepts_) entries.push_back({listener_.fd(), POLLIN, 0});
  for (const Connection& connection : connections_) entries.push_back({connection.socket.fd(), POLLIN, 0});
  {
    MutexLock lock(mu_);
    for (const auto& [pid, watched] : watched_) entries.push_back({watched.pidfd.get(), POLLIN, 0});
  }
  poll(entries.data(), entries.size(), accepts_ ? kPollMs : kNoDescriptorMs);
  accepts_ = true;
  uint64_t ignored;
  if (read(wake_.get(), &ignored, sizeof(ignored)) < 0) return;  // nobody woke it
}

void NodeServer::AcceptOne() {
  absl::StatusOr<LocalSocket> socket = listener_.Accept(absl::ZeroDuration());
  if (absl::IsDeadlineExceeded(socket.status())) return;
  if (!socket.ok()) {
    accepts_ = false;
    return;
  }
  const auto peer = socket->Peer();
  absl::Status refused;
  if (!peer.ok() || (peer->first != geteuid() && peer->first != 0)) {
    refused = absl::PermissionDeniedError(absl::StrCat("user ", peer.ok() ? static_cast<int>(peer->first) : -1,
                                                       " may not ask a node of user ", geteuid()));
  } else if (peer->second <= 0) {
    refused =
        absl::PermissionDeniedError("the node cannot see this process; start both in one namespace of process numbers");
  } else if (connections_.size() >= kMaxNodeConnections) {
    refused = absl::ResourceExhaustedError(absl::StrCat("the node has ", kMaxNodeConnections, " connections"));
  }
  const auto waits_for_refusal = [](const Connection& connection) { return !connection.refused.ok(); };
  if (!refused.ok() && std::count_if(connections_.begin(), connections_.end(), waits_for_refusal) >= kMaxRefused) return;
  connections_.push_back({*std::move(socket), peer.ok() ? peer->second : 0, "", refused});
}

void NodeServer::TellEnds() {
  std::map<pid_t, Watched> ended;
  {
    MutexLock lock(mu_);
    for (auto it = watched_.begin(); it != watched_.end();) {
      const auto next = std::next(it);
      if (Ready(it->second.pidfd.get(), POLLIN)) ended.insert(watched_.extract(it));
      it = next;
    }
  }
  for (const auto& [pid, watched] : ended) TellEnd(pid, watched);
}

void NodeServer::TellEnd(pid_t pid, const Watched& watched) {
  // What it still asked must not be taken for a request of its next incarnation.
  for (Connection& connection : connections_) connection.over = connection.over || connection.pid == pid;
  const std::optional<int> status = WaitStatus(watched.pidfd.get());
  for (const std::string& worker : watched.workers) {
    const WorkerEnd end = {worker, pid, status, store_.Served(worker, pid), store_.HeartbeatTimeout(worker)};
    store_.Ended(worker, pid, status == 0, MonotonicNanos());
    events_.ended(end);
  }
}

void NodeServer::AnswerOne(Connection& connection) {
  absl::StatusOr<LocalMessage> message = connection.socket.Receive(absl::ZeroDuration());
  if (absl::IsDeadlineExceeded(message.status())) return;
  if (absl::IsUnavailable(message.status())) {
    connection.over = true;
    return;
  }
  int reply_fd = -1;
  absl::StatusOr<v1::NodeReply> answer;
  v1::NodeRequest request;
  if (!connection.refused.ok()) {
    answer = connection.refused;
  } else if (!message.ok()) {
    answer =
        absl::ResourceExhaustedError(absl::StrCat("the node could not take the request (", message.status().message(),
                                                  ") or has no descriptor left; raise its limit of open files"));
  } else if (!request.ParseFromString(message->bytes)) {
    answer = absl::InvalidArgumentError("the message is no NodeRequest; run one build of shardmesh everywhere");
  } else {
    answer = Answer(connection, request, std::move(message->descriptors), reply_fd);
  }
  if (!SendReply(connection.socket, answer, reply_fd).ok() || !connection.refused.ok()) connection.over = true;
}

absl::StatusOr<v1::NodeReply> NodeServer::Answer(Connection& connection, const v1::NodeRequest& request,
                                                 std::vector<UniqueFd> descriptors, int& reply_fd) {
  v1::NodeReply reply;
  switch (request.what_case()) {
    case v1::NodeRequest::kHello:
      return AnswerHello(connection, request.hello());
    case v1::NodeRequest::kServing:
      RETURN_IF_ERROR(store_.Serving(connection.worker, request.serving()));
      return reply;
    case v1::NodeRequest::kKeep:
      RETURN_IF_ERROR(store_.Keep(connection.worker, request.keep(),
                                  descriptors.empty() ? UniqueFd() : std::move(descriptors.front())));
      return reply;
    case v1::NodeRequest::kFind: {
      ASSIGN_OR_RETURN(const NodeStore::Found found, store_.Find(connection.worker, request.find()));
      reply.set_num_bytes(found.num_bytes);
      reply.set_data_offset(found.data_offset);
      reply_fd = found.fd;
      return reply;
    }
    case v1::NodeRequest::kWhole:
      RETURN_IF_ERROR(store_.Whole(connection.worker, request.whole()));
      return reply;
    case v1::NodeRequest::kDrop:
      RETURN_IF_ERROR(store_.Drop(connection.worker, request.drop()));
      return reply;
    case v1::NodeRequest::WHAT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("the request asks for nothing; run one build of shardmesh everywhere");
}

absl::StatusOr<v1::NodeReply> NodeServer::AnswerHello(Connection& connection, const v1::NodeHello& hello) {
  TellEnds();  // the worker's last incarnation may be over this very moment
  RETURN_IF_ERROR(Watch(hello.worker(), connection.pid));
  if (Ready(connection.socket.fd(), POLLRDHUP)) {  // the number was the peer's as long as it held its end
    return absl::UnavailableError(absl::StrCat("process ", connection.pid, " hung up"));
  }
  ASSIGN_OR_RETURN(v1::NodeReply reply, store_.Hello(hello, connection.pid));
  for (Connection& other : connections_) {
    other.over = other.over || (&other != &connection && other.worker == hello.worker());
  }
  connection.worker = hello.worker();
  spdlog::info("event=worker_came worker={} pid={} incarnation={} last_incarnation={} whole_jobs={}", hello.worker(),
               connection.pid, reply.incarnation(), reply.last_incarnation(), reply.jobs_size());
  events_.came(hello.worker(), connection.pid);
  return reply;
}

}  // namespace shardmesh
