#include "worker/pass/device/device_pass.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/keep_forever.h"
#include "core/base/status.h"
#include "core/job/support.h"
#include "kernels/cuda/warp_step_body.h"
#include "kernels/tile/walk.h"
#include "worker/pass/check.h"

namespace shardmesh {
namespace {

constexpr int64_t kLine = 64;  // the result's, and the verdict's
constexpr absl::Duration kUploadTimeout = absl::Seconds(30);
static_assert(kPassStreams == kStreams && kPassSlots == kMaxSlots && kMaxDeviceSlots <= kMaxSlots);
static_assert(sizeof(PassStep) % 8 == 0 && sizeof(PassOptimizer) % 8 == 0);

int64_t Lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
template <class Value>
int64_t BytesOf(const std::vector<Value>& values) {
  return Lines(static_cast<int64_t>(values.size() * sizeof(Value)));
}

}  // namespace

absl::StatusOr<WorkerDevice> WorkerDevice::Open(int number, const PassKernels* kernels, const std::string& library) {
  if (kernels == nullptr) {
    return absl::UnimplementedError(
        "this build has no CUDA kernels; build shardmesh-worker with --config=cuda, or take --device cpu");
  }
  WorkerDevice device;
  ASSIGN_OR_RETURN(device.copies, DeviceRuntime::Open(number, library));
  RETURN_IF_ERROR(DeviceSegment::CheckSupported(*device.copies));
  device.kernels = kernels;
  return device;
}

DevicePass::DevicePass(const JobSpec& job, const Plan& plan, Rank rank, HostMemory& host, const PassKernels& kernels,
                       ReplicaShare share, const DevicePassOptions& options, ShardStorage cut)
    : job_(job),
      plan_(plan),
      rank_(rank),
      host_(host),
      groups_(host.control(), plan),
      kernels_(kernels),
      share_(share),
      options_(options),
      cut_(std::move(cut)) {
  int64_t before = 0;
  for (const StorageRange& range : cut_.ranges()) {
    initial_begin_.push_back(before);
    before += range.num_elements;
  }
}

char* DevicePass::Scalars() const { return host_block_.data() + kLine; }
uint64_t* DevicePass::ResultOnDevice() const {
  return host_block_.OnDevice(reinterpret_cast<uint64_t*>(host_block_.data()));
}

DevicePass::~DevicePass() {
  if (steps_ == nullptr) return;
  // A kernel in its gate ends by its time limit. Nothing runs any more on a device that failed.
  if (!absl::IsDeadlineExceeded(steps_->AwaitIdle(options_.end_timeout))) return;
  host_.KeepForDevice();
  KeepForever(std::make_pair(std::move(steps_), std::move(host_block_)));
  KeepForever(std::make_tuple(std::move(digest_), std::move(checks_), std::move(look_sums_)));
  for (DeviceSegment* segment : {&storage_, &tables_, &block_}) KeepForever(std::move(*segment));
}

absl::StatusOr<std::unique_ptr<DevicePass>> DevicePass::Create(const JobSpec& job, const Plan& plan, ShardPlace place,
                                                               HostMemory& host, const WorkerDevice& device,
                                                               ReplicaShare share, const DevicePassOptions& options) {
  ASSIGN_OR_RETURN(ShardStorage cut, ShardStorage::Cut(plan, place.shard, kDeviceCut, options.cancelled));
  std::unique_ptr<DevicePass> pass(
      new DevicePass(job, plan, plan.RankOf(place), host, *device.kernels, share, options, std::move(cut)));
  RETURN_IF_ERROR(pass->Open(device));
  return pass;
}

absl::Status DevicePass::Open(const WorkerDevice& device) {
  ASSIGN_OR_RETURN(steps_, DeviceRuntime::Open(device.copies->device(), device.copies->library()));
  ASSIGN_OR_RETURN(storage_, DeviceSegment::Create(steps_, cut_.segment_bytes()));
  RETURN_IF_ERROR(UploadTables());
  ASSIGN_OR_RETURN(block_, DeviceSegment::Create(steps_, std::max(2 * steps_bytes_, kLine)));
  ASSIGN_OR_RETURN(host_block_, PinnedBlock::Create(steps_, kLine + 2 * steps_bytes_));
  return Rehearse();
}

// Kernels are loaded when they are first launched, for which the driver may wait for what is on the device: so before
// there is a gate that waits. They change nothing: the verdict is on no command yet.
absl::Status DevicePass::Rehearse() {
  DeviceRuntime::Scope scope(*steps_);
  FillSteps(Command(), 0, false);
  for (const CommandKind kind : {CommandKind::kStep, CommandKind::kNorm}) RETURN_IF_ERROR(LaunchBuckets(kind, 0));
  RETURN_IF_ERROR(steps_->AwaitIdle(kUploadTimeout));
  auto* const verdict = reinterpret_cast<uint64_t*>(tables_.data());
  const PassGate gate = {0, verdict, verdict, 0, verdict};  // aborts nothing, opens at once
  RETURN_IF_ERROR(Launched(kernels_.Gate(gate, steps_->stream()), "the gate of a command"));
  RETURN_IF_ERROR(
      Launched(kernels_.Arrival({verdict, ResultOnDevice()}, steps_->stream()), "the arrival of a command"));
  RETURN_IF_ERROR(Launched(digest_->Launch(kernels_, 0, steps_->stream()), "a digest"));
  return steps_->AwaitIdle(kUploadTimeout);
}

void DevicePass::AddBucket(int bucket, Tables& all) {
  auto& [ranges, cut_ranges, runs, first_runs] = all;
  const Bucket& b = plan_.buckets()[bucket];
  BucketTables tables;
  tables.bucket = bucket;
  tables.first_range = static_cast<int>(ranges.size());
  for (int r = 0; r < static_cast<int>(cut_.ranges().size()); ++r) {
    const StorageRange& from = cut_.ranges()[r];
    if (from.bucket != bucket) continue;
    if (static_cast<int>(ranges.size()) == tables.first_range) tables.range = r;
    cut_ranges.push_back(r);
    PassRange& range = ranges.emplace_back();
    range.bucket_begin = from.bucket_begin;
    for (int parity = 0; parity < 2; ++parity) range.base[parity] = from.Base(parity);
    range.num_chunks = static_cast<int32_t>(from.num_chunks());
    range.first_chunk = static_cast<int32_t>(first_runs.size());
    for (int s = 0; s < kStreams; ++s) range.streams[s] = storage_.data() + cut_.StreamAt(r, s);
    range.progress = reinterpret_cast<uint64_t*>(storage_.data() + cut_.ProgressAt(r));
    for (int64_t chunk = 0; chunk < from.num_chunks(); ++chunk) {
      first_runs.push_back(static_cast<int32_t>(runs.size()));
      for (int i = cut_.first_run(r, chunk); i < cut_.first_run(r, chunk + 1); ++i) {
        const ChunkRun& run = cut_.runs(r)[i];
        const int group = job_.parameters[run.tensor].group;
        auto found = std::find(tables.groups.begin(), tables.groups.end(), group);
        if (found == tables.groups.end()) found = tables.groups.insert(found, group);
        const int64_t row = run.first_element / b.row_elements * GatheredScaleBytes(b.gather);
        runs.push_back({run.first_element, run.offset, run.num_elements,
                        plan_.placements()[run.tensor].scale_offset + row, static_cast<uint32_t>(run.tensor),
                        static_cast<int32_t>(found - tables.groups.begin())});
        if (chunk % share_.count == share_.index) window_bytes_ += b.CodeOffset(run.num_elements);
      }
    }
    first_runs.push_back(static_cast<int32_t>(runs.size()));  // the end of the range's last chunk
  }
  tables.num_ranges = static_cast<int>(ranges.size()) - tables.first_range;
  if (tables.groups.empty()) return;
  const bool all_warp =
      absl::c_all_of(tables.groups, [&](int group) { return HasWarpBody(FormatsOf(b, group), OptimizerRun()); });
  if (all_warp) tables.warp = FormatsOf(b, tables.groups[0]);
  tables.step_at = steps_bytes_;
  steps_bytes_ += Lines(sizeof(PassStep)) + Lines(static_cast<int64_t>(tables.groups.size() * sizeof(PassOptimizer)));
  for (int r = tables.first_range; r < static_cast<int>(ranges.size()); ++r) ranges[r].step_at = tables.step_at;
  AddLaunch(tables);
  buckets_.push_back(std::move(tables));
}

// A device idles at the end of each kernel, so there are as few as can be.
void DevicePass::AddLaunch(const BucketTables& tables) {
  const auto like = [](const std::optional<OptimizerContext>& a, const std::optional<OptimizerContext>& b) {
    if (!a.has_value() || !b.has_value()) return a.has_value() == b.has_value();
    return a->weights == b->weights && a->states == b->states;
  };
  const PassLaunch* const last = launches_.empty() ? nullptr : &launches_.back();
  if (last == nullptr || last->first_range + last->num_ranges != tables.first_range || !like(last->warp, tables.warp)) {
    launches_.push_back({tables.first_range, 0, tables.warp});
  }
  launches_.back().num_ranges += tables.num_ranges;
}

// What of a context no step changes.
OptimizerContext DevicePass::FormatsOf(const Bucket& bucket, int group) const {
  OptimizerContext context;
  context.hyper = job_.group(group);
  context.weights = bucket.weights;
  context.states = bucket.states;
  context.gradients = job_.gradient_format;
  context.seed = job_.seed;
  return context;
}

absl::Status DevicePass::UploadTables() {
  Tables all;
  for (int b = 0; b < static_cast<int>(plan_.buckets().size()); ++b) {
    if (!plan_.buckets()[b].frozen) AddBucket(b, all);
  }
  const auto& [ranges, cut_ranges, runs, first_runs] = all;
  const int64_t runs_at = kLine + BytesOf(ranges), first_at = runs_at + BytesOf(runs);
  ASSIGN_OR_RETURN(tables_, DeviceSegment::Create(steps_, first_at + BytesOf(first_runs)));
  DeviceRuntime::Scope scope(*steps_);
  const auto upload = [&](int64_t at, const auto& values) {
    return steps_->Copy(tables_.data() + at, values.data(), static_cast<int64_t>(values.size() * sizeof(values[0])));
  };
  RETURN_IF_ERROR(upload(kLine, ranges));
  RETURN_IF_ERROR(upload(runs_at, runs));
  RETURN_IF_ERROR(upload(first_at, first_runs));
  ASSIGN_OR_RETURN(digest_, DeviceDigest::Create(cut_, storage_.data(), steps_));
  if (job_.check_every > 0) {
    ASSIGN_OR_RETURN(checks_, DeviceChecks::Create(job_, cut_, storage_.data(), ranges, cut_ranges, steps_));
  }
  RETURN_IF_ERROR(steps_->AwaitIdle(kUploadTimeout));
  ranges_ = reinterpret_cast<const PassRange*>(tables_.data() + kLine);
  runs_ = reinterpret_cast<const PassChunkRun*>(tables_.data() + runs_at);
  first_runs_ = reinterpret_cast<const int32_t*>(tables_.data() + first_at);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> DevicePass::Run(const Command& command, uint64_t seq, const float* initial, BucketGate*) {
  uint64_t digest = 0;
  switch (command.kind) {
    case CommandKind::kStep:
      if (command.apply == 0) break;
      RETURN_IF_ERROR(RunStep(command, seq));
      break;
    case CommandKind::kNorm:
      RETURN_IF_ERROR(RunNorm(command, seq));
      break;
    case CommandKind::kInit:
      RETURN_IF_ERROR(PlaceInitial(command, initial));
      break;
    case CommandKind::kRestore:
      RETURN_IF_ERROR(PlaceWeights(command));
      break;
    case CommandKind::kPublish:
      RETURN_IF_ERROR(PublishShare(command));
      break;
    case CommandKind::kDigest: {
      ASSIGN_OR_RETURN(digest, Digest(command));
      break;
    }
    default:
      return absl::UnimplementedError(
          absl::StrCat("a command of kind ", static_cast<int>(command.kind), " on CUDA device ", device()));
  }
  return digest;
}

void DevicePass::FillStep(const Command& command, uint64_t seq, const BucketTables& tables, PassStep& step,
                          PassOptimizer* groups) {
  const Bucket& bucket = plan_.buckets()[tables.bucket];
  const DeviceWindows& windows = *host_.device();
  step = PassStep();
  step.seq = seq;
  step.parity = command.parity;
  step.num_slots = job_.num_slots;
  step.divide_scale = command.divide_scale;
  step.clip = command.clip;
  step.share_index = share_.index;
  step.share_count = share_.count;
  step.num_states = bucket.num_states;
  for (uint8_t* place : Places(command, tables.bucket)) step.places[step.num_places++] = place;
  for (int s = 0; s < job_.num_slots; ++s) step.slots[s] = windows.slots[s].data() + bucket.gradient_offset;
  step.gradient_bytes = BytesPerElement(job_.gradient_format);
  step.code_bytes = bucket.CodeOffset(kBlockElements) / kBlockElements;
  step.row_elements = bucket.row_elements;
  step.has_scales = bucket.weights == WeightFormat::kInt8Row ? 1 : 0;
  step.square_sums = windows.control.OnDevice(SquareSums(host_.control())) + bucket.first_block;
  step.groups = reinterpret_cast<const PassOptimizer*>(block_.data() + tables.step_at + Lines(sizeof(PassStep)));
  for (int s = 0; s < kStreams; ++s) step.parts[s] = cut_.ranges()[tables.range].parts[s];
  for (size_t g = 0; g < tables.groups.size(); ++g) {
    OptimizerContext& context = groups[g].context;
    context = FormatsOf(bucket, tables.groups[g]);
    context.scalars = groups_.scalars(command.groups)[tables.groups[g]];
    context.step = command.step;
    OptimizerRun run;
    run.clip = command.clip;
    run.row_elements = bucket.row_elements;
    groups[g].plan = PlanStep(context, run);
    groups[g].plan.context = nullptr;
    groups[g].plan.run = nullptr;
  }
}

absl::Status DevicePass::Launched(const char* error, absl::string_view what) const {
  if (error == nullptr) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("CUDA device ", device(), " cannot launch ", what, ": ", error));
}

absl::Status DevicePass::LaunchBuckets(CommandKind kind, uint64_t seq, bool again) {
  PassArgs args;
  args.steps = block_.data() + (again ? steps_bytes_ : 0);
  args.runs = runs_;
  args.first_runs = first_runs_;
  args.verdict = reinterpret_cast<const uint64_t*>(tables_.data());
  args.opened = GateWord(seq, GateVerdict::kOpen);
  for (const PassLaunch& launch : launches_) {
    args.ranges = ranges_ + launch.first_range;
    args.num_ranges = launch.num_ranges;
    if (again && kind == CommandKind::kStep) {
      std::tie(args.ranges, args.num_ranges) = checks_->Drawn(launch.first_range, launch.num_ranges);
      if (args.num_ranges == 0) continue;
    }
    if (kind == CommandKind::kNorm) {
      RETURN_IF_ERROR(Launched(kernels_.Squares(args, steps_->stream()), "the squares of a norm"));
      continue;
    }
    const OptimizerContext* const warp = launch.warp.has_value() ? &*launch.warp : nullptr;
    RETURN_IF_ERROR(Launched(kernels_.Step(args, warp, steps_->stream()), "the pass of a step"));
  }
  return absl::OkStatus();
}

void DevicePass::FillSteps(const Command& command, uint64_t seq, bool again) {
  for (const BucketTables& tables : buckets_) {
    char* const at = Scalars() + tables.step_at;
    auto* const groups = reinterpret_cast<PassOptimizer*>(at + Lines(sizeof(PassStep)));
    auto& step = *reinterpret_cast<PassStep*>(at);
    FillStep(command, seq, tables, step, groups);
    if (!again) continue;
    auto& second = *reinterpret_cast<PassStep*>(at + steps_bytes_);  // its groups are the first one's
    second = step;
    second.num_places = 0;
    second.square_sums = look_at_.empty() ? nullptr : look_sums_.OnDevice(const_cast<float*>(LookSums(tables.bucket)));
  }
}

absl::Status DevicePass::RunStep(const Command& command, uint64_t seq) {
  const ControlBlock& control = *host_.control();
  Watch watch;
  watch.squares = control.looks_again.load() != 0 || control.elsewhere_looks_again.load() != 0;
  // Of chunks that were stepped before, the sources are not there any more.
  watch.checks = checks_ != nullptr && begun_ != seq;
  const uint64_t before = std::exchange(begun_, seq);
  if (watch.squares) RETURN_IF_ERROR(OpenLook());
  const absl::Status launched = Launch(command, seq, watch);
  if (!launched.ok() && (Verdict(seq) == GateVerdict::kAborted || Verdict(seq) == GateVerdict::kLate)) begun_ = before;
  RETURN_IF_ERROR(launched);
  gathered_bytes_.fetch_add(window_bytes_, std::memory_order_relaxed);
  std::atomic<uint64_t>& word = host_.control()->members[rank_.value()].damage;
  if (watch.checks) {
    if (const std::optional<Damage> damage = checks_->Found(command); damage.has_value()) TellDamage(*damage, word);
  } else if (checks_ != nullptr) {
    checks_->Forget();
  }
  if (watch.squares) RETURN_IF_ERROR(LookAgain([&](int bucket) { return LookSums(bucket); }));
  return CheckDamage(job_, command.step, word);
}

absl::Status DevicePass::RunNorm(const Command& command, uint64_t seq) {
  RETURN_IF_ERROR(Launch(command, seq, {}));
  const float* const sums = SquareSums(host_.control());
  RETURN_IF_ERROR(LookAgain([&](int bucket) { return sums + plan_.buckets()[bucket].first_block; }));
  return CheckDamage(job_, command.step, host_.control()->members[rank_.value()].damage);
}

absl::Status DevicePass::Launch(const Command& command, uint64_t seq, const Watch& watch) {
  DeviceRuntime::Scope scope(*steps_);
  const DeviceWindows& windows = *host_.device();
  if (watch.checks) RETURN_IF_ERROR(checks_->Begin(command, kernels_));
  const bool again = watch.checks || watch.squares;
  FillSteps(command, seq, again);
  // Words of the control block are atomics of 64 bits: the device reads them as such.
  PassGate gate;
  gate.seq = seq;
  gate.decided = reinterpret_cast<const uint64_t*>(windows.control.OnDevice(&host_.control()->decided));
  gate.abort = reinterpret_cast<const uint64_t*>(windows.control.OnDevice(&host_.control()->abort));
  gate.timeout_nanos = static_cast<uint64_t>(absl::ToInt64Nanoseconds(options_.gate_timeout));
  gate.verdict = reinterpret_cast<uint64_t*>(tables_.data());
  RETURN_IF_ERROR(Launched(kernels_.Gate(gate, steps_->stream()), "the gate of a command"));
  RETURN_IF_ERROR(steps_->Copy(block_.data(), Scalars(), again ? 2 * steps_bytes_ : steps_bytes_));
  RETURN_IF_ERROR(LaunchBuckets(command.kind, seq));
  // Behind the step: what was written into a slot before the step read it is still there.
  if (watch.squares) RETURN_IF_ERROR(LaunchBuckets(CommandKind::kNorm, seq, /*again=*/true));
  if (watch.checks) {
    RETURN_IF_ERROR(LaunchBuckets(CommandKind::kStep, seq, /*again=*/true));
    RETURN_IF_ERROR(checks_->End(command, kernels_));
  }
  const PassArrival arrival = {gate.verdict, ResultOnDevice()};
  RETURN_IF_ERROR(Launched(kernels_.Arrival(arrival, steps_->stream()), "the arrival of a command"));
  return AwaitResult(command.kind, seq);
}

GateVerdict DevicePass::Verdict(uint64_t seq) const {
  return VerdictOf(__atomic_load_n(reinterpret_cast<uint64_t*>(host_block_.data()), __ATOMIC_ACQUIRE), seq);
}

absl::Status DevicePass::AwaitResult(CommandKind kind, uint64_t seq) {
  // A sleep ends up to kLate late. Who looks all the time instead takes a processor from the trainers.
  constexpr absl::Duration kLate = absl::Microseconds(150);
  absl::Duration& usual = usual_[kind == CommandKind::kNorm ? 1 : 0];
  const absl::Time begin = MonotonicNow();
  if (usual > 2 * kLate) absl::SleepFor(std::min(usual - kLate, options_.timeout / 2));
  RETURN_IF_ERROR(steps_->AwaitIdle(begin + options_.timeout - MonotonicNow()));
  usual = std::min(MonotonicNow() - begin, std::max(2 * usual, 3 * kLate));  // one that is late makes few others late
  switch (Verdict(seq)) {
    case GateVerdict::kOpen:
      return absl::OkStatus();
    case GateVerdict::kAborted:
      return absl::AbortedError("the job was aborted before the command began on the device");
    case GateVerdict::kLate:
      return absl::DeadlineExceededError(absl::StrCat("command ", seq, " was not decided within ",
                                                      absl::FormatDuration(options_.gate_timeout), " of its launch on ",
                                                      "CUDA device ", device(), "; nothing was changed"));
    case GateVerdict::kNone:
      break;
  }
  return absl::UnavailableError(absl::StrCat("CUDA device ", device(), " ended command ", seq, " without a result"));
}

absl::Status DevicePass::GiveBackGradients(const Command&) { return absl::OkStatus(); }  // no bucket residency here
absl::Status DevicePass::GiveBackWeights(int) { return absl::UnimplementedError("bucket residency on a device"); }

}  // namespace shardmesh
