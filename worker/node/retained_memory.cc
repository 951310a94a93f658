#include "worker/node/retained_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {

RetainedMemory::RetainedMemory(NodeLink& link, std::string job, int64_t epoch, bool resume)
    : link_(link), job_(std::move(job)), epoch_(epoch), resume_(resume) {}

absl::StatusOr<Segment> RetainedMemory::Open(const std::string& name, int64_t num_bytes, int64_t data_offset) {
  ASSIGN_OR_RETURN(Segment segment,
                   resume_ ? Find(name, num_bytes, data_offset) : Segment::Create(name, num_bytes, data_offset));
  const absl::Status retained = link_.Keep(job_, epoch_, name, segment);
  if (!retained.ok() && !absl::IsUnavailable(retained)) {
    return Annotate(retained, absl::StrCat("segment ", name, " of ", job_, "@", epoch_));
  }
  return segment;
}

absl::StatusOr<Segment> RetainedMemory::Find(const std::string& name, int64_t num_bytes, int64_t data_offset) {
  absl::StatusOr<Segment> found = link_.Find(job_, epoch_, name);
  if (absl::IsNotFound(found.status())) {
    return absl::FailedPreconditionError(absl::StrCat("the node has no memory retained of ", name, " of ", job_, "@",
                                                      epoch_, "; drop the job and restore it from a checkpoint"));
  }
  RETURN_IF_ERROR(found.status());
  if (found->num_bytes() != num_bytes || found->data_offset() != data_offset) {
    return absl::FailedPreconditionError(
        absl::StrCat("memory retained of ", name, " of ", job_, "@", epoch_, " has ", found->num_bytes(),
                     " bytes with data from ", found->data_offset(), ", this build needs ", num_bytes,
                     " with data from ", data_offset, "; run one build of shardmesh everywhere"));
  }
  return found;
}

}  // namespace shardmesh
