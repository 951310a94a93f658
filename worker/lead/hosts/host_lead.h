// HostLead: the lead of one host, of a job on several hosts, on a thread of its own: the engine of the first rank
// executes commands while the lead meets those of the other hosts.
#pragma once

#include <atomic>
#include <functional>
#include <thread>

#include "absl/time/time.h"
#include "worker/control/trace.h"
#include "worker/lead/lead.h"
#include "worker/lead/hosts/several_hosts.h"

namespace shardmesh {

struct HostLeadOptions {
  absl::Duration round_timeout = absl::Seconds(3);  // SeveralHostsOptions::round_timeout
  absl::Duration step_timeout = absl::Seconds(60);  // for members to execute a command
  Mail* mail = nullptr;
  // Called from the lead's thread after each commit and an abort. May be empty.
  std::function<void()> progress;
  // EngineOptions::spin: of waits for the notifier. Waits for other hosts sleep.
  absl::Duration spin;
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

  const SeveralHosts& hosts() const { return hosts_; }

 private:
  void Loop();
  void Leave();

  StepProtocol& protocol_;
  const absl::Duration spin_;
  SeveralHosts hosts_;
  Lead lead_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace shardmesh
