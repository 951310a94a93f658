// bench/plan: planning a large model for many ranks, against torch's planner and name handling in the same run.
//
//   bazel run -c opt //bench:plan -- --quick --json plan.json
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/model_shapes.h"
#include "bench/harness/process.h"
#include "core/base/status.h"
#include "core/layout/bucket_layout.h"
#include "core/layout/layout_boxes.h"
#include "core/layout/layout_reshard.h"
#include "core/names/names.h"

namespace shardmesh::bench {
namespace {

constexpr int64_t kRanks = 16'384, kFewerRanks = 4'096;
constexpr double kPlanLimit = 0.050, kBoxesLimit = 0.001, kReshardLimit = 0.005, kMemoryLimit = 64e6;  // seconds, bytes
constexpr double kFlatPadding = 0.001, kOtherPadding = 0.03, kNamesGoal = 20;
constexpr int kNames = 100'000;

struct Flags : CommonFlags {
  std::string python;
};

// Every matrix in granules of one kind; the rest (norms, biases, small gates) flat.
std::vector<LayoutTensor> TensorsOf(const ModelShapes& model, const Granule& granule) {
  std::vector<LayoutTensor> tensors;
  tensors.reserve(model.parameters.size());
  for (const NamedShape& parameter : model.parameters) {
    const bool matrix = parameter.shape.size() == 2;
    tensors.push_back({parameter.name, parameter.shape, "bf16", matrix ? granule : Granule(), ""});
  }
  return tensors;
}

absl::StatusOr<BucketLayout> LayoutOf(const ModelShapes& model, const Granule& granule, int64_t num_shards) {
  LayoutOptions options;
  options.num_shards = num_shards;
  return BucketLayout::Create(TensorsOf(model, granule), options);
}

// The seconds of one rank whose work is the heaviest of a few: first, middle, last.
template <typename Work>
absl::StatusOr<double> OfAFewShards(int64_t num_shards, const Work& work) {
  double worst = 0;
  for (const int64_t shard : {int64_t{0}, num_shards / 2, num_shards - 1}) {
    const double start = MonotonicSeconds();
    RETURN_IF_ERROR(work(shard));
    worst = std::max(worst, MonotonicSeconds() - start);
  }
  return worst;
}

class PlanBench {
 public:
  explicit PlanBench(const Flags& flags)
      : flags_(flags), report_("bench/plan: 50,000 tensors (600 experts a layer) on 16,384 ranks") {}
  absl::Status Run();

 private:
  absl::Status Verify();
  absl::Status MeasurePlanning();
  absl::Status MeasureMemory();
  absl::Status MeasureNames();
  absl::Status MeasureDcp();
  absl::Status AddPadding();
  absl::StatusOr<double> Ask(const std::string& question);
  absl::Status StartRivals();
  std::vector<double> Limit(double value) const { return std::vector<double>(flags_.rounds, value); }

