#include "worker/relay/heartbeat_relay.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/incarnation.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLook = absl::Seconds(1);  // what it waits for is signalled; this bounds every wait

absl::StatusOr<v1::HeartbeatReply> Told(v1::HostHeartbeatReplies::Answer& answer) {
  if (answer.code() == 0) return std::move(*answer.mutable_reply());
  return WithNextIncarnation(absl::Status(static_cast<absl::StatusCode>(answer.code()), answer.message()),
                             answer.next_incarnation());
}

}  // namespace

HeartbeatRelay::HeartbeatRelay(std::unique_ptr<HostsLink> link, HeartbeatRelayOptions options)
    : link_(std::move(link)), options_(options) {
  thread_ = std::thread([this] { Loop(); });
}

HeartbeatRelay::~HeartbeatRelay() { Stop(); }

void HeartbeatRelay::Stop() {
  std::vector<Waiting> left;
  {
    MutexLock lock(mu_);
    stop_ = true;
    left.swap(waiting_);
  }
  changed_.SignalAll();
  for (Waiting& one : left) one.answer(absl::UnavailableError("the relay of heartbeats stops"));
  if (thread_.joinable()) thread_.join();
}

bool HeartbeatRelay::IsNewsLocked(const Waiting& waiting) const {
  const auto known = known_.find(waiting.name);
  return known == known_.end() || known->second.bytes != waiting.bytes;
}

void HeartbeatRelay::Take(const v1::HeartbeatRequest& heartbeat, Answer answer) {
  Waiting one{heartbeat.name(), heartbeat.SerializeAsString(), MonotonicNow(), std::move(answer)};
  Answer superseded;
  bool stopped = false;
  {
    MutexLock lock(mu_);
    stopped = stop_;
    if (!stopped) {
      send_at_ = std::min(send_at_, MonotonicNow() + (IsNewsLocked(one) ? options_.wait_with_news : options_.wait));
      const auto there =
          std::find_if(waiting_.begin(), waiting_.end(), [&](const Waiting& other) { return other.name == one.name; });
      if (there == waiting_.end()) {
        waiting_.push_back(std::move(one));
      } else {
        std::swap(*there, one);
        superseded = std::move(one.answer);
      }
    }
  }
  changed_.SignalAll();
  if (stopped) one.answer(absl::UnavailableError("the relay of heartbeats stops"));
  if (superseded) superseded(absl::AbortedError("a later heartbeat of the worker came"));
}

// False: it stops.
bool HeartbeatRelay::AwaitBatch() {
  MutexLock lock(mu_);
  while (!stop_) {
    if (!waiting_.empty() && (waiting_.size() >= known_.size() || MonotonicNow() >= send_at_)) return true;
    changed_.WaitFor(mu_, std::min(kLook, waiting_.empty() ? kLook : send_at_ - MonotonicNow()));
  }
  return false;
}

std::vector<HeartbeatRelay::Waiting> HeartbeatRelay::TakeBatch() {
  MutexLock lock(mu_);
  int64_t bytes = 0;
  size_t count = 0;
  for (; count < waiting_.size() && count < static_cast<size_t>(options_.max_places); ++count) {
    bytes += static_cast<int64_t>(waiting_[count].bytes.size());
    if (count > 0 && bytes > options_.max_message_bytes) break;
  }
  std::vector<Waiting> batch(std::make_move_iterator(waiting_.begin()),
                             std::make_move_iterator(waiting_.begin() + static_cast<int64_t>(count)));
  waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<int64_t>(count));
  send_at_ = waiting_.empty() ? absl::InfiniteFuture() : MonotonicNow();
  return batch;
}

// The same workers as in the last message, each with what the coordinator has kept of it.
bool HeartbeatRelay::IsAgainLocked(const std::vector<Waiting>& batch) const {
  if (!takes_again_ || batch.size() != last_.size()) return false;
  for (size_t i = 0; i < batch.size(); ++i) {
    if (batch[i].name != last_[i]) return false;
    const Known& known = known_.at(batch[i].name);
    if (!known.kept || known.bytes != batch[i].bytes) return false;
  }
  return true;
}

