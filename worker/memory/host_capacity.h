// HostCapacity: what a host can give to a job, compared with what the job takes, before anything is built. Memory is
// given by the page, as it is written: a job that is too large would start, and be killed in its first steps.
//
// Every job is compared by itself. What other jobs and programs of the host take is not looked at.
// Pure functions, but for ReadHostCapacity; thread-safe.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "core/job/job.h"
#include "core/job/plan.h"
#include "worker/memory/host_memory.h"

namespace shardmesh {

struct HostCapacity {
  int64_t bytes = std::numeric_limits<int64_t>::max();
  std::string source = "no limit is known";  // for messages
};

// Physical memory, or the least limit of this process's control groups (v1 and v2) and those around them, if that is
// less. `root` is the folder that has proc/ and sys/.
HostCapacity ReadHostCapacity(const std::string& root = "");

// Bytes of the segments that all workers of a job have on a host; INT64_MAX stands for everything over it. With
// bucket residency: of window and slots what a training takes at most that has a trainer for each slot, which acquires
// and declares bucket by bucket: 1 + prefetch_buckets of the largest buckets each, and the sums of gradients. Of a job
// on several hosts `control` has what the lead keeps of the other hosts' control pages, their maxima, and with copies=2
// `copies` two of each shard and two of as many of another host (worker/move/peer_copies.h).
struct JobMemory {
  int64_t shards = 0, window = 0, publications = 0, slots = 0, control = 0, sums = 0, copies = 0;
  int64_t total() const;
};
// `ranks_here`: members on the host; unset: all.
JobMemory MemoryOf(const Plan& plan, HostShape shape, std::optional<int> ranks_here = std::nullopt);

// ResourceExhausted: the job takes more than `capacity`; the message has every term. `beside`: bytes that the host has
// of the same job on another mesh, at the same time.
absl::Status CheckFits(const JobSpec& job, const Plan& plan, const HostCapacity& capacity,
                       std::optional<int> ranks_here = std::nullopt, int64_t beside = 0);

// The copies (snapshot.h) of a job that is saved: one worker of each shard makes one. INT64_MAX stands for more.
int64_t CopyBytesOf(const Plan& plan, std::optional<int> ranks_here = std::nullopt);

// ResourceExhausted: there is no room for these beside the job; the message has both. `on_device`: the job itself is not in
// memory of the host.
absl::Status CheckCopyFits(const JobSpec& job, const Plan& plan, const HostCapacity& capacity,
                           std::optional<int> ranks_here = std::nullopt, bool on_device = false);

}  // namespace shardmesh
