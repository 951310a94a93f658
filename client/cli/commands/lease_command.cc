#include "client/cli/commands/lease_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/cli/base/connection.h"
#include "client/cli/base/table.h"
#include "client/cpp/version_reader.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

struct Flags {
  ConnectionFlags connection;
  std::string job, release, nonce;
  int64_t count = 0;  // of watch; 0: without end
  int64_t from = -1;  // of watch; -1: the newest
  double idle = 600;  // of watch, seconds
};

std::string HexId(uint64_t id) { return absl::StrFormat("%016x", id); }

std::string Seconds(int64_t ms) { return absl::StrFormat("%.1f s", static_cast<double>(ms) / 1000); }

// A trainer may have gone back to an older state.
std::string VersionOf(const v1::ListLeasesReply::Holder& holder, int64_t epoch) {
  if (holder.epoch() == epoch) return absl::StrCat(holder.step());
  return absl::StrCat(holder.step(), " of epoch ", holder.epoch(), ", left behind");
}

std::string KeeperOf(const v1::ListLeasesReply::Holder& holder) {
  if (holder.lease() != 0) return absl::StrCat("lease ", HexId(holder.lease()));
  if (!holder.puller().empty()) return absl::StrCat("pull of ", holder.puller());
  return absl::StrCat("reader ", holder.seat(), " (pid ", holder.pid(), ")");
}

std::string Until(const v1::ListLeasesReply::Holder& holder) {
  if (!holder.puller().empty()) {
    return absl::StrCat("its end; cut off in ", Seconds(std::max<int64_t>(holder.left_ms(), 0)), " if nothing is read");
  }
  return holder.left_ms() >= 0 ? absl::StrCat("ends in ", Seconds(holder.left_ms()))
                               : absl::StrCat("abandoned for ", Seconds(-holder.left_ms()));
}

Json ToJson(const v1::ListLeasesReply::Holder& holder, const std::string& worker, int64_t epoch) {
  Json json = {{"version", holder.step()},
               {"epoch", holder.epoch()},
               {"left_behind", holder.epoch() != epoch},
               {"worker", worker}};
  if (holder.lease() != 0) {
    json["lease"] = HexId(holder.lease());
  } else if (!holder.puller().empty()) {
    json["puller"] = holder.puller();
  } else {
    json.update({{"seat", holder.seat()}, {"pid", holder.pid()}});
  }
  json["left_ms"] = holder.left_ms();
  json["abandoned"] = holder.left_ms() < 0 && holder.puller().empty();
  return json;
}

struct HostLeases {
  std::string worker;  // its first one that answers
  v1::ListLeasesReply reply;
  std::vector<std::pair<std::string, v1::ListLeasesReply::Holder>> holders;  // each with its worker
  std::vector<std::string> silent;                                           // workers that did not say who pulls
};

// A worker lists the leases and readers of its host, and the pulls that go through itself: all are asked.
absl::StatusOr<std::vector<HostLeases>> AskAll(const Job& job, const Flags& flags) {
  std::vector<HostLeases> hosts;
  std::map<std::string, size_t> of_host;
  for (const v1::Member& member : job.members()) {
    if (!member.alive()) continue;
    absl::StatusOr<v1::ListLeasesReply> reply =
        job.worker(Rank(member.rank())).ListLeases(flags.job, flags.connection.timeout());
    const auto [at, first] = of_host.emplace(member.host_id(), hosts.size());
    if (first) {
      RETURN_IF_ERROR(reply.status());
      hosts.push_back({member.worker(), *reply, {}, {}});
    } else if (!reply.ok()) {
      hosts[at->second].silent.push_back(member.worker());
      continue;
    }
    for (v1::ListLeasesReply::Holder& holder : *reply->mutable_holders()) {
      if (!first && holder.puller().empty()) continue;
      hosts[at->second].holders.emplace_back(member.worker(), std::move(holder));
    }
  }
  return hosts;
}

