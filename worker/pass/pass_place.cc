// Of Pass: initial weights, and those that a shard has already, on their way into windows and publications.
#include <cstring>
#include <initializer_list>

#include "absl/types/span.h"
#include "kernels/encode/encode.h"
#include "kernels/encode/gathered.h"
#include "worker/pass/pass.h"
#include "worker/transport/streaming_copy.h"

namespace shardmesh {
namespace {

// Of values that were checked when they were pushed: nothing of them can be refused.
void MustEncode(const CodeSpec& spec, std::initializer_list<int64_t> dims, const float* values, const StoredRun& to) {
  void* const parts[] = {to.codes, to.extra};
  (void)Encode(spec, dims, values, absl::MakeSpan(parts, to.extra == nullptr ? 1 : 2));
}

}  // namespace

// Without `initial` the shard has its weights and states.
void Pass::PlaceFirst(const Command& command, int range, const float* initial) {
  const StorageRange& r = storage_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  for (int64_t chunk = 0; chunk < r.num_chunks(); ++chunk) {
    for (int i = storage_.first_run(range, chunk); i < storage_.first_run(range, chunk + 1); ++i) {
      const ChunkRun& run = storage_.runs(range)[i];
      if (initial != nullptr) PlaceRun(command, range, run, initial + initial_begin_[range] + run.offset);
      if (bucket.quantized()) {
        if (Writes(chunk)) RaiseRun(range, command.parity, run);
        continue;
      }
      void* copies[1 + kMaxPublications];
      const int num_copies = Copies(command, range, chunk, run.offset, copies);
      const void* codes = storage_.weights(range, command.parity, run.offset).codes;
      const int64_t bytes = bucket.CodeOffset(run.num_elements);
      for (int c = 0; c < num_copies; ++c) {
        if (stream_copies_) {
          StreamingCopy(copies[c], codes, bytes);
        } else {
          std::memcpy(copies[c], codes, bytes);
        }
      }
      if (num_copies > 0 && bucket.weights == WeightFormat::kInt8Row) CopyScales(command, range, command.parity, run);
    }
    if (job_.check_every > 0 && !r.frozen) {
      storage_.SetGuard(range, command.parity, chunk, DigestChunk(range, command.parity, chunk));
    }
  }
}

void Pass::PlaceRun(const Command& command, int range, const ChunkRun& run, const float* weights) {
  const Bucket& bucket = plan_.buckets()[storage_.ranges()[range].bucket];
  CodeSpec spec;
  spec.format = CodeFormatOf(bucket.weights);
  spec.seed = job_.seed;
  spec.step = 0;
  spec.tensor = static_cast<uint32_t>(run.tensor);
  spec.first_element = static_cast<uint64_t>(run.first_element);
  const StoredRun stored = storage_.weights(range, command.parity, run.offset);
  if (bucket.weights == WeightFormat::kNf4) {
    StoreNf4(weights, run.num_elements, static_cast<uint8_t*>(stored.codes), static_cast<float*>(stored.extra));
  } else {
    MustEncode(spec, {run.num_elements / bucket.row_elements, bucket.row_elements}, weights, stored);
  }
  spec.format = CodeFormatOf(bucket.states);
  for (int s = 0; s < bucket.num_states; ++s) {
    spec.is_signed = StateIsSigned(job_.group(job_.parameters[run.tensor].group), s);
    MustEncode(spec, {run.num_elements}, zeros_.data(), storage_.state(s, range, command.parity, run.offset));
  }
}

}  // namespace shardmesh
