// How the leads of a job's hosts find each other: addresses go through the worker of rank 0 (Shard.Meet), and then
// every two of them are connected. Thread-safe.
//
// Keys of a MeetRequest: "MEETING/KEY" for a value of a meeting, "come" with a lead's number, of which the reply is the
// meeting's key or -H where host H is still missing, and "not met" with a cause (meeting_place.h).
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/shardmesh/v1/coordinator.pb.h"
#include "proto/shardmesh/v1/shard.pb.h"
#include "rpc/tls/tls.h"
#include "worker/control/host_ranks.h"
#include "worker/lead/hosts/host_lead.h"
#include "worker/lead/hosts/meeting_place.h"

namespace shardmesh {

// Asks the lead of another host (Shard.Meet).
using MeetCall = std::function<absl::StatusOr<v1::MeetReply>(const v1::Peer& lead, const v1::MeetRequest& request,
                                                             absl::Duration timeout)>;

// Where the assigned rank's host stands among those of the job. InvalidArgument: the ranks are not in the order of
// hosts, or not equally many on each.
absl::StatusOr<HostRanks> HostRanksOf(const v1::Assignment& assignment);

// How bytes go between the leads of hosts.
struct HostTransport {
  TlsOptions tls;         // with which they prove who they are; not enabled: in the clear, between who knows the secret
  bool insecure = false;  // through Gloo, in the clear, without a proof of anything
};

struct HostMeeting {
  const v1::Assignment& assignment;
  HostRanks ranks;
  std::string plan_hash;
  std::string group_address;  // of this host
  HostTransport transport;
  MeetCall meet;                          // on hosts other than the first
  std::shared_ptr<MeetingPlace> place;    // on the first
  std::function<absl::Status()> goes_on;  // else why not; asked every few milliseconds
  absl::Duration timeout;
  bool again = false;  // not the first meeting of a new job: the others were connected before
};

// Connects this lead with the others, and says in the log how. Errors name ranks of the job.
//   Unavailable: one did not come in time. FailedPrecondition: the group address is not this host's, or another lead
//   could not, and why. Cancelled: what `goes_on` says. Errors of Shard.Meet.
// A lead that cannot says so at the meeting place, for those that still wait.
absl::StatusOr<HostGroups> MeetLeads(const HostMeeting& meeting);

// The key of a request that tells why leads cannot meet.
inline constexpr char kNotMetKey[] = "not met";
// Shard.Meet, on the first worker: what a lead, which may ask, says or wants to know at the place.
absl::StatusOr<v1::MeetReply> AnswerMeet(const v1::MeetRequest& request, const HostRanks& ranks, MeetingPlace& place);

}  // namespace shardmesh
