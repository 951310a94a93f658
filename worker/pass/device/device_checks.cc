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
  return std::min(num_chunks, static_cast<int64_t>(expected + 8 * std::sqrt(expected)) + 8);
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
  int64_t chunks = 0, stretches_of_one = 0;
  std::array<int64_t, kStreams> bytes = {};
  for (const int r : cut_ranges_) {
    const StorageRange& range = cut_.ranges()[r];
    chunks += range.num_chunks();
    int64_t streams = 0;
    for (int s = 0; s < kStreams; ++s) {
      // A chunk's source and where its result goes.
      bytes[s] = std::max(bytes[s], range.parts[s].BytesOf(2 * range.spare()));
      if (range.parts[s].bytes > 0) ++streams;
    }
    for (int64_t c = 0; c < range.num_chunks(); ++c) {
      stretches_of_one = std::max(stretches_of_one, streams * (cut_.first_run(r, c + 1) - cut_.first_run(r, c)));
    }
  }
  for (int s = 0; s < kStreams; ++s) {
    stream_at_[s] = slot_bytes_;
    slot_bytes_ += Aligned(bytes[s]);
  }
  most_drawn_ = MostDrawn(chunks, job_.check_every);
  most_stretches_ = 3 * most_drawn_ * stretches_of_one;
  progress_at_ = Aligned(most_drawn_ * static_cast<int64_t>(sizeof(PassRange)));
  stretches_at_ = progress_at_ + Aligned(most_drawn_ * static_cast<int64_t>(sizeof(uint64_t)));
  tables_bytes_ = stretches_at_ + Aligned(most_stretches_ * static_cast<int64_t>(sizeof(DigestStretch)));
  if (chunks == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(scratch_, DeviceSegment::Create(device_, tables_bytes_ + most_drawn_ * slot_bytes_));
  ASSIGN_OR_RETURN(
      block_, PinnedBlock::Create(device_, tables_bytes_ + most_stretches_ * static_cast<int64_t>(sizeof(uint64_t))));
  return absl::OkStatus();
}

void DeviceChecks::Forget() {
  for (std::vector<Guard>& guards : guards_) guards.clear();
}

int64_t DeviceChecks::ElementsOf(const Chunk& at) const {
  const StorageRange& range = cut_.ranges()[cut_ranges_[at.range]];
  return std::min(range.chunk_elements, range.num_elements - at.chunk * range.chunk_elements);
}

StreamAddresses DeviceChecks::SlotAddresses(int slot) const {
  StreamAddresses addresses = {};
  for (int s = 0; s < kStreams; ++s) {
    addresses[s] = scratch_.data() + tables_bytes_ + slot * slot_bytes_ + stream_at_[s];
  }
  return addresses;
}

void DeviceChecks::Draw(int64_t step) {
  drawn_.clear();
  for (int i = 0; i < static_cast<int>(ranges_.size()); ++i) {
    for (int32_t chunk = 0; chunk < ranges_[i].num_chunks; ++chunk) {
      if (!IsDrawn(job_, step, cut_ranges_[i], chunk)) continue;
      const int r = cut_ranges_[i];
      if (cut_.first_run(r, chunk) == cut_.first_run(r, chunk + 1)) continue;  // padding alone
      if (static_cast<int64_t>(drawn_.size()) == most_drawn_) return;
      drawn_.push_back({i, chunk});
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

void DeviceChecks::FillTables(int parity) {
  std::vector<DigestStretch> stretches;
  firsts_.assign(1, 0);
  const auto in_shard = [&](const Chunk& at) {
    AddChunk(at, AddressesOf(cut_, cut_ranges_[at.range], storage_), 0, &stretches);
  };
  for (const Guard& guard : guards_[parity]) in_shard(guard.at);
  num_guard_stretches_ = static_cast<int32_t>(stretches.size());
  for (const Chunk& at : drawn_) in_shard(at);
  auto* const ranges = reinterpret_cast<PassRange*>(block_.data());
  for (size_t i = 0; i < drawn_.size(); ++i) {
    const Chunk& at = drawn_[i];
    const StreamAddresses addresses = SlotAddresses(static_cast<int>(i));
    const int64_t before = at.chunk * cut_.ranges()[cut_ranges_[at.range]].chunk_elements;
    AddChunk(at, addresses, before, &stretches);
    PassRange& range = ranges[i] = ranges_[at.range];
    for (int64_t& base : range.base) base -= before;
    range.num_chunks = 1;
    range.first_chunk += at.chunk;
    for (int s = 0; s < kStreams; ++s) range.streams[s] = const_cast<uint8_t*>(addresses[s]);
    range.progress = reinterpret_cast<uint64_t*>(scratch_.data() + progress_at_) + i;  // always 0 in the block
  }
  std::memcpy(block_.data() + stretches_at_, stretches.data(), stretches.size() * sizeof(DigestStretch));
}

absl::Status DeviceChecks::CopySource(const Chunk& at, int slot, int parity) {
  const int r = cut_ranges_[at.range];
  const StorageRange& range = cut_.ranges()[r];
  const StreamAddresses from = AddressesOf(cut_, r, storage_), to = SlotAddresses(slot);
  const int64_t base = range.Base(parity), before = at.chunk * range.chunk_elements;
  for (int s = 0; s < kStreams; ++s) {
    const PartLayout& part = range.parts[s];
    if (part.bytes == 0) continue;
    RETURN_IF_ERROR(device_->Copy(const_cast<uint8_t*>(to[s]) + part.BytesOf(base),
                                  from[s] + part.BytesOf(base + before), part.BytesOf(ElementsOf(at))));
  }
  return absl::OkStatus();
}

absl::Status DeviceChecks::Begin(const Command& command, const PassKernels& kernels) {
  Draw(command.step);
  FillTables(command.parity);
  if (firsts_.back() == 0) return absl::OkStatus();
  RETURN_IF_ERROR(device_->Copy(scratch_.data(), block_.data(), tables_bytes_));
  for (size_t i = 0; i < drawn_.size(); ++i) {
    RETURN_IF_ERROR(CopySource(drawn_[i], static_cast<int>(i), command.parity));
  }
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
  const char* const error = kernels.Digests(args, device_->stream());
  if (error == nullptr) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("CUDA device ", device_->device(), " cannot launch the digests of checked chunks: ", error));
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
