#include "worker/lead/hosts/host_meeting.h"

#include <netdb.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/clock.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "core/base/sync.h"
#include "local/descriptor/fd.h"
#include "worker/lead/hosts/did_not_come.h"
#include "worker/transport/gloo_group.h"
#include "worker/transport/secure/secure_group.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kCallTime = absl::Seconds(2);  // for one call
constexpr absl::Duration kRetry = absl::Milliseconds(20);
constexpr absl::Duration kTellTime = absl::Seconds(5);  // until the first lead is there to be told of a failure
constexpr absl::Duration kAttempt = absl::Seconds(1);   // of leads that meet again, to connect: one may die meanwhile
constexpr char kComeKey[] = "come";

std::string Missing(int rank) { return absl::StrCat("rank ", rank, " ", kDidNotCome); }

// The meeting place as the lead of a host sees it: in this process, or behind calls. Waits end when the meeting is
// cancelled.
class PlaceOfMeeting {
 public:
  explicit PlaceOfMeeting(const HostMeeting& meeting) : meeting_(meeting) {}

  // That this lead cannot.
  void Tell(absl::string_view cause, absl::Duration time) {
    if (first()) return meeting_.place->TellNotMet(cause);
    Ask(kNotMetKey, cause, time).status().IgnoreError();  // who does not hear it waits for its deadline
  }

  // Comes to meet the others again, with a new number: the meeting's key.
  absl::StatusOr<std::string> Come(absl::Time until) {
    const std::string number = absl::BytesToHexString(RandomSecret());
    int missing = 0;
    while (true) {
      ASSIGN_OR_RETURN(const std::string said, TryCome(number, until - MonotonicNow()));
      if (!absl::StartsWith(said, "-")) return said;
      if (absl::SimpleAtoi(said.substr(1), &missing) && MonotonicNow() >= until) {
        return absl::UnavailableError(Missing(missing * meeting_.ranks.per_host));
      }
      RETURN_IF_ERROR(Pause());
    }
  }

  absl::Status Set(const std::string& of, const std::string& key, absl::string_view value, absl::Duration timeout) {
    if (first()) return meeting_.place->Set(of, key, value);
    return Ask(absl::StrCat(of, "/", key), value, timeout).status();
  }
  // Empty: there is none yet.
  absl::StatusOr<std::string> TryGet(const std::string& of, const std::string& key, absl::Duration left) {
    if (first()) {
      RETURN_IF_ERROR(meeting_.place->Check());
      absl::StatusOr<std::string> value = meeting_.place->Get(of, key, absl::ZeroDuration());
      return absl::IsDeadlineExceeded(value.status()) ? "" : value;
    }
    ASSIGN_OR_RETURN(v1::MeetReply reply, Ask(absl::StrCat(of, "/", key), "", left));
    return std::move(*reply.mutable_value());
  }
  absl::Status CheckGoesOn() const {
    const absl::Status over = meeting_.goes_on();
    return over.ok() ? over : absl::CancelledError(over.message());
  }
  absl::Status Pause() {
    RETURN_IF_ERROR(CheckGoesOn());
    MutexLock lock(mu_);
    never_.WaitFor(mu_, kRetry);
    return absl::OkStatus();
  }

 private:
  bool first() const { return meeting_.ranks.host == 0; }

  absl::StatusOr<std::string> TryCome(const std::string& number, absl::Duration left) {
    v1::MeetRequest request;
    request.set_rank(meeting_.ranks.first());
    request.set_key(kComeKey);
    request.set_value(number);
    ASSIGN_OR_RETURN(v1::MeetReply reply,
                     first() ? AnswerMeet(request, meeting_.ranks, *meeting_.place) : Ask(kComeKey, number, left));
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
      RETURN_IF_ERROR(Pause());
    }
  }

  const HostMeeting& meeting_;
  Mutex mu_;
  CondVar never_;
};

// One meeting's values.
class LeadRendezvous final : public Rendezvous {
 public:
  LeadRendezvous(const HostMeeting& meeting, PlaceOfMeeting& place, std::string key)
      : meeting_(meeting), place_(place), key_(std::move(key)) {}

  absl::Status Set(const std::string& key, absl::string_view value) override {
    return place_.Set(key_, key, value, meeting_.timeout);
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    const absl::Time until = MonotonicNow() + timeout;
    while (true) {
      RETURN_IF_ERROR(place_.CheckGoesOn());
      ASSIGN_OR_RETURN(std::string value, place_.TryGet(key_, key, until - MonotonicNow()));
      if (!value.empty()) return value;
      if (MonotonicNow() >= until) {
        return absl::DeadlineExceededError(absl::StrCat("it did not come within ", absl::FormatDuration(timeout)));
      }
      RETURN_IF_ERROR(place_.Pause());
    }
  }

