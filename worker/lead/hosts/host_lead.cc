#include "worker/lead/hosts/host_lead.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "local/memory/futex.h"

namespace shardmesh {

HostLead::HostLead(StepProtocol& protocol, HostMemory& memory, StepPass& pass, const JobSpec& job, const Plan& plan,
                   HostGroups groups, HostLeadOptions options, Trace* trace)
    : protocol_(protocol),
      spin_(options.spin),
      hosts_(protocol, memory, pass, job, plan, std::move(groups),
             {options.round_timeout, options.step_timeout, options.spin}, trace),
      lead_(protocol, pass, job, plan, hosts_, {options.step_timeout, options.mail, std::move(options.progress)}) {
  thread_ = std::thread([this] { Loop(); });
}

HostLead::~HostLead() {
  stop_.store(true);
  FutexBump(protocol_.notifier());
  Leave();
  thread_.join();
}

void HostLead::Loop() {
  while (!stop_.load()) {
    const uint32_t seen = protocol_.notifier().load(std::memory_order_acquire);
    if (!lead_.Advance()) break;
    if (const absl::Duration wait = lead_.Patience(); wait > absl::ZeroDuration()) {
      AwaitChange(protocol_.notifier(), seen, spin_, wait);
    }
  }
  Leave();
  lead_.End();
}

void HostLead::Leave() {
  const absl::Status health = protocol_.members().Health();
  hosts_.Leave(health.ok() ? absl::StrCat("rank ", protocol_.local().first(), " closed the job") : health.message());
}

}  // namespace shardmesh
