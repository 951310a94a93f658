#include "worker/transport/group.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "core/base/reduction.h"
#include "core/base/status.h"
#include "kernels/sum/slot_sum.h"

namespace shardmesh {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 46;

absl::Status CheckMemory(absl::string_view what, const void* memory, int64_t bytes, int64_t alignment = 1) {
  if (bytes < 0 || bytes > kMostBytes) {
    return absl::InvalidArgumentError(absl::StrCat(what, " has ", bytes, " bytes; 0 to 2^46 can be sent"));
  }
  if (bytes == 0 || (memory != nullptr && reinterpret_cast<uintptr_t>(memory) % alignment == 0)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(what, " begins at address ", reinterpret_cast<uintptr_t>(memory),
                                                 "; it must be a multiple of ", alignment, ", and not 0"));
}

bool Overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto first = reinterpret_cast<uintptr_t>(a), second = reinterpret_cast<uintptr_t>(b);
  return a_bytes > 0 && b_bytes > 0 && first < second + b_bytes && second < first + a_bytes;
}

// Not absl::Hash, whose values differ from process to process.
uint32_t DetailOf(const SlotSum& sum) {
  uint32_t hash = 2166136261u ^ static_cast<uint32_t>(BytesPerElement(sum.format));  // FNV-1a
  for (const int holder : sum.holders) hash = (hash ^ static_cast<uint32_t>(holder)) * 16777619u;
  return (hash ^ static_cast<uint32_t>(sum.holders.size())) * 16777619u;
}

}  // namespace

absl::string_view CallKindName(CallKind kind) {
  switch (kind) {
    case CallKind::kBarrier:
      return "barrier";
    case CallKind::kAllGather:
      return "all-gather";
    case CallKind::kAllToAll:
      return "all-to-all";
    case CallKind::kBroadcast:
      return "broadcast";
    case CallKind::kReduceScatter:
      return "reduce-scatter";
    case CallKind::kAllocate:
      return "allocation";
    case CallKind::kExchange:
      return "exchange";
  }
  return "unknown call";
}

std::string DescribeCall(const CallHeader& header) {
  return absl::StrCat(CallKindName(header.kind), " ", header.number, " of ", header.bytes, " bytes in epoch ",
                      header.epoch,
                      header.kind == CallKind::kBroadcast ? absl::StrCat(" from rank ", header.detail) : std::string());
}

absl::Status CheckHeader(const CallHeader& mine, const CallHeader& theirs, int rank, int peer) {
  if (mine.epoch == theirs.epoch && mine.number == theirs.number && mine.kind == theirs.kind &&
      mine.bytes == theirs.bytes && mine.detail == theirs.detail) {
    return absl::OkStatus();
  }
  const bool slots = mine.kind == CallKind::kReduceScatter && theirs.kind == mine.kind && mine.bytes == theirs.bytes &&
                     mine.number == theirs.number && mine.epoch == theirs.epoch;
  return absl::FailedPreconditionError(absl::StrCat("rank ", peer, " is at ", DescribeCall(theirs), ", rank ", rank,
                                                    " at ", DescribeCall(mine),
                                                    slots ? "; formats or holders of their slots differ" : ""));
}

bool IsGone(const absl::Status& status) {
  return (absl::IsUnavailable(status) || absl::IsAborted(status)) &&
         absl::StrContains(status.message(), " is gone; it did not come to ");
}

absl::Status MissingRanks(absl::Span<const int> ranks, const CallHeader& header, absl::Duration timeout) {
  return absl::UnavailableError(absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "),
                                             " did not come to ", DescribeCall(header), " within ",
                                             absl::FormatDuration(timeout)));
}

absl::Status GroupEnded(absl::string_view reason) {
  return absl::AbortedError(absl::StrCat("the group was ended: ", reason));
}

