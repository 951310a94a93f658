// What a trainer is told of a step beyond the next one. Thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "worker/step/step_view.h"

namespace shardmesh {

// FailedPrecondition. Unavailable on several hosts, if it is one beyond: the trainer may have heard of a commit at another
// host before this one has, which will in a moment.
inline absl::Status Ahead(const StepView& view, Step step) {
  const Step committed = view.committed_step();
  const std::string what = absl::StrCat("step ", step.value(), " is ahead: job ", view.job->name, " committed step ",
                                        committed.value(), ", the next is ", committed.value() + 1);
  if (view.local.alone() || step != committed.next().next()) return absl::FailedPreconditionError(what);
  return absl::UnavailableError(absl::StrCat(what, ", as far as this host has heard; try again"));
}

}  // namespace shardmesh