  const Flags flags_;
  const ModelShapes model_ = ManyExperts();
  std::unique_ptr<Process> rivals_;  // null: there is no Python with torch
  Report report_;
};

// Boxes and reshard lists of whole layouts: every element of every tensor once.
absl::Status PlanBench::Verify() {
  ASSIGN_OR_RETURN(const BucketLayout to, LayoutOf(model_, Granule(), 64));
  ASSIGN_OR_RETURN(const BucketLayout from, LayoutOf(model_, Granule(), 24));
  int64_t in_boxes = 0, copied = 0;
  for (int64_t shard = 0; shard < to.num_shards(); ++shard) {
    ASSIGN_OR_RETURN(const std::vector<ShardBox> boxes, BoxesOfShard(to, shard));
    for (const ShardBox& box : boxes) in_boxes += box.local.box.NumElements();
    ASSIGN_OR_RETURN(const std::vector<ShardCopy> copies, CopiesInto(from, to, shard));
    for (const ShardCopy& copy : copies) copied += copy.num_elements;
  }
  if (in_boxes == model_.NumElements() && copied == in_boxes) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("boxes have ", in_boxes, " elements, copies ", copied, ", the model ", model_.NumElements()));
}

absl::Status PlanBench::MeasurePlanning() {
  ASSIGN_OR_RETURN(const BucketLayout to, LayoutOf(model_, Granule(), kRanks));
  ASSIGN_OR_RETURN(const BucketLayout from, LayoutOf(model_, Granule(), kFewerRanks));
  size_t most_copies = 0;
  const auto plan = [this](int64_t ranks) {
    return [this, ranks]() -> absl::StatusOr<double> {
      std::vector<LayoutTensor> tensors = TensorsOf(model_, Granule());
      LayoutOptions options;
      options.num_shards = ranks;
      const double start = MonotonicSeconds();
      RETURN_IF_ERROR(BucketLayout::Create(std::move(tensors), options).status());
      return MonotonicSeconds() - start;
    };
  };
  Rounds rounds;
  rounds.Add("plan", plan(kRanks));
  rounds.Add("plan, 64 ranks", plan(64));
  rounds.Add("boxes", [&] { return OfAFewShards(kRanks, [&](int64_t s) { return BoxesOfShard(to, s).status(); }); });
  rounds.Add("reshard", [&] {
    return OfAFewShards(kRanks, [&](int64_t s) {
      const absl::StatusOr<std::vector<ShardCopy>> copies = CopiesInto(from, to, s);
      if (copies.ok()) most_copies = std::max(most_copies, copies->size());
      return copies.status();
    });
  });
  RETURN_IF_ERROR(rounds.Measure(1, flags_.rounds));
  const auto row = [&](const char* name, const char* what, double limit) {
    report_.Add(CompareCost(name, rounds.seconds(what), Limit(limit), 1e3, Goal::AtMost(1)));
  };
  row("plan and hash, times its limit of 50 ms", "plan", kPlanLimit);
  row("one rank's boxes, times their limit of 1 ms", "boxes", kBoxesLimit);
  row("one rank's copies 4,096 -> 16,384, times their limit of 5 ms", "reshard", kReshardLimit);
  report_.Add(CompareCost("plan for 16,384 ranks, times that for 64, ms", rounds.seconds("plan"),
                          rounds.seconds("plan, 64 ranks"), 1e3, Goal::AtMost(1.25)));
  report_.Note(absl::StrCat("Verified first on 24 -> 64 ranks: boxes and copies have every element of the model once. ",
                            "A rank's list has at most ", most_copies, " copies."));
  return absl::OkStatus();
}

// What the heap holds more with the layout than without, its tensors' names and shapes among it.
absl::Status PlanBench::MeasureMemory() {
  const auto in_use = [] {
    const struct mallinfo2 info = mallinfo2();
    return static_cast<double>(info.uordblks + info.hblkhd);
  };
  std::vector<double> used;
  for (int round = 0; round < flags_.rounds; ++round) {
    const double before = in_use();
    ASSIGN_OR_RETURN(const BucketLayout layout, LayoutOf(model_, Granule(), kRanks));
    used.push_back(in_use() - before);
  }
  report_.Add(
      CompareCost("memory of the plan, times its limit of 64 MB", used, Limit(kMemoryLimit), 1e-6, Goal::AtMost(1)));
  return absl::OkStatus();
}

// --python, else the environment of tools/parity_env.sh in the repository.
absl::Status PlanBench::StartRivals() {
  const char* root = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  std::string python = flags_.python;
  if (python.empty() && root != nullptr) python = absl::StrCat(root, "/.cache/parity/bin/python");
  if (python.empty() || !std::filesystem::exists(python)) {
    report_.Note(absl::StrCat("No rivals: no Python with torch at \"", python,
                              "\". Make one with tools/parity_env.sh, or name one with --python."));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(rivals_, Process::Start({python, "bench/plan/plan_rivals.py"}, 1));
  RETURN_IF_ERROR(rivals_->WriteLine("versions"));
  ASSIGN_OR_RETURN(const std::string versions, rivals_->ReadLine(absl::Seconds(120)));
  report_.Note(absl::StrCat("Rivals: ", versions, "."));
  return absl::OkStatus();
}

absl::StatusOr<double> PlanBench::Ask(const std::string& question) {
  RETURN_IF_ERROR(rivals_->WriteLine(question));
  ASSIGN_OR_RETURN(const std::string line, rivals_->ReadLine(absl::Minutes(5)));
  double seconds = 0;
  if (absl::SimpleAtod(line, &seconds)) return seconds;
  return absl::InternalError(absl::StrCat("the rival's answer to \"", question, "\": ", line));
}

absl::Status PlanBench::MeasureNames() {
  std::vector<std::string> names, canonical;
  for (int i = 0; i < kNames; ++i) {
    const absl::string_view wrapper = i % 3 == 0 ? "_checkpoint_wrapped_module." : "";
    const std::string module = absl::StrCat("model.layers.", i / 1000, "."),
                      parameter = absl::StrCat("mlp.experts.", i % 1000, ".gate_proj.weight");
    names.push_back(absl::StrCat("_orig_mod.", module, wrapper, parameter));
    canonical.push_back(absl::StrCat(module, parameter));
  }
  ASSIGN_OR_RETURN(const Canonicalizer canonicalizer, Canonicalizer::Create({}));
  ASSIGN_OR_RETURN(const PackedNames ours, canonicalizer.CanonicalAll(names));
  for (int i = 0; i < kNames; ++i) {
    if (ours[i] == canonical[i]) continue;
    return absl::InternalError(absl::StrCat(names[i], " became ", ours[i], ", not ", canonical[i]));
  }
  std::string path = (std::filesystem::temp_directory_path() / "shardmesh-names-XXXXXX").string();
  const int fd = mkstemp(path.data());
  if (fd < 0) return absl::PermissionDeniedError(absl::StrCat("cannot write ", path));
  close(fd);
  std::ofstream file(path);
  for (const std::string& name : names) file << name << "\n";
  file.close();
  Rounds rounds;
  rounds.Add("ours", [&]() -> absl::StatusOr<double> {
    const double start = MonotonicSeconds();
    RETURN_IF_ERROR(canonicalizer.CanonicalAll(names).status());
    return MonotonicSeconds() - start;
  });
  rounds.Add("torch", [&] { return Ask(absl::StrCat("names torch ", path)); });
  rounds.Add("accelerate", [&] { return Ask(absl::StrCat("names accelerate ", path)); });
  const absl::Status status = rounds.Measure(1, flags_.rounds);
  std::filesystem::remove(path);
  RETURN_IF_ERROR(status);
  for (const char* rival : {"torch", "accelerate"}) {
    report_.Add(Compare(absl::StrCat("100,000 names / ", rival, ", ms"), rounds.seconds("ours"), rounds.seconds(rival),
                        1e3, Goal::AtLeast(kNamesGoal)));
  }
  return absl::OkStatus();
}

// The same tensors and ranks for both; ours is the plan and the boxes of one rank, which is what a save needs.
absl::Status PlanBench::MeasureDcp() {
  const std::vector<std::pair<int, int>> sizes =
      flags_.quick ? std::vector<std::pair<int, int>>{{500, 16}, {500, 64}, {2000, 16}}
                   : std::vector<std::pair<int, int>>{{1000, 64}, {1000, 256}, {4000, 64}, {4000, 256}, {8000, 256}};
  for (const auto& size : sizes) {
    const int tensors = size.first, ranks = size.second;
    std::vector<LayoutTensor> model;
    for (int i = 0; i < tensors; ++i)
      model.push_back({absl::StrCat("layers.", i, ".weight"), {2 * ranks, 64}, "", {}, ""});
    LayoutOptions options;
    options.num_shards = ranks;
    Rounds rounds;
    rounds.Add("ours", [&]() -> absl::StatusOr<double> {
      std::vector<LayoutTensor> copy = model;
      const double start = MonotonicSeconds();
      ASSIGN_OR_RETURN(const BucketLayout layout, BucketLayout::Create(std::move(copy), options));
      RETURN_IF_ERROR(BoxesOfShard(layout, ranks / 2).status());
      return MonotonicSeconds() - start;
    });
    rounds.Add("dcp", [&] { return Ask(absl::StrCat("dcp ", tensors, " ", ranks)); });
    RETURN_IF_ERROR(rounds.Measure(0, flags_.quick ? 1 : 3));
    report_.Add(Compare(absl::StrCat("plan of ", tensors, " tensors, ", ranks, " ranks / torch DCP, ms"),
                        rounds.seconds("ours"), rounds.seconds("dcp"), 1e3));
  }
  return absl::OkStatus();
}

absl::Status PlanBench::AddPadding() {
  const std::pair<const char*, double> granules[] = {{"flat:256", kFlatPadding},
                                                     {"flat:16384", kOtherPadding},
                                                     {"rows:1", kOtherPadding},
                                                     {"block:128", kOtherPadding},
                                                     {"whole", kOtherPadding}};
  const std::vector<ModelShapes> models = {Llama3_8B(), Llama3_70B(), Mixtral_8x7B(), DeepSeekV3()};
  std::string table =
      absl::StrFormat("Padding of the whole model, in percent, with every matrix in the granules of\n%-14s", "");
  for (const auto& [granule, limit] : granules) absl::StrAppendFormat(&table, "%12s", granule);
  std::vector<double> worst(std::size(granules));
  for (const ModelShapes& model : models) {
    for (const int64_t ranks : {8, 64, 1024}) {
      absl::StrAppendFormat(&table, "\n%-14s%5d", model.name, ranks);
      for (size_t g = 0; g < std::size(granules); ++g) {
        ASSIGN_OR_RETURN(const Granule granule, ParseGranule(granules[g].first));
        ASSIGN_OR_RETURN(const BucketLayout layout, LayoutOf(model, granule, ranks));
        double padding = 0;
        for (const KindPadding& sum : layout.PaddingByKind()) padding += static_cast<double>(sum.padding);
        padding /= static_cast<double>(model.NumElements());
        worst[g] = std::max(worst[g], padding);
        absl::StrAppendFormat(&table, "%*.4f", g == 0 ? 7 : 12, 100 * padding);
      }
    }
  }
  for (size_t g = 0; g < std::size(granules); ++g) {
    report_.Add(CompareCost(absl::StrCat("padding with ", granules[g].first, ", worst, times its limit, %"), {worst[g]},
                            {granules[g].second}, 100, Goal::AtMost(1)));
  }
  report_.Note(table);
  return absl::OkStatus();
}

absl::Status PlanBench::Run() {
  RETURN_IF_ERROR(Annotate(Verify(), "verifying"));
  RETURN_IF_ERROR(StartRivals());
  RETURN_IF_ERROR(MeasurePlanning());
  RETURN_IF_ERROR(MeasureMemory());
  RETURN_IF_ERROR(AddPadding());
  if (rivals_ != nullptr) {
    RETURN_IF_ERROR(MeasureNames());
    RETURN_IF_ERROR(MeasureDcp());
  }
  report_.Note(absl::StrCat(flags_.rounds, " rounds. Machine: ", MachineNow(), "."));
  return report_.Publish(flags_.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/plan: planning 50,000 tensors for 16,384 ranks: time, memory, growth and padding, against the planning "
      "of\n"
      "torch.distributed.checkpoint and the name handling of torch and Accelerate in turns inside one run. Checks "
      "first\n"
      "that boxes and reshard lists have every element once."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "smaller sizes of the rivals: under a minute on two cores", flags);
  app.add_option("--python", flags.python, "a Python with torch and Accelerate; unset: that of tools/parity_env.sh");
  app.footer(
      "Examples:\n"
      "  tools/parity_env.sh && bazel run -c opt //bench:plan\n"
      "  bazel run -c opt //bench:plan -- --quick --json $PWD/plan.json");
  CLI11_PARSE(app, argc, argv);
  return shardmesh::bench::ExitStatus("plan", shardmesh::bench::PlanBench(flags).Run());
}
