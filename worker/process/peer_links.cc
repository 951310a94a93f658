#include "worker/process/peer_links.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSilence = absl::Seconds(3);  // of a worker that was asked, after which it counts as gone
constexpr absl::Duration kAskWho = absl::Seconds(2);   // who answers at an address
constexpr absl::Duration kDialAgain = absl::Seconds(1);
constexpr size_t kMaxName = 128;                       // of a stranger, in messages

v1::Member MemberOf(const v1::Peer& peer) {
  v1::Member member;
  member.set_rank(peer.rank());
  member.set_worker(peer.worker());
  member.set_address(peer.address());
  return member;
}

// Whether a caller believes it, and whoever has the address now may have said it. After Unavailable and
// DeadlineExceeded it asks again anyway. Cancelled and DataLoss are found at this end.
bool MayBeAStrangersWord(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kDataLoss:
      return false;
    default:
      return true;
  }
}

// The worker was killed, and its next incarnation went on with the job, in which it is still named as the one before.
bool TookOver(const v1::GetStatusReply& there, const v1::Peer& meant, const std::string& job) {
  return there.worker() == meant.worker() && there.incarnation() > meant.incarnation() &&
         std::any_of(there.jobs().begin(), there.jobs().end(),
                     [&](const v1::GetStatusReply::Job& each) { return each.name() == job && each.restarts() > 0; });
}

// Unavailable: it is not `meant`, or does not say who it is. `said`: what it answered.
absl::Status CheckAnswers(const v1::Peer& meant, const std::string& job, ShardTransport& link,
                          const absl::Status& said) {
  const std::string who =
      absl::StrCat("worker \"", meant.worker(), "\" (incarnation ", meant.incarnation(), ") at ", meant.address());
  const absl::StatusOr<v1::GetStatusReply> there = link.GetStatus(kAskWho);
  if (!there.ok()) {
    return absl::UnavailableError(absl::StrCat("what answers for ", who, " does not say who it is (",
                                               there.status().message(),
                                               "), so this does not count: ", said.ToString()));
  }
  if (there->worker() != meant.worker()) {
    const std::string other = absl::CHexEscape(there->worker().substr(0, kMaxName));
    return absl::UnavailableError(absl::StrCat(who, " has ended: worker \"", other, "\" answers there now"));
  }
  if (there->incarnation() == meant.incarnation() || TookOver(*there, meant, job)) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(who, there->incarnation() > meant.incarnation() ? " has ended" : " is not there yet",
                   ": its incarnation ", there->incarnation(), " answers there now"));
}

}  // namespace

// One that cannot be dialed, as while certificates are being replaced, leaves the connection as it was.
absl::StatusOr<std::unique_ptr<ShardTransport>> PeerLinks::ConnectionTo(const v1::Peer& peer, Connection Link::*which) {
  const v1::Member member = MemberOf(peer);
  const absl::Time now = MonotonicNow();
  {
    MutexLock lock(mu_);
    const auto link = links_.find(peer.address());
    if (link != links_.end()) {
      Connection& there = link->second.*which;
      const bool again = there.transport != nullptr && now >= there.dialed + kDialAgain && there.transport->broken();
      if (there.transport != nullptr && !again) return there.transport->As(member);
      there.dialed = now;  // others go on with what is there
    }
  }
  auto dialed = ShardTransport::Dial(member, tls_, kSilence);  // connects with the first call
  MutexLock lock(mu_);
  Connection& there = links_[peer.address()].*which;
  if (!dialed.ok() && there.transport == nullptr) return dialed.status();
  if (dialed.ok()) there = {*std::move(dialed), now};
  return there.transport->As(member);
}

// Once for each that answers: callers ask again and again.
void PeerLinks::Log(const v1::Peer& peer, const absl::Status& other) {
  {
    MutexLock lock(mu_);
    const auto link = links_.find(peer.address());
    if (link == links_.end() || link->second.logged == other.message()) return;
    link->second.logged = std::string(other.message());
  }
  spdlog::warn("event=peer_not_there worker={} incarnation={} address={} error=\"{}\"", peer.worker(),
               peer.incarnation(), peer.address(), std::string(other.message()));
}

template <class Reply>
absl::StatusOr<Reply> PeerLinks::OnlyOf(const v1::Peer& peer, const std::string& job, absl::StatusOr<Reply> reply) {
  if (!MayBeAStrangersWord(reply.status().code())) return reply;
  ASSIGN_OR_RETURN(const auto link, ConnectionTo(peer, &Link::calls));
  const absl::Status answers = CheckAnswers(peer, job, *link, reply.status());
  if (answers.ok()) return reply;
  Log(peer, answers);
  return answers;
}

absl::StatusOr<v1::MeetReply> PeerLinks::Meet(const v1::Peer& lead, const v1::MeetRequest& request,
                                              absl::Duration timeout) {
  ASSIGN_OR_RETURN(const auto link, ConnectionTo(lead, &Link::calls));
  return OnlyOf(lead, request.job(), link->Meet(request, timeout));
}

absl::StatusOr<v1::TransferHeader> PeerLinks::Transfer(const v1::Peer& from, const v1::TransferRequest& request,
                                                       const TransferSink& sink, absl::Duration timeout) {
  ASSIGN_OR_RETURN(const auto link, ConnectionTo(from, &Link::transfers));
  return OnlyOf(from, request.job(), link->Transfer(request, sink.begin, sink.data, timeout));
}

absl::StatusOr<v1::FileProgress> PeerLinks::Copy(const v1::Peer& to, const v1::CopyRequest& request,
                                                 const ReportProgress& told, absl::Duration timeout) {
  ASSIGN_OR_RETURN(const auto link, ConnectionTo(to, &Link::calls));
  return OnlyOf(to, request.job(), link->Copy(request, told, timeout));
}

void PeerLinks::DropAllBut(const std::set<std::string>& addresses) {
  MutexLock lock(mu_);
  for (auto link = links_.begin(); link != links_.end();) {
    link = addresses.count(link->first) > 0 ? std::next(link) : links_.erase(link);
  }
}

}  // namespace shardmesh
