// Lead: decides the commands of a job and commits them, for the members of its host and with the leads of the other
// hosts, if there are any (lead_transport.h). Members see only their control block: what they do is the same on one
// host and on several.
//
//   collect   until the facts of all hosts lead to a command (worker/step/decide.h): every slot is declared, with every
//             gradient shard on some host; or there are initial weights, a bucket to sum, a digest to take, ...
//   prepare   a publication is set aside for a command that writes one; gradients that members lack begin to come
//   run       the DECISION: the command is on every host's control block. Members execute it, and what they write
//             begins to go where it lacks
//   commit    when all hosts have said that they are done
//
// All leads decide the same from the same facts, so nobody decides for others. Between the last round and the commit
// nothing can fail but a process.
//
// No thread of its own: whoever calls Advance. Of a job on one host that is the engine of the first rank, of one on
// several a thread (host_lead.h). Not thread-safe.
#pragma once

#include <functional>
#include <optional>

#include "absl/time/time.h"
#include "worker/lead/lead_transport.h"
#include "worker/lead/mail.h"
#include "worker/pass/step_pass.h"
#include "worker/step/decide.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

struct LeadOptions {
  absl::Duration step_timeout = absl::Seconds(60);  // for members to execute a command; then the slowest is named
  Mail* mail = nullptr;
  // Called after each commit, and when a version that was asked for is there or cannot be. May be empty.
  std::function<void()> progress;
};

class Lead {
 public:
  // Borrowed arguments, and what the options name, outlive the object. `pass`: of this host's first rank, which gives
  // pages of buckets back. A command that was decided before and is not committed goes on; what crosses between hosts
  // for it crosses once more.
  Lead(StepProtocol& protocol, StepPass& pass, const JobSpec& job, const Plan& plan, LeadTransport& transport,
       LeadOptions options);
  Lead(const Lead&) = delete;
  Lead& operator=(const Lead&) = delete;

  // Takes what has come and does what follows from it: one round, and at most one commit. False: the job is over; why
  // is in its health.
  bool Advance();
  // How long to wait for the notifier before the next Advance; zero: not at all.
  absl::Duration Patience();
  // Behind the last Advance: gives back what was set aside, and answers trainers.
  void End();

  // What a lead does to its host's control block, apart, for tests of what comes before and behind.
  // The decision point: writes the command and decides it. False: it cannot be (the job is over, or the scalars of a
  // group, which were checked when they were declared). REQUIRES: the newest command is committed.
  static bool Issue(StepProtocol& protocol, const Command& command, const Facts& facts);
  // The same of an epoch that ends, whose job is aborted here (worker/lead/hosts/hosts_ending.h).
  static bool Decide(StepProtocol& protocol, const Command& command, const Facts& facts);
  // Publishes, records the outcome and commits the newest command; a step of which quantized weights are gathered is
  // committed with the command that quantizes them. REQUIRES: every member of the host has executed it.
  static void CommitNewest(StepProtocol& protocol);

 private:
  enum class Phase { kCollect, kPrepare, kRun };

  void Collect();
  void Prepare();
  void EndPrepare();
  void Run();
  // While members execute: sees that they are done, or late.
  void LookAtMembers();
  void Commit();
  bool PartDone();
  void AnswerPublish(int64_t step);
  void GaveBack(const absl::Status& status);
  void Fail(absl::string_view why);

  StepProtocol& protocol_;
  StepPass& pass_;
  const JobSpec& job_;
  const Plan& plan_;
  LeadTransport& transport_;
  const LeadOptions options_;

  Phase phase_ = Phase::kCollect;
  uint64_t part_ = 0;  // the one that is under way
  bool executing_ = false;
  int64_t run_since_ = 0, looked_ = 0;  // MonotonicNanos
  Facts facts_;                         // that led to the command
  bool resumed_ = false;                // they did not: the command is of the last incarnation
  Command command_;                     // that is prepared and run
  int reserved_ = -1;                   // publication
  int publish_ = -1;                    // the same, as all hosts agreed on it
};

}  // namespace shardmesh
