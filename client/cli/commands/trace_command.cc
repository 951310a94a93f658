#include "client/cli/commands/trace_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <limits>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/base/connection.h"
#include "client/cli/base/table.h"
#include "client/cli/files/whole_file.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

struct Flags {
  ConnectionFlags connection;
  std::string job, output;
  int64_t steps = 0;
};

std::string Title(const v1::TraceSpan& span) {
  if (span.name() == "range") return absl::StrCat("range ", span.item(), " of bucket ", span.bucket());
  if (span.name() == "declared") {
    const std::string what = span.bucket() < 0 ? "" : absl::StrCat(" bucket ", span.bucket());
    return absl::StrCat("slot ", span.item(), " declared", what, ", step ", span.step());
  }
  if (span.bucket() >= 0) {
    const char* const bucket = absl::EndsWith(span.name(), "_bucket") ? " " : " bucket ";
    return absl::StrCat(span.name(), bucket, span.bucket(), ", step ", span.step());
  }
  return absl::StrCat(span.name(), " ", span.step());
}

// The first step that is shown. The newest one is the last that all ranks have taken which took any: they were asked
// one after the other, and slots of a later step may have been declared.
int64_t FirstStep(const std::vector<v1::GetTraceReply>& ranks, int64_t steps) {
  int64_t newest = std::numeric_limits<int64_t>::max();
  for (const v1::GetTraceReply& rank : ranks) {
    int64_t of_rank = 0;
    for (const v1::TraceSpan& span : rank.spans()) {
      if (span.name() == "step") of_rank = std::max(of_rank, span.step());
    }
    if (of_rank > 0) newest = std::min(newest, of_rank);
  }
  return steps == 0 ? 0 : newest - std::min(newest, steps) + 1;
}

uint64_t FirstNanos(const std::vector<v1::GetTraceReply>& ranks, int64_t first_step) {
  uint64_t first = std::numeric_limits<uint64_t>::max();
  for (const v1::GetTraceReply& rank : ranks) {
    for (const v1::TraceSpan& span : rank.spans()) {
      if (span.step() >= first_step) first = std::min<uint64_t>(first, span.begin_nanos());
    }
  }
  return first;
}

Json Event(const v1::TraceSpan& span, int rank, uint64_t origin) {
  const double begin = static_cast<double>(span.begin_nanos() - origin) / 1000;
  Json event = {{"name", Title(span)}, {"cat", span.name()}, {"pid", rank}, {"tid", span.thread()}, {"ts", begin}};
  if (span.end_nanos() > span.begin_nanos()) {
    event["ph"] = "X";
    event["dur"] = static_cast<double>(span.end_nanos() - span.begin_nanos()) / 1000;
  } else {
    event["ph"] = "i";
    event["s"] = "p";
  }
  event["args"] = {{"step", span.step()}};
  return event;
}

absl::StatusOr<v1::GetTraceReply> Ask(const v1::Member& member, const Flags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ShardTransport> worker, DialWorker(member, flags.connection));
  return worker->GetTrace(flags.job, flags.connection.timeout());
}

struct Answers {
  std::vector<v1::GetTraceReply> ranks;
  absl::Status silent;  // why some did not answer
};

// The workers that hold the job, asked one after the other. An error: none answered.
absl::StatusOr<Answers> AskAll(const Flags& flags) {
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  ASSIGN_OR_RETURN(const v1::JobDescription job, DescribeJob(client, flags.job, flags.connection));
  Answers answers;
  for (const v1::Member& member : job.members()) {
    absl::StatusOr<v1::GetTraceReply> reply = Ask(member, flags);
    answers.silent.Update(reply.status());
    if (reply.ok()) answers.ranks.push_back(*std::move(reply));
  }
  if (job.members().empty()) {
    return absl::FailedPreconditionError(absl::StrCat("job ", flags.job, " has no workers yet; nothing was done"));
  }
  if (answers.ranks.empty()) return answers.silent;
  answers.silent = Annotate(answers.silent, absl::StrCat(job.members_size() - answers.ranks.size(), " of ",
                                                         job.members_size(), " workers did not answer"));
  return answers;
}

// Not an instant, a part of a command, or what crosses between hosts while commands run.
bool IsCommandOrWait(const v1::TraceSpan& span) {
  for (const char* const other : {"range", "declared", "orthogonalize", "gradients", "weights"}) {
    if (span.name() == other) return false;
  }
  return true;
}

