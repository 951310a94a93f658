#include "worker/transport/symmetric_group.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/transport/streaming_copy.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(20);  // for the dead and the end of the group, while sleeping

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// From so many bytes of a result on, it is written past the caches.
constexpr int64_t kStreamedBytes = 16 << 20;

// `all`: of the result that the copy is a part of.
void Copy(char* to, const char* from, int64_t bytes, int64_t all = 0) {
  if (bytes == 0 || to == from) return;
  if (all >= kStreamedBytes) return StreamingCopy(to, from, bytes);
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SymmetricGroup>> SymmetricGroup::Join(std::shared_ptr<SymmetricMemory> memory, int rank,
                                                                     uint64_t epoch, absl::Duration spin,
                                                                     RankNames names) {
  if (rank < 0 || rank >= memory->ranks()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " of symmetric memory for ", memory->ranks(), "; ranks begin at 0"));
  }
  ASSIGN_OR_RETURN(Presence presence, Presence::Hold(memory->fd(), rank));
  if (memory->page().ranks[rank].joined.exchange(1) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " was a member of the group in this memory before; give a new group new memory"));
  }
  return std::unique_ptr<SymmetricGroup>(
      new SymmetricGroup(std::move(memory), std::move(presence), rank, epoch, spin, names));
}

SymmetricGroup::SymmetricGroup(std::shared_ptr<SymmetricMemory> memory, Presence presence, int rank, uint64_t epoch,
                               absl::Duration spin, RankNames names)
    : Group(rank, memory->ranks(), epoch, names),
      memory_(std::move(memory)),
      presence_(std::move(presence)),
      spin_(spin) {}

// ---- Meeting. ----

void SymmetricGroup::Abort(absl::string_view reason) {
  uint32_t going_on = 0;
  if (!page().ended.compare_exchange_strong(going_on, 1)) return;
  const size_t length = std::min(reason.size(), sizeof(page().reason) - 1);
  std::memcpy(page().reason, reason.data(), length);
  page().reason[length] = 0;
  page().ended.store(2, std::memory_order_release);
  FutexBump(page().notifier);
}

absl::Status SymmetricGroup::WhyEnded() const {
  for (int look = 0; look < 100 && page().ended.load(std::memory_order_acquire) != 2; ++look) {
    FutexWait(page().notifier, page().notifier.load(), absl::Milliseconds(1));
  }
  if (page().ended.load(std::memory_order_acquire) != 2) return GroupEnded("by a rank that did not get to say why");
  return GroupEnded(std::string(page().reason, strnlen(page().reason, sizeof(page().reason))));
}

absl::Status SymmetricGroup::End(const absl::Status& status) {
  Abort(status.message());
  return status;
}

bool SymmetricGroup::AllHere() const {
  for (int peer = 0; peer < size(); ++peer) {
    if (page().ranks[peer].arrived.load() < meetings_) return false;
  }
  return true;
}

absl::Status SymmetricGroup::Late(const Call& call) const {
  std::vector<int> missing;
  for (int peer = 0; peer < size(); ++peer) {
    if (page().ranks[peer].arrived.load() < meetings_) missing.push_back(peer);
  }
  if (missing.empty()) return absl::OkStatus();
  for (const int peer : missing) {
    if (page().ranks[peer].joined.load() != 0 && !presence_.Sees(peer)) {
      // It may have come and gone since.
      if (page().ranks[peer].arrived.load() >= meetings_) continue;
      return absl::UnavailableError(absl::StrCat("the process of rank ", NameOf(peer), " is gone; it did not come to ",
                                                 DescribeCall(call.header)));
    }
  }
  if (MonotonicNanos() < call.until_nanos) return absl::OkStatus();
  for (int& peer : missing) peer = NameOf(peer);
  return MissingRanks(missing, call.header, call.timeout);
}

absl::Status SymmetricGroup::AwaitSleeping(const Call& call) {
  while (true) {
    page().sleepers.fetch_add(1);
    const uint32_t notifier = page().notifier.load();
    const bool sleep = !AllHere() && !Ended();
    if (sleep) {
      const absl::Duration left = absl::Nanoseconds(call.until_nanos - MonotonicNanos());
      FutexWait(page().notifier, notifier, std::min(left, kLook));
    }
    page().sleepers.fetch_sub(1);
    if (AllHere()) return absl::OkStatus();
    if (Ended()) return WhyEnded();
    if (const absl::Status late = Late(call); !late.ok()) return End(late);
  }
}

absl::Status SymmetricGroup::Meet(const Call& call) {
  if (Ended()) return WhyEnded();
  page().ranks[rank()].arrived.store(++meetings_);
  if (AllHere()) {
    if (page().sleepers.load() > 0) FutexBump(page().notifier);
    return absl::OkStatus();
  }
  if (spin_ > absl::ZeroDuration()) {
    const int64_t until = MonotonicNanos() + absl::ToInt64Nanoseconds(spin_);
    do {
      for (int i = 0; i < 64; ++i) {
        if (AllHere()) return absl::OkStatus();
        Pause();
      }
    } while (!Ended() && MonotonicNanos() < until);
  }
  return AwaitSleeping(call);
}

