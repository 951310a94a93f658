#include "worker/pass.h"

#include <algorithm>
#include <cstring>

#include "core/stream_digest.h"
#include "kernels/encode.h"

namespace shardmesh {

namespace {

// Of values that were checked when they were pushed: nothing of them can be refused.
void MustEncode(const CodeSpec& spec, int64_t elements, const float* values, const StoredRun& to) {
  void* const parts[] = {to.codes, to.extra};
  (void)Encode(spec, {elements}, values, absl::MakeSpan(parts, to.extra == nullptr ? 1 : 2));
}

}  // namespace

Pass::Pass(const JobSpec& job, const Plan& plan, ShardPlace place, HostMemory& host, ShardStorage& storage, int threads,
           Trace* trace)
    : job_(job),
      plan_(plan),
      place_(place),
      host_(host),
      storage_(storage),
      trace_(trace),
      step_(BestOptimizerStep()),
      squares_(BestGradientSquares()),
      divide_scale_(static_cast<float>(1.0 / job.num_slots)),
      zeros_(kChunkElements),
      team_(threads) {
  int64_t before = 0;
  for (const StorageRange& range : storage_.ranges()) {
    initial_begin_.push_back(before);
    before += range.num_elements;
  }
}

uint64_t Pass::Execute(const Command& command, uint64_t seq, const float* initial) {
  const int num_ranges = static_cast<int>(storage_.ranges().size());
  std::atomic<uint64_t> digest{0};
  team_.ForEach(num_ranges, [&](int range) {
    if (!Works(command, range)) return;
    const ScopedSpan span(trace_, "range", command.step, storage_.ranges()[range].bucket, range);
    switch (command.kind) {
      case CommandKind::kStep:
        StepRange(command, seq, range);
        break;
      case CommandKind::kInit:
        PlaceInitial(command, range, initial);
        break;
      case CommandKind::kNorm:
        SquareRange(command, range);
        break;
      case CommandKind::kGather:
        GatherRange(command, range);
        break;
      case CommandKind::kDigest:
        digest.fetch_add(DigestRange(command, range));
        break;
      case CommandKind::kNone:
        break;
    }
  });
  return digest.load();
}

bool Pass::Works(const Command& command, int range) const {
  const Bucket& bucket = plan_.buckets()[storage_.ranges()[range].bucket];
  switch (command.kind) {
    case CommandKind::kStep:
      return command.apply != 0 && !bucket.frozen;
    case CommandKind::kNorm:
      return !bucket.frozen;
    case CommandKind::kGather:  // frozen weights once, with the initial ones
      return bucket.coded() && (!bucket.frozen || command.step == 0);
    case CommandKind::kInit:
    case CommandKind::kDigest:
      return true;
    case CommandKind::kNone:
      break;
  }
  return false;
}

int Pass::Copies(const Command& command, int range, int64_t chunk, int64_t offset, void** copies) const {
  if (!Writes(chunk)) return 0;
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const int64_t at = bucket.weight_offset + bucket.CodeOffset(r.bucket_begin + offset);
  int num_copies = 0;
  copies[num_copies++] = host_.window().data() + at;
  for (int i = 0; i < kPublicationBuffers; ++i) {
    if (bucket.frozen || i == command.publish) copies[num_copies++] = host_.publication(i).data() + at;
  }
  return num_copies;
}

void Pass::StepRange(const Command& command, uint64_t seq, int range) {
  const int64_t chunks = storage_.ranges()[range].num_chunks();
  for (int64_t done = storage_.Progress(range, seq); done < chunks; ++done) {
    StepChunk(command, range, command.parity == 0 ? done : chunks - 1 - done);
    storage_.SetProgress(range, seq, done + 1);
  }
}

void Pass::Gradients(const Bucket& bucket, int64_t element, const void* (&gradients)[kMaxSlots]) const {
  const int64_t at = bucket.gradient_offset + element * BytesPerElement(job_.gradient_format);
  for (int s = 0; s < job_.num_slots; ++s) gradients[s] = host_.slot(s).data() + at;
}

void Pass::SquareRange(const Command& command, int range) {
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const OptimizerContext context = ContextOf(command, bucket, 0);  // squares are of no group
  const void* gradients[kMaxSlots];
  for (int64_t chunk = place_.replica; chunk < r.num_chunks(); chunk += plan_.num_replicas()) {
    for (int i = storage_.first_run(range, chunk); i < storage_.first_run(range, chunk + 1); ++i) {
      const ChunkRun& run = storage_.runs(range)[i];
      const int64_t element = r.bucket_begin + run.offset;
      Gradients(bucket, element, gradients);
      OptimizerRun squares;
      squares.gradients = gradients;
      squares.num_slots = job_.num_slots;
      squares.divide_scale = divide_scale_;
      squares.square_sums = SquareSums(host_.control()) + bucket.first_block + element / kBlockElements;
      squares.num_elements = run.num_elements;
      squares_(context, squares);
    }
  }
}

OptimizerContext Pass::ContextOf(const Command& command, const Bucket& bucket, int group) const {
  OptimizerContext context;
  context.hyper = job_.group(group);
  context.scalars = command.scalars[group];
  context.weights = bucket.weights;
  context.states = bucket.states;
  context.gradients = job_.gradient_format;
  context.seed = job_.seed;
  context.step = command.step;
  return context;
}

void Pass::StepChunk(const Command& command, int range, int64_t chunk) {
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const int to = 1 - command.parity;
  OptimizerContext context;
  int group = -1;
  const void* gradients[kMaxSlots];
  int64_t written = 0;
  for (int i = storage_.first_run(range, chunk); i < storage_.first_run(range, chunk + 1); ++i) {
    const ChunkRun& run = storage_.runs(range)[i];
    if (const int of_run = job_.parameters[run.tensor].group; of_run != group) {
      group = of_run;
      context = ContextOf(command, bucket, group);
    }
    Gradients(bucket, r.bucket_begin + run.offset, gradients);
    OptimizerRun step;
    step.gradients = gradients;
    step.num_slots = job_.num_slots;
    step.divide_scale = divide_scale_;
    step.clip = command.clip;
    step.weights_in = storage_.weights(range, command.parity, run.offset);
    step.weights_out = storage_.weights(range, to, run.offset);
    for (int s = 0; s < plan_.num_states(); ++s) {
      step.states_in[s] = storage_.state(s, range, command.parity, run.offset);
      step.states_out[s] = storage_.state(s, range, to, run.offset);
    }
    step.num_copies = bucket.coded() ? 0 : Copies(command, range, chunk, run.offset, step.copies);
    step.num_elements = run.num_elements;
    step.first_element = static_cast<uint64_t>(run.first_element);
    step.tensor = static_cast<uint32_t>(run.tensor);
    step_(context, step);
    if (bucket.coded() && Writes(chunk)) RaiseRun(range, to, run);
    if (step.num_copies > 0) written += run.num_elements * BytesPerElement(bucket.format());
  }
  gathered_bytes_.fetch_add(written, std::memory_order_relaxed);
}

void Pass::PlaceInitial(const Command& command, int range, const float* initial) {
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  for (int64_t chunk = 0; chunk < r.num_chunks(); ++chunk) {
    for (int i = storage_.first_run(range, chunk); i < storage_.first_run(range, chunk + 1); ++i) {
      const ChunkRun& run = storage_.runs(range)[i];
      PlaceRun(command, range, run, initial + initial_begin_[range] + run.offset);
      if (bucket.coded()) {
        if (Writes(chunk)) RaiseRun(range, command.parity, run);
        continue;
      }
      void* copies[1 + kPublicationBuffers];
      const int num_copies = Copies(command, range, chunk, run.offset, copies);
      const void* codes = storage_.weights(range, command.parity, run.offset).codes;
      for (int c = 0; c < num_copies; ++c) std::memcpy(copies[c], codes, bucket.CodeOffset(run.num_elements));
    }
  }
}

GatheredRun Pass::GatheredOf(int range, int parity, const ChunkRun& run) const {
  const Bucket& bucket = plan_.buckets()[storage_.ranges()[range].bucket];
  GatheredRun gathered;
  gathered.gather = bucket.gather;
  gathered.blocks = &plan_.placements()[run.tensor].scales;
  gathered.format = bucket.format();
  gathered.values = storage_.weights(range, parity, run.offset).codes;
  gathered.first_element = run.first_element;
  gathered.num_elements = run.num_elements;
  return gathered;
}

void Pass::RaiseRun(int range, int parity, const ChunkRun& run) {
  RaiseMaxima(GatheredOf(range, parity, run),
              Maxima(host_.control(), plan_) + plan_.placements()[run.tensor].first_maximum);
}

void Pass::GatherRange(const Command& command, int range) {
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const std::atomic<uint32_t>* const maxima = Maxima(host_.control(), plan_);
  int64_t written = 0;
  for (int64_t chunk = place_.replica; chunk < r.num_chunks(); chunk += plan_.num_replicas()) {
    for (int i = storage_.first_run(range, chunk); i < storage_.first_run(range, chunk + 1); ++i) {
      const ChunkRun& run = storage_.runs(range)[i];
      const Placement& tensor = plan_.placements()[run.tensor];
      GatheredPlace places[1 + kPublicationBuffers];
      const auto place = [&](const Segment& segment) -> GatheredPlace {
        char* const begin = segment.data() + bucket.weight_offset;
        char* const codes = begin + bucket.CodeOffset(r.bucket_begin + run.offset);
        return {reinterpret_cast<uint8_t*>(codes), begin + tensor.scale_offset};
      };
      int num_places = 0;
      places[num_places++] = place(host_.window());
      for (int p = 0; p < kPublicationBuffers; ++p) {
        if (bucket.frozen || p == command.publish) places[num_places++] = place(host_.publication(p));
      }
      EncodeGathered(GatheredOf(range, command.parity, run), maxima + tensor.first_maximum, places, num_places);
      if (command.step > 0) written += run.num_elements;
    }
  }
  gathered_bytes_.fetch_add(written, std::memory_order_relaxed);
}

void Pass::PlaceRun(const Command& command, int range, const ChunkRun& run, const float* weights) {
  const Bucket& bucket = plan_.buckets()[storage_.ranges()[range].bucket];
  CodeSpec spec;
  spec.format = CodeFormatOf(bucket.weights);
  spec.seed = job_.seed;
  spec.step = 0;
  spec.tensor = static_cast<uint32_t>(run.tensor);
  spec.first_element = static_cast<uint64_t>(run.first_element);
  MustEncode(spec, run.num_elements, weights, storage_.weights(range, command.parity, run.offset));
  if (bucket.frozen) return;
  spec.format = CodeFormatOf(bucket.states);
  for (int s = 0; s < plan_.num_states(); ++s) {
    spec.is_signed = StateIsSigned(job_.optimizer, s);
    MustEncode(spec, run.num_elements, zeros_.data(), storage_.state(s, range, command.parity, run.offset));
  }
}

uint64_t Pass::DigestRange(const Command& command, int range) const {
  const StorageRange& r = storage_.ranges()[range];
  uint64_t digest = 0;
  for (const ChunkRun& run : storage_.runs(range)) {
    const auto add = [&](int stream, bool extra, const void* data) {
      const PartLayout& layout = r.parts[StreamOf(stream, extra)];
      if (layout.bytes == 0) return;
      digest += DigestPart(DigestKey(static_cast<uint32_t>(run.tensor), stream, extra ? 1 : 0), layout,
                           static_cast<uint64_t>(run.first_element), data, run.num_elements);
    };
    for (int stream = 0; stream <= plan_.num_states(); ++stream) {
      const StoredRun stored = stream == 0 ? storage_.weights(range, command.parity, run.offset)
                                           : storage_.state(stream - 1, range, command.parity, run.offset);
      add(stream, false, stored.codes);
      add(stream, true, stored.extra);
    }
  }
  return digest;
}

}  // namespace shardmesh