// Workers come and go under other names: when their places are used up, the next call gives them anew.
v1::HostHeartbeats HeartbeatRelay::MessageOf(std::vector<Waiting>& batch, bool& anew) {
  MutexLock lock(mu_);
  size_t newcomers = 0;
  for (const Waiting& one : batch) newcomers += known_.count(one.name) == 0;
  const absl::Time now = MonotonicNow();
  const bool full = known_.size() + newcomers > static_cast<size_t>(options_.max_places);
  if (full || now - began_ >= options_.renew_after) known_.clear();
  anew = known_.empty();
  if (anew) {
    began_ = now;
    takes_again_ = false;
    skip_within_ = absl::ZeroDuration();
  }
  for (const Waiting& one : batch) {
    const auto [known, is_new] = known_.try_emplace(one.name);
    if (is_new) known->second.place = static_cast<int>(known_.size()) - 1;
  }
  std::sort(batch.begin(), batch.end(), [this](const Waiting& a, const Waiting& b) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return known_.at(a.name).place < known_.at(b.name).place;
  });
  v1::HostHeartbeats message;
  message.set_again(IsAgainLocked(batch));
  if (message.again()) return message;
  last_.clear();
  for (const Waiting& one : batch) {
    last_.push_back(one.name);
    const auto known = known_.find(one.name);
    v1::HostHeartbeats::Worker& worker = *message.add_workers();
    worker.set_place(known->second.place);
    if (known->second.kept && known->second.bytes == one.bytes) continue;
    known->second.bytes = one.bytes;
    worker.mutable_heartbeat()->ParseFromString(one.bytes);
  }
  return message;
}

absl::Status HeartbeatRelay::Learn(const std::vector<Waiting>& batch, v1::HostHeartbeatReplies& replies) {
  takes_again_ = replies.takes_again();
  skip_within_ = absl::Milliseconds(replies.skip_within_ms());
  if (replies.same()) return absl::OkStatus();
  if (replies.answers_size() != static_cast<int>(batch.size())) {
    return absl::InternalError(absl::StrCat("the coordinator answered ", replies.answers_size(), " of ", batch.size(),
                                            " heartbeats of a message"));
  }
  MutexLock lock(mu_);
  for (size_t i = 0; i < batch.size(); ++i) {
    v1::HostHeartbeatReplies::Answer& answer = *replies.mutable_answers(static_cast<int>(i));
    Known& known = known_.at(batch[i].name);
    known.kept = answer.kept();
    if (!answer.same()) known.told = Told(answer);
  }
  return absl::OkStatus();
}

absl::Status HeartbeatRelay::Send(const std::vector<Waiting>& batch, const v1::HostHeartbeats& message, bool anew) {
  const absl::Time now = MonotonicNow();
  const absl::Duration since = now - sent_at_;
  skipped_ = message.again() && !skipped_ && since >= options_.hurry && since < skip_within_ && link_->Stands();
  if (skipped_) return absl::OkStatus();
  sent_at_ = now;
  ASSIGN_OR_RETURN(v1::HostHeartbeatReplies replies, link_->Exchange(message, anew));
  return Learn(batch, replies);
}

// A process that was stopped finds what waited then.
void HeartbeatRelay::DropOld() {
  std::vector<Waiting> old;
  {
    MutexLock lock(mu_);
    const absl::Time first = MonotonicNow() - options_.give_up;
    const auto young =
        std::find_if(waiting_.begin(), waiting_.end(), [&](const Waiting& waiting) { return waiting.since >= first; });
    old.assign(std::make_move_iterator(waiting_.begin()), std::make_move_iterator(young));
    waiting_.erase(waiting_.begin(), young);
  }
  for (Waiting& one : old) one.answer(absl::DeadlineExceededError("the heartbeat waited too long to be sent on"));
}

void HeartbeatRelay::Loop() {
  bool failing = false;
  while (AwaitBatch()) {
    DropOld();
    std::vector<Waiting> batch = TakeBatch();
    if (batch.empty()) continue;
    bool anew = false;
    const v1::HostHeartbeats message = MessageOf(batch, anew);
    const absl::Status status = Send(batch, message, anew);
    if (std::exchange(failing, !status.ok()) == status.ok()) {
      if (status.ok()) {
        spdlog::info("event=relays_heartbeats_again");
      } else {
        spdlog::warn("event=relays_no_heartbeats error=\"{}\"", status.ToString());
      }
    }
    for (const Waiting& one : batch) {
      if (!status.ok()) {
        one.answer(status);
        continue;
      }
      absl::StatusOr<v1::HeartbeatReply> told;
      {
        MutexLock lock(mu_);
        told = known_.at(one.name).told;
      }
      one.answer(std::move(told));
    }
    if (status.ok()) continue;
    MutexLock lock(mu_);
    known_.clear();
  }
}

}  // namespace shardmesh
