#include "worker/transport/secure/secure_group.h"

#include <spdlog/spdlog.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "worker/transport/late_ranks.h"
#include "worker/transport/secure/link_mesh.h"
#include "worker/transport/secure/tls_stream.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLateTime =
    absl::Milliseconds(500);  // after a call's time is up: until all have said whom they wait for
constexpr absl::Duration kTellTime = absl::Milliseconds(500);  // for a peer to take the news of the end
constexpr absl::Duration kLeaveTime = absl::Seconds(2);        // for the peers' kernels to have all that was sent
constexpr absl::Duration kLook = absl::Milliseconds(1);        // between looks at what they have

absl::Status CheckOptions(const SecureOptions& options) {
  if (options.size < 1 || options.size > kMaxGroupRanks || options.rank < 0 || options.rank >= options.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", options.rank, " of ", options.size, " ranks; a group has 1 to ", kMaxGroupRanks));
  }
  if (options.secret.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("group '", options.key, "' has no secret; give that of the job's assignment"));
  }
  return absl::OkStatus();
}

int Milliseconds(absl::Duration wait) {
  return static_cast<int>(absl::ToInt64Milliseconds(std::clamp(wait, absl::ZeroDuration(), absl::Hours(1)))) + 1;
}

std::string BitsOf(const std::vector<int>& ranks) {
  std::string bits(kMaxGroupRanks / 8, '\0');
  for (const int rank : ranks) bits[static_cast<size_t>(rank / 8)] |= static_cast<char>(1 << rank % 8);
  return bits;
}

std::vector<int> RanksOf(const std::string& bits, int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size && rank / 8 < static_cast<int>(bits.size()); ++rank) {
    if ((bits[static_cast<size_t>(rank / 8)] >> rank % 8 & 1) != 0) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SecureGroup>> SecureGroup::Connect(const std::shared_ptr<Rendezvous>& rendezvous,
                                                                  const SecureOptions& options) {
  RETURN_IF_ERROR(CheckOptions(options));
  std::shared_ptr<const TlsContext> tls;
  if (options.tls.enabled()) {
    ASSIGN_OR_RETURN(tls, TlsContext::Load(options.tls));
  }
  UniqueFd wake(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake.valid()) {
    return absl::ResourceExhaustedError(absl::StrCat("no descriptor is left for a group: ", std::strerror(errno)));
  }
  std::unique_ptr<SecureGroup> group(new SecureGroup(options, std::move(wake)));
  if (options.size == 1) return group;
  ASSIGN_OR_RETURN(auto streams, ConnectMesh(*rendezvous, options, tls.get()));
  std::string protection;
  for (int peer = 0; peer < options.size; ++peer) {
    if (peer == options.rank) continue;
    protection = streams[static_cast<size_t>(peer)]->Protection();
    group->links_[static_cast<size_t>(peer)] = std::make_unique<Link>(options.names(options.rank), options.names(peer),
                                                                      std::move(streams[static_cast<size_t>(peer)]));
  }
  spdlog::info("event=group_connected group={} rank={} ranks={} epoch={} protection=\"{}\"", options.key,
               options.names(options.rank), options.size, options.epoch, protection);
  return group;
}

SecureGroup::SecureGroup(const SecureOptions& options, UniqueFd wake)
    : TransferGroup(options.rank, options.size, options.epoch, options.names),
      secure_(options.tls.enabled()),
      wake_(std::move(wake)),
      links_(static_cast<size_t>(options.size)) {}

SecureGroup::~SecureGroup() {
  bool leaves = false;
  CallHeader last;
  {
    MutexLock lock(mu_);
    leaves = end_.ok();
    last = last_;
  }
  last.epoch = epoch();
  for (const auto& link : links_) {
    if (leaves && link != nullptr) link->Tell(FrameType::kLeft, last, "");
  }
  if (leaves) FlushAll(kLeaveTime);
  Linger(leaves ? kLeaveTime : kTellTime);
}

// ---- The end. ----

absl::Status SecureGroup::EndLocked() const { return absl::IsAborted(end_) ? GroupEnded(end_.message()) : end_; }

void SecureGroup::Abort(absl::string_view reason) {
  {
    MutexLock lock(mu_);
    if (!end_.ok()) return;
    end_ = absl::AbortedError(reason);
    if (links_taken_) {  // the call tells the peers
      const uint64_t one = 1;
      (void)!write(wake_.get(), &one, sizeof(one));
      return;
    }
    links_taken_ = true;
  }
  TellEnd(reason);
  MutexLock lock(mu_);
  links_taken_ = false;
}

absl::Status SecureGroup::Enter(const CallHeader& header) {
  MutexLock lock(mu_);
  if (!end_.ok()) return GroupEnded(end_.message());
  links_taken_ = true;
  last_ = header;
  return absl::OkStatus();
}

absl::Status SecureGroup::Exit(absl::Status status) {
  std::string reason;
  {
    MutexLock lock(mu_);
    if (end_.ok()) end_ = std::move(status);
    if (end_.ok()) {
      links_taken_ = false;
      return end_;
    }
    reason = std::string(end_.message());
  }
  TellEnd(reason);
  MutexLock lock(mu_);
  links_taken_ = false;
  return EndLocked();
}

void SecureGroup::TellEnd(absl::string_view reason) {
  CallHeader header;
  header.epoch = epoch();
  for (const auto& link : links_) {
    if (link != nullptr) link->Tell(FrameType::kEnd, header, reason.substr(0, kMostNews));
  }
  FlushAll(kTellTime);
  for (const auto& link : links_) {
    if (link != nullptr) link->FinishWriting();
  }
}

void SecureGroup::FlushAll(absl::Duration time) {
  const absl::Time until = MonotonicNow() + time;
  while (true) {
    std::vector<pollfd> polled;
    std::vector<Link*> waiting;
    bool ready = false;
    for (const auto& link : links_) {
      if (link == nullptr || link->Flush()) continue;
      polled.push_back(link->Wanted());
      polled.back().events &= POLLOUT;
      waiting.push_back(link.get());
      ready = ready || (polled.back().events == 0);
    }
    const absl::Duration left = until - MonotonicNow();
    if (polled.empty() || left <= absl::ZeroDuration()) return;
    poll(polled.data(), polled.size(), ready ? 0 : Milliseconds(left));
    for (size_t i = 0; i < polled.size(); ++i) waiting[i]->Polled(polled[i].revents);
  }
}

// A connection that is closed while something lies in it that nobody has read is reset, and with it goes what the peer
// has not got yet.
void SecureGroup::Linger(absl::Duration time) {
  const absl::Time until = MonotonicNow() + time;
  for (const auto& link : links_) {
    if (link != nullptr) link->FinishWriting();
  }
  while (true) {
    bool all = true;
    for (const auto& link : links_) all = (link == nullptr || link->Drain()) && all;
    if (all || MonotonicNow() >= until) return;
    poll(nullptr, 0, static_cast<int>(absl::ToInt64Milliseconds(kLook)));
  }
}

// ---- Calls. ----

void SecureGroup::Begin(const CallHeader& header, absl::Span<const PeerTransfer> transfers) {
  std::vector<std::vector<Link::Piece>> out(links_.size()), in(links_.size());
  for (const PeerTransfer& t : transfers) {
    if (t.bytes == 0) continue;
    if (t.from == rank()) out[static_cast<size_t>(t.to)].push_back({t.memory, t.bytes});
    if (t.to == rank()) in[static_cast<size_t>(t.from)].push_back({t.memory, t.bytes});
  }
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (links_[peer] != nullptr) links_[peer]->Begin(header, std::move(out[peer]), std::move(in[peer]));
  }
}

