#include "client/cli/plan/plan_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/base/connection.h"
#include "client/cli/base/table.h"
#include "client/cli/plan/hosts_of_job.h"
#include "client/cli/plan/plan_file.h"
#include "core/base/status.h"
#include "proto/convert.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxColumns = 64;
constexpr int kMaxDrawnShards = 64;
constexpr size_t kMaxDrawnBuckets = 16;
constexpr absl::string_view kMarks = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
constexpr char kPaddingMark = '.';

struct Flags {
  ConnectionFlags connection;
  std::string job;
  std::string spec;          // a file; empty: the plan of a job
  int32_t rank = -1;         // of the file's mesh; below 0: the whole plan
  std::string reshard_from;  // another file
};

// The elements of one parameter in its bucket.
struct Marked {
  int64_t begin;  // included
  int64_t end;    // not included
  char mark;
};

// By bucket, ascending; parameters without elements or with another's storage are left out.
std::vector<std::vector<Marked>> MarkedIn(const JobSpec& job, const Plan& plan) {
  std::vector<std::vector<Marked>> buckets(plan.buckets().size());
  for (size_t i = 0; i < job.parameters.size(); ++i) {
    const Placement& at = plan.placements()[i];
    if (!job.parameters[i].tied_to.empty() || at.num_elements == 0) continue;
    std::vector<Marked>& stretches = buckets[at.bucket];
    stretches.push_back({at.offset, at.offset + at.num_elements, kMarks[stretches.size() % kMarks.size()]});
  }
  for (auto& stretches : buckets) {
    std::sort(stretches.begin(), stretches.end(), [](const Marked& a, const Marked& b) { return a.begin < b.begin; });
  }
  return buckets;
}

// Calls visit(mark, elements) for every parameter in elements [begin, end) of a bucket.
template <typename Visit>
void VisitIn(const std::vector<Marked>& stretches, int64_t begin, int64_t end, Visit visit) {
  auto at = std::partition_point(stretches.begin(), stretches.end(), [=](const Marked& s) { return s.end <= begin; });
  for (; at != stretches.end() && at->begin < end; ++at) {
    visit(at->mark, std::min(end, at->end) - std::max(begin, at->begin));
  }
}

char MarkOf(const std::vector<Marked>& stretches, int64_t begin, int64_t end) {
  char mark = kPaddingMark;
  int64_t most = 0;
  VisitIn(stretches, begin, end, [&](char candidate, int64_t elements) {
    if (elements > most) mark = candidate;
    most = std::max(most, elements);
  });
  return mark;
}

std::string RanksOf(const Plan& plan, int shard) {
  std::vector<int32_t> ranks;
  for (int replica = 0; replica < plan.num_replicas(); ++replica) {
    ranks.push_back(plan.RankOf({shard, replica}).value());
  }
  std::sort(ranks.begin(), ranks.end());
  return absl::StrJoin(ranks, ",");
}

std::string DrawBucket(const Plan& plan, size_t index, const std::vector<Marked>& stretches) {
  const Bucket& bucket = plan.buckets()[index];
  const int64_t columns = std::min(kMaxColumns, bucket.shard_elements / kGroupElements);
  Table table({absl::StrCat("bucket ", index), "layout", "ranks", "padding"});
  const int drawn = std::min(plan.num_shards(), kMaxDrawnShards);
  for (int shard = 0; shard < drawn; ++shard) {
    const int64_t begin = bucket.begin(shard), size = bucket.size(shard);
    std::string bar = "|";
    for (int64_t c = 0; c < columns; ++c) {
      bar.push_back(MarkOf(stretches, begin + c * size / columns, begin + (c + 1) * size / columns));
    }
    int64_t used = 0;
    VisitIn(stretches, begin, begin + size, [&](char, int64_t elements) { used += elements; });
    table.AddRow({absl::StrCat("shard ", shard), bar + "|", RanksOf(plan, shard), absl::StrCat(size - used)});
  }
  std::string out = table.ToString();
  if (drawn < plan.num_shards()) absl::StrAppend(&out, "and ", plan.num_shards() - drawn, " shards more\n");
  return out;
}

