// Worker's dealings with the other members of a job: the lead's shared memory goes to the peers, and each end of a
// connection learns when the other is gone.
#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "proto/protocol_version.h"
#include "worker/lead/hosts/host_meeting.h"
#include "worker/process/worker.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLinkTimeout = absl::Seconds(10);  // for one message between peers
constexpr absl::Duration kLinkSlice = absl::Milliseconds(200);
constexpr absl::Duration kRetry = absl::Milliseconds(50);

// The next message of a link, unless none comes within kLinkTimeout or `done` says that nobody waits for it any more.
template <typename Done>
absl::StatusOr<LocalMessage> AwaitMessage(LocalSocket& link, Done done) {
  const absl::Time deadline = MonotonicNow() + kLinkTimeout;
  while (MonotonicNow() < deadline && !done()) {
    absl::StatusOr<LocalMessage> message = link.Receive(kLinkSlice);
    if (!absl::IsDeadlineExceeded(message.status())) return message;
  }
  return absl::DeadlineExceededError(absl::StrCat("nothing for ", absl::FormatDuration(kLinkTimeout)));
}

// Waits on a link that carries nothing any more, until its other end is gone or `done` says so. True: gone.
template <typename Done>
bool AwaitHangUp(LocalSocket& link, Done done) {
  while (!done()) {
    if (absl::IsUnavailable(link.Receive(kLinkSlice).status())) return true;
  }
  return false;
}

}  // namespace

// The lead may not know of the job yet (its heartbeat comes later): asks again until the deadline.
absl::StatusOr<HostMemory> Worker::FetchFromLead(Entry& entry, const JobSpec& spec, const Plan& plan,
                                                 std::unique_ptr<LocalSocket>& link) {
  const v1::Assignment& assignment = entry.assignment;
  ASSIGN_OR_RETURN(const HostRanks ranks, HostRanksOf(assignment));
  const v1::Peer& lead = assignment.peers(ranks.first());
  v1::LocalHello hello;
  *hello.mutable_protocol() = OwnProtocol();
  hello.mutable_peer()->set_job(spec.name);
  hello.mutable_peer()->set_epoch(assignment.epoch());
  hello.mutable_peer()->set_rank(assignment.rank());
  hello.mutable_peer()->set_incarnation(assignment.peers(assignment.rank()).incarnation());
  hello.mutable_peer()->set_plan_hash(plan.hash());
  hello.mutable_peer()->set_secret(assignment.secret());
  const absl::Time deadline = MonotonicNow() + options_.prepare_timeout;
  absl::Status last = absl::UnavailableError("it was not asked");
  while (MonotonicNow() < deadline && !entry.closing.load()) {
    const auto ask = [&]() -> absl::StatusOr<HostMemory> {
      ASSIGN_OR_RETURN(LocalSocket socket, LocalSocket::Connect(lead.local_socket()));
      RETURN_IF_ERROR(socket.Send(hello.SerializeAsString(), {}, kLinkTimeout));
      ASSIGN_OR_RETURN(LocalMessage message, AwaitMessage(socket, [&] { return entry.closing.load(); }));
      v1::LocalWelcome welcome;
      if (!welcome.ParseFromString(message.bytes))
        return absl::InternalError("the lead sent a message that is no welcome");
      if (welcome.code() != 0) return absl::Status(static_cast<absl::StatusCode>(welcome.code()), welcome.message());
      ASSIGN_OR_RETURN(HostMemory host, HostMemory::Map(welcome, std::move(message.descriptors), spec, plan, copies()));
      RETURN_IF_ERROR(socket.Send("mapped", {}, kLinkTimeout));
      link = std::make_unique<LocalSocket>(std::move(socket));
      return host;
    };
    absl::StatusOr<HostMemory> host = ask();
    if (host.ok()) return host;
    last = host.status();
    if (!absl::IsUnavailable(last) && !absl::IsNotFound(last)) break;
    MutexLock lock(mu_);
    stopped_.WaitFor(mu_, kRetry);
  }
  return Annotate(last, absl::StrCat("getting the shared memory from worker ", lead.worker(), " (rank ", lead.rank(),
                                     ", pid ", lead.pid(), ") at ", lead.local_socket()));
}