bool SecureGroup::AllDone() const {
  return std::all_of(links_.begin(), links_.end(), [](const auto& link) { return link == nullptr || link->done(); });
}

absl::Status SecureGroup::Turn(absl::Time until) {
  bool ready = false;
  for (int i = 0; i < size() - 1; ++i) {
    Link& link = LinkWith(PeerAt(i));
    RETURN_IF_ERROR(link.Advance());
    ready = ready || (link.ready() && !link.done());
  }
  if (AllDone()) return absl::OkStatus();
  polled_.clear();
  for (int i = 0; i < size() - 1; ++i) polled_.push_back(LinkWith(PeerAt(i)).Wanted());
  polled_.push_back({wake_.get(), POLLIN, 0});
  poll(polled_.data(), polled_.size(), ready ? 0 : Milliseconds(until - MonotonicNow()));
  for (int i = 0; i < size() - 1; ++i) LinkWith(PeerAt(i)).Polled(polled_[static_cast<size_t>(i)].revents);
  if (polled_.back().revents == 0) return absl::OkStatus();
  MutexLock lock(mu_);
  return end_;
}

absl::Status SecureGroup::Run(const Call& call) {
  while (true) {
    RETURN_IF_ERROR(Turn(call.until));
    if (AllDone()) return absl::OkStatus();
    if (MonotonicNow() >= call.until) return Late(call);
  }
}

absl::Status SecureGroup::Late(const Call& call) {
  std::vector<int> missing;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank() && !LinkWith(peer).done()) missing.push_back(peer);
  }
  const std::string bits = BitsOf(missing);
  for (int i = 0; i < size() - 1; ++i) LinkWith(PeerAt(i)).Tell(FrameType::kLate, call.header, bits);
  for (const absl::Time until = MonotonicNow() + kLateTime; MonotonicNow() < until;) {
    for (int i = 0; i < size() - 1; ++i) LinkWith(PeerAt(i)).LookAgain();
    RETURN_IF_ERROR(Turn(until));
    if (AllDone()) return absl::OkStatus();
  }
  std::vector<std::vector<int>> waits_for;
  for (int peer = 0; peer < size(); ++peer) {
    waits_for.push_back(peer == rank() ? missing : RanksOf(LinkWith(peer).late(), size()));
  }
  std::vector<int> names;
  for (const int peer : WhoHoldsUp(rank(), waits_for)) names.push_back(NameOf(peer));
  return MissingRanks(names, call.header, call.timeout);
}

absl::Status SecureGroup::DoExchange(const CallHeader& header, absl::Span<const PeerTransfer> transfers,
                                     absl::Duration timeout) {
  const Call call = {header, timeout, MonotonicNow() + timeout};
  RETURN_IF_ERROR(Enter(header));
  Begin(header, transfers);
  return Exit(Run(call));
}

}  // namespace shardmesh