absl::StatusOr<std::string> List(const Job& job, const Flags& flags) {
  ASSIGN_OR_RETURN(const std::vector<HostLeases> hosts_asked, AskAll(job, flags));
  Table table({"version", "kept by", "until"});
  Json holders = Json::array(), hosts = Json::array();
  std::string summary;
  for (const HostLeases& host : hosts_asked) {
    const v1::ListLeasesReply& reply = host.reply;
    const std::string& worker = host.worker;
    std::set<int64_t> held;  // of now
    for (const auto& [at, holder] : host.holders) {
      if (holder.epoch() == reply.epoch()) held.insert(holder.step());
      table.AddRow({VersionOf(holder, reply.epoch()), absl::StrCat(KeeperOf(holder), " at ", at), Until(holder)});
      holders.push_back(ToJson(holder, at, reply.epoch()));
    }
    hosts.push_back({{"worker", worker},
                     {"epoch", reply.epoch()},
                     {"published_steps", StepsToJson(reply.published_steps())},
                     {"publications", reply.publications()},
                     {"held", held.size()},
                     {"silent_workers", host.silent},
                     {"refused", reply.refused()}});
    absl::StrAppend(&summary, "host of ", worker, ": published ", StepList(reply.published_steps()), "; ", held.size(),
                    " of ", reply.publications(), " publications kept; ", reply.refused(),
                    " versions not published for want of one\n");
    if (host.silent.empty()) continue;
    absl::StrAppend(&summary, "these did not say who pulls from them: ", absl::StrJoin(host.silent, ", "), "\n");
  }
  if (flags.connection.json) return JsonLine({{"job", flags.job}, {"holders", holders}, {"hosts", hosts}});
  return absl::StrCat(holders.empty() ? "" : table.ToString(), summary);
}

absl::StatusOr<std::string> Release(const Job& job, const Flags& flags) {
  uint64_t id = 0;
  if (!absl::SimpleHexAtoi(flags.release, &id) || id == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("lease \"", flags.release, "\" is none; it is 16 hexadecimal digits, as `shardctl leases` says"));
  }
  uint64_t nonce = 0;
  if (!absl::SimpleHexAtoi(flags.nonce, &nonce) || nonce == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("nonce \"", flags.nonce,
                     "\" is none; it is the value, in hexadecimal digits, that the lease was "
                     "acquired with, which its reader alone knows: --nonce"));
  }
  v1::ReleaseLeaseRequest request;
  request.set_job(flags.job);
  request.set_epoch(job.epoch().value());
  request.set_id(id);
  request.set_nonce(nonce);
  absl::Status last;
  for (const v1::Member& member : job.members()) {  // whichever granted it
    if (!member.alive()) continue;
    last = job.worker(Rank(member.rank())).ReleaseLease(request, flags.connection.timeout()).status();
    if (last.ok() || absl::IsPermissionDenied(last)) break;
  }
  RETURN_IF_ERROR(last);
  return flags.connection.json ? JsonLine({{"job", flags.job}, {"released", HexId(id)}})
                               : absl::StrCat("released ", HexId(id), "\n");
}

absl::StatusOr<std::string> Leases(const Flags& flags) {
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.OpenJob(flags.job, {}, JobUse::kRead));
  return flags.release.empty() ? List(*job, flags) : Release(*job, flags);
}

absl::StatusOr<std::string> Publish(const Flags& flags) {
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.OpenJob(flags.job));
  ASSIGN_OR_RETURN(const v1::PublishReply reply,
                   job->worker(job->reading_rank()).Publish(flags.job, flags.connection.timeout()));
  return flags.connection.json ? JsonLine({{"job", flags.job}, {"version", reply.step()}})
                               : absl::StrCat("published version ", reply.step(), "\n");
}

// "13:05:09.250"
std::string LocalTime(absl::Time time) {
  const std::time_t seconds = absl::ToTimeT(time);
  std::tm local = {};
  localtime_r(&seconds, &local);
  return absl::StrFormat("%02d:%02d:%02d.%03d", local.tm_hour, local.tm_min, local.tm_sec,
                         absl::ToUnixMillis(time) % 1000);
}