void Worker::WatchLead(const std::shared_ptr<Entry>& entry, LocalSocket& link) {
  if (AwaitHangUp(link, [&] { return entry->closing.load(); })) PeerGone(entry, entry->ranks.first());
}

void Worker::PeerGone(const std::shared_ptr<Entry>& entry, int rank) {
  std::shared_ptr<JobShard> shard;
  {
    MutexLock lock(mu_);
    shard = entry->shard;
  }
  if (shard == nullptr || entry->closing.load()) return;
  if (shard->protocol().members().ComesBack(rank)) {
    spdlog::warn("event=peer_gone job={} rank={} waits_for=\"its next incarnation\"", shard->spec().name, rank);
    return;
  }
  shard->protocol().members().Abort(AbortReason::kGone, rank, shard->rank());
  Changed();
}

absl::StatusOr<std::shared_ptr<Worker::Entry>> Worker::FindLead(const v1::PeerHello& hello, bool other_host) const {
  MutexLock lock(mu_);
  auto it = staged_.find(hello.job());
  const bool staged = it != staged_.end() && it->second->assignment.epoch() == hello.epoch() &&
                      !it->second->assignment.leaves();
  if (!staged) it = jobs_.find(hello.job());
  const bool over = it != jobs_.end() && it->second->assignment.epoch() > hello.epoch();
  if (it == jobs_.end() || (it->second->shard == nullptr && !over) ||
      it->second->assignment.epoch() < hello.epoch()) {
    return absl::UnavailableError(
        absl::StrCat("worker ", options_.name, " has no memory of job ", hello.job(), " yet"));
  }
  std::shared_ptr<Entry> entry = it->second;
  // The job is about to go on at a later epoch, and the leads of the one before meet again to end it.
  const bool ends = over && entry->before != nullptr && entry->before->assignment.epoch() == hello.epoch() &&
                    entry->before->shard != nullptr;
  if (ends) entry = entry->before;
  const v1::Assignment& mine = entry->assignment;
  if (!SameSecret(mine.secret(), hello.secret())) {  // before anything of the job is told
    return absl::PermissionDeniedError(absl::StrCat("the caller does not show the secret of job ", hello.job(),
                                                    "; only its members, which the coordinator tells it, may ask"));
  }
  if (mine.epoch() > hello.epoch()) {
    return absl::AbortedError(
        absl::StrCat("epoch ", hello.epoch(), " of job ", hello.job(), " is over; now ", mine.epoch()));
  }
  const HostRanks& ranks = entry->ranks;
  const Rank asks(hello.rank());
  const bool is_lead = mine.rank() == ranks.first() && hello.rank() >= 0 && hello.rank() < mine.peers_size();
  const bool may_ask = other_host ? mine.rank() == 0 && hello.rank() % ranks.per_host == 0 : ranks.Has(asks);
  if (!is_lead || !may_ask || hello.rank() == mine.rank()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", hello.rank(), " asks rank ", mine.rank(),
                                                   "; members ask the first rank of their host, and those rank 0"));
  }
  if (mine.peers(hello.rank()).incarnation() != hello.incarnation()) {
    return absl::AbortedError(absl::StrCat("rank ", hello.rank(), " is incarnation ",
                                           mine.peers(hello.rank()).incarnation(), " in this epoch, not ",
                                           hello.incarnation()));
  }
  if (entry->plan_hash != hello.plan_hash()) {
    return absl::FailedPreconditionError(absl::StrCat("plan hash ", hello.plan_hash(), " differs from the lead's ",
                                                      entry->plan_hash, "; run one build of shardmesh everywhere"));
  }
  return entry;
}

void Worker::PeerMapped(const std::shared_ptr<Entry>& entry, int rank) {
  std::shared_ptr<JobShard> shard;
  {
    MutexLock lock(mu_);
    entry->mapped[rank - entry->ranks.first()] = true;
    for (bool mapped : entry->mapped) {
      if (!mapped) return;
    }
    shard = entry->shard;
  }
  if (shard == nullptr) return;
  if (const absl::Status sealed = shard->host().Seal(entry->in_node); !sealed.ok())
    spdlog::warn("event=seal_failed error=\"{}\"", sealed.ToString());
}

