// The reductions of NcclGroup.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "worker/transport/nccl/nccl_group.h"

#ifdef SHARDMESH_CUDA
#include "kernels/sum/slot_sum_cuda.h"
#endif

namespace shardmesh {

DeviceSum NcclGroup::BuiltDeviceSum() {
#ifdef SHARDMESH_CUDA
  return SlotSumCuda;
#else
  return nullptr;
#endif
}

// Staging: what is sent, what is received, and the sum, `part` elements of each array.
absl::StatusOr<NcclGroup::Cut> NcclGroup::CutOf(const SlotSum& sum, int64_t most_held, bool in_place) const {
  const auto slots = static_cast<int64_t>(sum.holders.size());
  Cut cut;
  cut.sent = options_.fast ? size() : in_place ? 0 : most_held * size();
  cut.received = options_.fast ? most_held : slots;
  const int64_t element = BytesPerElement(sum.format) * (cut.sent + cut.received) + sizeof(float);
  cut.part = options_.staging_bytes / element / kGroupElements * kGroupElements;
  if (cut.part > 0) return cut;
  return absl::ResourceExhaustedError(absl::StrCat("staging of ", options_.staging_bytes, " bytes is too small for ",
                                                   slots, " slots and ", size(), " ranks; give it ",
                                                   element * kGroupElements));
}

absl::Status NcclGroup::SendSlots(const Call& call, const SlotSum& sum, const Cut& cut, int64_t begin, int64_t some,
                                  bool in_place) {
  const int64_t element = BytesPerElement(sum.format), bytes = some * element;
  std::vector<Parcel> sent, received;
  for (const void* slot : sum.mine) {
    for (int peer = 0; peer < size(); ++peer) {
      // NCCL does not write what is sent.
      char* from = const_cast<char*>(static_cast<const char*>(slot)) + (peer * sum.elements + begin) * element;
      char* staged = staging_ + static_cast<int64_t>(sent.size()) * bytes;
      if (!in_place) RETURN_IF_ERROR(device_->Copy(staged, from, bytes));
      sent.push_back({in_place ? from : staged, peer});
    }
  }
  // A rank's slots come in the order in which it sends them.
  char* to = staging_ + cut.sent * cut.part * element;
  for (const int holder : sum.holders) received.push_back({std::exchange(to, to + bytes), holder});
  return Exchange(call, sent, received, bytes);
}

absl::Status NcclGroup::SumByNccl(const Call& call, const SlotSum& sum, const Cut& cut, int64_t begin, int64_t some) {
  const int64_t element = BytesPerElement(sum.format), bytes = some * element;
  const NcclType type = sum.format == Format::kFp32 ? kNcclFloat32 : kNcclBfloat16;
  // Round k adds every rank's k-th slot; a rank that has fewer gives zeros.
  for (int64_t round = 0; round < cut.received; ++round) {
    const bool has = round < static_cast<int64_t>(sum.mine.size());
    const char* slot = has ? static_cast<const char*>(sum.mine[round]) : nullptr;
    const bool in_place = has && some == sum.elements && device_->Owns(slot);
    if (!has) host_.assign(bytes, 0);
    for (int peer = 0; peer < size() && !in_place; ++peer) {
      const char* from = has ? slot + (peer * sum.elements + begin) * element : host_.data();
      RETURN_IF_ERROR(device_->Copy(staging_ + peer * bytes, from, bytes));
    }
    char* to = staging_ + cut.sent * cut.part * element + round * bytes;
    RETURN_IF_ERROR(
        Run(call, nccl_.ReduceScatter(in_place ? slot : staging_, to, some, type, kNcclSum, comm_, device_->stream())));
  }
  return absl::OkStatus();
}

absl::Status NcclGroup::SumParts(const Call& call, Format format, const Cut& cut, int64_t some, float* piece) {
  const int64_t element = BytesPerElement(format), bytes = some * element;
  const char* parts = staging_ + cut.sent * cut.part * element;
  auto* staged = reinterpret_cast<float*>(staging_ + (cut.sent + cut.received) * cut.part * element);
  const bool in_place = device_->Owns(piece);
  if (options_.sum != nullptr) {
    const char* error =
        options_.sum(format, parts, static_cast<int>(cut.received), some, in_place ? piece : staged, device_->stream());
    if (error != nullptr) return absl::UnavailableError(absl::StrCat("the device cannot add slots: ", error));
    RETURN_IF_ERROR(Await(call));
    return in_place ? absl::OkStatus()
                    : ToHost(call, piece, reinterpret_cast<const char*>(staged), some * sizeof(float));
  }
  const int64_t sum_at = (cut.received * bytes + 3) / 4 * 4;
  host_.resize(sum_at + some * sizeof(float));
  RETURN_IF_ERROR(ToHost(call, host_.data(), parts, cut.received * bytes));
  std::vector<const void*> slots;
  for (int64_t i = 0; i < cut.received; ++i) slots.push_back(host_.data() + i * bytes);
  float* sum = in_place ? reinterpret_cast<float*>(&host_[sum_at]) : piece;
  SumSlots(format, slots, some, sum);
  if (!in_place) return absl::OkStatus();
  RETURN_IF_ERROR(device_->Copy(piece, sum, some * sizeof(float)));
  return Await(call);
}

absl::Status NcclGroup::DoReduceScatter(const CallHeader& header, const SlotSum& sum, float* piece,
                                        absl::Duration timeout) {
  return Make(header, timeout, [&](Call& call) -> absl::Status {
    bool in_place = true;
    for (const void* slot : sum.mine) in_place = in_place && (header.bytes == 0 || device_->Owns(slot));
    ASSIGN_OR_RETURN(in_place, Agree(call, in_place));
    std::vector<int64_t> held(size());
    for (const int holder : sum.holders) ++held[holder];
    ASSIGN_OR_RETURN(const Cut cut, CutOf(sum, *std::max_element(held.begin(), held.end()), in_place));
    for (int64_t begin = 0; begin < sum.elements; begin += cut.part) {
      const int64_t some = std::min(cut.part, sum.elements - begin);
      RETURN_IF_ERROR(options_.fast ? SumByNccl(call, sum, cut, begin, some)
                                    : SendSlots(call, sum, cut, begin, some, in_place));
      RETURN_IF_ERROR(SumParts(call, sum.format, cut, some, piece + begin));
    }
    return absl::OkStatus();
  });
}

}  // namespace shardmesh
