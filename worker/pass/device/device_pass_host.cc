// Of DevicePass: initial weights and digests, which go through memory of the host, range by range.
#include <cstring>

#include "core/base/status.h"
#include "core/format/stream_digest.h"
#include "kernels/encode/encode.h"
#include "worker/pass/device/device_pass.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kRangeTimeout = absl::Seconds(30);

// Of values that were checked when they were pushed: nothing of them can be refused.
void MustEncode(const CodeSpec& spec, std::initializer_list<int64_t> dims, const float* values, const StoredRun& to) {
  void* const parts[] = {to.codes, to.extra};
  (void)Encode(spec, dims, values, absl::MakeSpan(parts, to.extra == nullptr ? 1 : 2));
}

}  // namespace

std::vector<uint8_t*> DevicePass::Places(const Command& command, int bucket) const {
  const DeviceWindows& windows = *host_.device();
  const int64_t at = plan_.buckets()[bucket].weight_offset;
  std::vector<uint8_t*> places = {windows.window.data() + at};
  for (int i = 0; i < static_cast<int>(windows.publications.size()); ++i) {
    // Of frozen weights, which are placed once, every publication.
    if (plan_.buckets()[bucket].frozen || i == command.publish) places.push_back(windows.publications[i].data() + at);
  }
  return places;
}

std::vector<std::vector<char>> DevicePass::HostRange(int range) const {
  std::vector<std::vector<char>> streams(kStreams);
  for (int s = 0; s < kStreams; ++s) streams[s].resize(static_cast<size_t>(cut_.StreamBytes(range, s)));
  return streams;
}

StoredRun DevicePass::InHost(std::vector<std::vector<char>>& streams, int range, int stream, int parity,
                             int64_t offset) const {
  const StorageRange& r = cut_.ranges()[range];
  const auto part = [&](bool extra) -> char* {
    const int s = StreamOf(stream, extra);
    return r.parts[s].bytes == 0 ? nullptr : streams[s].data() + r.parts[s].BytesOf(r.Base(parity) + offset);
  };
  return {part(false), part(true)};
}

absl::Status DevicePass::PlaceInitial(const Command& command, const float* initial) {
  for (int range = 0; range < static_cast<int>(cut_.ranges().size()); ++range) {
    RETURN_IF_ERROR(PlaceRange(command, range, initial + initial_begin_[range]));
  }
  return absl::OkStatus();
}

absl::Status DevicePass::PlaceRange(const Command& command, int range, const float* initial) {
  const StorageRange& r = cut_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const std::vector<uint8_t*> places = Places(command, r.bucket);
  std::vector<std::vector<char>> streams = HostRange(range);
  const std::vector<float> zeros(static_cast<size_t>(r.chunk_elements));
  DeviceRuntime::Scope scope(*steps_);
  for (int64_t chunk = 0; chunk < r.num_chunks(); ++chunk) {
    for (int i = cut_.first_run(range, chunk); i < cut_.first_run(range, chunk + 1); ++i) {
      const ChunkRun& run = cut_.runs(range)[i];
      CodeSpec spec;
      spec.format = CodeFormatOf(bucket.weights);
      spec.seed = job_.seed;
      spec.step = 0;
      spec.tensor = static_cast<uint32_t>(run.tensor);
      spec.first_element = static_cast<uint64_t>(run.first_element);
      const StoredRun weights = InHost(streams, range, 0, command.parity, run.offset);
      MustEncode(spec, {run.num_elements / bucket.row_elements, bucket.row_elements}, initial + run.offset, weights);
      spec.format = CodeFormatOf(bucket.states);
      for (int s = 0; s < bucket.num_states; ++s) {
        spec.is_signed = StateIsSigned(job_.group(job_.parameters[run.tensor].group), s);
        MustEncode(spec, {run.num_elements}, zeros.data(), InHost(streams, range, s + 1, command.parity, run.offset));
      }
      if (chunk % share_.count != share_.index) continue;
      const int64_t at = bucket.CodeOffset(r.bucket_begin + run.offset);
      for (uint8_t* place : places) {
        RETURN_IF_ERROR(steps_->Copy(place + at, weights.codes, bucket.CodeOffset(run.num_elements)));
      }
      if (bucket.weights == WeightFormat::kInt8Row) RETURN_IF_ERROR(CopyScales(range, run, weights.extra, places));
    }
  }
  for (int s = 0; s < kStreams; ++s) {
    RETURN_IF_ERROR(steps_->Copy(storage_.data() + cut_.StreamAt(range, s), streams[s].data(),
                                 static_cast<int64_t>(streams[s].size())));
  }
  return steps_->AwaitIdle(kRangeTimeout);
}

absl::Status DevicePass::CopyScales(int range, const ChunkRun& run, const void* scales,
                                    const std::vector<uint8_t*>& places) {
  const Bucket& bucket = plan_.buckets()[cut_.ranges()[range].bucket];
  const int64_t bytes = GatheredScaleBytes(bucket.gather), rows = run.num_elements / bucket.row_elements;
  const int64_t at = plan_.placements()[run.tensor].scale_offset + run.first_element / bucket.row_elements * bytes;
  for (uint8_t* place : places) RETURN_IF_ERROR(steps_->Copy(place + at, scales, rows * bytes));
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> DevicePass::DigestRange(const Command& command, int range) {
  const StorageRange& r = cut_.ranges()[range];
  std::vector<std::vector<char>> streams = HostRange(range);
  {
    DeviceRuntime::Scope scope(*steps_);
    for (int s = 0; s < kStreams; ++s) {
      RETURN_IF_ERROR(steps_->Copy(streams[s].data(), storage_.data() + cut_.StreamAt(range, s),
                                   static_cast<int64_t>(streams[s].size())));
    }
    RETURN_IF_ERROR(steps_->AwaitIdle(kRangeTimeout));
  }
  uint64_t digest = 0;
  for (const ChunkRun& run : cut_.runs(range)) {
    for (int stream = 0; stream <= plan_.buckets()[r.bucket].num_states; ++stream) {
      const StoredRun stored = InHost(streams, range, stream, command.parity, run.offset);
      for (const bool extra : {false, true}) {
        const PartLayout& layout = r.parts[StreamOf(stream, extra)];
        if (layout.bytes == 0) continue;
        digest +=
            DigestPart(DigestKey(static_cast<uint32_t>(run.tensor), stream, extra ? 1 : 0), layout,
                       static_cast<uint64_t>(run.first_element), extra ? stored.extra : stored.codes, run.num_elements);
      }
    }
  }
  return digest;
}

}  // namespace shardmesh
