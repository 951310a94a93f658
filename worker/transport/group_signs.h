// GroupSigns: what the ranks of a group tell each other beside their transport, through a rendezvous: that the group
// has ended and why, and how far a rank has come that waits for long. A transport that hangs says neither.
//
// Nothing is written or read while all goes well: a rank shows where it is and looks for an end only when a call lasts.
// Under `name`: "ended" has the reason, "at/R" how far rank R has come. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/sync.h"

namespace shardmesh {

// Writes a value under a key, for all ranks. Waits for the value of a key: DeadlineExceeded: there was none in time.
using SetKey = std::function<absl::Status(const std::string& key, absl::string_view value)>;
using GetKey = std::function<absl::StatusOr<std::string>(const std::string& key, absl::Duration timeout)>;

class GroupSigns {
 public:
  // `name`: of the group, the same for all its ranks and for no other group.
  GroupSigns(std::string name, int rank, int size, SetKey set, GetKey get)
      : name_(std::move(name)), rank_(rank), size_(size), set_(std::move(set)), get_(std::move(get)) {}

  // This rank has come to `point`; points grow.
  void Show(uint64_t point);
  // The ranks that have not shown that they came so far.
  std::vector<int> Missing(uint64_t point) const;

  // Ends the group; the first reason counts, of whichever rank: true where it is this one.
  bool End(absl::string_view reason);
  // Looks whether a rank has ended the group.
  void Look();
  // Whether this rank knows that it has ended, and why.
  bool ended() const;
  std::string reason() const;

 private:
  const std::string name_;
  const int rank_, size_;
  const SetKey set_;
  const GetKey get_;

  mutable Mutex mu_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::string reason_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh
