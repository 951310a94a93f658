// Of DevicePass: initial weights and copies of the shard, which go through memory of the host; digests; and weights that
// are copied on the device.
#include <algorithm>
#include <array>

#include "core/base/status.h"
#include "kernels/encode/encode.h"
#include "worker/pass/device/device_pass.h"

namespace shardmesh {
namespace {

constexpr int64_t kCopyElements = 2 << 20;  // of a copy between the device and the host: some megabytes a stream

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

// Ranges in a row of the shard, in memory of the host: each stream's bytes follow each other there as on the device, so one
// copy takes all of a stream's.
class DevicePass::HostRanges {
 public:
  // In memory of its own, zeros.
  HostRanges(const ShardStorage& cut, int first, int end) : cut_(cut), first_(first), end_(end) {
    for (int s = 0; s < kStreams; ++s) {
      own_[s].resize(static_cast<size_t>(bytes(s)));
      begin_[s] = own_[s].data();
    }
  }
  // In memory that has the whole shard, cut the same way.
  HostRanges(const ShardStorage& cut, int first, int end, const ShardStorage& in)
      : cut_(cut), first_(first), end_(end) {
    for (int s = 0; s < kStreams; ++s) begin_[s] = in.StreamBegin(first, s);
  }

  int first() const { return first_; }
  int end() const { return end_; }
  char* begin(int stream) const { return begin_[stream]; }
  int64_t bytes(int stream) const {
    return cut_.StreamAt(end_ - 1, stream) + cut_.StreamBytes(end_ - 1, stream) - cut_.StreamAt(first_, stream);
  }
  StoredRun At(int range, int stream, int parity, int64_t offset) const {
    const StorageRange& r = cut_.ranges()[range];
    const auto part = [&](bool extra) -> char* {
      const int s = StreamOf(stream, extra);
      if (r.parts[s].bytes == 0) return nullptr;
      return begin_[s] + r.begin[s] - cut_.ranges()[first_].begin[s] + r.parts[s].BytesOf(r.Base(parity) + offset);
    };
    return {part(false), part(true)};
  }

