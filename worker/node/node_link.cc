#include "worker/node/node_link.h"

#include <fcntl.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/base/sync.h"
#include "local/descriptor/descriptor_error.h"
#include "worker/node/node_line.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kAskAgain = absl::Milliseconds(100);
constexpr absl::Duration kLookAgain = absl::Seconds(1);  // a hang-up is seen at once; this bounds the wait

// What a node is to know, in the order in which one that comes back is told.
enum class Kind { kDrop, kServing, kSegment, kWhole };
using GiftKey = std::tuple<Kind, std::string, int64_t, std::string>;  // job, epoch, name

struct Gift {
  uint64_t id = 0;
  v1::NodeRequest request;
  std::shared_ptr<const UniqueFd> fd;  // of a segment
};

v1::RetainedJob OwnerOf(const std::string& job, int64_t epoch) {
  v1::RetainedJob owner;
  owner.set_job(job);
  owner.set_epoch(epoch);
  return owner;
}

NodeLink::Left LeftOf(const v1::NodeReply& reply) {
  NodeLink::Left left;
  left.incarnation = reply.last_incarnation();
  left.address = reply.last_serving().address();
  left.local_socket = reply.last_serving().local_socket();
  left.away_since_nanos = reply.away_since_nanos();
  for (const v1::RetainedJob& job : reply.jobs())
    left.jobs.push_back({job.job(), job.epoch(), job.rank(), job.plan_hash()});
  return left;
}

struct Greeted {
  NodeLine line;
  v1::NodeReply reply;
};

absl::StatusOr<Greeted> Greet(const std::string& path, const v1::NodeHello& hello) {
  ASSIGN_OR_RETURN(NodeLine line, NodeLine::Connect(path));
  v1::NodeRequest request;
  *request.mutable_hello() = hello;
  ASSIGN_OR_RETURN(NodeLine::Answer answer, line.Ask(request, -1, MonotonicNow() + kNodeTimeout));
  return Greeted{std::move(line), std::move(answer.reply)};
}

class SocketNodeLink final : public NodeLink {
 public:
  SocketNodeLink(std::string path, v1::NodeHello hello, std::function<void()> changed, Greeted greeted, UniqueFd wake)
      : path_(std::move(path)),
        hello_(Granted(std::move(hello), greeted.reply)),
        left_(LeftOf(greeted.reply)),
        wake_(std::move(wake)),
        line_(std::make_unique<NodeLine>(std::move(greeted.line))),
        changed_(std::move(changed)) {
    thread_ = std::thread([this] { Loop(); });
  }

  ~SocketNodeLink() override {
    stop_.store(true);
    const uint64_t one = 1;
    if (write(wake_.get(), &one, sizeof(one)) < 0) spdlog::debug("event=node_link_not_woken");
    thread_.join();
  }

  const Left& left() const override { return left_; }
  int64_t incarnation() const override { return hello_.incarnation(); }

  bool connected() const override {
    MutexLock lock(mu_);
    return connected_;
  }

  void OnChange(std::function<void()> changed) override {
    MutexLock lock(callback_mu_);
    changed_ = std::move(changed);
  }

  absl::Status Serve(const std::string& address, const std::string& local_socket) override {
    Gift gift;
    gift.request.mutable_serving()->set_address(address);
    gift.request.mutable_serving()->set_local_socket(local_socket);
    return Give(ServingKey(), std::move(gift));
  }

  absl::Status Joined(int64_t incarnation, absl::Duration heartbeat_timeout) override {
    Gift gift;
    {
      MutexLock lock(mu_);
      if (const auto serving = gifts_.find(ServingKey()); serving != gifts_.end()) gift = serving->second;
    }
    gift.request.mutable_serving()->set_incarnation(incarnation);
    gift.request.mutable_serving()->set_heartbeat_timeout_ms(absl::ToInt64Milliseconds(heartbeat_timeout));
    return Give(ServingKey(), std::move(gift));
  }

