#include "worker/lead/hosts/host_meeting.h"

#include <netdb.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/plain_text.h"
#include "core/base/status.h"
#include "core/base/sync.h"
#include "local/descriptor/fd.h"
#include "worker/transport/gloo_group.h"
#include "worker/transport/secure/secure_group.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kCallTime = absl::Seconds(2);  // for one call
constexpr absl::Duration kRetry = absl::Milliseconds(20);
constexpr absl::Duration kTellTime = absl::Seconds(5);  // until the first lead is there to be told of a failure

// The rendezvous as the lead of a host sees it: that of rank 0, in this process or behind calls. Waits end when the
// meeting is cancelled.
class LeadRendezvous final : public Rendezvous {
 public:
  explicit LeadRendezvous(const HostMeeting& meeting) : meeting_(meeting) {}

  // That this lead cannot.
  void Tell(absl::string_view cause) {
    if (meeting_.ranks.host == 0) return TellNotMet(*meeting_.rendezvous, cause);
    Ask(kNotMetKey, cause, kTellTime).status().IgnoreError();  // who does not hear it waits for its deadline
  }

  absl::Status Set(const std::string& key, absl::string_view value) override {
    if (meeting_.ranks.host == 0) return meeting_.rendezvous->Set(key, value);
    return Ask(key, value, meeting_.timeout).status();
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    const absl::Time until = MonotonicNow() + timeout;
    while (true) {
      ASSIGN_OR_RETURN(std::string value, TryGet(key, until - MonotonicNow()));
      if (!value.empty()) return value;
      if (MonotonicNow() >= until) {
        return absl::DeadlineExceededError(absl::StrCat("it did not come within ", absl::FormatDuration(timeout)));
      }
      Pause();
    }
  }

 private:
  // Empty: there is none yet.
  absl::StatusOr<std::string> TryGet(const std::string& key, absl::Duration left) {
    if (meeting_.cancelled.load()) return absl::CancelledError("the job was closed");
    if (meeting_.ranks.host == 0) {
      RETURN_IF_ERROR(CheckMeeting(*meeting_.rendezvous));
      return meeting_.rendezvous->Get(key, kRetry).value_or("");
    }
    ASSIGN_OR_RETURN(v1::MeetReply reply, Ask(key, "", left));
    return std::move(*reply.mutable_value());
  }

  // The first lead may not have its memory yet: asks again until the time is up.
  absl::StatusOr<v1::MeetReply> Ask(const std::string& key, absl::string_view value, absl::Duration left) {
    v1::MeetRequest request;
    request.set_job(meeting_.assignment.spec().name());
    request.set_epoch(meeting_.assignment.epoch());
    request.set_rank(meeting_.ranks.first());
    request.set_incarnation(meeting_.assignment.peers(meeting_.ranks.first()).incarnation());
    request.set_plan_hash(meeting_.plan_hash);
    request.set_secret(meeting_.assignment.secret());
    request.set_key(key);
    request.set_value(std::string(value));
    const absl::Time until = MonotonicNow() + left;
    while (true) {
      absl::StatusOr<v1::MeetReply> reply = meeting_.meet(meeting_.assignment.peers(0), request, kCallTime);
      const bool later = absl::IsUnavailable(reply.status()) || absl::IsNotFound(reply.status()) ||
                         absl::IsDeadlineExceeded(reply.status());
      if (!later || MonotonicNow() >= until) return reply;
      if (meeting_.cancelled.load()) return absl::CancelledError("the job was closed");
      Pause();
    }
  }
  void Pause() {
    MutexLock lock(mu_);
    never_.WaitFor(mu_, kRetry);
  }

  const HostMeeting& meeting_;
  Mutex mu_;
  CondVar never_;
};

}  // namespace

absl::StatusOr<HostRanks> HostRanksOf(const v1::Assignment& assignment) {
  std::vector<std::string> hosts;
  std::vector<int> counts;
  for (const v1::Peer& peer : assignment.peers()) {
    if (hosts.empty() || hosts.back() != peer.host_id()) {
      if (std::find(hosts.begin(), hosts.end(), peer.host_id()) != hosts.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat("ranks are not ordered by host: rank ", peer.rank(), " is on the host of earlier ranks"));
      }
      hosts.push_back(peer.host_id());
      counts.push_back(0);
    }
    ++counts.back();
  }
  for (size_t h = 0; h < hosts.size(); ++h) {
    if (counts[h] == counts[0]) continue;
    return absl::InvalidArgumentError(absl::StrCat("host ", h, " has ", counts[h], " ranks of the job, host 0 has ",
                                                   counts[0], "; give equally many to each"));
  }
  const int per_host = counts.empty() ? 1 : counts[0];
  return HostRanks{assignment.rank() / per_host, std::max<int>(static_cast<int>(hosts.size()), 1), per_host};
}

