#include "worker/lead/hosts/host_lead.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "local/memory/futex.h"
#include "worker/lead/hosts/did_not_come.h"

namespace shardmesh {

HostLead::HostLead(StepProtocol& protocol, HostMemory& memory, StepPass& pass, const JobSpec& job, const Plan& plan,
                   HostGroups groups, HostLeadOptions options, Trace* trace)
    : protocol_(protocol),
      memory_(memory),
      pass_(pass),
      job_(job),
      plan_(plan),
      options_(std::move(options)),
      trace_(trace),
      transport_(groups.rounds->name()) {
  Connect(std::move(groups));
  MutexLock lock(stopping_);
  thread_ = std::thread([this] { Loop(); });
}

HostLead::~HostLead() { Stop(); }

void HostLead::Stop() {
  stop_.store(true);
  FutexBump(protocol_.notifier());
  Leave();
  MutexLock lock(stopping_);
  if (thread_.joinable()) thread_.join();
}

void HostLead::Connect(HostGroups groups) {
  const SeveralHostsOptions options{options_.round_timeout, options_.step_timeout, options_.spin,
                                    options_.meet_again != nullptr};
  auto hosts = std::make_unique<SeveralHosts>(protocol_, memory_, pass_, job_, plan_, std::move(groups), options,
                                              traffic_, trace_);
  MutexLock lock(mu_);
  hosts_.swap(hosts);
}

void HostLead::Loop() {
  do {
    Serve();
  } while (MeetOthers());
  Leave();
  if (lead_.has_value()) return lead_->End();
  protocol_.publications().KeepUnused(protocol_.members().PublicationInUse());
  if (options_.mail != nullptr) options_.mail->Poll();
  if (options_.progress) options_.progress();
}

void HostLead::Serve() {
  if (!GoesOn().ok() || !hosts_->CatchUp()) return;
  lead_.emplace(protocol_, pass_, job_, plan_, *hosts_,
                LeadOptions{options_.step_timeout, options_.mail, options_.progress});
  while (!stop_.load()) {
    const uint32_t seen = protocol_.notifier().load(std::memory_order_acquire);
    if (!lead_->Advance()) break;
    if (const absl::Duration wait = lead_->Patience(); wait > absl::ZeroDuration()) {
      AwaitChange(protocol_.notifier(), seen, options_.spin, wait);
    }
  }
}

bool HostLead::MeetOthers() {
  const absl::Status broke = hosts_->broken();
  if (broke.ok() || !GoesOn().ok()) return false;
  spdlog::warn("event=hosts_meet_again job={} rank={} error=\"{}\"", job_.name, protocol_.local().first(),
               broke.ToString());
  const absl::Time until = hosts_->last_met() + options_.round_timeout;
  Disconnect();
  if (options_.apart != nullptr) options_.apart->store(true);
  absl::StatusOr<HostGroups> groups = options_.meet_again(until - MonotonicNow(), [this] { return GoesOnApart(); });
  if (options_.apart != nullptr) options_.apart->store(false);
  if (!groups.ok()) {
    LostOthers(broke, groups.status());
    return false;
  }
  Connect(*std::move(groups));
  return GoesOn().ok();
}

// What the lead had set aside stays so until all are equally far.
void HostLead::Disconnect() {
  lead_.reset();
  std::unique_ptr<SeveralHosts> hosts;
  {
    MutexLock lock(mu_);
    hosts_.swap(hosts);
  }
  hosts->Leave(kMeetsAgain);
}

void HostLead::LostOthers(const absl::Status& broke, const absl::Status& not_met) {
  if (!GoesOn().ok()) return;
  spdlog::error("event=hosts_failed job={} rank={} error=\"{}\" then=\"{}\"", job_.name, protocol_.local().first(),
                broke.ToString(), not_met.ToString());
  const int self = protocol_.local().first();
  // The first lead tells the others whom it waited for in vain: the job may go on without that one.
  const bool lost_one = absl::StrContains(not_met.message(), kDidNotCome);
  if (absl::IsFailedPrecondition(not_met) && !lost_one) {
    return protocol_.members().AbortFor(AbortReason::kNotMet, self, not_met.message());
  }
  int named = NamedRank(broke.message(), self);
  if (named < 0 || named >= plan_.num_ranks()) named = NamedRank(not_met.message(), self);
  const bool known = named >= 0 && named < plan_.num_ranks();
  protocol_.members().Abort(known ? AbortReason::kUnreachable : AbortReason::kInternal, known ? named : self,
                            Rank(self));
}

absl::Status HostLead::GoesOn() const {
  const absl::Status health = protocol_.members().Health();
  if (!health.ok() || !stop_.load()) return health;
  return absl::CancelledError(absl::StrCat("rank ", protocol_.local().first(), " closed the job"));
}

absl::Status HostLead::GoesOnApart() const {
  const int self = protocol_.local().first();
  if (plan_.num_replicas() > 1 && protocol_.control()->ends.load() != 0) {
    protocol_.members().Abort(AbortReason::kReformed, self, Rank(self));
  }
  return GoesOn();
}

// The job is over for it: it stops, or was aborted.
void HostLead::Leave() {
  const absl::Status over = GoesOn();
  const uint64_t abort = protocol_.control()->abort.load();
  const bool ends = abort != 0 && ReasonOf(abort) == AbortReason::kReformed;
  MutexLock lock(mu_);
  if (hosts_ != nullptr) hosts_->Leave(ends ? kEndsEpoch : over.message());
}

}  // namespace shardmesh