absl::Status SymmetricGroup::Begin(const Call& call, const SymmetricPost& post) {
  // Peers read the post of one meeting while this rank writes that of the next one; the one after that waits for them.
  page().ranks[rank()].posts[(meetings_ + 1) % 2] = post;
  RETURN_IF_ERROR(Meet(call));
  for (int peer = 0; peer < size(); ++peer) {
    const absl::Status same = CheckHeader(call.header, PostOf(peer).header, NameOf(rank()), NameOf(peer));
    if (!same.ok()) return End(same);
  }
  return absl::OkStatus();
}

absl::StatusOr<const char*> SymmetricGroup::BytesAt(int peer, int64_t place, int64_t bytes) const {
  const char* memory = memory_->AtPlace(place, bytes);
  if (memory != nullptr) return memory;
  return absl::FailedPreconditionError(absl::StrCat("rank ", NameOf(peer), " gives ", bytes, " bytes at place ", place,
                                                    " of the symmetric memory, which is not in its heaps"));
}

bool SymmetricGroup::AllDirect() const {
  for (int peer = 0; peer < size(); ++peer) {
    if (PostOf(peer).in < 0) return false;
  }
  return true;
}

// ---- Moving. ----

template <class Fill, class Drain>
absl::Status SymmetricGroup::Staged(const Call& call, int64_t bytes, int64_t part, const Fill& fill,
                                    const Drain& drain) {
  for (int64_t begin = 0; begin < bytes; begin += part) {
    const int64_t some = std::min(part, bytes - begin);
    // While peers take one part out, the next one goes into the other half.
    const int64_t half = static_cast<int64_t>(parts_++ % 2) * (memory_->staging_bytes() / 2);
    fill(begin, some, memory_->staging(rank()) + half);
    RETURN_IF_ERROR(Meet(call));
    for (int peer = 0; peer < size(); ++peer) drain(peer, begin, some, memory_->staging(peer) + half);
  }
  return absl::OkStatus();
}

absl::Status SymmetricGroup::DoBarrier(const CallHeader& header, absl::Duration timeout) {
  return Begin({header, timeout, MonotonicNanos() + absl::ToInt64Nanoseconds(timeout)}, {header, -1, -1});
}

absl::Status SymmetricGroup::GatherDirectly(const Call& call, const char* mine, char* all) {
  const int64_t bytes = call.header.bytes;
  // One result for all: everybody writes the own part of it, where it is not there yet.
  bool shared = PostOf(0).out >= 0, there = true;
  for (int peer = 0; peer < size(); ++peer) {
    shared = shared && PostOf(peer).out == PostOf(0).out;
    there = there && PostOf(peer).in == PostOf(peer).out + peer * bytes;
  }
  if (shared && there) return absl::OkStatus();
  if (shared) {
    Copy(all + rank() * bytes, mine, bytes, size() * bytes);
    return Meet(call);
  }
  for (int i = 0; i < size(); ++i) {
    const int peer = (rank() + i) % size();  // not all from the same one at once
    const auto from = BytesAt(peer, PostOf(peer).in, bytes);
    if (!from.ok()) return End(from.status());
    Copy(all + peer * bytes, *from, bytes, size() * bytes);
  }
  return Meet(call);
}

absl::Status SymmetricGroup::DoAllGather(const CallHeader& header, const char* mine, char* all,
                                         absl::Duration timeout) {
  const Call call = {header, timeout, MonotonicNanos() + absl::ToInt64Nanoseconds(timeout)};
  const int64_t in = memory_->PlaceOf(mine, header.bytes), out = memory_->PlaceOf(all, header.bytes * size());
  RETURN_IF_ERROR(Begin(call, {header, in, out}));
  if (AllDirect()) return GatherDirectly(call, mine, all);
  RETURN_IF_ERROR(Staged(
      call, header.bytes, memory_->staging_bytes() / 2,
      [&](int64_t begin, int64_t some, char* staging) { Copy(staging, mine + begin, some); },
      [&](int peer, int64_t begin, int64_t some, const char* staging) {
        Copy(all + peer * header.bytes + begin, staging, some, size() * header.bytes);
      }));
  return absl::OkStatus();
}

absl::Status SymmetricGroup::DoAllToAll(const CallHeader& header, const char* mine, char* theirs,
                                        absl::Duration timeout) {
  const Call call = {header, timeout, MonotonicNanos() + absl::ToInt64Nanoseconds(timeout)};
  const int64_t bytes = header.bytes;
  RETURN_IF_ERROR(Begin(call, {header, memory_->PlaceOf(mine, bytes * size()), -1}));
  if (AllDirect()) {
    for (int i = 0; i < size(); ++i) {
      const int peer = (rank() + i) % size();
      const auto from = BytesAt(peer, PostOf(peer).in, bytes * size());
      if (!from.ok()) return End(from.status());
      Copy(theirs + peer * bytes, *from + rank() * bytes, bytes, size() * bytes);
    }
    return Meet(call);
  }
  const int64_t part = memory_->staging_bytes() / 2 / size();
  return Staged(
      call, bytes, part,
      [&](int64_t begin, int64_t some, char* staging) {
        for (int peer = 0; peer < size(); ++peer) Copy(staging + peer * part, mine + peer * bytes + begin, some);
      },
      [&](int peer, int64_t begin, int64_t some, const char* staging) {
        Copy(theirs + peer * bytes + begin, staging + rank() * part, some, size() * bytes);
      });
}