 private:
  const HostMeeting& meeting_;
  PlaceOfMeeting& place_;
  const std::string key_;
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

absl::StatusOr<HostGroups> ConnectGroups(const HostMeeting& meeting, const std::shared_ptr<LeadRendezvous>& rendezvous,
                                         absl::Duration timeout) {
  const absl::Time until = MonotonicNow() + timeout;
  RETURN_IF_ERROR(Annotate(CheckOwnAddress(meeting.group_address), absl::StrCat("rank ", meeting.ranks.first())));
  HostGroups groups;
  const auto connect = meeting.transport.insecure ? ConnectInsecure : ConnectSecure;
  for (auto& [name, group] :
       {std::pair("gradients", &groups.gradients), {"results", &groups.results}, {"rounds", &groups.rounds}}) {
    ASSIGN_OR_RETURN(*group, connect(meeting, rendezvous, name, until - MonotonicNow()));
  }
  spdlog::info("event={} job={} epoch={} hosts={} transport={}", meeting.again ? "hosts_met_again" : "hosts_met",
               meeting.assignment.spec().name(), meeting.assignment.epoch(), meeting.ranks.num_hosts,
               std::string(groups.rounds->name()));
  return groups;
}

// In a meeting: under the key that all have come to, or the first one's.
absl::StatusOr<HostGroups> MeetOnce(const HostMeeting& meeting, PlaceOfMeeting& place, absl::Time until) {
  if (!meeting.again) {
    const auto rendezvous = std::make_shared<LeadRendezvous>(meeting, place, MeetingPlace::kFirst);
    return ConnectGroups(meeting, rendezvous, until - MonotonicNow());
  }
  ASSIGN_OR_RETURN(const std::string key, place.Come(until));
  const auto rendezvous = std::make_shared<LeadRendezvous>(meeting, place, key);
  const absl::Duration left = until - MonotonicNow();
  return ConnectGroups(meeting, rendezvous, std::min(left, std::max(left / 2, kAttempt)));
}

// Whether leads that meet again try once more: one may have been killed on the way.
bool MayTryAgain(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsAborted(status) || absl::IsDeadlineExceeded(status);
}

}  // namespace

absl::StatusOr<HostGroups> MeetLeads(const HostMeeting& meeting) {
  const absl::Time until = MonotonicNow() + meeting.timeout;
  PlaceOfMeeting place(meeting);
  absl::StatusOr<HostGroups> groups = MeetOnce(meeting, place, until);
  while (meeting.again && MayTryAgain(groups.status()) && MonotonicNow() < until && place.CheckGoesOn().ok()) {
    groups = MeetOnce(meeting, place, until);
  }
  const absl::Status over = place.CheckGoesOn();
  if (!over.ok()) groups = over;
  if (!groups.ok() && over.ok()) place.Tell(groups.status().message(), kTellTime);
  if (!over.ok() && meeting.again) place.Tell(over.message(), absl::ZeroDuration());
  return groups;
}

absl::StatusOr<v1::MeetReply> AnswerMeet(const v1::MeetRequest& request, const HostRanks& ranks, MeetingPlace& place) {
  v1::MeetReply reply;
  if (request.key() == kNotMetKey) {
    place.TellNotMet(request.value());
    return reply;
  }
  RETURN_IF_ERROR(place.Check());
  if (request.key() == kComeKey) {
    ASSIGN_OR_RETURN(const MeetingPlace::Meeting met,
                     place.Come(ranks.HostOf(Rank(request.rank())), ranks.num_hosts, request.value()));
    reply.set_value(met.key.empty() ? absl::StrCat("-", met.missing) : met.key);
    return reply;
  }
  const std::pair<std::string, std::string> parts = absl::StrSplit(request.key(), absl::MaxSplits('/', 1));
  if (!request.value().empty()) {
    RETURN_IF_ERROR(place.Set(parts.first, parts.second, request.value()));
    return reply;
  }
  absl::StatusOr<std::string> value = place.Get(parts.first, parts.second, absl::ZeroDuration());
  if (value.ok()) reply.set_value(*std::move(value));
  if (absl::IsAborted(value.status())) return value.status();
  return reply;
}

}  // namespace shardmesh