void TellNotMet(Rendezvous& rendezvous, absl::string_view cause) {
  if (CheckMeeting(rendezvous).ok()) rendezvous.Set(kNotMetKey, PlainText(cause, kMaxCause)).IgnoreError();
}

absl::Status CheckMeeting(Rendezvous& rendezvous) {
  const absl::StatusOr<std::string> cause = rendezvous.Get(kNotMetKey, absl::ZeroDuration());
  return cause.ok() ? absl::FailedPreconditionError(*cause) : absl::OkStatus();
}

namespace {

// Whether something can listen there. Gloo says less, and does not give back what it has when it cannot.
absl::Status CheckOwnAddress(const std::string& host) {
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), nullptr, nullptr, &found); error != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("group address ", host, " is none: ", gai_strerror(error), "; give one of this host's"));
  }
  int failed = 0;
  bool bound = false;
  for (const addrinfo* at = found; at != nullptr && !bound; at = at->ai_next) {
    const UniqueFd fd(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    bound = fd.valid() && bind(fd.get(), at->ai_addr, at->ai_addrlen) == 0;
    if (!bound) failed = errno;
  }
  freeaddrinfo(found);
  if (bound) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("nothing can listen at group address ", host, " (",
                                                    std::strerror(failed), "); give one of this host's"));
}

using Connected = absl::StatusOr<std::unique_ptr<ExchangeGroup>>;

Connected ConnectInsecure(const HostMeeting& meeting, const std::shared_ptr<LeadRendezvous>& rendezvous,
                          const char* key, absl::Duration timeout) {
  GlooOptions options;
  options.rank = meeting.ranks.host;
  options.size = meeting.ranks.num_hosts;
  options.epoch = static_cast<uint64_t>(meeting.assignment.epoch());
  options.names = {0, meeting.ranks.per_host};
  options.key = key;
  options.host = meeting.group_address;
  options.timeout = timeout;
  return GlooGroup::Connect(rendezvous, options);
}

Connected ConnectSecure(const HostMeeting& meeting, const std::shared_ptr<LeadRendezvous>& rendezvous, const char* key,
                        absl::Duration timeout) {
  SecureOptions options;
  options.rank = meeting.ranks.host;
  options.size = meeting.ranks.num_hosts;
  options.epoch = static_cast<uint64_t>(meeting.assignment.epoch());
  options.names = {0, meeting.ranks.per_host};
  options.key = key;
  options.secret = meeting.assignment.secret();
  options.host = meeting.group_address;
  options.tls = meeting.transport.tls;
  options.timeout = timeout;
  return SecureGroup::Connect(rendezvous, options);
}

absl::StatusOr<HostGroups> ConnectGroups(const HostMeeting& meeting,
                                         const std::shared_ptr<LeadRendezvous>& rendezvous) {
  const absl::Time until = MonotonicNow() + meeting.timeout;
  RETURN_IF_ERROR(Annotate(CheckOwnAddress(meeting.group_address), absl::StrCat("rank ", meeting.ranks.first())));
  HostGroups groups;
  const auto connect = meeting.transport.insecure ? ConnectInsecure : ConnectSecure;
  for (auto& [name, group] :
       {std::pair("gradients", &groups.gradients), {"results", &groups.results}, {"rounds", &groups.rounds}}) {
    ASSIGN_OR_RETURN(*group, connect(meeting, rendezvous, name, until - MonotonicNow()));
  }
  spdlog::info("event=hosts_met job={} epoch={} hosts={} transport={}", meeting.assignment.spec().name(),
               meeting.assignment.epoch(), meeting.ranks.num_hosts, std::string(groups.rounds->name()));
  return groups;
}

}  // namespace

absl::StatusOr<HostGroups> MeetLeads(const HostMeeting& meeting) {
  const auto rendezvous = std::make_shared<LeadRendezvous>(meeting);
  absl::StatusOr<HostGroups> groups = ConnectGroups(meeting, rendezvous);
  if (!groups.ok() && !meeting.cancelled.load()) rendezvous->Tell(groups.status().message());
  return groups;
}

}  // namespace shardmesh
