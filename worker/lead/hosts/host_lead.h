// HostLead: the lead of one host, of a job on several hosts, on a thread of its own: the engine of the first rank
// executes commands while the lead meets those of the other hosts.
//
// Where a lead is killed whose next incarnation comes soon (a node has its host's memory), or a connection between two
// leads breaks, all meet again within the heartbeat time-out, tell each other how far they are, and go on: members and
// trainers see a pause. What had crossed for the open command crosses once more.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "core/base/sync.h"
#include "worker/control/trace.h"
#include "worker/lead/hosts/several_hosts.h"
#include "worker/lead/lead.h"

namespace shardmesh {

// Connects this lead with the others anew, within the time, as long as `goes_on` says OK. Errors name ranks of the job.
//   FailedPrecondition: another lead cannot, and why.
using MeetAgain =
    std::function<absl::StatusOr<HostGroups>(absl::Duration timeout, const std::function<absl::Status()>& goes_on)>;

struct HostLeadOptions {
  absl::Duration round_timeout = absl::Seconds(3);  // SeveralHostsOptions::round_timeout
  absl::Duration step_timeout = absl::Seconds(60);  // for members to execute a command
  Mail* mail = nullptr;
  // Called from the lead's thread after each commit and an abort. May be empty.
  std::function<void()> progress;
  // EngineOptions::spin: of waits for the notifier. Waits for other hosts sleep.
  absl::Duration spin;
  MeetAgain meet_again;  // null: a lead that is lost ends the job
  std::atomic<bool>* apart = nullptr;  // set while the leads meet again; may be null
};

class HostLead {
 public:
  // Borrowed arguments, and what the options name, outlive the object. `pass`: of this host's first rank.
  HostLead(StepProtocol& protocol, HostMemory& memory, StepPass& pass, const JobSpec& job, const Plan& plan,
           HostGroups groups, HostLeadOptions options, Trace* trace = nullptr);
  // Leaves the groups: other hosts see it, and their job fails unless it is over.
  ~HostLead();
  HostLead(const HostLead&) = delete;
  HostLead& operator=(const HostLead&) = delete;

  // Leaves the groups, and decides nothing more. From any thread but its own; again: no effect.
  void Stop();

  const HostTraffic& traffic() const { return traffic_; }
  // How bytes cross between the hosts (ExchangeGroup::name).
  const std::string& transport() const { return transport_; }

 private:
  void Loop();
  // Until the job is over, or the leads have to meet again.
  void Serve();
  // False: the job is over.
  bool MeetOthers();
  void Connect(HostGroups groups);
  void Disconnect();
  void LostOthers(const absl::Status& broke, const absl::Status& not_met);
  void Leave();
  // OK, or why the job is over for this lead.
  absl::Status GoesOn() const;
  // The same while the leads are apart: an epoch that is to end does so at once, where each host can execute what
  // another has decided.
  absl::Status GoesOnApart() const;

  StepProtocol& protocol_;
  HostMemory& memory_;
  StepPass& pass_;
  const JobSpec& job_;
  const Plan& plan_;
  const HostLeadOptions options_;
  Trace* const trace_;
  HostTraffic traffic_;
  const std::string transport_;
  std::atomic<bool> stop_{false};
  Mutex mu_;
  // Of the newest meeting; null: the next one is under way. Replaced by the lead's thread, with mu_.
  std::unique_ptr<SeveralHosts> hosts_;
  std::optional<Lead> lead_;  // with those hosts
  Mutex stopping_;
  std::thread thread_ ABSL_GUARDED_BY(stopping_);
};

}  // namespace shardmesh