int NamedRank(absl::string_view message, int self) {
  for (size_t at = message.find("rank"); at != absl::string_view::npos; at = message.find("rank", at + 1)) {
    absl::string_view rest = message.substr(at + 4);
    absl::ConsumePrefix(&rest, "s");
    int rank = 0;
    size_t digits = 0;
    if (!absl::ConsumePrefix(&rest, " ")) continue;
    while (digits < rest.size() && absl::ascii_isdigit(rest[digits])) ++digits;
    if (absl::SimpleAtoi(rest.substr(0, digits), &rank) && rank != self) return rank;
  }
  return -1;
}

absl::Status Group::AllGather(const void* mine, void* all, int64_t bytes, absl::Duration timeout) {
  RETURN_IF_ERROR(CheckMemory("all-gather: what this rank gives", mine, bytes));
  RETURN_IF_ERROR(CheckMemory("all-gather: what it gets", all, bytes));
  char* const place = static_cast<char*>(all) + rank_ * bytes;
  if (mine != place && Overlap(mine, bytes, all, bytes * size_)) {
    return absl::InvalidArgumentError(
        "all-gather: what this rank gives overlaps what it gets; give it apart, or at its place there");
  }
  return DoAllGather(NextHeader(CallKind::kAllGather, bytes), static_cast<const char*>(mine), static_cast<char*>(all),
                     timeout);
}

absl::Status Group::AllToAll(const void* mine, void* theirs, int64_t bytes, absl::Duration timeout) {
  RETURN_IF_ERROR(CheckMemory("all-to-all: what this rank gives", mine, bytes));
  RETURN_IF_ERROR(CheckMemory("all-to-all: what it gets", theirs, bytes));
  if (Overlap(mine, bytes * size_, theirs, bytes * size_)) {
    return absl::InvalidArgumentError("all-to-all: what this rank gives overlaps what it gets; give it apart");
  }
  return DoAllToAll(NextHeader(CallKind::kAllToAll, bytes), static_cast<const char*>(mine), static_cast<char*>(theirs),
                    timeout);
}

absl::Status Group::CheckSum(const SlotSum& sum, const float* piece) const {
  if (sum.format != Format::kFp32 && sum.format != Format::kBf16) {
    return absl::InvalidArgumentError(
        absl::StrCat("reduce-scatter: slots in ", FormatName(sum.format), "; they are fp32 or bf16"));
  }
  const auto slots = static_cast<int64_t>(sum.holders.size());
  if (slots < 1 || slots > kMaxReducedSlots) {
    return absl::InvalidArgumentError(
        absl::StrCat("reduce-scatter: ", slots, " slots; there are 1 to ", kMaxReducedSlots));
  }
  int64_t held = 0;
  for (const int holder : sum.holders) {
    if (holder < 0 || holder >= size_) {
      return absl::InvalidArgumentError(
          absl::StrCat("reduce-scatter: a slot is held by rank ", holder, "; ranks are 0 to ", size_ - 1));
    }
    held += holder == rank_;
  }
  if (held != static_cast<int64_t>(sum.mine.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("reduce-scatter: rank ", rank_, " holds ", held, " slots and gives ", sum.mine.size()));
  }
  const int64_t bytes = sum.elements * BytesPerElement(sum.format);
  RETURN_IF_ERROR(CheckMemory("reduce-scatter: the piece of this rank", piece, sum.elements * 4, 4));
  for (const void* slot : sum.mine) {
    RETURN_IF_ERROR(CheckMemory("reduce-scatter: a slot", slot, bytes, BytesPerElement(sum.format)));
    if (Overlap(slot, bytes * size_, piece, sum.elements * 4)) {
      return absl::InvalidArgumentError("reduce-scatter: a slot overlaps the piece of this rank; give them apart");
    }
  }
  return absl::OkStatus();
}

absl::Status Group::ReduceScatter(const SlotSum& sum, float* piece, absl::Duration timeout) {
  RETURN_IF_ERROR(CheckSum(sum, piece));
  return DoReduceScatter(
      NextHeader(CallKind::kReduceScatter, sum.elements * BytesPerElement(sum.format), DetailOf(sum)), sum, piece,
      timeout);
}