absl::Status SymmetricGroup::DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) {
  const Call call = {header, timeout, MonotonicNanos() + absl::ToInt64Nanoseconds(timeout)};
  const int64_t place = memory_->PlaceOf(memory, header.bytes);
  RETURN_IF_ERROR(Begin(call, {header, place, place}));
  if (PostOf(root).in >= 0) {
    const auto from = BytesAt(root, PostOf(root).in, header.bytes);
    if (!from.ok()) return End(from.status());
    Copy(memory, *from, header.bytes, header.bytes);
    return Meet(call);
  }
  return Staged(
      call, header.bytes, memory_->staging_bytes() / 2,
      [&](int64_t begin, int64_t some, char* staging) {
        if (rank() == root) Copy(staging, memory + begin, some);
      },
      [&](int peer, int64_t begin, int64_t some, const char* staging) {
        if (peer == root && rank() != root) Copy(memory + begin, staging, some, header.bytes);
      });
}

// ---- Reducing. ----

absl::StatusOr<bool> SymmetricGroup::ShowSlots(const Call& call, const SlotSum& sum) {
  int64_t* places = page().ranks[rank()].slots[(meetings_ + 1) % 2];
  int64_t first = 0;
  for (size_t i = 0; i < sum.mine.size(); ++i) {
    places[i] = memory_->PlaceOf(sum.mine[i], call.header.bytes * size());
    first = std::min(first, places[i]);
  }
  RETURN_IF_ERROR(Begin(call, {call.header, first, -1}));
  return AllDirect();
}

absl::Status SymmetricGroup::DoReduceScatter(const CallHeader& header, const SlotSum& sum, float* piece,
                                             absl::Duration timeout) {
  const Call call = {header, timeout, MonotonicNanos() + absl::ToInt64Nanoseconds(timeout)};
  ASSIGN_OR_RETURN(const bool direct, ShowSlots(call, sum));
  return direct ? ReduceDirectly(call, sum, piece) : ReduceStaged(call, sum, piece);
}

absl::Status SymmetricGroup::ReduceDirectly(const Call& call, const SlotSum& sum, float* piece) {
  std::vector<int> taken(size());
  std::vector<const void*> slots;
  for (const int holder : sum.holders) {
    const int64_t place = page().ranks[holder].slots[meetings_ % 2][taken[holder]++];
    const auto slot = BytesAt(holder, place, call.header.bytes * size());
    if (!slot.ok()) return End(slot.status());
    slots.push_back(*slot + rank() * call.header.bytes);
  }
  SumSlots(sum.format, slots, sum.elements, piece, 4 * size() * sum.elements >= kStreamedBytes);
  return Meet(call);
}

absl::Status SymmetricGroup::ReduceStaged(const Call& call, const SlotSum& sum, float* piece) {
  std::vector<int64_t> held(size()), slot_of(sum.holders.size());
  for (size_t s = 0; s < sum.holders.size(); ++s) slot_of[s] = held[sum.holders[s]]++;
  const int64_t most = *std::max_element(held.begin(), held.end());
  const int64_t bytes = call.header.bytes, element = BytesPerElement(sum.format);
  // A part of every slot for every rank, of whole cache lines where there is room.
  int64_t part = memory_->staging_bytes() / 2 / (most * size());
  part = part >= 64 ? part / 64 * 64 : part / element * element;
  if (part < element) {
    return End(absl::ResourceExhaustedError(
        absl::StrCat("staging of ", memory_->staging_bytes(), " bytes is too small for ", most, " slots of a rank and ",
                     size(), " ranks; give it ", 2 * 64 * most * size(), ", or have the slots in the heaps")));
  }
  const bool streamed = 4 * size() * sum.elements >= kStreamedBytes;
  std::vector<const void*> slots(sum.holders.size());
  return Staged(
      call, bytes, part,
      [&](int64_t begin, int64_t some, char* staging) {
        for (size_t i = 0; i < sum.mine.size(); ++i) {
          for (int peer = 0; peer < size(); ++peer) {
            if (peer == rank()) continue;  // it reads them where they are
            Copy(staging + (i * size() + peer) * part, static_cast<const char*>(sum.mine[i]) + peer * bytes + begin,
                 some);
          }
        }
      },
      [&](int peer, int64_t begin, int64_t some, const char* staging) {
        for (size_t s = 0; s < slots.size(); ++s) {
          if (sum.holders[s] != peer) continue;
          slots[s] = peer == rank() ? static_cast<const char*>(sum.mine[slot_of[s]]) + rank() * bytes + begin
                                    : staging + (slot_of[s] * size() + rank()) * part;
        }
        if (peer == size() - 1) SumSlots(sum.format, slots, some / element, piece + begin / element, streamed);
      });
}

}  // namespace shardmesh
