// Of SeveralHosts: what a lead does when the leads have met (host_progress.h).
#include "core/base/clock.h"
#include "core/base/status.h"
#include "worker/control/residency.h"
#include "worker/lead/hosts/host_progress.h"
#include "worker/lead/hosts/several_hosts.h"
#include "worker/lead/lead.h"
#include "worker/step/decide.h"

namespace shardmesh {

bool SeveralHosts::CatchUp() {
  const int hosts = protocol_.local().num_hosts, host = protocol_.local().host;
  const int64_t bytes = HostProgressBytes(job_, plan_);
  std::vector<char> said(hosts * bytes);
  PackHostProgress(ReadHostProgress(protocol_), plan_, said.data() + host * bytes);
  if (!Met(rounds_->AllGather(said.data() + host * bytes, said.data(), bytes, options_.round_timeout))) return false;
  std::vector<HostProgress> all;
  for (int h = 0; h < hosts; ++h) all.push_back(UnpackHostProgress(said.data() + h * bytes, job_, plan_));
  int liar = 0;
  if (const absl::Status status = CheckProgress(all, job_, plan_, liar); !status.ok()) return Refuse(liar, status);
  AdoptSources(control(), all);
  while (true) {
    const uint64_t decided = protocol_.decided();
    const bool open = protocol_.committed() != decided;
    const int ahead = open ? -1 : HostThatDecided(all, decided + 1);
    if (open && HostThatCommitted(all, decided) >= 0) {
      CommitBehind(all);
      continue;
    }
    TakeSeatsOver(all);  // members read them while they execute
    if (ahead < 0) break;
    if (!IssueBehind(all[ahead])) return false;
  }
  protocol_.publications().KeepUnused(protocol_.members().PublicationInUse());
  for (size_t b = 0; b < takers_.size(); ++b) {
    takers_[b] = ResidencyTable(&control(), plan_).bucket(static_cast<int>(b)).takers.load();
  }
  return true;
}

// This host had said that it is done with the command: all that came for it is here.
void SeveralHosts::CommitBehind(absl::Span<const HostProgress> all) {
  const Command command = protocol_.command();
  const HostRanks& ranks = protocol_.local();
  for (int r = 0; r < plan_.num_ranks() && command.kind == CommandKind::kDigest; ++r) {
    control().members[r].digest.store(all[r / ranks.per_host].digests[r % ranks.per_host]);
  }
  if (const absl::Status back = pass_.GiveBackGradients(command); !back.ok()) Fail(back);
  Lead::CommitNewest(protocol_);
  AfterCommit(MoreFollows(ReadCommitted(control()), job_, plan_));
}

void SeveralHosts::TakeSeatsOver(absl::Span<const HostProgress> all) {
  if (!plan_.pulled()) return;
  const SeatTable* const newest = NewestSeats(all, protocol_.local().host);
  if (newest != nullptr) AdoptSeatTable(control(), *newest, job_, MonotonicNanos());
}

// This host had said that it is ready for the command. Tickets are its own.
bool SeveralHosts::IssueBehind(const HostProgress& ahead) {
  Command command = ahead.command;
  if (command.kind == CommandKind::kDigest) command.nonfinite = static_cast<int64_t>(control().digest_wanted.load());
  if (command.kind == CommandKind::kPublish) command.nonfinite = static_cast<int64_t>(control().publish_wanted.load());
  for (size_t b = 0; b < ahead.takers.size(); ++b) takers_[b] = ahead.takers[b];
  Ready(command);
  if (plan_.bucketed()) LendToTakers(command);
  Facts facts;
  facts.learning_rates.assign(ahead.learning_rates.begin(), ahead.learning_rates.end());
  if (Lead::Issue(protocol_, command, facts)) return true;
  protocol_.members().Abort(AbortReason::kInternal, protocol_.local().first(), Rank(protocol_.local().first()));
  return false;
}

}  // namespace shardmesh
