// The gradients that a trainer has written, by its own names (core/job/gradient_run.h). Pure functions; thread-safe.
#pragma once

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "core/base/status.h"
#include "core/job/gradient_run.h"

namespace shardmesh {

inline GradientRun GradientIn(const Job& job, int tensor, const char* window) {
  return GradientIn(job.plan(), tensor, window);
}

// A view of a tensor's gradients in a window, by this client's name. NotFound, InvalidArgument: as Session::gradient.
inline absl::StatusOr<TensorView> GradientView(const Job& job, absl::string_view name, const char* window) {
  ASSIGN_OR_RETURN(const int tensor, job.Resolve(name));
  if (job.spec().parameters[tensor].frozen) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter \"", job.spec().parameters[tensor].name, "\" is frozen: it has no gradient"));
  }
  const GradientRun run = GradientIn(job, tensor, window);
  return TensorView{const_cast<char*>(run.data), run.format, run.num_elements};
}

inline absl::Status NotFinite(const Job& job, Slot slot, Step step, int tensor, int64_t element,
                              absl::string_view then) {
  return NotFinite(job.spec(), slot, step, tensor, element, then);
}

}  // namespace shardmesh
