// GroupTable: what depends on the parameter group, of a job's control block (control_block.h). It lies behind the
// control block's other tables, and has an entry for each group that the job has.
//
// A step's scalars and learning rates belong to its command: they are written before it is decided, and stay as it
// does. What a slot said of learning rates belongs to its declaration.
//
// A view: no memory of its own. Learning rates of slots are lock-free atomics. All is zero at creation.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/job/optimizer.h"
#include "core/job/plan.h"
#include "worker/control/control_block.h"
#include "worker/control/residency.h"

namespace shardmesh {

class GroupTable {
 public:
  using Rate = std::atomic<double>;

  // Bytes behind the residency table.
  static int64_t NumBytes(const Plan& plan) {
    const auto step = static_cast<int64_t>(sizeof(double) + sizeof(StepScalars));
    const auto said = static_cast<int64_t>(sizeof(Rate)) * (plan.slots().num_writers() + 1);
    return kAlignment + plan.slots().num_groups * (2 * step + said);
  }

  // REQUIRES: a control block of NumBytes more than control block and the tables before this one.
  GroupTable(ControlBlock* control, const Plan& plan) : num_groups_(plan.slots().num_groups) {
    const auto end =
        reinterpret_cast<uintptr_t>(Maxima(control, plan) + plan.scales().num_maxima) + ResidencyTable::NumBytes(plan);
    elsewhere_ = reinterpret_cast<Rate*>((end + kAlignment - 1) / kAlignment * kAlignment);
    rates_ = reinterpret_cast<double*>(elsewhere_ + num_groups_ * (plan.slots().num_writers() + 1));
    scalars_ = reinterpret_cast<StepScalars*>(rates_ + 2 * num_groups_);
  }

  // By group, of the command that has the place (Command::groups): what a step computes with, and the learning rates of
  // that, for what depends on a shape too (Muon).
  StepScalars* scalars(int place) const { return scalars_ + place * num_groups_; }
  double* rates(int place) const { return rates_ + place * num_groups_; }

  // By group: the learning rates of the step that the slot declared, and those that slots of another host did.
  Rate* said(int slot) const { return elsewhere_ + num_groups_ * (slot + 1); }
  Rate* said_elsewhere() const { return elsewhere_; }

 private:
  static constexpr int64_t kAlignment = 64;

  int64_t num_groups_;
  Rate* elsewhere_;
  double* rates_;
  StepScalars* scalars_;
};

}  // namespace shardmesh
