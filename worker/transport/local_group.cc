#include "worker/transport/local_group.h"

#include <algorithm>
#include <cstring>

#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh {

bool LocalHub::AllHereLocked(uint64_t arrivals) const {
  return std::all_of(arrivals_.begin(), arrivals_.end(), [&](uint64_t each) { return each >= arrivals; });
}

void LocalHub::EndLocked(absl::string_view reason) {
  if (!ended_) reason_ = std::string(reason);
  ended_ = true;
  changed_.SignalAll();
}

void LocalHub::End(absl::string_view reason) {
  MutexLock lock(mu_);
  EndLocked(reason);
}

LocalHub::Post LocalHub::PostOf(int rank) const {
  MutexLock lock(mu_);
  return posts_[rank];
}

absl::Status LocalHub::Enter(int rank, const Post& post, absl::Duration timeout) {
  MutexLock lock(mu_);
  if (ended_) return GroupEnded(reason_);
  posts_[rank] = post;
  const uint64_t mine = ++arrivals_[rank];
  // With the last arrival it is settled that all of them read, those too that have yet to wake up.
  if (AllHereLocked(mine)) readers_ = size();
  return WaitForAllLocked(mine, post.header, timeout);
}

absl::Status LocalHub::Leave(int rank, const CallHeader& header, absl::Duration timeout) {
  MutexLock lock(mu_);
  --readers_;
  const absl::Status met = WaitForAllLocked(++arrivals_[rank], header, timeout);
  while (!met.ok() && readers_ > 0) changed_.WaitFor(mu_, absl::Seconds(1));  // as long as they copy
  return met;
}

absl::Status LocalHub::WaitForAllLocked(uint64_t arrivals, const CallHeader& header, absl::Duration timeout) {
  const absl::Time until = MonotonicNow() + timeout;
  changed_.SignalAll();
  while (!AllHereLocked(arrivals)) {
    if (ended_) return GroupEnded(reason_);
    const absl::Duration left = until - MonotonicNow();
    if (left <= absl::ZeroDuration()) {
      std::vector<int> missing;
      for (int peer = 0; peer < size(); ++peer) {
        if (arrivals_[peer] < arrivals) missing.push_back(names_(peer));
      }
      const absl::Status late = MissingRanks(missing, header, timeout);
      EndLocked(late.message());
      return late;
    }
    changed_.WaitFor(mu_, left);
  }
  return absl::OkStatus();
}

template <class Part>
absl::Status LocalGroup::Together(const LocalHub::Post& post, absl::Duration timeout, const Part& part) {
  RETURN_IF_ERROR(hub_->Enter(rank(), post, timeout));
  absl::Status same;
  for (int peer = 0; peer < size() && same.ok(); ++peer) {
    same = CheckHeader(post.header, hub_->PostOf(peer).header, NameOf(rank()), NameOf(peer));
  }
  if (same.ok()) {
    part();
  } else {
    hub_->End(same.message());
  }
  const absl::Status left = hub_->Leave(rank(), post.header, timeout);
  return same.ok() ? left : same;
}

absl::Status LocalGroup::DoBarrier(const CallHeader& header, absl::Duration timeout) {
  return Together({header, nullptr, {}, {}}, timeout, [] {});
}

absl::Status LocalGroup::DoAllGather(const CallHeader& header, const char* mine, char* all, absl::Duration timeout) {
  return Together({header, mine, {}, {}}, timeout, [&] {
    for (int peer = 0; peer < size(); ++peer) {
      const char* from = hub_->PostOf(peer).mine;
      char* to = all + peer * header.bytes;
      if (from != to && header.bytes > 0) std::memcpy(to, from, static_cast<size_t>(header.bytes));
    }
  });
}

absl::Status LocalGroup::DoAllToAll(const CallHeader& header, const char* mine, char* theirs, absl::Duration timeout) {
  return Together({header, mine, {}, {}}, timeout, [&] {
    for (int peer = 0; peer < size() && header.bytes > 0; ++peer) {
      std::memcpy(theirs + peer * header.bytes, hub_->PostOf(peer).mine + rank() * header.bytes,
                  static_cast<size_t>(header.bytes));
    }
  });
}

absl::Status LocalGroup::DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) {
  return Together({header, memory, {}, {}}, timeout, [&] {
    const char* from = hub_->PostOf(root).mine;
    if (from != memory && header.bytes > 0) std::memcpy(memory, from, static_cast<size_t>(header.bytes));
  });
}

absl::Status LocalGroup::DoReduceScatter(const CallHeader& header, const SlotSum& sum, float* piece,
                                         absl::Duration timeout) {
  return Together({header, nullptr, sum.mine, {}}, timeout, [&] {
    std::vector<int64_t> taken(size());
    std::vector<const void*> slots;
    for (const int holder : sum.holders) {
      const void* slot = hub_->PostOf(holder).slots[taken[holder]++];
      slots.push_back(static_cast<const char*>(slot) + rank() * header.bytes);
    }
    SumSlots(sum.format, slots, sum.elements, piece);
  });
}

absl::Status LocalGroup::DoExchange(const CallHeader& header, absl::Span<const PeerTransfer> transfers,
                                    absl::Duration timeout) {
  return Together({header, nullptr, {}, transfers}, timeout, [&] {
    for (size_t i = 0; i < transfers.size(); ++i) {
      const PeerTransfer& mine = transfers[i];
      if (mine.to != rank()) continue;
      std::memcpy(mine.memory, hub_->PostOf(mine.from).transfers[i].memory, static_cast<size_t>(mine.bytes));
    }
  });
}

}  // namespace shardmesh
