// HostsGroup: ranks on several hosts, as one group made of two: `within`, of the ranks of this rank's host (symmetric,
// say), and `between`, of the ranks at the same place of their hosts, one a host (Gloo, say). Ranks are numbered host
// by host, and every host has equally many: rank = host * ranks of a host + place.
//
// Every byte crosses to another host once: a rank sends to those at its place, and they pass on within their hosts. All
// ranks of a host send at the same time. Slots of a reduction reach their owner as they are, nothing is added on the
// way.
//
// A call begins with every rank's header, gathered within and between, so that a wrong call is named as in any group.
// Its waits are one behind the other, and each one may last 1 s longer than the one before, which is longer than a
// group takes to say who is late: whoever waits for a rank that is missing is late before those that wait for it are,
// and so the missing one is named, by its rank in this group. A call that fails may therefore last 3.5 s longer than
// its limit. Ranks that enter a call more than half a second apart may be named for the one that they wait for.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/transport/group.h"

namespace shardmesh {

class HostsGroup final : public Group {
 public:
  // What the two groups call their ranks in messages; give it to them when they are made.
  static RankNames NamesWithin(int host, int ranks_of_host) { return {host * ranks_of_host, 1}; }
  static RankNames NamesBetween(int place, int ranks_of_host) { return {place, ranks_of_host}; }

  // InvalidArgument: the two are of different epochs, or of too many ranks in all.
  static absl::StatusOr<std::unique_ptr<HostsGroup>> Join(std::unique_ptr<Group> within,
                                                          std::unique_ptr<Group> between);

  absl::string_view name() const override { return "hosts"; }
  void Abort(absl::string_view reason) override;

 protected:
  absl::Status DoBarrier(const CallHeader& header, absl::Duration timeout) override;
  absl::Status DoAllGather(const CallHeader& header, const char* mine, char* all, absl::Duration timeout) override;
  absl::Status DoAllToAll(const CallHeader& header, const char* mine, char* theirs, absl::Duration timeout) override;
  absl::Status DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) override;

 private:
  HostsGroup(std::unique_ptr<Group> within, std::unique_ptr<Group> between);

  // The time that is left for the call's wait `number`, from 0.
  using TimeLeft = std::function<absl::Duration(int number)>;
  // Agrees on the call, does `rest`, and ends both groups if that fails.
  absl::Status Call(const CallHeader& header, absl::Duration timeout,
                    const std::function<absl::Status(const TimeLeft& left)>& rest);
  absl::Status Agree(const CallHeader& header, const TimeLeft& left);

  int hosts() const { return between_->size(); }
  int places() const { return within_->size(); }

  const std::unique_ptr<Group> within_, between_;
  std::vector<char> crossed_, turned_, shared_;  // on their way
};

}  // namespace shardmesh
