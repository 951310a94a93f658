#include "worker/lead/hosts/hosts_ending.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/lead/lead.h"

namespace shardmesh {
namespace {

absl::Status Says(int host, absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat("host ", host, " said of the epoch that ends: ", what));
}

// The newest command as this host's members agreed on it, whoever was stopped and decides another now.
uint64_t AgreedSeq(const ControlBlock& control) {
  const uint64_t ended = control.ended.load(std::memory_order_acquire);
  return (ended != 0 ? ended : control.ending.load(std::memory_order_acquire)) >> 2;
}

HostProgress ReadAgreed(const StepProtocol& protocol) {
  HostProgress progress = ReadHostProgress(protocol);
  progress.decided = AgreedSeq(*protocol.control());
  progress.committed = std::min(progress.committed, progress.decided);
  progress.command = protocol.control()->commands[progress.decided % 2];
  return progress;
}

// This host had said that it is ready for the command: with replicas its gradients are here; else EpochEnd looks.
absl::Status Adopt(StepProtocol& protocol, const HostProgress& ahead) {
  Facts facts;
  facts.learning_rates.assign(ahead.learning_rates.begin(), ahead.learning_rates.end());
  if (Lead::Decide(protocol, ahead.command, facts)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("step ", ahead.command.step, " was decided with learning rates that no step can have"));
}

}  // namespace

absl::StatusOr<std::string> ProgressOfStopped(const StepProtocol& protocol) {
  if (protocol.control()->ending.load(std::memory_order_acquire) == 0) {
    return absl::UnavailableError("the members of this host have not stopped yet; ask again");
  }
  const HostProgress progress = ReadAgreed(protocol);
  std::string bytes(HostProgressBytes(protocol.job(), protocol.plan()), '\0');
  PackHostProgress(progress, protocol.plan(), bytes.data());
  return bytes;
}

absl::StatusOr<Ending> EndTogether(StepProtocol& protocol, const std::vector<int>& others, const AskHost& ask) {
  ControlBlock& control = *protocol.control();
  const JobSpec& job = protocol.job();
  const Plan& plan = protocol.plan();
  std::vector<HostProgress> all(protocol.local().num_hosts, ReadAgreed(protocol));
  for (const int host : others) {
    ASSIGN_OR_RETURN(const std::string bytes, ask(host));
    if (static_cast<int64_t>(bytes.size()) != HostProgressBytes(job, plan)) {
      return absl::DataLossError(absl::StrCat("host ", host, " said ", bytes.size(), " bytes of its progress; expected ",
                                              HostProgressBytes(job, plan)));
    }
    all[host] = UnpackHostProgress(bytes.data(), job, plan);
  }
  int liar = 0;
  if (const absl::Status status = CheckProgress(all, job, plan, liar); !status.ok()) return Says(liar, status.message());
  AdoptSources(control, all);
  uint64_t decided = AgreedSeq(control);
  while (true) {
    if (protocol.committed() < decided) {
      if (HostThatCommitted(all, decided) < 0 || protocol.decided() != decided) break;
      Lead::CommitNewest(protocol);
      continue;
    }
    if (plan.pulled()) {
      const SeatTable* const newest = NewestSeats(all, protocol.local().host);
      if (newest != nullptr) AdoptSeatTable(control, *newest, job, MonotonicNanos());
    }
    const int ahead = HostThatDecided(all, decided + 1);
    if (ahead < 0) break;
    // One that was stopped may have decided the same meanwhile.
    const absl::Status status = protocol.decided() == decided ? Adopt(protocol, all[ahead]) : absl::OkStatus();
    if (!status.ok()) return Says(ahead, status.message());
    ++decided;
  }
  const bool committed =
      HostThatCommitted(all, decided) >= 0 ||
      std::any_of(all.begin(), all.end(), [](const HostProgress& host) { return host.committed_step != kNoStep; });
  uint64_t none = 0;
  control.ended.compare_exchange_strong(none, EndingWord(decided, committed));
  FutexBump(control.finished);
  return EndingOf(control, control.ended.load());
}

}  // namespace shardmesh