absl::Status Group::DoReduceScatter(const CallHeader& header, const SlotSum& sum, float* piece,
                                    absl::Duration timeout) {
  // Round k moves every rank's k-th slot; a rank that has fewer sends what nobody adds.
  std::vector<int64_t> held(size_);
  std::vector<int64_t> round_of(sum.holders.size());
  for (size_t s = 0; s < sum.holders.size(); ++s) round_of[s] = held[sum.holders[s]]++;
  const int64_t rounds = *std::max_element(held.begin(), held.end());
  gathered_.resize(static_cast<size_t>(std::max<int64_t>(rounds * size_ * header.bytes, 1)));
  std::vector<char> nothing;
  for (int64_t round = 0; round < rounds; ++round) {
    const bool has = round < static_cast<int64_t>(sum.mine.size());
    if (!has) nothing.resize(static_cast<size_t>(header.bytes * size_));
    const void* from = has ? sum.mine[round] : nothing.data();
    CallHeader part = header;
    part.detail += static_cast<uint32_t>(round);
    RETURN_IF_ERROR(
        DoAllToAll(part, static_cast<const char*>(from), &gathered_[round * size_ * header.bytes], timeout));
  }
  std::vector<const void*> slots(sum.holders.size());
  for (size_t s = 0; s < slots.size(); ++s) {
    slots[s] = &gathered_[0] + (round_of[s] * size_ + sum.holders[s]) * header.bytes;
  }
  SumSlots(sum.format, slots, sum.elements, piece);
  return absl::OkStatus();
}

template <class Combine>
absl::Status Group::AllReduce(absl::Span<float> values, absl::Duration timeout, const Combine& combine) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(float));
  RETURN_IF_ERROR(CheckMemory("all-reduce: the vector", values.data(), bytes, 4));
  gathered_.resize(static_cast<size_t>(bytes * size_));
  RETURN_IF_ERROR(AllGather(values.data(), gathered_.data(), bytes, timeout));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = combine([&](int rank) {
      float value = 0;
      std::memcpy(&value, &gathered_[rank * bytes + i * sizeof(float)], sizeof(value));
      return value;
    });
  }
  return absl::OkStatus();
}

absl::Status Group::AllReduceMax(absl::Span<float> values, absl::Duration timeout) {
  return AllReduce(values, timeout, [&](const auto& of_rank) {
    float largest = of_rank(0);
    for (int rank = 1; rank < size_ && largest == largest; ++rank) {
      const float next = of_rank(rank);
      if (!(next <= largest)) largest = next;  // a NaN, too
    }
    return largest;
  });
}

absl::Status Group::AllReduceSum(absl::Span<float> values, absl::Duration timeout) {
  return AllReduce(values, timeout, [&](const auto& of_rank) { return TreeSum<float>(size_, of_rank); });
}

absl::Status Group::Broadcast(void* memory, int64_t bytes, int root, absl::Duration timeout) {
  RETURN_IF_ERROR(CheckMemory("broadcast: the memory", memory, bytes));
  if (root < 0 || root >= size_) {
    return absl::InvalidArgumentError(absl::StrCat("broadcast from rank ", root, "; ranks are 0 to ", size_ - 1));
  }
  return DoBroadcast(NextHeader(CallKind::kBroadcast, bytes, static_cast<uint32_t>(root)), static_cast<char*>(memory),
                     root, timeout);
}

absl::Status Group::Barrier(absl::Duration timeout) { return DoBarrier(NextHeader(CallKind::kBarrier, 0), timeout); }

void SumSlots(Format format, absl::Span<const void* const> slots, int64_t elements, float* piece, bool streamed) {
  BestSlotSum()(format, {slots.data(), static_cast<int>(slots.size()), 1, piece, elements, streamed});
}

}  // namespace shardmesh
