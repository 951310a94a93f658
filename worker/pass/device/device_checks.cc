#include "worker/pass/device/device_checks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "worker/pass/check.h"

namespace shardmesh {
namespace {

constexpr int64_t kAlignment = 256;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

int64_t DeviceChecks::MostDrawn(int64_t num_chunks, int check_every) {
  const double expected = static_cast<double>(num_chunks) / check_every;
  return std::min(num_chunks, static_cast<int64_t>(std::ceil(expected + 4 * std::sqrt(expected))) + 1);
}

absl::StatusOr<std::unique_ptr<DeviceChecks>> DeviceChecks::Create(const JobSpec& job, const ShardStorage& cut,
                                                                   const uint8_t* storage,
                                                                   std::vector<PassRange> ranges,
                                                                   std::vector<int> cut_ranges,
                                                                   const std::shared_ptr<DeviceRuntime>& device) {
  std::unique_ptr<DeviceChecks> checks(
      new DeviceChecks(job, cut, storage, std::move(ranges), std::move(cut_ranges), device));
  RETURN_IF_ERROR(checks->Open());
  return checks;
}

absl::Status DeviceChecks::Open() {
  for (const int r : cut_ranges_) {
    const StorageRange& range = cut_.ranges()[r];
    if (static_cast<int>(rooms_.size()) <= range.bucket) rooms_.resize(static_cast<size_t>(range.bucket) + 1);
    Room& room = rooms_[range.bucket];
    room.chunks += range.num_chunks();
    int64_t slot = 0, streams = 0;
    for (int s = 0; s < kStreams; ++s) {
      room.stream_at[s] = std::max(room.stream_at[s], slot);
      slot = room.stream_at[s] + Aligned(range.parts[s].BytesOf(2 * range.spare()));
      if (range.parts[s].bytes > 0) ++streams;
    }
    room.slot_bytes = std::max(room.slot_bytes, slot);
    for (int64_t c = 0; c < range.num_chunks(); ++c) {
      room.stretches = std::max(room.stretches, streams * (cut_.first_run(r, c + 1) - cut_.first_run(r, c)));
    }
  }
  int64_t drawn = 0, stretches = 0, slots = 0;
  for (Room& room : rooms_) {
    room.most_drawn = MostDrawn(room.chunks, job_.check_every);
    drawn += room.most_drawn;
    stretches += 3 * room.most_drawn * room.stretches;
    slots += room.most_drawn * room.slot_bytes;
  }
  if (drawn == 0) return absl::OkStatus();
  const auto bytes = [](int64_t num, size_t each) { return Aligned(num * static_cast<int64_t>(each)); };
  progress_at_ = bytes(drawn, sizeof(PassRange));
  stretches_at_ = progress_at_ + bytes(drawn, sizeof(uint64_t));
  copies_at_ = stretches_at_ + bytes(stretches, sizeof(DigestStretch));
  tables_bytes_ = copies_at_ + bytes(drawn * kStreams, sizeof(StretchCopy));
  ASSIGN_OR_RETURN(scratch_, DeviceSegment::Create(device_, tables_bytes_ + slots));
  ASSIGN_OR_RETURN(block_, PinnedBlock::Create(device_, tables_bytes_ + bytes(stretches, sizeof(uint64_t))));
  return absl::OkStatus();
}

void DeviceChecks::Forget() {
  for (std::vector<Guard>& guards : guards_) guards.clear();
}

StreamAddresses DeviceChecks::SlotAddresses(const Chunk& at) const {
  const Room& room = rooms_[cut_.ranges()[cut_ranges_[at.range]].bucket];
  StreamAddresses addresses = {};
  for (int s = 0; s < kStreams; ++s) addresses[s] = scratch_.data() + tables_bytes_ + at.slot_at + room.stream_at[s];
  return addresses;
}

void DeviceChecks::Draw(int64_t step) {
  drawn_.clear();
  int64_t slot_at = 0, of_bucket = 0;
  int bucket = -1;
  for (int i = 0; i < static_cast<int>(ranges_.size()); ++i) {
    const int r = cut_ranges_[i];
    if (cut_.ranges()[r].bucket != bucket) of_bucket = 0;
    bucket = cut_.ranges()[r].bucket;
    for (int32_t chunk = 0; chunk < ranges_[i].num_chunks; ++chunk) {
      if (!IsDrawn(job_, step, r, chunk) || of_bucket == rooms_[bucket].most_drawn) continue;
      if (cut_.first_run(r, chunk) == cut_.first_run(r, chunk + 1)) continue;  // padding alone
      drawn_.push_back({i, chunk, slot_at});
      slot_at += rooms_[bucket].slot_bytes;
      ++of_bucket;
    }
  }
}

void DeviceChecks::AddChunk(const Chunk& at, const StreamAddresses& addresses, int64_t before,
                            std::vector<DigestStretch>* stretches) {
  const int r = cut_ranges_[at.range];
  for (int i = cut_.first_run(r, at.chunk); i < cut_.first_run(r, at.chunk + 1); ++i) {
    AddStretches(cut_.ranges()[r], cut_.runs(r)[i], addresses, before, stretches);
  }
  firsts_.push_back(static_cast<int32_t>(stretches->size()));
}

void DeviceChecks::AddCopies(const Chunk& at, int parity, std::vector<StretchCopy>* copies) const {
  const int r = cut_ranges_[at.range];
  const StorageRange& range = cut_.ranges()[r];
  const StreamAddresses from = AddressesOf(cut_, r, storage_), to = SlotAddresses(at);
  const int64_t base = range.Base(parity), before = at.chunk * range.chunk_elements;
  const int64_t elements = std::min(range.chunk_elements, range.num_elements - before);
  for (int s = 0; s < kStreams; ++s) {
    const PartLayout& part = range.parts[s];
    if (part.bytes == 0) continue;
    copies->push_back({const_cast<uint8_t*>(to[s]) + part.BytesOf(base), from[s] + part.BytesOf(base + before),
                       part.BytesOf(elements)});
  }
}

template <class Value>
absl::Status DeviceChecks::Upload(int64_t at, const std::vector<Value>& values) {
  if (values.empty()) return absl::OkStatus();
  const size_t bytes = values.size() * sizeof(Value);
  std::memcpy(block_.data() + at, values.data(), bytes);
  return device_->Copy(scratch_.data() + at, block_.data() + at, static_cast<int64_t>(bytes));
}

absl::Status DeviceChecks::FillTables(int parity) {
  std::vector<DigestStretch> stretches;
  firsts_.assign(1, 0);
  const auto in_shard = [&](const Chunk& at) {
    AddChunk(at, AddressesOf(cut_, cut_ranges_[at.range], storage_), 0, &stretches);
  };
  for (const Guard& guard : guards_[parity]) in_shard(guard.at);
  num_guard_stretches_ = static_cast<int32_t>(stretches.size());
  for (const Chunk& at : drawn_) in_shard(at);
  std::vector<PassRange> ranges;
  std::vector<StretchCopy> copies;
  auto* const progress = reinterpret_cast<uint64_t*>(scratch_.data() + progress_at_);
  for (const Chunk& at : drawn_) {
    const StreamAddresses addresses = SlotAddresses(at);
    const int64_t before = at.chunk * cut_.ranges()[cut_ranges_[at.range]].chunk_elements;
    AddChunk(at, addresses, before, &stretches);
    AddCopies(at, parity, &copies);
    PassRange& range = ranges.emplace_back(ranges_[at.range]);
    for (int64_t& base : range.base) base -= before;
    range.num_chunks = 1;
    range.first_chunk += at.chunk;
    for (int s = 0; s < kStreams; ++s) range.streams[s] = const_cast<uint8_t*>(addresses[s]);
    range.progress = progress + (ranges.size() - 1);
  }
  num_copies_ = static_cast<int32_t>(copies.size());
  RETURN_IF_ERROR(Upload(0, ranges));
  RETURN_IF_ERROR(Upload(progress_at_, std::vector<uint64_t>(ranges.size())));
  RETURN_IF_ERROR(Upload(stretches_at_, stretches));
  return Upload(copies_at_, copies);
}

absl::Status DeviceChecks::Begin(const Command& command, const PassKernels& kernels) {
  Draw(command.step);
  RETURN_IF_ERROR(FillTables(command.parity));
  StretchCopies args;
  args.copies = reinterpret_cast<const StretchCopy*>(scratch_.data() + copies_at_);
  args.num_copies = num_copies_;
  if (num_copies_ > 0) RETURN_IF_ERROR(Launched(kernels.Copies(args, device_->stream())));
  return Digest(0, num_guard_stretches_, command.parity, kernels);
}

std::pair<const PassRange*, int> DeviceChecks::Drawn(int first, int num) const {
  const auto before = [](const Chunk& at, int range) { return at.range < range; };
  const auto begin = std::lower_bound(drawn_.begin(), drawn_.end(), first, before);
  const auto end = std::lower_bound(begin, drawn_.end(), first + num, before);
  return {reinterpret_cast<const PassRange*>(scratch_.data()) + (begin - drawn_.begin()),
          static_cast<int>(end - begin)};
}

absl::Status DeviceChecks::End(const Command& command, const PassKernels& kernels) {
  return Digest(num_guard_stretches_, firsts_.back() - num_guard_stretches_, 1 - command.parity, kernels);
}

absl::Status DeviceChecks::Digest(int32_t first, int32_t num, int parity, const PassKernels& kernels) {
  if (num == 0) return absl::OkStatus();
  StretchDigests args;
  args.stretches = reinterpret_cast<const DigestStretch*>(scratch_.data() + stretches_at_) + first;
  args.num_stretches = num;
  args.parity = parity;
  args.digests = block_.OnDevice(reinterpret_cast<uint64_t*>(block_.data() + tables_bytes_)) + first;
  return Launched(kernels.Digests(args, device_->stream()));
}

absl::Status DeviceChecks::Launched(const char* error) const {
  if (error == nullptr) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("CUDA device ", device_->device(), " cannot launch the check of chunks: ", error));
}

uint64_t DeviceChecks::DigestOf(size_t i) const {
  const auto* const digests = reinterpret_cast<const uint64_t*>(block_.data() + tables_bytes_);
  uint64_t digest = 0;
  for (int32_t s = firsts_[i]; s < firsts_[i + 1]; ++s) digest += digests[s];
  return digest;
}

Damage DeviceChecks::DamageOf(Damage::What what, const Chunk& at) const {
  const int r = cut_ranges_[at.range];
  const ChunkRun& run = cut_.runs(r)[cut_.first_run(r, at.chunk)];
  return {what, run.tensor, run.first_element};
}

std::optional<Damage> DeviceChecks::Found(const Command& command) {
  std::optional<Damage> found;
  const auto tell = [&](Damage::What what, const Chunk& at) {
    if (!found.has_value()) found = DamageOf(what, at);
  };
  const std::vector<Guard>& before = guards_[command.parity];
  for (size_t i = 0; i < before.size(); ++i) {
    if (DigestOf(i) != before[i].digest) tell(Damage::kMemory, before[i].at);
  }
  std::vector<Guard>& after = guards_[1 - command.parity];
  after.clear();
  for (size_t i = 0; i < drawn_.size(); ++i) {
    const uint64_t digest = DigestOf(before.size() + i);
    if (digest != DigestOf(before.size() + drawn_.size() + i)) tell(Damage::kArithmetic, drawn_[i]);
    after.push_back({drawn_[i], digest});
  }
  return found;
}

}  // namespace shardmesh
