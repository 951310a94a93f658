#include "worker/pass/pass.h"

#include <algorithm>
#include <cstring>

#include "core/base/fault_point.h"
#include "worker/control/residency.h"
#include "worker/transport/streaming_copy.h"

namespace shardmesh {

namespace {

// Windows from here on are more than the caches keep until somebody reads them (docs/performance.md).
constexpr int64_t kStreamedWindowBytes = int64_t{16} << 20;

}  // namespace

Pass::Pass(const JobSpec& job, const Plan& plan, ShardPlace place, HostMemory& host, ShardStorage& storage, int threads,
           Trace* trace, GradientSums* sums, std::optional<HostRanks> ranks)
    : job_(job),
      plan_(plan),
      absent_(plan),
      rank_(plan.RankOf(place)),
      ranks_(ranks.value_or(HostRanks::OneHost(plan.num_ranks()))),
      share_(ShareOf(plan, ranks_, rank_)),
      host_(host),
      groups_(host.control(), plan),
      storage_(storage),
      trace_(trace),
      sums_(sums),
      step_(BestOptimizerStep()),
      squares_(BestGradientSquares()),
      sum_(BestSlotSum()),
      stream_copies_(plan.window_bytes() >= kStreamedWindowBytes),
      threads_(threads),
      scratch_(storage.scratch_space().elements > 0 ? threads : 0, storage.scratch_space(), storage.scratch()),
      ranges_left_(plan.buckets().size()),
      team_(threads) {
  int64_t before = 0, longest = 0;
  for (const StorageRange& range : storage_.ranges()) {
    initial_begin_.push_back(before);
    before += range.num_elements;
    longest = std::max(longest, range.spare());
  }
  zeros_.resize(longest);
  for (int range = 0; range < static_cast<int>(initial_begin_.size()); ++range) {
    if (plan_.buckets()[storage_.ranges()[range].bucket].gather != GatherFormat::kNf4) continue;
    for (const ChunkRun& run : storage_.runs(range)) nf4_tensors_.push_back(run.tensor);
  }
  std::sort(nf4_tensors_.begin(), nf4_tensors_.end());
  nf4_tensors_.erase(std::unique(nf4_tensors_.begin(), nf4_tensors_.end()), nf4_tensors_.end());
  if (!nf4_tensors_.empty()) nf4_means_.resize(job_.parameters.size());
}

uint64_t Pass::Execute(const Command& command, uint64_t seq, const float* initial, BucketGate* gate) {
  const int num_ranges = static_cast<int>(storage_.ranges().size());
  if (command.kind == CommandKind::kPublish && !plan_.bucketed()) {
    PublishShare(command);
    return 0;
  }
  if (gate != nullptr) {
    MutexLock lock(gate_mu_);
    std::fill(ranges_left_.begin(), ranges_left_.end(), 0);
    for (const StorageRange& range : storage_.ranges()) ++ranges_left_[range.bucket];
    buckets_done_ = 0;
  }
  executing_ = std::this_thread::get_id();
  std::atomic<uint64_t> digest{0};
  const bool encodes = command.kind == CommandKind::kQuantize || command.kind == CommandKind::kGatherBucket ||
                       command.kind == CommandKind::kPublish;
  if (encodes) FindNf4Means(command);
  if (command.kind == CommandKind::kDigest && snapshots_ != nullptr) snapshot_ = snapshots_->Wanted();
  const auto execute = [&](int range) {
    if (Works(command, range)) {
      if (!AwaitGradients(command, range, gate)) return;
      if (StepsMatrix(command, range)) {
        StepMatrix(command, seq, range);
      } else {
        digest.fetch_add(ExecuteRange(command, seq, range, initial));
      }
    }
    if (gate != nullptr) RangeDone(seq, storage_.ranges()[range].bucket, *gate);
  };
  team_.ForEach(num_ranges, [&](int range) {
    if (!StepsMatrix(command, range)) execute(range);
  });
  for (int range = 0; range < num_ranges; ++range) {
    if (StepsMatrix(command, range)) execute(range);
  }
  if (snapshot_ != nullptr) snapshots_->Filled(snapshot_.get(), {command.step, command.parity});
  snapshot_ = nullptr;
  return digest.load();
}

void Pass::RangeDone(uint64_t seq, int bucket, BucketGate& gate) {
  MutexLock lock(gate_mu_);
  --ranges_left_[bucket];
  const int before = buckets_done_;
  while (buckets_done_ < static_cast<int>(ranges_left_.size()) && ranges_left_[buckets_done_] == 0) ++buckets_done_;
  if (buckets_done_ > before) gate.Done(seq, buckets_done_);
}

bool Pass::AwaitGradients(const Command& command, int range, BucketGate* gate) const {
  const bool reads = command.kind == CommandKind::kStep || command.kind == CommandKind::kNorm;
  return !reads || gate == nullptr || gate->AwaitGradients(command, storage_.ranges()[range].bucket);
}

uint64_t Pass::ExecuteRange(const Command& command, uint64_t seq, int range, const float* initial) {
  const ScopedSpan span(trace_, "range", command.step, storage_.ranges()[range].bucket, range);
  switch (command.kind) {
    case CommandKind::kStep:
      StepRange(command, seq, range);
      break;
    case CommandKind::kInit:
      PlaceFirst(command, range, initial);
      break;
    case CommandKind::kRestore:
      PlaceFirst(command, range, nullptr);
      break;
    case CommandKind::kNorm:
      SquareRange(command, range);
      break;
    case CommandKind::kQuantize:
      QuantizeRange(command, range);
      break;
    case CommandKind::kReduceBucket:
      ReduceRange(range);
      break;
    case CommandKind::kGatherBucket:
    case CommandKind::kPublish:
      GatherRange(command, range);
      break;
    case CommandKind::kMerge:
      MergeRange(command, range);
      break;
    case CommandKind::kDigest:
      return DigestRange(command, range);
    case CommandKind::kNone:
      break;
  }
  return 0;
}

bool Pass::Works(const Command& command, int range) const {
  const Bucket& bucket = plan_.buckets()[storage_.ranges()[range].bucket];
  switch (command.kind) {
    case CommandKind::kStep:
      return command.apply != 0 && !bucket.frozen;
    case CommandKind::kNorm:
    case CommandKind::kMerge:
    case CommandKind::kPublish:  // publications have frozen weights from the beginning
      return !bucket.frozen;
    case CommandKind::kQuantize:  // frozen weights once, with the initial ones
      return bucket.quantized() && (!bucket.frozen || command.first != 0);
    case CommandKind::kReduceBucket:
    case CommandKind::kGatherBucket:
      return storage_.ranges()[range].bucket == command.bucket;
    case CommandKind::kInit:
    case CommandKind::kRestore:
    case CommandKind::kDigest:
      return true;
    case CommandKind::kNone:
      break;
  }
  return false;
}

int Pass::Places(const Command& command, int bucket, const Segment** places) const {
  const bool gathers_bucket = command.kind == CommandKind::kGatherBucket;
  int num_places = 0;
  if (gathers_bucket || (command.kind != CommandKind::kPublish && InWindow(bucket)))
    places[num_places++] = &host_.window();
  for (int i = 0; i < host_.num_publications() && !gathers_bucket; ++i) {
    if (plan_.buckets()[bucket].frozen || i == command.publish) places[num_places++] = &host_.publication(i);
  }
  return num_places;
}

int Pass::Copies(const Command& command, int range, int64_t chunk, int64_t offset, void** copies) const {
  if (!Writes(chunk)) return 0;
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const Segment* places[1 + kMaxPublications];
  const int num_copies = Places(command, r.bucket, places);
  const int64_t at = bucket.weight_offset + bucket.CodeOffset(r.bucket_begin + offset);
  for (int i = 0; i < num_copies; ++i) copies[i] = places[i]->data() + at;
  return num_copies;
}

void Pass::CopyScales(const Command& command, int range, int parity, const ChunkRun& run) const {
  const int in_bucket = storage_.ranges()[range].bucket;
  const Bucket& bucket = plan_.buckets()[in_bucket];
  const int64_t bytes = GatheredScaleBytes(bucket.gather), rows = run.num_elements / bucket.row_elements;
  const int64_t at = bucket.weight_offset + plan_.placements()[run.tensor].scale_offset +
                     run.first_element / bucket.row_elements * bytes;
  const Segment* places[1 + kMaxPublications];
  for (int i = Places(command, in_bucket, places); i-- > 0;) {
    std::memcpy(places[i]->data() + at, storage_.weights(range, parity, run.offset).extra, rows * bytes);
  }
}

void Pass::StepRange(const Command& command, uint64_t seq, int range) {
  const int64_t chunks = storage_.ranges()[range].num_chunks();
  for (int64_t done = storage_.Progress(range, seq); done < chunks; ++done) {
    const int64_t chunk = command.parity == 0 ? done : chunks - 1 - done;
    const int64_t written =
        job_.check_every > 0 ? StepChecked(command, range, chunk) : StepChunk(command, range, chunk);
    gathered_bytes_.fetch_add(written, std::memory_order_relaxed);
    Reach(FaultPoint::kChunkStepped);
    storage_.SetProgress(range, seq, done + 1);
  }
}

bool Pass::InWindow(int bucket) const {
  if (!plan_.bucketed()) return true;
  const BucketWords& words = ResidencyTable(host_.control(), plan_).bucket(bucket);
  return words.held.load() != kBucketAbsent || words.lent.load() != 0;
}

int Pass::Gradients(const Command& command, int bucket, int64_t element, const void* (&gradients)[kMaxSlots]) const {
  if (sums_ != nullptr) {
    gradients[0] = sums_->At(bucket, element, plan_.pulled() ? command.partial : 0);
    return 1;
  }
  const int64_t at = plan_.buckets()[bucket].gradient_offset + element * BytesPerElement(job_.gradient_format);
  for (int s = 0; s < job_.num_slots; ++s) gradients[s] = host_.slot(s).data() + at;
  return job_.num_slots;
}

void Pass::SquareRange(const Command& command, int range) {
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const OptimizerContext context = ContextOf(command, bucket, 0);  // squares are of no group
  const void* gradients[kMaxSlots];
  for (int64_t chunk = share_.index; chunk < r.num_chunks(); chunk += share_.count) {
    for (int i = storage_.first_run(range, chunk); i < storage_.first_run(range, chunk + 1); ++i) {
      const ChunkRun& run = storage_.runs(range)[i];
      const int64_t element = r.bucket_begin + run.offset;
      OptimizerRun squares;
      squares.num_slots = Gradients(command, r.bucket, element, gradients);
      squares.gradients = gradients;
      squares.divide_scale = command.divide_scale;
      squares.square_sums = SquareSums(host_.control()) + bucket.first_block + element / kBlockElements;
      squares.num_elements = run.num_elements;
      squares_(context, squares);
      LookAgain(range, chunk, squares);
    }
  }
}

OptimizerContext Pass::ContextOf(const Command& command, const Bucket& bucket, int group) const {
  OptimizerContext context;
  context.hyper = job_.group(group);
  context.scalars = groups_.scalars(command.groups)[group];
  context.weights = bucket.weights;
  context.states = bucket.states;
  context.gradients = sums_ == nullptr ? job_.gradient_format : Format::kFp32;
  context.seed = job_.seed;
  context.step = command.step;
  return context;
}

OptimizerRun Pass::RunOf(const Command& command, int range, const ChunkRun& run,
                         const void* (&gradients)[kMaxSlots]) const {
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const int to = 1 - command.parity;
  OptimizerRun step;
  step.num_slots = Gradients(command, r.bucket, r.bucket_begin + run.offset, gradients);
  step.gradients = gradients;
  step.divide_scale = command.divide_scale;
  step.clip = command.clip;
  step.weights_in = storage_.weights(range, command.parity, run.offset);
  step.weights_out = storage_.weights(range, to, run.offset);
  for (int s = 0; s < bucket.num_states; ++s) {
    step.states_in[s] = storage_.state(s, range, command.parity, run.offset);
    step.states_out[s] = storage_.state(s, range, to, run.offset);
  }
  step.num_elements = run.num_elements;
  step.first_element = static_cast<uint64_t>(run.first_element);
  step.tensor = static_cast<uint32_t>(run.tensor);
  step.row_elements = bucket.row_elements;
  return step;
}

MuonMatrix Pass::MatrixOf(const Command& command, int tensor) const {
  const auto [rows, columns] = plan_.MatrixOf(tensor);
  const int group = job_.parameters[tensor].group;
  OptimizerHyper hyper = job_.group(group);
  hyper.lr = groups_.rates(command.groups)[group];  // validated before it was decided
  return {rows, columns, ComputeMuonScalars(hyper, {}, rows, columns).value_or(MuonScalars())};
}

void Pass::StepMatrix(const Command& command, uint64_t seq, int range) {
  const StorageRange& r = storage_.ranges()[range];
  if (storage_.Progress(range, seq) == r.num_chunks()) return;
  if (!storage_.UpdateIsReady(range, seq)) {
    const ScopedSpan span(trace_, "orthogonalize", command.step, r.bucket, range);
    const int tensor = storage_.runs(range).front().tensor;
    const void* gradients[kMaxSlots];
    const OptimizerRun run = RunOf(command, range, {tensor, 0, 0, plan_.placements()[tensor].num_elements}, gradients);
    const OptimizerContext context = ContextOf(command, plan_.buckets()[r.bucket], job_.parameters[tensor].group);
    const auto on_team = [this](int parts, Parallel::Body body) { team_.ForEach(parts, body); };
    MuonUpdate(context, MatrixOf(command, tensor), run, scratch_, Parallel(threads_, on_team));
    storage_.SetUpdateReady(range, seq);
  }
  const ScopedSpan span(trace_, "range", command.step, r.bucket, range);
  StepRange(command, seq, range);
}

int64_t Pass::StepChunk(const Command& command, int range, int64_t chunk) {
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  OptimizerContext context;
  int group = -1;
  const void* gradients[kMaxSlots];
  const ControlBlock& control = *host_.control();
  const bool look = control.looks_again.load(std::memory_order_relaxed) != 0 ||
                    control.elsewhere_looks_again.load(std::memory_order_relaxed) != 0;
  static thread_local std::vector<float> squares;  // of a run, as long as the longest that this thread had
  int64_t written = 0;
  for (int i = storage_.first_run(range, chunk); i < storage_.first_run(range, chunk + 1); ++i) {
    const ChunkRun& run = storage_.runs(range)[i];
    if (const int of_run = job_.parameters[run.tensor].group; of_run != group) {
      group = of_run;
      context = ContextOf(command, bucket, group);
    }
    OptimizerRun step = RunOf(command, range, run, gradients);
    const int copies = bucket.quantized() ? 0 : Copies(command, range, chunk, run.offset, step.copies);
    step.num_copies = stream_copies_ ? 0 : copies;
    if (look) {
      squares.resize(static_cast<size_t>((run.num_elements + kBlockElements - 1) / kBlockElements));
      step.square_sums = squares.data();
    }
    if (bucket.owned()) {
      const MuonScalars scalars = MatrixOf(command, run.tensor).scalars;
      MuonApply(context, scalars, step, scratch_.update(scalars) + run.first_element);
    } else {
      step_(context, step);
    }
    if (look) LookAgain(range, chunk, step);
    if (bucket.quantized() && Writes(chunk)) RaiseRun(range, 1 - command.parity, run);
    if (copies == 0) continue;
    for (int c = step.num_copies; c < copies; ++c) {
      StreamingCopy(step.copies[c], step.weights_out.codes, bucket.CodeOffset(run.num_elements));
    }
    if (bucket.weights == WeightFormat::kInt8Row) CopyScales(command, range, 1 - command.parity, run);
    if (InWindow(r.bucket)) written += bucket.CodeOffset(run.num_elements);
  }
  return written;
}

}  // namespace shardmesh
