#include "worker/node/node.h"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "rpc/base/main_support.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLookAgain = absl::Seconds(1);  // ends and stops are told; this bounds every wait
constexpr absl::Duration kDieTimeout = absl::Seconds(10);
constexpr int kWaitsInTimeout =
    6;  // before restarts, at the longest: the coordinator must hear of an incarnation in between

absl::Status CheckRunnable(const std::string& program) {
  if (access(program.c_str(), X_OK) == 0) return absl::OkStatus();
  const std::string message =
      absl::StrCat("cannot run the worker ", program, ": ", strerror(errno), "; say where it is with --worker-binary");
  return errno == EACCES ? absl::PermissionDeniedError(message) : absl::NotFoundError(message);
}

// "signal KILL", "status 3".
std::string EndWords(const std::optional<int>& wait_status) {
  return wait_status.has_value() ? EndText(*wait_status) : "status unknown";
}

// A node that stops removes its socket.
bool WasLeftBehind(const std::string& socket) {
  struct stat info;
  return lstat(socket.c_str(), &info) == 0 && S_ISSOCK(info.st_mode);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Node>> Node::Start(NodeOptions options, std::function<void()> all_left) {
  RETURN_IF_ERROR(CheckRunnable(options.worker_binary));
  const absl::Duration wait = WasLeftBehind(options.socket) ? kAdopt : absl::ZeroDuration();
  std::unique_ptr<Node> node(new Node(std::move(options), std::move(all_left)));
  NodeEvents events;
  events.came = [node = node.get()](const std::string& worker, pid_t pid) { node->Came(worker, pid); };
  events.ended = [node = node.get()](const WorkerEnd& end) { node->Ended(end); };
  ASSIGN_OR_RETURN(node->node_, NodeServer::Start(node->options_.socket, std::move(events)));
  if (node->options_.listening) node->options_.listening();
  {
    MutexLock lock(node->mu_);
    for (Slot& slot : node->slots_) slot.again = MonotonicNow() + wait;
  }
  node->thread_ = std::thread([node = node.get()] { node->Supervise(); });
  return node;
}

Node::Node(NodeOptions options, std::function<void()> all_left)
    : options_(std::move(options)), all_left_(std::move(all_left)) {
  for (int i = 0; i < options_.num_workers; ++i) {
    Slot& slot = slots_.emplace_back();
    slot.again = absl::InfiniteFuture();
    slot.options.name = absl::StrCat(options_.prefix, "-", i);
    slot.options.program = options_.worker_binary;
    slot.options.args = {"--name", slot.options.name, "--node", options_.socket};
    slot.options.args.insert(slot.options.args.end(), options_.worker_args.begin(), options_.worker_args.end());
    std::vector<std::string>& args = slot.options.args;
    if (!options_.address_dir.empty()) {
      args.insert(args.end(), {"--address-file", absl::StrCat(options_.address_dir, "/", slot.options.name)});
    }
    if (!options_.devices.empty()) {
      args.insert(args.end(), {"--device", options_.devices[i % options_.devices.size()]});
    }
    if (!options_.log_dir.empty())
      slot.options.log_file = absl::StrCat(options_.log_dir, "/", slot.options.name, ".log");
    slot.options.outlives_parent = true;
  }
}

Node::~Node() {
  Stop();
  node_.reset();  // its threads call this object
}

void Node::Supervise() {
  MutexLock lock(mu_);
  while (!stop_) {
    const absl::Time now = MonotonicNow();
    absl::Time next = now + kLookAgain;
    for (Slot& slot : slots_) {
      if (slot.pid != 0 || slot.left) continue;
      if (slot.again <= now) StartLocked(slot, now);
      if (slot.pid == 0) next = std::min(next, slot.again);
    }
    changed_.WaitFor(mu_, next - now);
  }
}

void Node::StartLocked(Slot& slot, absl::Time now) {
  slot.started = now;
  absl::StatusOr<std::unique_ptr<ChildProcess>> child = ChildProcess::Start(slot.options);
  absl::Status status = child.status();
  if (status.ok()) {
    status = node_->Watch(slot.options.name, (*child)->pid());
    if (!status.ok()) {  // its end would not be seen
      (*child)->Signal(SIGKILL);
      pollfd ended = {(*child)->pidfd(), POLLIN, 0};
      poll(&ended, 1, static_cast<int>(absl::ToInt64Milliseconds(kDieTimeout)));
      (*child)->Ended();
    }
  }
  if (!status.ok()) {
    slot.again = now + slot.restarts.WaitAfter(absl::ZeroDuration());
    spdlog::error("event=worker_not_started worker={} error={}", slot.options.name, Quoted(status.ToString()));
    return;
  }
  slot.child = *std::move(child);
  slot.pid = slot.child->pid();
  spdlog::info("event={} worker={} pid={}", slot.lived ? "worker_restarted" : "worker_started", slot.options.name,
               slot.pid);
  slot.lived = true;
  Tell(absl::StrCat("started ", slot.options.name, " pid ", slot.pid));
}

void Node::Tell(const std::string& line) const {
  if (options_.events_file.empty()) return;
  std::ofstream file(options_.events_file, std::ios::app);
  file << line + "\n" << std::flush;  // one write
  if (!file.good()) spdlog::error("event=not_told file={} line={}", options_.events_file, Quoted(line));
}

Node::Slot* Node::SlotLocked(const std::string& worker) {
  for (Slot& slot : slots_) {
    if (slot.options.name == worker) return &slot;
  }
  return nullptr;  // it was started by somebody else, with this node
}

void Node::Came(const std::string& worker, pid_t pid) {
  MutexLock lock(mu_);
  Slot* const slot = SlotLocked(worker);
  if (slot == nullptr || slot->pid == pid) return;
  if (slot->pid != 0) {
    slot->other = pid;
    return;
  }
  slot->pid = pid;
  slot->started = MonotonicNow();
  slot->lived = true;
  slot->left = false;
  spdlog::info("event=worker_adopted worker={} pid={}", worker, pid);
  if (stop_) node_->Signal(pid, SIGTERM);
}

void Node::Ended(const WorkerEnd& end) {
  bool all_left = true;
  {
    MutexLock lock(mu_);
    Slot* const slot = SlotLocked(end.worker);
    if (slot == nullptr) return;
    if (slot->other == end.pid) slot->other = 0;
    if (slot->pid != end.pid) return;
    EndSlotLocked(*slot, end);
    for (const Slot& other : slots_) all_left = all_left && other.left;
  }
  changed_.SignalAll();
  if (!all_left) return;
  spdlog::info("event=all_workers_left");
  if (all_left_) all_left_();
}

void Node::EndSlotLocked(Slot& slot, const WorkerEnd& end) {
  const absl::Time now = MonotonicNow();
  if (slot.child != nullptr) slot.child->Ended();  // reaps it
  slot.child = nullptr;
  slot.pid = std::exchange(slot.other, 0);
  slot.left = slot.pid == 0 && end.wait_status == 0;
  // An incarnation that served did what a long one does. What an earlier one left is lost when the coordinator gives it
  // up.
  const absl::Duration longest =
      end.heartbeat_timeout > absl::ZeroDuration() ? end.heartbeat_timeout / kWaitsInTimeout : absl::InfiniteDuration();
  const absl::Duration wait =
      slot.restarts.WaitAfter(end.served ? absl::InfiniteDuration() : now - slot.started, longest);
  slot.again = now + wait;
  const std::string next = slot.left || stop_ ? "none"
                           : slot.pid != 0    ? absl::StrCat("pid-", slot.pid)
                                              : absl::StrCat(absl::ToInt64Milliseconds(wait));
  spdlog::warn("event=worker_ended worker={} pid={} {} served={} restart_ms={}", end.worker, end.pid,
               absl::StrReplaceAll(EndWords(end.wait_status), {{" ", "="}}), end.served, next);
  Tell(absl::StrCat("ended ", end.worker, " pid ", end.pid, " ", EndWords(end.wait_status)));
}

void Node::SignalAll(int signal) {
  MutexLock lock(mu_);
  for (const Slot& slot : slots_) {
    if (slot.pid != 0) node_->Signal(slot.pid, signal);
    if (slot.other != 0) node_->Signal(slot.other, signal);
  }
}

bool Node::AwaitNone(absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  const auto runs = [](const Slot& slot) { return slot.pid != 0; };
  MutexLock lock(mu_);
  while (std::any_of(slots_.begin(), slots_.end(), runs) && MonotonicNow() < deadline) {
    changed_.WaitFor(mu_, deadline - MonotonicNow());
  }
  return std::none_of(slots_.begin(), slots_.end(), runs);
}

void Node::Stop() {
  if (!thread_.joinable()) return;  // stopped, or never started
  {
    MutexLock lock(mu_);
    stop_ = true;
  }
  changed_.SignalAll();
  thread_.join();
  SignalAll(SIGTERM);
  if (!AwaitNone(options_.stop_grace)) {
    spdlog::warn("event=workers_killed grace=\"{}\"", absl::FormatDuration(options_.stop_grace));
    SignalAll(SIGKILL);
    AwaitNone(kDieTimeout);
  }
}

}  // namespace shardmesh