  absl::Status Keep(const std::string& job, int64_t epoch, const std::string& name, const Segment& segment) override {
    Gift gift;
    gift.fd = std::make_shared<const UniqueFd>(fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0));
    if (!gift.fd->valid()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("a second descriptor of segment ", name, ": ", DescriptorError(errno)));
    }
    v1::RetainSegment& keep = *gift.request.mutable_keep();
    *keep.mutable_owner() = OwnerOf(job, epoch);
    keep.set_name(name);
    keep.set_num_bytes(segment.num_bytes());
    keep.set_data_offset(segment.data_offset());
    return Give({Kind::kSegment, job, epoch, name}, std::move(gift));
  }

  absl::StatusOr<Segment> Find(const std::string& job, int64_t epoch, const std::string& name) override {
    v1::NodeRequest request;
    *request.mutable_find()->mutable_owner() = OwnerOf(job, epoch);
    request.mutable_find()->set_name(name);
    const absl::Time deadline = MonotonicNow() + kNodeTimeout;
    RETURN_IF_ERROR(TakeLine(deadline));
    absl::StatusOr<NodeLine::Answer> answer = line_->Ask(request, -1, deadline);
    ReturnLine();
    RETURN_IF_ERROR(answer.status());
    if (answer->descriptors.empty()) {
      return absl::UnavailableError(absl::StrCat("segment ", name, " of ", job, "@", epoch,
                                                 " came without a descriptor: this process has none left"));
    }
    return Segment::Map(std::move(answer->descriptors.front()), answer->reply.num_bytes(), answer->reply.data_offset(),
                        Segment::Access::kReadWrite);
  }

  absl::Status Whole(const RetainedJob& job) override {
    Gift gift;
    v1::RetainedJob& whole = *gift.request.mutable_whole();
    whole = OwnerOf(job.job, job.epoch);
    whole.set_rank(job.rank);
    whole.set_plan_hash(job.plan_hash);
    return Give({Kind::kWhole, job.job, job.epoch, ""}, std::move(gift));
  }

  void Drop(const std::string& job, int64_t epoch) override {
    Gift gift;
    gift.request.mutable_drop()->set_job(job);
    gift.request.mutable_drop()->set_epoch(epoch);
    {
      MutexLock lock(mu_);
      ForgetLocked({Kind::kWhole, job, epoch, ""});
      auto it = gifts_.lower_bound({Kind::kSegment, job, epoch, ""});
      while (it != gifts_.end() && IsSegmentOf(it->first, job, epoch)) {
        untold_.erase(it->first);
        it = gifts_.erase(it);
      }
    }
    const absl::Status told = Give({Kind::kDrop, job, epoch, ""}, std::move(gift));
    if (!told.ok()) spdlog::debug("event=node_drop_later job={} error=\"{}\"", job, told.ToString());
  }

 private:
  static GiftKey ServingKey() { return {Kind::kServing, "", 0, ""}; }

  // As which the node is greeted from now on, also one that comes in its place.
  static v1::NodeHello Granted(v1::NodeHello hello, const v1::NodeReply& reply) {
    if (reply.incarnation() > 0) hello.set_incarnation(reply.incarnation());
    return hello;
  }
  static bool IsSegmentOf(const GiftKey& key, const std::string& job, int64_t epoch) {
    return std::get<0>(key) == Kind::kSegment && std::get<1>(key) == job && std::get<2>(key) == epoch;
  }

  void ForgetLocked(const GiftKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    gifts_.erase(key);
    untold_.erase(key);
  }

  // Remembers the gift, and tells the node of it now or, with Unavailable, when it is back.
  absl::Status Give(const GiftKey& key, Gift gift) {
    const absl::Time deadline = MonotonicNow() + kNodeTimeout;
    uint64_t id;
    {
      MutexLock lock(mu_);
      id = gift.id = ++last_id_;
      gifts_[key] = std::move(gift);
      untold_.insert(key);
    }
    RETURN_IF_ERROR(TakeLine(deadline));
    const absl::Status told = Tell(key, id, deadline);
    ReturnLine();
    return told;
  }

  // REQUIRES: the caller has the line.
  absl::Status Tell(const GiftKey& key, uint64_t id, absl::Time deadline) {
    Gift gift;
    {
      MutexLock lock(mu_);
      const auto it = gifts_.find(key);
      if (it == gifts_.end() || it->second.id != id) return absl::AbortedError("dropped or given anew meanwhile");
      gift = it->second;
    }
    const absl::Status told = line_->Ask(gift.request, gift.fd == nullptr ? -1 : gift.fd->get(), deadline).status();
    if (absl::IsUnavailable(told)) return told;
    MutexLock lock(mu_);
    const auto it = gifts_.find(key);
    if (it == gifts_.end() || it->second.id != id) return told;
    untold_.erase(key);
    const auto& [kind, job, epoch, name] = key;
    // A job of which the node refused a part is not whole.
    if (!told.ok() && kind == Kind::kSegment) ForgetLocked({Kind::kWhole, job, epoch, ""});
    if (!told.ok() || kind == Kind::kDrop) gifts_.erase(it);
    return told;
  }

  // For this thread to ask. Unavailable: not connected, or others asked until the deadline.
  absl::Status TakeLine(absl::Time deadline) {
    MutexLock lock(mu_);
    while (connected_ && taken_ && MonotonicNow() < deadline) free_.WaitFor(mu_, deadline - MonotonicNow());
    if (!connected_) {
      return absl::UnavailableError(absl::StrCat("not connected to the node at ", path_, "; it is asked again"));
    }
    if (taken_) {
      line_->HangUp();  // what was not told is told to the next one
      return absl::UnavailableError(absl::StrCat("the node at ", path_, " is too slow"));
    }
    taken_ = true;
    return absl::OkStatus();
  }

  void ReturnLine() {
    {
      MutexLock lock(mu_);
      taken_ = false;
    }
    free_.SignalAll();
  }

  void Loop() {
    while (!stop_.load()) {
      if (!line_->AwaitEnd(wake_.get(), kLookAgain) || stop_.load()) continue;
      {
        MutexLock lock(mu_);
        connected_ = false;
      }
      free_.SignalAll();
      spdlog::warn("event=node_gone worker={} socket={}", hello_.worker(), path_);
      Changed();
      absl::StatusCode last = absl::StatusCode::kUnavailable;
      absl::Status back = Reconnect();
      while (!back.ok() && !stop_.load()) {
        if (std::exchange(last, back.code()) != back.code()) {
          spdlog::warn("event=node_error worker={} error=\"{}\"", hello_.worker(), back.ToString());
        }
        pollfd wake = {wake_.get(), POLLIN, 0};
        poll(&wake, 1, static_cast<int>(absl::ToInt64Milliseconds(kAskAgain)));
        back = Reconnect();
      }
      if (!back.ok()) return;
      spdlog::info("event=node_back worker={} socket={}", hello_.worker(), path_);
      Changed();
    }
  }

  void Changed() {
    MutexLock lock(callback_mu_);
    if (changed_) changed_();
  }

  // A new line, over which the node has been told everything.
  absl::Status Reconnect() {
    ASSIGN_OR_RETURN(Greeted greeted, Greet(path_, hello_));
    {
      MutexLock lock(mu_);
      const absl::Time deadline = MonotonicNow() + 2 * kNodeTimeout;  // whoever has the line fails soon: it is hung up
      while (taken_ && MonotonicNow() < deadline) free_.WaitFor(mu_, deadline - MonotonicNow());
      if (taken_) return absl::DeadlineExceededError("a call over the old connection does not end");
      line_ = std::make_unique<NodeLine>(std::move(greeted.line));
      for (const auto& [key, gift] : gifts_) untold_.insert(key);
    }
    while (!stop_.load()) {
      const std::optional<std::pair<GiftKey, uint64_t>> next = NextUntold();
      if (!next.has_value()) return absl::OkStatus();
      const absl::Status told = Tell(next->first, next->second, MonotonicNow() + kNodeTimeout);
      if (absl::IsUnavailable(told)) return told;
      if (!told.ok() && !absl::IsAborted(told)) {
        spdlog::warn("event=node_refused worker={} job={} name={} error=\"{}\"", hello_.worker(),
                     std::get<1>(next->first), std::get<3>(next->first), told.ToString());
      }
    }
    return absl::CancelledError("the link is closed");
  }

  // None: the link is connected from now on.
  std::optional<std::pair<GiftKey, uint64_t>> NextUntold() {
    MutexLock lock(mu_);
    if (!untold_.empty()) return std::make_pair(*untold_.begin(), gifts_[*untold_.begin()].id);
    connected_ = true;
    return std::nullopt;
  }

  const std::string path_;
  const v1::NodeHello hello_;
  const Left left_;
  const UniqueFd wake_;
  std::atomic<bool> stop_{false};
  // Replaced by the thread alone, while nobody has it; used by the thread and by who took it.
  std::unique_ptr<NodeLine> line_;
  Mutex callback_mu_;  // held during the callback
  std::function<void()> changed_ ABSL_GUARDED_BY(callback_mu_);
  mutable Mutex mu_;
  CondVar free_;
  bool connected_ ABSL_GUARDED_BY(mu_) = true;
  bool taken_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<GiftKey, Gift> gifts_ ABSL_GUARDED_BY(mu_);
  std::set<GiftKey> untold_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<NodeLink>> NodeLink::Connect(const std::string& path, const std::string& worker,
                                                            int64_t incarnation, std::function<void()> changed) {
  v1::NodeHello hello;
  hello.set_worker(worker);
  hello.set_incarnation(incarnation);
  ASSIGN_OR_RETURN(Greeted greeted, Greet(path, hello));
  UniqueFd wake(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake.valid()) return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", DescriptorError(errno)));
  return std::unique_ptr<NodeLink>(
      new SocketNodeLink(path, std::move(hello), std::move(changed), std::move(greeted), std::move(wake)));
}

}  // namespace shardmesh