absl::StatusOr<std::string> Write(const std::vector<v1::GetTraceReply>& ranks, const Flags& flags) {
  const std::string file = ChromeTrace(ranks, flags.steps).dump();
  ASSIGN_OR_RETURN(const int64_t bytes, WriteWholeFile(flags.output, {file}));
  Json workers = Json::array();
  Table table({"rank", "pid", "steps", "spans", "working ms", "waiting ms"});
  for (const v1::GetTraceReply& rank : ranks) {
    const TraceSum sum = SumOf(rank, FirstStep(ranks, flags.steps));
    workers.push_back({{"rank", rank.rank()},
                       {"pid", rank.pid()},
                       {"steps", sum.steps.size()},
                       {"spans", sum.spans},
                       {"working_seconds", sum.working},
                       {"waiting_seconds", sum.waiting}});
    table.AddRow({absl::StrCat(rank.rank()), absl::StrCat(rank.pid()), absl::StrCat(sum.steps.size()),
                  absl::StrCat(sum.spans), absl::StrFormat("%.3f", 1e3 * sum.working),
                  absl::StrFormat("%.3f", 1e3 * sum.waiting)});
  }
  if (flags.connection.json) {
    return JsonLine({{"job", flags.job}, {"file", flags.output}, {"bytes", bytes}, {"workers", workers}});
  }
  return absl::StrCat(table.ToString(), "\nwrote ", HumanBytes(bytes), " to ", flags.output,
                      "; open it with https://ui.perfetto.dev or chrome://tracing\n");
}

void RunTrace(const Flags& flags, CommandResult& result) {
  if (const absl::Status status = CheckCanWrite(flags.output); !status.ok()) return Fail(status, result);
  const absl::StatusOr<Answers> answers = AskAll(flags);
  if (!answers.ok()) return Fail(answers.status(), result);
  Finish(Write(answers->ranks, flags), result);
  // What the others did is worth seeing even when one did not answer.
  if (result.code == kExitOk && !answers->silent.ok()) Fail(answers->silent, result);
}

}  // namespace

TraceSum SumOf(const v1::GetTraceReply& rank, int64_t first_step) {
  TraceSum sum;
  for (const v1::TraceSpan& span : rank.spans()) {
    if (span.step() < first_step) continue;
    ++sum.spans;
    if (!IsCommandOrWait(span)) continue;
    const double seconds = static_cast<double>(span.end_nanos() - span.begin_nanos()) * 1e-9;
    const bool waits = span.name() == "wait for members" || span.name() == "wait for lead";
    (waits ? sum.waiting : sum.working) += seconds;
    if (span.name() == "step") sum.steps.insert(span.step());
  }
  return sum;
}

Json ChromeTrace(const std::vector<v1::GetTraceReply>& ranks, int64_t steps) {
  const int64_t first_step = FirstStep(ranks, steps);
  const uint64_t origin = FirstNanos(ranks, first_step);
  Json events = Json::array();
  for (const v1::GetTraceReply& rank : ranks) {
    const std::string name = absl::StrCat("rank ", rank.rank(), " (pid ", rank.pid(), ")");
    events.push_back({{"name", "process_name"}, {"ph", "M"}, {"pid", rank.rank()}, {"args", {{"name", name}}}});
    events.push_back(
        {{"name", "process_sort_index"}, {"ph", "M"}, {"pid", rank.rank()}, {"args", {{"sort_index", rank.rank()}}}});
    for (const v1::TraceSpan& span : rank.spans()) {
      if (span.step() >= first_step) events.push_back(Event(span, rank.rank(), origin));
    }
  }
  return {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}};
}

void AddTraceCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("trace", "Write a timeline of a job's newest steps, for Perfetto to draw");
  const auto flags = std::make_shared<Flags>();
  AddJobArgument(*command, flags->job)->required();
  command->add_option("--output", flags->output, "The file, which appears whole or not at all")
      ->type_name("FILE")
      ->required();
  command->add_option("--steps", flags->steps, "Only so many of the newest steps; unset: all that workers remember")
      ->check(CLI::Range(int64_t{1}, std::numeric_limits<int64_t>::max()).description(""))
      ->type_name("N");
  AddConnectionOptions(*command, flags->connection);
  command->footer(
      "Workers remember their newest 4096 spans. In the file every rank is a process and every thread of it a row: "
      "the\n"
      "commands (norm, step), below them the ranges that each thread worked through, and the waits for other workers.\n"
      "Printed: time in commands and in waits behind them, by worker, for the steps in the file. Exit code 1 when a "
      "worker\n"
      "did not answer; what the others did is written.\n"
      "Examples:\n"
      "  shardctl trace llama --output llama.trace.json\n"
      "  shardctl trace llama --steps 1 --output step.json --json");
  command->callback([flags, &result] { RunTrace(*flags, result); });
}

}  // namespace shardmesh
