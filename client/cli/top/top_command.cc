#include "client/cli/top/top_command.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/base/connection.h"
#include "client/cli/top/top_table.h"
#include "client/cli/top/top_view.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "local/memory/futex.h"
#include "rpc/base/main_support.h"

namespace shardmesh {
namespace {

constexpr size_t kMaxThreads = 32;  // that ask workers at a time

struct Flags {
  ConnectionFlags connection;
  std::string job;
  double interval_seconds = 1;
  int64_t count = 0;  // 0: until it is stopped
};

// One worker, which may be a member of several jobs. Its connection is kept from one refresh to the next.
struct Worker {
  v1::Member member;
  std::vector<std::string> jobs;
  std::unique_ptr<ShardTransport> transport;
  absl::StatusOr<v1::GetStatusReply> status;
  int64_t answered_nanos = 0;
  std::map<std::string, absl::StatusOr<v1::GetTraceReply>> traces;  // by job
};

// All calls together take `flags.timeout()` at most.
void Ask(const ConnectionFlags& flags, Worker& worker) {
  const absl::Time deadline = MonotonicNow() + flags.timeout();
  worker.traces.clear();
  if (worker.transport == nullptr) {
    absl::StatusOr<std::unique_ptr<ShardTransport>> transport = DialWorker(worker.member, flags);
    if (!transport.ok()) {
      worker.status = transport.status();
      return;
    }
    worker.transport = *std::move(transport);
  }
  worker.status = worker.transport->GetStatus(flags.timeout());
  worker.answered_nanos = MonotonicNanos();
  for (const std::string& job : worker.jobs) {  // after the status: see WorkerAnswer
    if (!worker.status.ok()) return;
    worker.traces[job] = worker.transport->GetTrace(job, std::max(deadline - MonotonicNow(), absl::Milliseconds(1)));
  }
}

// What is known from one refresh to the next. For one thread.
class Monitor {
 public:
  Monitor(Client& client, const Flags& flags) : client_(client), flags_(flags) {}

  // NotFound: there is no such job, or none any more. Else: the coordinator did not answer the first time; later what
  // it said before is used, and the error is part of the view.
  absl::StatusOr<TopView> Refresh();

 private:
  using Key = std::pair<std::string, std::string>;  // name and address
  static Key KeyOf(const v1::Member& member) { return {member.worker(), member.address()}; }

  absl::StatusOr<std::vector<v1::JobDescription>> ListJobs();
  void AskWorkers();
  JobAnswers AnswersFor(const v1::JobDescription& job) const;

