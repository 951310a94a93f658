// Publications: the versions of a job that readers may read, as views of the words of a host's control block.
//
// A publication is memory of its own for one version. It is held by reads under way in workers (pins), by leases that
// workers granted (version_leases.h) and by processes that map it (local/memory/file_hold.h). The lead chooses one that
// nobody holds for the next version, never the newest while there is another. It takes the version away first and then
// looks whether anybody holds the memory; whoever wants to hold it does so first and then looks for the version: one of
// them sees the other. So what is held is never written, by whomever and however long; and the number of publications,
// JobSpec::publications, is all the memory that readers can make a host keep.
//
// Thread-safe between threads and processes; Reserve, Keep, KeepUnused and Show are for the lead's thread.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/ids.h"
#include "core/job/job.h"
#include "local/memory/futex.h"
#include "local/memory/version_board.h"
#include "worker/control/control_block.h"

namespace shardmesh {

class Publications {
 public:
  // Borrowed arguments outlive the object. `self`: the rank whose pins are taken here.
  Publications(ControlBlock* control, const JobSpec* job, Rank self, std::function<int64_t()> now = MonotonicNanos)
      : control_(control), job_(job), self_(self), now_(std::move(now)) {}

  // What there is beside the control block: the board of readers that map publications, and whether any of them holds
  // one. Before anything else is called.
  void ShowOn(VersionBoard* board, std::function<bool(int)> mapped);

  // Who pulls a publication through this worker: names for Holders. Before anything else is called.
  void NamePullsBy(std::function<std::vector<std::string>(int buffer)> pullers) { pullers_ = std::move(pullers); }

  // The publication for the version of `step`, without its version; -1: that step is not published, or every
  // publication is held, which is counted. Keep undoes it; no effect for -1.
  int Reserve(int64_t step);
  // The same, whatever JobSpec::publish_every says.
  int ReserveAny();
  void Keep(int buffer);
  // It holds the whole version now. Readers that wait are woken by Notify, when the step is committed.
  void Show(int buffer, int64_t step);
  void Notify();

  std::vector<Step> Published() const;  // ascending
  // Pins the publication that holds `step`; its bytes stay until Unpin. nullopt: none holds it.
  std::optional<int> Pin(Step step);
  // The same of one that a lease keeps there, while it does.
  void PinHeld(int buffer) { control_->publications[buffer].pins[self_.value()].fetch_add(1); }
  void Unpin(int buffer) { control_->publications[buffer].pins[self_.value()].fetch_sub(1); }
  // The publication that holds the version now; nullopt: none.
  std::optional<int> Find(Step step) const;

  int64_t refused() const {
    return control_->publications_refused.load();
  }  // versions that found every publication held
  int num_held() const;
  // Who holds which, for messages: "version 12 (mapped by readers), version 14 (2 pulls: ipv4:10.0.0.7:4711, 1 through
  // other workers)".
  std::string Holders() const;

  // The next incarnation of a member: its last one's reads are over.
  void TakeOver();
  // The next incarnation of a lead: gives back what the last one took away and did not come to use, or to show.
  // `in_use`: what the open command writes, -1: nothing.
  void KeepUnused(int in_use);

 private:
  int count() const { return job_->publications; }
  bool IsHeld(int buffer) const;
  bool IsLeased(int buffer) const;
  bool IsMapped(int buffer) const { return mapped_ && mapped_(buffer); }
  int64_t PinsOf(int buffer) const;
  std::string Pulls(int buffer, int64_t pins) const;
  int Best(uint32_t tried) const;
  bool Take(int buffer);

  ControlBlock* const control_;
  const JobSpec* const job_;
  const Rank self_;
  const std::function<int64_t()> now_;
  VersionBoard* board_ = nullptr;
  std::function<bool(int)> mapped_;
  std::function<std::vector<std::string>(int)> pullers_;
};

}  // namespace shardmesh