// "bf16_sr", its states where they are not fp32, how it is gathered where not as stored, and whether and how it is
// stepped: "bf16_sr/dyn8>fp8_row", "bf16 frozen", "bf16_sr muon".
std::string FormatsOf(const Bucket& bucket) {
  return absl::StrCat(WeightFormatName(bucket.weights),
                      bucket.states == StateFormat::kFp32 ? "" : absl::StrCat("/", StateFormatName(bucket.states)),
                      bucket.quantized() ? absl::StrCat(">", GatherFormatName(bucket.gather)) : "",
                      bucket.frozen ? " frozen" : "", bucket.owned() ? " muon" : "");
}

std::string BucketTable(const Plan& plan) {
  Table table({"bucket", "format", "elements", "per shard", "padding", "padding %", "bytes"});
  for (size_t b = 0; b < plan.buckets().size(); ++b) {
    const Bucket& bucket = plan.buckets()[b];
    const double share = bucket.num_elements == 0 ? 0 : 100.0 * bucket.padding / bucket.num_elements;
    table.AddRow({absl::StrCat(b), FormatsOf(bucket), absl::StrCat(bucket.num_elements),
                  absl::StrCat(bucket.shard_elements), absl::StrCat(bucket.padding), absl::StrFormat("%.1f%%", share),
                  HumanBytes(bucket.weight_bytes)});
  }
  return table.ToString();
}

std::string PlacementTable(const JobSpec& job, const Plan& plan, const std::vector<std::vector<Marked>>& stretches) {
  Table table({"parameter", "mark", "shape", "bucket", "offset", "elements", "group", "tied to"});
  for (size_t i = 0; i < job.parameters.size(); ++i) {
    const ParameterSpec& parameter = job.parameters[i];
    const Placement& at = plan.placements()[i];
    table.AddRow({parameter.name, std::string(1, MarkOf(stretches[at.bucket], at.offset, at.offset + at.num_elements)),
                  absl::StrCat("[", absl::StrJoin(parameter.shape, ","), "]"), absl::StrCat(at.bucket),
                  absl::StrCat(at.offset), absl::StrCat(at.num_elements),
                  parameter.tied_to.empty() ? absl::StrCat(parameter.group) : "-",
                  parameter.tied_to.empty() ? "-" : parameter.tied_to});
  }
  return table.ToString();
}

absl::StatusOr<std::string> PlanOf(Client& client, const Flags& flags) {
  ASSIGN_OR_RETURN(const v1::JobDescription description, DescribeJob(client, flags.job, flags.connection));
  ASSIGN_OR_RETURN(const JobSpec job, JobSpecFromProto(description.spec()));
  ASSIGN_OR_RETURN(const Plan plan, Plan::Create(job));
  if (plan.hash() != description.plan_hash()) {
    return absl::FailedPreconditionError(absl::StrCat("plan hash ", plan.hash(), " differs from the coordinator's ",
                                                      description.plan_hash(),
                                                      "; run one build of shardmesh everywhere"));
  }
  const std::vector<HostOfJob> hosts = HostsOfJob(description.members());
  if (flags.connection.json) {
    Json json = PlanToJson(job, plan);
    json["hosts"] = HostsToJson(hosts);
    return JsonLine(json);
  }
  return absl::StrCat(DrawPlan(job, plan), hosts.empty() ? "" : "\n", DrawHosts(hosts, job.on_loss, job.copies));
}

}  // namespace

Json PlanToJson(const JobSpec& job, const Plan& plan) {
  Json buckets = Json::array(), placements = Json::array();
  for (const Bucket& bucket : plan.buckets()) {
    buckets.push_back({{"format", std::string(WeightFormatName(bucket.weights))},
                       {"states", std::string(StateFormatName(bucket.states))},
                       {"gather", std::string(GatherFormatName(bucket.gather))},
                       {"elements", bucket.num_elements},
                       {"shard_elements", bucket.shard_elements},
                       {"shard_begins", bucket.shard_begins},
                       {"num_states", bucket.num_states},
                       {"row_elements", bucket.row_elements},
                       {"padding", bucket.padding},
                       {"frozen", bucket.frozen},
                       {"weight_offset", bucket.weight_offset},
                       {"weight_bytes", bucket.weight_bytes},
                       {"gradient_offset", bucket.gradient_offset}});
  }
  for (size_t i = 0; i < job.parameters.size(); ++i) {
    const Placement& at = plan.placements()[i];
    placements.push_back({{"name", job.parameters[i].name},
                          {"shape", job.parameters[i].shape},
                          {"bucket", at.bucket},
                          {"offset", at.offset},
                          {"elements", at.num_elements},
                          {"group", job.parameters[i].tied_to.empty() ? Json(job.parameters[i].group) : Json()},
                          {"scales", at.scales.num_blocks},
                          {"scale_offset", at.scale_offset},
                          {"tied_to", job.parameters[i].tied_to}});
  }
  return {{"job", job.name},
          {"hash", plan.hash()},
          {"shards", plan.num_shards()},
          {"replicas", plan.num_replicas()},
          {"version_bytes", plan.version_bytes()},
          {"window_bytes", plan.window_bytes()},
          {"buckets", std::move(buckets)},
          {"placements", std::move(placements)}};
}

