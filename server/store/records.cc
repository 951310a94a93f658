#include "server/store/records.h"

namespace shardmesh {

absl::string_view WorkerStateName(WorkerState state) {
  switch (state) {
    case WorkerState::kAlive:
      return "alive";
    case WorkerState::kDead:
      return "dead";
    case WorkerState::kLeft:
      return "left";
  }
  return "unknown";
}

absl::string_view JobStateName(JobState state) {
  switch (state) {
    case JobState::kWaiting:
      return "waiting";
    case JobState::kPreparing:
      return "preparing";
    case JobState::kReady:
      return "ready";
    case JobState::kFailed:
      return "failed";
  }
  return "unknown";
}

bool SameIncarnation(const WorkerIdentity& a, const WorkerIdentity& b) {
  return a.name == b.name && a.incarnation == b.incarnation;
}

}  // namespace shardmesh
