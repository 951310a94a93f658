#include "worker/process/peer_links.h"

#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kSilence = absl::Seconds(3);  // of a worker that was asked, after which it counts as gone

v1::Member MemberOf(const v1::Peer& peer) {
  v1::Member member;
  member.set_rank(peer.rank());
  member.set_worker(peer.worker());
  member.set_address(peer.address());
  return member;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShardTransport>> PeerLinks::LinkTo(const v1::Peer& peer) {
  const v1::Member member = MemberOf(peer);
  MutexLock lock(mu_);
  auto link = links_.find(peer.address());
  if (link == links_.end()) {
    ASSIGN_OR_RETURN(auto dialed, ShardTransport::Dial(member, tls_, kSilence));  // connects with the first call
    link = links_.emplace(peer.address(), std::move(dialed)).first;
  }
  return link->second->As(member);
}

absl::StatusOr<v1::MeetReply> PeerLinks::Meet(const v1::Peer& lead, const v1::MeetRequest& request,
                                              absl::Duration timeout) {
  ASSIGN_OR_RETURN(const auto link, LinkTo(lead));
  return link->Meet(request, timeout);
}

absl::StatusOr<v1::TransferHeader> PeerLinks::Transfer(const v1::Peer& from, const v1::TransferRequest& request,
                                                       const TransferSink& sink, absl::Duration timeout) {
  ASSIGN_OR_RETURN(const auto link, LinkTo(from));
  return link->Transfer(request, sink.begin, sink.data, timeout);
}

absl::StatusOr<v1::FileProgress> PeerLinks::Copy(const v1::Peer& to, const v1::CopyRequest& request,
                                                 const ReportProgress& told, absl::Duration timeout) {
  ASSIGN_OR_RETURN(const auto link, LinkTo(to));
  return link->Copy(request, told, timeout);
}

void PeerLinks::DropAllBut(const std::set<std::string>& addresses) {
  MutexLock lock(mu_);
  for (auto link = links_.begin(); link != links_.end();) {
    link = addresses.count(link->first) > 0 ? std::next(link) : links_.erase(link);
  }
}

}  // namespace shardmesh