std::string DrawPlan(const JobSpec& job, const Plan& plan) {
  const auto stretches = MarkedIn(job, plan);
  std::string out = absl::StrCat("plan ", plan.hash(), " of mesh ", job.mesh.ToString(), "\nshards ", plan.num_shards(),
                                 "  replicas ", plan.num_replicas(), "  buckets ", plan.buckets().size(), "  version ",
                                 HumanBytes(plan.version_bytes()), "\n\n", BucketTable(plan), "\n",
                                 PlacementTable(job, plan, stretches));
  const size_t drawn = std::min(plan.buckets().size(), kMaxDrawnBuckets);
  for (size_t b = 0; b < drawn; ++b) absl::StrAppend(&out, "\n", DrawBucket(plan, b, stretches[b]));
  if (drawn < plan.buckets().size()) absl::StrAppend(&out, "and ", plan.buckets().size() - drawn, " buckets more\n");
  return out;
}

namespace {

// Empty when `text` is a rank; else what is wrong with it.
std::string CheckRank(const std::string& text) {
  int32_t rank;
  if (absl::SimpleAtoi(text, &rank) && rank >= 0) return "";
  return absl::StrCat("\"", absl::CHexEscape(text), "\" is no rank; give a number from 0 to ",
                      std::numeric_limits<int32_t>::max());
}

}  // namespace

void AddPlanCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command =
      app.add_subcommand("plan", "Show where every parameter of a job or of a file lies, and what is padding");
  const auto flags = std::make_shared<Flags>();
  CLI::Option* job = AddJobArgument(*command, flags->job);
  command->add_option("--spec", flags->spec, "plan this file's tensors on its mesh instead; no coordinator is needed")
      ->excludes(job);
  CLI::Option* spec = command->get_option("--spec");
  CLI::Option* rank =
      command->add_option("--rank", flags->rank, "with --spec: which boxes of which tensors this rank holds")
          ->needs(spec)
          ->check(CLI::Validator(CheckRank, "RANK"));
  command
      ->add_option("--reshard-from", flags->reshard_from,
                   "with --rank: what it copies when this other file's plan is left")
      ->needs(spec)
      ->needs(rank);
  AddConnectionOptions(*command, flags->connection);
  command->footer(
      "Of a job that has members it also shows which hosts they are on, and whether the job survives the loss of one.\n"
      "Copies are of elements that a parameter has, but between equal block granules of whole blocks, with their\n"
      "padding.\n"
      "In the picture a letter is the parameter that has most of the column's elements, \".\" is padding alone.\n"
      "Examples:\n"
      "  shardctl plan llama\n"
      "  shardctl plan llama --json\n"
      "  shardctl plan --spec model.json\n"
      "  shardctl plan --spec model.json --rank 3\n"
      "  shardctl plan --spec model.json --rank 3 --reshard-from older.json --json\n"
      "with model.json like\n"
      "  {\"mesh\": \"ddp=2,fsdp=4\", \"tensors\": [{\"name\": \"embed.w\", \"shape\": [1000, 64], \"format\": "
      "\"bf16\",\n"
      "                                         \"granule\": \"rows:1\"}]}\n"
      "granules: flat:256 (unset), rows:1, block:128, whole.");
  command->callback([flags, &result] {
    if (flags->spec.empty() && flags->job.empty()) return FailUsage("plan: name a job, or a file with --spec", result);
    if (!flags->spec.empty()) {
      PlanFileOptions options;
      if (flags->rank >= 0) options.rank = Rank(flags->rank);
      options.reshard_from = flags->reshard_from;
      options.json = flags->connection.json;
      return Finish(PlanFile(flags->spec, options), result);
    }
    absl::StatusOr<Client> client = ConnectTo(flags->connection);
    if (!client.ok()) return Fail(client.status(), result);
    Finish(PlanOf(*client, *flags), result);
  });
}

}  // namespace shardmesh