 private:
  const ShardStorage& cut_;
  const int first_, end_;
  std::array<std::vector<char>, kStreams> own_;
  std::array<char*, kStreams> begin_ = {};
};

int DevicePass::EndOfCopy(int first) const {
  const int end = static_cast<int>(cut_.ranges().size());
  int64_t elements = 0;
  int at = first;
  for (; at < end && (at == first || elements + cut_.ranges()[at].num_elements <= kCopyElements); ++at) {
    elements += cut_.ranges()[at].num_elements;
  }
  return at;
}

absl::Status DevicePass::Upload(const HostRanges& ranges) const {
  for (int s = 0; s < kStreams; ++s) {
    if (ranges.bytes(s) == 0) continue;
    uint8_t* const to = storage_.data() + cut_.StreamAt(ranges.first(), s);
    RETURN_IF_ERROR(host_.device()->Copy(to, ranges.begin(s), ranges.bytes(s)));
  }
  return absl::OkStatus();
}

absl::Status DevicePass::PlaceInitial(const Command& command, const float* initial) {
  if (checks_ != nullptr) checks_->Forget();
  const int end = static_cast<int>(cut_.ranges().size());
  for (int first = 0; first < end; first = EndOfCopy(first)) {
    const HostRanges ranges(cut_, first, EndOfCopy(first));
    for (int range = ranges.first(); range < ranges.end(); ++range) {
      EncodeRange(command, range, initial + initial_begin_[range], ranges);
    }
    RETURN_IF_ERROR(Upload(ranges));
  }
  return PlaceWeights(command);
}

void DevicePass::EncodeRange(const Command& command, int range, const float* initial, const HostRanges& to) const {
  const StorageRange& r = cut_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const std::vector<float> zeros(static_cast<size_t>(r.chunk_elements));
  for (const ChunkRun& run : cut_.runs(range)) {
    CodeSpec spec;
    spec.format = CodeFormatOf(bucket.weights);
    spec.seed = job_.seed;
    spec.step = 0;
    spec.tensor = static_cast<uint32_t>(run.tensor);
    spec.first_element = static_cast<uint64_t>(run.first_element);
    MustEncode(spec, {run.num_elements / bucket.row_elements, bucket.row_elements}, initial + run.offset,
               to.At(range, 0, command.parity, run.offset));
    spec.format = CodeFormatOf(bucket.states);
    for (int s = 0; s < bucket.num_states; ++s) {
      spec.is_signed = StateIsSigned(job_.group(job_.parameters[run.tensor].group), s);
      MustEncode(spec, {run.num_elements}, zeros.data(), to.At(range, s + 1, command.parity, run.offset));
    }
  }
}

absl::Status DevicePass::Fill(const ShardStorage& from) {
  if (checks_ != nullptr) checks_->Forget();
  const int end = static_cast<int>(cut_.ranges().size());
  for (int first = 0; first < end; first = EndOfCopy(first)) {
    RETURN_IF_ERROR(Upload(HostRanges(cut_, first, EndOfCopy(first), from)));
  }
  return absl::OkStatus();
}

absl::Status DevicePass::CopyShard(Snapshot& to) const {
  const int end = static_cast<int>(cut_.ranges().size());
  for (int first = 0; first < end; first = EndOfCopy(first)) {
    const HostRanges ranges(cut_, first, EndOfCopy(first), to.storage());
    for (int s = 0; s < kStreams; ++s) {
      if (ranges.bytes(s) == 0) continue;
      const uint8_t* const from = storage_.data() + cut_.StreamAt(first, s);
      RETURN_IF_ERROR(host_.device()->Copy(ranges.begin(s), from, ranges.bytes(s)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> DevicePass::Digest(const Command& command) {
  const std::shared_ptr<Snapshot> wanted = snapshots_ != nullptr ? snapshots_->Wanted() : nullptr;
  if (wanted != nullptr) RETURN_IF_ERROR(CopyShard(*wanted));
  DeviceRuntime::Scope scope(*steps_);
  RETURN_IF_ERROR(Launched(digest_->Launch(kernels_, command.parity, steps_->stream()), "a digest"));
  RETURN_IF_ERROR(steps_->AwaitIdle(options_.timeout));
  if (wanted != nullptr) snapshots_->Filled(wanted.get(), {command.step, command.parity});
  return digest_->Sum();
}

// Replicas share the ranges.
absl::Status DevicePass::PlaceWeights(const Command& command) {
  DeviceRuntime::Scope scope(*steps_);
  for (int range = share_.index; range < static_cast<int>(cut_.ranges().size()); range += share_.count) {
    RETURN_IF_ERROR(PlaceRange(command, range));
  }
  return steps_->AwaitIdle(options_.timeout);
}

// Weights lie in a row there, as in the bucket: those of tensors that follow each other without padding are one copy.
absl::Status DevicePass::PlaceRange(const Command& command, int range) {
  const StorageRange& r = cut_.ranges()[range];
  const Bucket& bucket = plan_.buckets()[r.bucket];
  const std::vector<ChunkRun>& runs = cut_.runs(range);
  const auto stored = [&](bool extra, int64_t offset) -> const uint8_t* {
    const int s = StreamOf(0, extra);
    return storage_.data() + cut_.StreamAt(range, s) + r.parts[s].BytesOf(r.Base(command.parity) + offset);
  };
  const std::vector<uint8_t*> places = Places(command, r.bucket);
  for (size_t i = 0; i < runs.size();) {
    const int64_t first = runs[i].offset;
    int64_t end = first;
    for (; i < runs.size() && runs[i].offset == end; ++i) end += runs[i].num_elements;
    for (uint8_t* const place : places) {
      RETURN_IF_ERROR(steps_->Copy(place + bucket.CodeOffset(r.bucket_begin + first), stored(false, first),
                                   bucket.CodeOffset(end - first)));
    }
  }
  if (bucket.weights != WeightFormat::kInt8Row) return absl::OkStatus();
  const int64_t bytes = GatheredScaleBytes(bucket.gather);
  for (const ChunkRun& run : runs) {
    const int64_t row = run.first_element / bucket.row_elements, rows = run.num_elements / bucket.row_elements;
    const int64_t at = plan_.placements()[run.tensor].scale_offset + row * bytes;
    for (uint8_t* const place : places)
      RETURN_IF_ERROR(steps_->Copy(place + at, stored(true, run.offset), rows * bytes));
  }
  return absl::OkStatus();
}

// Each rank copies as much of the window as another.
absl::Status DevicePass::PublishShare(const Command& command) {
  constexpr int64_t kPiece = 1 << 20;
  const DeviceWindows& windows = *host_.device();
  const int64_t bytes = plan_.window_bytes(), pieces = (bytes + kPiece - 1) / kPiece, ranks = plan_.num_ranks();
  const int64_t begin = pieces * rank_.value() / ranks * kPiece;
  const int64_t end = std::min(pieces * (rank_.value() + 1) / ranks * kPiece, bytes);
  if (begin >= end) return absl::OkStatus();
  DeviceRuntime::Scope scope(*steps_);
  RETURN_IF_ERROR(
      steps_->Copy(windows.publications[command.publish].data() + begin, windows.window.data() + begin, end - begin));
  return steps_->AwaitIdle(options_.timeout);
}

}  // namespace shardmesh
