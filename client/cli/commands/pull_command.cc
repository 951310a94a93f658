#include "client/cli/commands/pull_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/base/connection.h"
#include "client/cli/base/progress.h"
#include "client/cli/base/table.h"
#include "client/cli/files/safetensors.h"
#include "client/cli/files/whole_file.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

struct Flags {
  ConnectionFlags connection;
  std::string job, name, output;
  int64_t exact = -1, at_least = -1;  // -1: not given
};

struct Pulled {
  std::shared_ptr<Job> job;
  int64_t step = 0;
  std::string bytes;                       // every bucket, in order, without gaps
  std::vector<NamedTensor> tensors;        // views of `bytes`: ties under every name
  std::vector<absl::string_view> formats;  // of those
  std::vector<NamedTensor> scales;         // of those that are quantized
  std::map<std::string, std::string> metadata;
};

v1::PullRequest RequestOf(const Flags& flags) {
  v1::PullRequest request;
  request.set_job(flags.job);
  if (flags.exact >= 0) {
    request.set_exact(flags.exact);
  } else if (flags.at_least >= 0) {
    request.set_at_least(flags.at_least);
  } else {
    request.set_latest(true);
  }
  return request;
}

// The newest version of a job that publishes on demand may be one that nobody has asked for.
absl::Status CheckIsThere(const Flags& flags, Job& job) {
  if (flags.exact >= 0 || flags.at_least >= 0 || job.spec().publish_every != kPublishOnDemand) return absl::OkStatus();
  ASSIGN_OR_RETURN(const v1::ListLeasesReply listed,
                   job.worker(job.reading_rank()).ListLeases(flags.job, flags.connection.timeout()));
  if (listed.published_steps_size() > 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("job ", flags.job, " publishes on demand, and no version of it is there; have one made first: ",
                   "shardctl publish ", flags.job));
}

// From any worker of the host: every one has whole versions. The last is asked because rank 0 leads the steps.
absl::Status PullBytes(const Flags& flags, Pulled& pulled) {
  const Plan& plan = pulled.job->plan();
  Progress progress("pulling");
  const auto begin = [&](const v1::PullHeader& header) -> absl::Status {
    if (header.plan_hash() != plan.hash() || header.total_bytes() != plan.version_bytes()) {
      return absl::FailedPreconditionError(absl::StrCat("the version has plan ", header.plan_hash(), " and ",
                                                        header.total_bytes(), " bytes; the job's plan is ", plan.hash(),
                                                        " with ", plan.version_bytes()));
    }
    pulled.step = header.step();
    pulled.bytes.reserve(header.total_bytes());
    return absl::OkStatus();
  };
  const auto data = [&](absl::string_view bytes) {
    pulled.bytes.append(bytes.data(), bytes.size());
    progress.Show(static_cast<int64_t>(pulled.bytes.size()), plan.version_bytes());
    return absl::OkStatus();
  };
  return pulled.job->worker(pulled.job->reading_rank())
      .Pull(RequestOf(flags), begin, data, flags.connection.timeout())
      .status();
}

// What a quantized parameter has beside its codes, as tensors, by names that none of the parameters' `names` has.
void AddScales(const ParameterSpec& parameter, const ConstTensorView& view, const std::set<absl::string_view>& names,
               Pulled& pulled) {
  const auto* const scales = static_cast<const char*>(view.scales);
  const auto add = [&](const char* what, std::vector<int64_t> shape, int64_t begin, int64_t end, const char* dtype) {
    std::string name = absl::StrCat(parameter.name, ".", what);
    while (names.count(name) > 0) name += "_";
    pulled.metadata[absl::StrCat(what, " ", parameter.name)] = name;
    pulled.scales.push_back(
        {std::move(name), Format::kFp32, std::move(shape), absl::string_view(scales + begin, end - begin), dtype});
  };
  const int64_t count = view.num_scales;
  const bool nf4 = view.gather == GatherFormat::kNf4;
  add("scales", ScaleShape(view.gather, parameter.shape), 0, count * GatheredScaleBytes(view.gather),
      nf4                                 ? "I8"
      : view.gather == GatherFormat::kMx8 ? "U8"
                                          : "");
  pulled.metadata[absl::StrCat("gather ", parameter.name)] = std::string(GatherFormatName(view.gather));
  if (!nf4) return;
  const int64_t factors = Nf4FactorsOffset(count), mean = Nf4MeanOffset(count);
  add("factors", {(mean - factors) / 4}, factors, mean, "");
  add("mean", {}, mean, mean + 4, "");
  pulled.metadata[absl::StrCat("shape ", parameter.name)] = absl::StrCat("[", absl::StrJoin(parameter.shape, ","), "]");
}

