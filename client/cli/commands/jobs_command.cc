#include "client/cli/commands/jobs_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/base/connection.h"
#include "client/cli/base/table.h"
#include "core/base/status.h"
#include "proto/convert.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

struct Flags {
  ConnectionFlags connection;
  std::string job;
};

// One job, or all of them with their parameters (which ListJobs leaves out).
absl::StatusOr<std::vector<v1::JobDescription>> Fetch(Client& client, const Flags& flags) {
  if (!flags.job.empty()) {
    ASSIGN_OR_RETURN(v1::JobDescription job, DescribeJob(client, flags.job, flags.connection));
    return std::vector<v1::JobDescription>{std::move(job)};
  }
  ASSIGN_OR_RETURN(const v1::ListJobsReply list, client.coordinator().ListJobs({}, flags.connection.timeout()));
  std::vector<v1::JobDescription> jobs;
  for (const v1::JobDescription& entry : list.jobs()) {
    absl::StatusOr<v1::JobDescription> job = DescribeJob(client, entry.spec().name(), flags.connection);
    if (absl::IsNotFound(job.status())) continue;  // deleted in between
    RETURN_IF_ERROR(job.status());
    jobs.push_back(*std::move(job));
  }
  return jobs;
}

int64_t NumAlive(const v1::JobDescription& job) {
  return std::count_if(job.members().begin(), job.members().end(), [](const v1::Member& m) { return m.alive(); });
}

int64_t NumRanks(const v1::JobDescription& job) {
  int64_t ranks = 1;
  for (const v1::MeshDimension& dim : job.spec().mesh()) ranks *= dim.size();
  return ranks;
}

std::string MeshText(const v1::JobDescription& job) {
  const absl::StatusOr<MeshSpec> mesh = MeshSpecFromProto(job.spec().mesh());
  return mesh.ok() ? mesh->ToString() : "?";
}

// Why the job failed, or what it waits for: one of them, the other is empty; both for a job that is ready.
std::string ErrorOf(const v1::JobDescription& job) { return job.state() == v1::JOB_STATE_FAILED ? job.error() : ""; }
std::string WaitingFor(const v1::JobDescription& job) {
  const bool waits = job.state() == v1::JOB_STATE_WAITING || job.state() == v1::JOB_STATE_PREPARING;
  return waits ? WaitsFor(job) : "";
}

std::string ReshardingText(const v1::JobDescription& job) {
  if (!job.has_resharding()) return "";
  const absl::StatusOr<MeshSpec> mesh = MeshSpecFromProto(job.resharding().mesh());
  return absl::StrCat("on its way to ", mesh.ok() ? mesh->ToString() : "?", ": waits for the memory of ",
                      absl::StrJoin(job.resharding().preparing(), ", "));
}

// Of a job that keeps copies: what a loss of a host would leave of it. Empty: it keeps none.
std::string CopiesText(const v1::JobDescription& job) {
  if (job.spec().copies() < 2 || job.state() != v1::JOB_STATE_READY || job.members().empty()) return "";
  const std::string& host = job.members(0).host_id();
  const bool alone = std::all_of(job.members().begin(), job.members().end(),
                                 [&](const v1::Member& member) { return member.host_id() == host; });
  if (alone) return "no copies: all its workers are on one host";
  if (!job.has_copied()) return "no copies yet";
  return absl::StrCat("copies of step ", job.copied().step());
}

std::string GoneBackText(const v1::JobDescription& job) {
  const v1::GoneBack& back = job.gone_back();
  if (!job.has_gone_back() || back.epoch() != job.epoch()) return "";
  const int64_t step = back.checkpoint().step();
  const std::string where = back.checkpoint().copied_at() > 0 ? "copies of step " : "a checkpoint of step ";
  const std::string lost =
      back.lost_step() > step ? absl::StrCat(", from step ", back.lost_step()) : ", without a loss";
  return absl::StrCat("went back to ", where, step, lost, ": ", back.cause());
}

std::string Note(const v1::JobDescription& job) {
  if (const std::string resharding = ReshardingText(job); !resharding.empty()) return resharding;
  if (const std::string waiting_for = WaitingFor(job); !waiting_for.empty()) {
    return absl::StrCat("waiting for ", waiting_for);
  }
  if (std::string error = ErrorOf(job); !error.empty()) return error;
  if (!job.reshard_error().empty()) return absl::StrCat("stayed on its mesh: ", job.reshard_error());
  const std::string copies = CopiesText(job), back = GoneBackText(job);
  if (copies.empty() && back.empty()) return "-";
  return absl::StrCat(copies, copies.empty() || back.empty() ? "" : "; ", back);
}

Json MemberToJson(const v1::Member& member) {
  return {{"rank", member.rank()},       {"worker", member.worker()},   {"incarnation", member.incarnation()},
          {"address", member.address()}, {"host_id", member.host_id()}, {"pid", member.pid()},
          {"alive", member.alive()},     {"ready", member.ready()}};
}

