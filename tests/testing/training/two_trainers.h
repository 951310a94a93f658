// A job that two trainers train at the same time, one attached and one connected, each with its half of the slots, or
// both pulling; and a job that has everything. They go on at the job's next epoch, as often as there is one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "client/cpp/client.h"
#include "core/job/job.h"

namespace shardmesh::testing {

// Every format of weights, states and gathered codes; Muon's matrices, frozen parameters, clipping.
JobSpec EverythingJob(const std::string& name, const std::string& mesh);

// Until `last` is committed, with every other slot.
absl::Status TrainHalf(Job& job, bool attached, int64_t last);
// By two trainers. Errors are failures of the test.
void TrainByTwo(Client& client, const std::shared_ptr<Job>& job, int64_t last);

}  // namespace shardmesh::testing
