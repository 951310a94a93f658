#include "client/cli/commands/status_command.h"

#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/base/connection.h"
#include "client/cli/base/table.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;
using WorkerJob = v1::GetStatusReply::Job;

struct Flags {
  ConnectionFlags connection;
  std::string job;
};

struct Answer {
  v1::Member member;
  absl::StatusOr<v1::GetStatusReply> reply;
};

// The members of the job, or of all jobs, each worker once, by name and address.
absl::StatusOr<std::vector<v1::Member>> Members(Client& client, const Flags& flags) {
  std::vector<v1::JobDescription> jobs;
  if (flags.job.empty()) {
    ASSIGN_OR_RETURN(const v1::ListJobsReply list, client.coordinator().ListJobs({}, flags.connection.timeout()));
    jobs.assign(list.jobs().begin(), list.jobs().end());
  } else {
    ASSIGN_OR_RETURN(v1::JobDescription job, DescribeJob(client, flags.job, flags.connection));
    jobs.push_back(std::move(job));
  }
  std::map<std::pair<std::string, std::string>, v1::Member> members;
  for (const v1::JobDescription& job : jobs) {
    for (const v1::Member& member : job.members()) members[{member.worker(), member.address()}] = member;
  }
  std::vector<v1::Member> list;
  for (auto& entry : members) list.push_back(std::move(entry.second));
  return list;
}

absl::StatusOr<v1::GetStatusReply> Ask(const v1::Member& member, const ConnectionFlags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ShardTransport> worker, DialWorker(member, flags));
  return worker->GetStatus(flags.timeout());
}

bool Wanted(const WorkerJob& job, const Flags& flags) { return flags.job.empty() || flags.job == job.name(); }

Json AnswerToJson(const Answer& answer, const Flags& flags) {
  Json json = {{"worker", answer.member.worker()},
               {"address", answer.member.address()},
               {"pid", answer.member.pid()},
               {"device", answer.reply.ok() ? answer.reply->device() : std::string()},
               {"answered", answer.reply.ok()},
               {"error", answer.reply.ok() ? std::string() : answer.reply.status().ToString()}};
  Json& jobs = json["jobs"] = Json::array();
  if (!answer.reply.ok()) return json;
  for (const WorkerJob& job : answer.reply->jobs()) {
    if (!Wanted(job, flags)) continue;
    jobs.push_back({{"name", job.name()},
                    {"epoch", job.epoch()},
                    {"rank", job.rank()},
                    {"committed_step", job.committed_step()},
                    {"published_steps", StepsToJson(job.published_steps())},
                    {"shard_bytes", job.shard_bytes()},
                    {"window_bytes", job.window_bytes()},
                    {"publication_bytes", job.publication_bytes()},
                    {"slot_bytes", job.slot_bytes()},
                    {"gathered_bytes", job.gathered_bytes()},
                    {"transport", job.transport()},
                    {"error", job.error()}});
  }
  return json;
}

std::string AnswerTable(const std::vector<Answer>& answers, const Flags& flags) {
  Table table({"worker", "pid", "device", "job", "rank", "epoch", "committed", "published", "shard", "window",
               "publications", "slots", "gathered", "transport", "error"});
  for (const Answer& answer : answers) {
    const std::string pid = absl::StrCat(answer.member.pid());
    if (!answer.reply.ok()) {
      table.AddRow(
          {answer.member.worker(), pid, "-", "-", "-", "-", "-", "-", "-", "-", "-", "-", "-", "-", "no answer"});
      continue;
    }
    for (const WorkerJob& job : answer.reply->jobs()) {
      if (!Wanted(job, flags)) continue;
      table.AddRow({answer.member.worker(), pid, answer.reply->device(), job.name(), absl::StrCat(job.rank()),
                    absl::StrCat(job.epoch()), job.committed_step() < 0 ? "-" : absl::StrCat(job.committed_step()),
                    StepList(job.published_steps()), HumanBytes(job.shard_bytes()), HumanBytes(job.window_bytes()),
                    HumanBytes(job.publication_bytes()), HumanBytes(job.slot_bytes()), HumanBytes(job.gathered_bytes()),
                    job.transport().empty() ? "-" : job.transport(), job.error().empty() ? "-" : job.error()});
    }
  }
  return table.ToString();
}

void RunStatus(const Flags& flags, CommandResult& result) {
  absl::StatusOr<Client> client = ConnectTo(flags.connection);
  if (!client.ok()) return Fail(client.status(), result);
  const absl::StatusOr<std::vector<v1::Member>> members = Members(*client, flags);
  if (!members.ok()) return Fail(members.status(), result);
  std::vector<Answer> answers;
  absl::Status first_error;
  int64_t silent = 0;
  for (const v1::Member& member : *members) {
    answers.push_back({member, Ask(member, flags.connection)});
    const absl::Status& status = answers.back().reply.status();
    if (!status.ok()) ++silent;
    first_error.Update(status);
  }
  // What the others said is worth showing even when one did not answer.
  if (silent > 0) {
    Fail(Annotate(first_error, absl::StrCat(silent, " of ", answers.size(), " workers did not answer")), result);
  }
  if (flags.connection.json) {
    Json list = Json::array();
    for (const Answer& answer : answers) list.push_back(AnswerToJson(answer, flags));
    result.out = JsonLine(list);
  } else {
    result.out = AnswerTable(answers, flags);
  }
}

}  // namespace

void AddStatusCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("status", "Ask the workers of one job, or of all, for their state and memory");
  const auto flags = std::make_shared<Flags>();
  AddJobArgument(*command, flags->job)->description("Name of the job; unset: all jobs");
  AddConnectionOptions(*command, flags->connection);
  command->footer(
      "Memory: shard (weights, states and spares of this worker); window, publications, slots (one of each per host,\n"
      "reported by every worker of it); gathered: written into the window by this worker so far.\n"
      "Transport, of the first worker of each of several hosts: how bytes cross between them. tls; tcp: in the clear, "
      "on\n"
      "one machine; gloo: in the clear (--insecure-transport).\n"
      "Workers that hold no job are not asked. Exit code 1 when a worker did not answer; the others are printed.\n"
      "Examples:\n"
      "  shardctl status\n"
      "  shardctl status llama --json");
  command->callback([flags, &result] { RunStatus(*flags, result); });
}

}  // namespace shardmesh