// A parameter; of nf4, where a byte has two elements, with the shape of its bytes.
void AddTensor(const ParameterSpec& parameter, const ConstTensorView& view, const std::set<absl::string_view>& names,
               Pulled& pulled) {
  const absl::string_view bytes(static_cast<const char*>(view.data), view.data_bytes());
  NamedTensor tensor{parameter.name, view.format, parameter.shape, bytes};
  if (view.gather != GatherFormat::kStored) {
    tensor.dtype = view.gather == GatherFormat::kInt8Row ? "I8" : view.gather == GatherFormat::kNf4 ? "U8" : "F8_E4M3";
    if (view.gather == GatherFormat::kNf4) tensor.shape = {view.data_bytes()};
    AddScales(parameter, view, names, pulled);
  }
  pulled.tensors.push_back(std::move(tensor));
  pulled.formats.push_back(view.gather == GatherFormat::kStored ? FormatName(view.format)
                                                                : GatherFormatName(view.gather));
}

// All parameters of the version, or the one asked for.
absl::Status NameTensors(const Flags& flags, Pulled& pulled) {
  const Plan& plan = pulled.job->plan();
  std::vector<int64_t> bucket_begins = {0};
  for (const Bucket& bucket : plan.buckets()) {
    bucket_begins.push_back(bucket_begins.back() + bucket.weight_bytes);
  }
  const std::vector<ParameterSpec>& parameters = pulled.job->spec().parameters;
  int only = -1;
  if (!flags.name.empty()) {
    ASSIGN_OR_RETURN(only, pulled.job->Resolve(flags.name));
    for (size_t i = 0; i < parameters.size(); ++i) {  // a tied name as it was asked for
      if (parameters[i].name == flags.name) only = static_cast<int>(i);
    }
  }
  std::set<absl::string_view> names;
  for (const ParameterSpec& parameter : parameters) names.insert(parameter.name);
  for (int i = 0; i < static_cast<int>(parameters.size()); ++i) {
    if (only >= 0 && only != i) continue;
    const char* const begin = pulled.bytes.data() + bucket_begins[plan.placements()[i].bucket];
    AddTensor(parameters[i], WeightsIn(plan, i, begin), names, pulled);
  }
  return absl::OkStatus();
}

// Of what is not quantized; of codes only the number.
struct Stats {
  int64_t elements = 0;
  double min = 0, max = 0, mean = 0;  // of no elements: 0; with a NaN among them: NaN
};

Stats StatsOf(const NamedTensor& tensor) {
  const int64_t width = BytesPerElement(tensor.format);
  Stats stats;
  if (!tensor.dtype.empty()) {
    stats.elements = static_cast<int64_t>(tensor.bytes.size());
    return stats;
  }
  stats.elements = static_cast<int64_t>(tensor.bytes.size()) / width;
  double sum = 0;
  for (int64_t i = 0; i < stats.elements; ++i) {
    float value;
    if (width == 4) {
      std::memcpy(&value, tensor.bytes.data() + i * width, sizeof(value));
    } else {
      uint16_t half;
      std::memcpy(&half, tensor.bytes.data() + i * width, sizeof(half));
      value = Bf16ToFloat(half);
    }
    // Written so that a NaN, once met, stays.
    if (i == 0 || !(value >= stats.min)) stats.min = value;
    if (i == 0 || !(value <= stats.max)) stats.max = value;
    if (stats.min != stats.min) break;
    sum += value;
  }
  stats.mean = stats.min != stats.min ? stats.min : sum / std::max<int64_t>(1, stats.elements);
  if (stats.min != stats.min) stats.max = stats.min;
  return stats;
}

