#include "worker/pass.h"

#include <algorithm>
#include <cstring>

#include "core/philox.h"
#include "core/stream_digest.h"

namespace shardmesh {

Pass::Pass(const JobSpec& job, const Plan& plan, ShardPlace place, HostMemory& host, ShardStorage& storage, int threads)
    : job_(job),
      plan_(plan),
      place_(place),
      host_(host),
      storage_(storage),
      step_(BestFusedStep()),
      key_(MakePhiloxKey(job.seed, DrawPurpose::kWeightRounding)),
      divide_scale_(static_cast<float>(1.0 / job.num_slots)),
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
    switch (command.kind) {
      case CommandKind::kStep:
        if (command.apply) StepRange(command, seq, range);
        break;
      case CommandKind::kInit:
        PlaceInitial(command, range, initial);
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

int Pass::Copies(const Command& command, int range, int64_t chunk, int64_t offset, void* (&copies)[2]) const {
  if (chunk % plan_.num_replicas() != place_.replica) return 0;
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const int64_t at = bucket.weight_offset + (r.bucket_begin + offset) * BytesPerElement(bucket.format);
  copies[0] = host_.window().data() + at;
  if (command.publish < 0) return 1;
  copies[1] = host_.publication(command.publish).data() + at;
  return 2;
}

void Pass::StepRange(const Command& command, uint64_t seq, int range) {
  const int64_t chunks = storage_.ranges()[range].num_chunks();
  for (int64_t done = storage_.Progress(range, seq); done < chunks; ++done) {
    StepChunk(command, range, command.parity == 0 ? done : chunks - 1 - done);
    storage_.SetProgress(range, seq, done + 1);
  }
}

void Pass::StepChunk(const Command& command, int range, int64_t chunk) {
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const int64_t gradient_bytes = BytesPerElement(job_.gradient_format);
  const int to = 1 - command.parity;
  const StepContext context{command.scalars, bucket.format, job_.gradient_format, key_, command.step};
  const void* gradients[kMaxSlots];
  int64_t written = 0;
  for (int i = storage_.first_run(range, chunk); i < storage_.first_run(range, chunk + 1); ++i) {
    const ChunkRun& run = storage_.runs(range)[i];
    const int64_t at = bucket.gradient_offset + (r.bucket_begin + run.offset) * gradient_bytes;
    for (int s = 0; s < job_.num_slots; ++s) gradients[s] = host_.slot(s).data() + at;
    FusedRun fused;
    fused.gradients = gradients;
    fused.num_slots = job_.num_slots;
    fused.divide_scale = divide_scale_;
    fused.weights_in = storage_.weights(range, command.parity, run.offset);
    fused.m_in = storage_.moment1(range, command.parity, run.offset);
    fused.v_in = storage_.moment2(range, command.parity, run.offset);
    fused.weights_out = storage_.weights(range, to, run.offset);
    fused.m_out = storage_.moment1(range, to, run.offset);
    fused.v_out = storage_.moment2(range, to, run.offset);
    fused.num_copies = Copies(command, range, chunk, run.offset, fused.copies);
    fused.num_elements = run.num_elements;
    fused.first_element = static_cast<uint64_t>(run.first_element);
    fused.tensor = static_cast<uint32_t>(run.tensor);
    step_(context, fused);
    if (fused.num_copies > 0) written += run.num_elements * BytesPerElement(bucket.format);
  }
  gathered_bytes_.fetch_add(written, std::memory_order_relaxed);
}

void Pass::PlaceInitial(const Command& command, int range, const float* initial) {
  const StorageRange& r = storage_.ranges()[range];
  const Format format = plan_.buckets()[r.bucket].format;
  const int64_t bytes = BytesPerElement(format);
  for (int64_t chunk = 0; chunk < r.num_chunks(); ++chunk) {
    for (int i = storage_.first_run(range, chunk); i < storage_.first_run(range, chunk + 1); ++i) {
      const ChunkRun& run = storage_.runs(range)[i];
      char* out = storage_.weights(range, command.parity, run.offset);
      const float* in = initial + initial_begin_[range] + run.offset;
      // Elements past the tensor's end are padding, which holds zeros whatever was pushed.
      const int64_t size = plan_.placements()[run.tensor].num_elements - run.first_element;
      for (int64_t e = 0; e < run.num_elements; ++e) {
        const float value = e < size ? in[e] : 0.0f;
        if (format == Format::kFp32) {
          std::memcpy(out + e * 4, &value, 4);
        } else {
          const uint16_t rounded = FloatToBf16Rne(value);
          std::memcpy(out + e * 2, &rounded, 2);
        }
      }
      void* copies[2];
      const int num_copies = Copies(command, range, chunk, run.offset, copies);
      for (int c = 0; c < num_copies; ++c) std::memcpy(copies[c], out, run.num_elements * bytes);
    }
  }
}

uint64_t Pass::DigestRange(const Command& command, int range) const {
  const StorageRange& r = storage_.ranges()[range];
  const int64_t bytes = BytesPerElement(plan_.buckets()[r.bucket].format);
  uint64_t digest = 0;
  for (const ChunkRun& run : storage_.runs(range)) {
    const auto add = [&](int stream, const void* data, int64_t bytes_per_element) {
      digest += DigestPart(DigestKey(static_cast<uint32_t>(run.tensor), stream, 0), {bytes_per_element},
                           static_cast<uint64_t>(run.first_element), data, run.num_elements);
    };
    add(0, storage_.weights(range, command.parity, run.offset), bytes);
    add(1, storage_.moment1(range, command.parity, run.offset), sizeof(float));
    add(2, storage_.moment2(range, command.parity, run.offset), sizeof(float));
  }
  return digest;
}

}  // namespace shardmesh