  Client& client_;
  const Flags& flags_;
  bool listed_ = false;
  std::vector<v1::JobDescription> jobs_;
  std::map<Key, Worker> workers_;
  std::map<std::string, JobView> before_;
};

absl::StatusOr<std::vector<v1::JobDescription>> Monitor::ListJobs() {
  ASSIGN_OR_RETURN(const v1::ListJobsReply list, client_.coordinator().ListJobs({}, flags_.connection.timeout()));
  std::vector<v1::JobDescription> jobs;
  for (const v1::JobDescription& job : list.jobs()) {
    if (flags_.job.empty() || job.spec().name() == flags_.job) jobs.push_back(job);
  }
  if (!jobs.empty() || flags_.job.empty()) return jobs;
  ASSIGN_OR_RETURN(v1::JobDescription job,
                   DescribeJob(client_, flags_.job, flags_.connection));  // says which there are
  jobs.push_back(std::move(job));
  return jobs;
}

// All at once: one that is silent delays the others' answers, but not their times.
void Monitor::AskWorkers() {
  std::map<Key, Worker> workers;
  for (const v1::JobDescription& job : jobs_) {
    for (const v1::Member& member : job.members()) {
      Worker& worker = workers[KeyOf(member)];
      worker.member = member;
      worker.jobs.push_back(job.spec().name());
      const auto known = workers_.find(KeyOf(member));
      if (known != workers_.end() && worker.transport == nullptr) worker.transport = std::move(known->second.transport);
    }
  }
  workers_ = std::move(workers);
  std::vector<Worker*> list;
  for (auto& entry : workers_) list.push_back(&entry.second);
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  const auto ask = [&] {
    for (size_t i = next.fetch_add(1); i < list.size(); i = next.fetch_add(1)) Ask(flags_.connection, *list[i]);
  };
  for (size_t t = 0; t < std::min(list.size(), kMaxThreads); ++t) {
    absl::StatusOr<std::thread> thread = StartThread("a question to a worker", ask);
    if (!thread.ok()) break;
    threads.push_back(*std::move(thread));
  }
  ask();  // what is left, when there are fewer threads
  for (std::thread& thread : threads) thread.join();
}

JobAnswers Monitor::AnswersFor(const v1::JobDescription& job) const {
  JobAnswers answers;
  answers.job = job;
  for (const v1::Member& member : job.members()) {
    const Worker& worker = workers_.at(KeyOf(member));
    const auto trace = worker.traces.find(job.spec().name());
    WorkerAnswer answer = {member, worker.status, absl::UnknownError("not asked"), worker.answered_nanos};
    if (trace != worker.traces.end()) answer.trace = trace->second;
    answers.workers.push_back(std::move(answer));
  }
  return answers;
}

absl::StatusOr<TopView> Monitor::Refresh() {
  TopView view;
  absl::StatusOr<std::vector<v1::JobDescription>> jobs = ListJobs();
  if (!jobs.ok() && (!listed_ || absl::IsNotFound(jobs.status()))) return jobs.status();
  if (jobs.ok()) {
    jobs_ = *std::move(jobs);
    listed_ = true;
  } else {
    view.coordinator_error = jobs.status().ToString();
  }
  AskWorkers();
  view.time = absl::Now();
  std::map<std::string, JobView> now;
  for (const v1::JobDescription& job : jobs_) {
    const auto before = before_.find(job.spec().name());
    view.jobs.push_back(ViewOf(AnswersFor(job), before == before_.end() ? nullptr : &before->second));
    now[job.spec().name()] = view.jobs.back();
  }
  before_ = std::move(now);
  return view;
}

absl::Status Print(const std::string& text) {
  if (std::fputs(text.c_str(), stdout) != EOF && std::fflush(stdout) == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("writing to standard output: ", std::strerror(errno)));
}

absl::Status Top(const Flags& flags) {
  StopSignal stop;
  const bool terminal = isatty(STDOUT_FILENO) == 1;
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  Monitor monitor(client, flags);
  for (int64_t shown = 0;;) {
    const absl::Duration begun = absl::Nanoseconds(MonotonicNanos());
    ASSIGN_OR_RETURN(const TopView view, monitor.Refresh());
    RETURN_IF_ERROR(
        Print(flags.connection.json ? JsonLine(TopJson(view)) : Redraw(TopText(view), terminal, /*first=*/shown == 0)));
    if (++shown == flags.count) return absl::OkStatus();
    const absl::Duration taken = absl::Nanoseconds(MonotonicNanos()) - begun;
    if (stop.WaitFor(std::max(absl::Seconds(flags.interval_seconds) - taken, absl::ZeroDuration()))) {
      return absl::OkStatus();
    }
  }
}

}  // namespace

void AddTopCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command =
      app.add_subcommand("top", "Watch jobs: steps, what workers do, which trainer the others wait for");
  const auto flags = std::make_shared<Flags>();
  flags->connection.timeout_seconds = 3;  // a silent worker holds up a refresh so long
  AddJobArgument(*command, flags->job)->description("Name of the job; unset: all jobs");
  AddSeconds(*command, "--interval", flags->interval_seconds, "Seconds from one refresh to the next");
  command->add_option("--count", flags->count, "So many refreshes; 0: until it is stopped")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()).description(""))
      ->type_name("N")
      ->capture_default_str();
  AddConnectionOptions(*command, flags->connection);
  command->footer(
      "Jobs: steps/s since the refresh before. Then, of the steps that the trace of the job's first worker still has\n"
      "(a worker remembers its newest 4096 spans): the median and the longest time from commit to commit, and the\n"
      "longest pause between two commits in which that worker had nothing to do, with the step before which it was.\n"
      "Workers: busy in commands of steps, waiting behind them for other workers; parts of the time in their trace;\n"
      "how often they were killed and went on with the job (shardmesh-node), and how long the last time took.\n"
      "Slots: the last step that was declared; idle, the median part of a step from its declaration to its commit;\n"
      "and which slots the others wait for: that a late step lacks, or that were mostly the last to declare.\n"
      "Trainers, of a job whose slots are pulled: slots that they finished, and the part of the time since the "
      "refresh\n"
      "before in which they waited for one, or for a commit.\n"
      "On a terminal each refresh replaces the one before; with --json it is a line. A worker that does not answer is\n"
      "shown as such. Ctrl-C ends the view, exit code 0.\n"
      "Examples:\n"
      "  shardctl top\n"
      "  shardctl top llama --interval 5\n"
      "  shardctl top llama --count 1 --json");
  command->callback([flags, &result] {
    if (const absl::Status status = Top(*flags); !status.ok()) Fail(status, result);
  });
}

}  // namespace shardmesh