Json JobToJson(const v1::JobDescription& job, bool with_members) {
  Json json = {{"name", job.spec().name()},
               {"state", JobStateName(job.state())},
               {"epoch", job.epoch()},
               {"mesh", MeshText(job)},
               {"residency", job.spec().residency() == v1::RESIDENCY_BUCKET ? "bucket" : "full"},
               {"slots", job.spec().slots()},
               {"parameters", job.spec().parameters_size()},
               {"committed_step", job.committed_step()},
               {"published_steps", StepsToJson(job.published_steps())},
               {"workers_alive", NumAlive(job)},
               {"workers", NumRanks(job)},
               {"plan_hash", job.plan_hash()},
               {"error", ErrorOf(job)},
               {"waiting_for", WaitingFor(job)},
               {"resharding", ReshardingText(job)},
               {"reshard_error", job.reshard_error()},
               {"on_loss", job.spec().on_loss() == v1::ON_LOSS_CHECKPOINT ? "checkpoint" : "fail"},
               {"copies", std::max(1, job.spec().copies())},
               {"copied", job.has_copied() ? Json(job.copied().step()) : Json()},
               {"checkpoints", Json::array()},
               {"gone_back", nullptr}};
  for (const v1::StoredCheckpoint& checkpoint : job.checkpoints()) {
    json["checkpoints"].push_back({{"step", checkpoint.step()}, {"path", checkpoint.folder()}});
  }
  if (const v1::GoneBack& back = job.gone_back(); job.has_gone_back()) {
    json["gone_back"] = {{"epoch", back.epoch()},
                         {"step", back.checkpoint().step()},
                         {"lost_step", back.lost_step()},
                         {"path", back.checkpoint().folder()},
                         {"cause", back.cause()}};
  }
  if (!with_members) return json;
  Json& members = json["members"] = Json::array();
  for (const v1::Member& member : job.members()) members.push_back(MemberToJson(member));
  return json;
}

std::string JobTable(const std::vector<v1::JobDescription>& jobs) {
  Table table({"name", "state", "epoch", "mesh", "slots", "parameters", "committed", "published", "workers", "note"});
  for (const v1::JobDescription& job : jobs) {
    table.AddRow({job.spec().name(), JobStateName(job.state()), absl::StrCat(job.epoch()), MeshText(job),
                  absl::StrCat(job.spec().slots()), absl::StrCat(job.spec().parameters_size()),
                  job.committed_step() < 0 ? "-" : absl::StrCat(job.committed_step()), StepList(job.published_steps()),
                  absl::StrCat(NumAlive(job), "/", NumRanks(job)), Note(job)});
  }
  return table.ToString();
}

std::string MemberTable(const v1::JobDescription& job) {
  Table table({"rank", "worker", "alive", "ready", "pid", "address", "host", "incarnation"});
  for (const v1::Member& member : job.members()) {
    table.AddRow({absl::StrCat(member.rank()), member.worker(), member.alive() ? "yes" : "no",
                  member.ready() ? "yes" : "no", absl::StrCat(member.pid()), member.address(), member.host_id(),
                  absl::StrCat(member.incarnation())});
  }
  return table.ToString();
}

void RunJobs(const Flags& flags, CommandResult& result) {
  absl::StatusOr<Client> client = ConnectTo(flags.connection);
  if (!client.ok()) return Fail(client.status(), result);
  const absl::StatusOr<std::vector<v1::JobDescription>> jobs = Fetch(*client, flags);
  if (!jobs.ok()) return Fail(jobs.status(), result);
  const bool one = !flags.job.empty();
  if (flags.connection.json && one) {
    result.out = JsonLine(JobToJson(jobs->front(), true));
  } else if (flags.connection.json) {
    Json list = Json::array();
    for (const v1::JobDescription& job : *jobs) list.push_back(JobToJson(job, false));
    result.out = JsonLine(list);
  } else {
    result.out = JobTable(*jobs);
    if (one && jobs->front().members_size() > 0) absl::StrAppend(&result.out, "\n", MemberTable(jobs->front()));
  }
}

}  // namespace

void AddJobsCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("jobs", "List the jobs of a service, or show one and its members");
  const auto flags = std::make_shared<Flags>();
  AddJobArgument(*command, flags->job)->description("Name of the job; unset: all jobs");
  AddConnectionOptions(*command, flags->connection);
  command->footer(
      "committed and published are as of the last heartbeat; workers: how many live, of how many the mesh has; note: "
      "why\n"
      "a job failed, what it waits for, or of which step each shard is on two hosts (in JSON \"error\", "
      "\"waiting_for\"\n"
      "and \"copied\").\n"
      "Examples:\n"
      "  shardctl jobs\n"
      "  shardctl jobs llama --coordinator 10.0.0.1:7000 --tls-cert me.pem --tls-key me.key --tls-ca ca.pem\n"
      "  shardctl jobs llama --json");
  command->callback([flags, &result] { RunJobs(*flags, result); });
}

}  // namespace shardmesh
