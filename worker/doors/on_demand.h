// Of jobs that publish on demand: what is said to readers whose version nobody had made in time. Thread-safe.
#pragma once

#include "core/job/job.h"

namespace shardmesh {

// What helps; empty of jobs that publish with their steps.
inline const char* OnDemandHint(const JobSpec& job) {
  return job.publish_every == kPublishOnDemand
             ? "; the job publishes on demand: have a version made (shardctl publish, Shard.Publish)"
             : "";
}

}  // namespace shardmesh