// One line for each version, when it can be read.
absl::Status Watch(const Flags& flags) {
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  ASSIGN_OR_RETURN(const std::unique_ptr<VersionReader> reader, VersionReader::Open(std::move(client), flags.job));
  FollowOptions options;
  options.timeout = absl::Seconds(flags.idle);
  if (flags.from >= 0) options.from = {VersionChoice::kAtLeast, Step(flags.from)};
  int64_t seen = 0;
  const absl::Status ended = Follow(*reader, options, [&](const HeldVersion& version) {
    const absl::Time now = absl::Now();
    const std::string line =
        flags.connection.json
            ? JsonLine({{"job", flags.job},
                        {"version", version.step().value()},
                        {"epoch", version.epoch().value()},
                        {"unix_ms", absl::ToUnixMillis(now)}})
            : absl::StrCat(LocalTime(now), "  version ", version.step().value(), " of epoch ", version.epoch().value(),
                           "\n");
    if (std::fputs(line.c_str(), stdout) < 0 || std::fflush(stdout) != 0) return absl::CancelledError("no reader");
    return ++seen == flags.count ? absl::CancelledError("enough") : absl::OkStatus();
  });
  return absl::IsCancelled(ended) ? absl::OkStatus() : ended;
}

CLI::App* Add(CLI::App& app, const char* name, const char* help, const std::shared_ptr<Flags>& flags) {
  CLI::App* command = app.add_subcommand(name, help);
  AddJobArgument(*command, flags->job)->required();
  AddConnectionOptions(*command, flags->connection);
  return command;
}

}  // namespace

void AddLeasesCommand(CLI::App& app, CommandResult& result) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* command = Add(app, "leases", "Show who keeps which versions, or release a lease", flags);
  CLI::Option* const release =
      command->add_option("--release", flags->release, "End this lease; its reader is told at its next call")
          ->type_name("LEASE");
  CLI::Option* const nonce =
      command->add_option("--nonce", flags->nonce, "That the lease to be released was acquired with")
          ->type_name("NONCE");
  release->needs(nonce);
  nonce->needs(release);
  command->footer(
      "A version is kept by leases that workers granted (Shard.AcquireLease), by readers of the host that map it, and\n"
      "by pulls under way. A pull of which nothing is read for 30 s is cut off.\n"
      "What a reader maps is never overwritten; a reader that is silent for too long is shown as abandoned, and its\n"
      "version is free again when it lets go or its process ends. When every publication is kept no version is\n"
      "published (RESOURCE_EXHAUSTED), and training goes on.\n"
      "Examples:\n"
      "  shardctl leases llama\n"
      "  shardctl leases llama --json\n"
      "  shardctl leases llama --release 00c0ffee00c0ffee --nonce 5eed5eed5eed5eed");
  command->callback([flags, &result] { Finish(Leases(*flags), result); });
}

void AddPublishCommand(CLI::App& app, CommandResult& result) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* command = Add(app, "publish", "Publish the newest committed version now", flags);
  command->footer(
      "For jobs that publish rarely or on demand only (publish_every: -1). Published already, it stays.\n"
      "Examples:\n"
      "  shardctl publish llama      # published version 120");
  command->callback([flags, &result] { Finish(Publish(*flags), result); });
}

void AddWatchCommand(CLI::App& app, CommandResult& result) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* command = Add(app, "watch", "Print a line for each version when it can be read", flags);
  command->add_option("--count", flags->count, "End after so many versions")
      ->check(CLI::Range(int64_t{1}, std::numeric_limits<int64_t>::max()).description(""));
  command->add_option("--from", flags->from, "Begin with the first version of at least this step")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()).description(""))
      ->type_name("STEP");
  command->add_option("--idle", flags->idle, "End with an error when no version comes for so many seconds")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 1e7).description(""));
  command->footer(
      "Begins with the newest version. After a trainer has gone back to an older state, versions have a later epoch\n"
      "and may have older steps. Versions that come faster than lines can be printed are passed over. On a host\n"
      "of the job it maps versions and copies nothing; elsewhere each one is pulled whole.\n"
      "Examples:\n"
      "  shardctl watch llama\n"
      "  shardctl watch llama --from 100 --count 1 --idle 3600   # waits for version 100 or later");
  command->callback([flags, &result] {
    const absl::Status ended = Watch(*flags);
    if (!ended.ok()) Fail(ended, result);
  });
}

}  // namespace shardmesh