std::string Summary(const Flags& flags, const Pulled& pulled) {
  Table table({"parameter", "format", "shape", "elements", "min", "max", "mean"});
  Json list = Json::array();
  for (size_t i = 0; i < pulled.tensors.size(); ++i) {
    const NamedTensor& tensor = pulled.tensors[i];
    const Stats stats = StatsOf(tensor);
    const std::string format(pulled.formats[i]);
    const bool quantized = !tensor.dtype.empty();
    list.push_back({{"name", tensor.name}, {"format", format}, {"shape", tensor.shape}, {"elements", stats.elements}});
    if (!quantized) list.back().update({{"min", stats.min}, {"max", stats.max}, {"mean", stats.mean}});
    const auto number = [&](double value) {
      return stats.elements == 0 || quantized ? "-" : absl::StrFormat("%.6g", value);
    };
    table.AddRow({tensor.name, format, absl::StrCat("[", absl::StrJoin(tensor.shape, ","), "]"),
                  absl::StrCat(stats.elements), number(stats.min), number(stats.max), number(stats.mean)});
  }
  if (flags.connection.json) {
    return JsonLine({{"job", flags.job}, {"step", pulled.step}, {"parameters", std::move(list)}});
  }
  return absl::StrCat("step ", pulled.step, "\n", table.ToString());
}

absl::StatusOr<std::string> Save(const Flags& flags, const Pulled& pulled) {
  std::vector<NamedTensor> all = pulled.tensors;
  all.insert(all.end(), pulled.scales.begin(), pulled.scales.end());
  std::map<std::string, std::string> metadata = pulled.metadata;
  metadata["job"] = flags.job;
  metadata["step"] = absl::StrCat(pulled.step);
  ASSIGN_OR_RETURN(const int64_t num_bytes, WriteSafetensors(flags.output, all, metadata));
  if (flags.connection.json) {
    return JsonLine({{"job", flags.job},
                     {"step", pulled.step},
                     {"file", flags.output},
                     {"bytes", num_bytes},
                     {"parameters", pulled.tensors.size()}});
  }
  return absl::StrCat("step ", pulled.step, ": ", pulled.tensors.size(), " parameters, ", HumanBytes(num_bytes), " in ",
                      flags.output, "\n");
}

absl::StatusOr<std::string> Pull(const Flags& flags) {
  if (!flags.output.empty()) RETURN_IF_ERROR(CheckCanWrite(flags.output));
  ASSIGN_OR_RETURN(Client client, ConnectTo(flags.connection));
  Pulled pulled;
  ASSIGN_OR_RETURN(pulled.job, client.OpenJob(flags.job, {}, JobUse::kRead));
  RETURN_IF_ERROR(CheckIsThere(flags, *pulled.job));
  RETURN_IF_ERROR(PullBytes(flags, pulled));
  RETURN_IF_ERROR(NameTensors(flags, pulled));
  return flags.output.empty() ? Summary(flags, pulled) : Save(flags, pulled);
}

void RunPull(const Flags& flags, CommandResult& result) {
  absl::StatusOr<std::string> out;
  try {
    out = Pull(flags);
  } catch (const std::bad_alloc&) {
    out = absl::ResourceExhaustedError("the version does not fit into this machine's memory");
  } catch (const std::length_error&) {
    out = absl::ResourceExhaustedError("the version does not fit into any memory");
  }
  Finish(std::move(out), result);
}

}  // namespace

void AddPullCommand(CLI::App& app, CommandResult& result) {
  CLI::App* command = app.add_subcommand("pull", "Pull a whole version: sum it up, or write it as a safetensors file");
  const auto flags = std::make_shared<Flags>();
  flags->connection.timeout_seconds = 300;  // a version may be large
  AddJobArgument(*command, flags->job)->required();
  CLI::Option* exact = command->add_option("--exact", flags->exact, "The version of this step");
  CLI::Option* at_least = command->add_option(
      "--at-least", flags->at_least, "The newest version, once it is of this step or later; waits for --timeout");
  for (CLI::Option* option : {exact, at_least}) {
    option->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()).description(""))->type_name("STEP");
  }
  exact->excludes(at_least);
  command->add_option("--name", flags->name, "Only this parameter, by its canonical name or as a wrapped model has it");
  command->add_option("--output", flags->output, "Write a safetensors file that appears whole or not at all")
      ->type_name("FILE");
  AddConnectionOptions(*command, flags->connection);
  command->footer(
      "Without --exact and --at-least: the newest version there is. Tied parameters appear under every name.\n"
      "Weights that are gathered in codes (fp8_tensor, ...) are written as codes, with NAME.scales beside them\n"
      "(the file's metadata names both: \"gather NAME\", \"scales NAME\").\n"
      "The versions of a job that failed come from the workers that live.\n"
      "Examples:\n"
      "  shardctl pull llama\n"
      "  shardctl pull llama --exact 120 --output llama-120.safetensors\n"
      "  shardctl pull llama --at-least 200 --name layers.0.wq --timeout 60 --json");
  command->callback([flags, &result] { RunPull(*flags, result); });
}

}  // namespace shardmesh