void Worker::ServePeer(LocalSocket socket, const v1::PeerHello& hello, const std::atomic<bool>& stop) {
  v1::LocalWelcome welcome;
  absl::StatusOr<std::shared_ptr<Entry>> found = FindLead(hello, /*other_host=*/false);
  if (!found.ok()) {
    welcome.set_code(static_cast<int>(found.status().code()));
    welcome.set_message(std::string(found.status().message()));
    socket.Send(welcome.SerializeAsString(), {}, kLinkTimeout).IgnoreError();
    return;
  }
  const std::shared_ptr<Entry> entry = *found;
  std::shared_ptr<JobShard> shard;
  {
    MutexLock lock(mu_);
    shard = entry->shard;
  }
  if (shard == nullptr) return;
  const auto done = [&] { return entry->closing.load() || stop.load(); };
  shard->host().DescribeTo(welcome);
  if (!socket.Send(welcome.SerializeAsString(), shard->host().PeerDescriptors(), kLinkTimeout).ok()) return;
  if (!AwaitMessage(socket, done).ok()) return;
  PeerMapped(entry, hello.rank());
  shard.reset();
  if (AwaitHangUp(socket, done)) PeerGone(entry, hello.rank());
}

absl::StatusOr<v1::MeetReply> Worker::Meet(const v1::MeetRequest& request) const {
  v1::PeerHello hello;
  hello.set_job(request.job());
  hello.set_epoch(request.epoch());
  hello.set_rank(request.rank());
  hello.set_incarnation(request.incarnation());
  hello.set_plan_hash(request.plan_hash());
  hello.set_secret(request.secret());
  absl::StatusOr<std::shared_ptr<Entry>> found = FindLead(hello, /*other_host=*/true);
  if (absl::IsFailedPrecondition(found.status())) {  // a lead with another plan: there will be no meeting
    MutexLock lock(mu_);
    const auto it = jobs_.find(hello.job());
    if (it != jobs_.end()) it->second->meeting_place->TellNotMet(found.status().message());
  }
  RETURN_IF_ERROR(found.status());
  return AnswerMeet(request, (*found)->ranks, *(*found)->meeting_place);
}

absl::StatusOr<HostGroups> Worker::MeetLeadsOf(const Entry& entry, bool again, absl::Duration timeout,
                                               const std::function<absl::Status()>& goes_on) const {
  return MeetLeads({entry.assignment, entry.ranks, entry.plan_hash, options_.group_address, options_.transport,
                    options_.meet, entry.meeting_place, goes_on, timeout, again});
}

absl::Status Worker::MeetHosts(const std::shared_ptr<Entry>& entry, JobShard& shard) {
  if (options_.group_address.empty() || options_.meet == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", shard.spec().name, " is on several hosts, and this worker has no address for the others; ",
                     "start it with --group-address"));
  }
  for (const v1::Peer& peer : entry->assignment.peers()) {
    if (entry->ranks.Has(Rank(peer.rank()))) continue;
    shard.protocol().control()->members[peer.rank()].pid.store(peer.pid());  // for messages
  }
  const auto goes_on = [&] {
    return entry->closing.load() ? absl::CancelledError("the job was closed") : shard.protocol().members().Health();
  };
  ASSIGN_OR_RETURN(HostGroups groups, MeetLeadsOf(*entry, entry->resumed, options_.prepare_timeout, goes_on));
  MeetAgain meet_again;
  if (entry->in_node) {
    meet_again = [this, of = std::weak_ptr<Entry>(entry)](
                     absl::Duration timeout, const std::function<absl::Status()>& may) -> absl::StatusOr<HostGroups> {
      const std::shared_ptr<Entry> there = of.lock();
      if (there == nullptr || there->closing.load()) return absl::CancelledError("the job was closed");
      return MeetLeadsOf(*there, /*again=*/true, timeout,
                         [&] { return there->closing.load() ? absl::CancelledError("the job was closed") : may(); });
    };
  }
  shard.StartHosts(std::move(groups), heartbeat_timeout(), std::move(meet_again));
  return absl::OkStatus();
}

}  // namespace shardmesh
