// Groups of NCCL over its stand-in, for tests.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "worker/transport/nccl/nccl_group.h"
#include "worker/transport/rendezvous.h"
#include "worker/transport/testing/load_stand_in.h"

namespace shardmesh {

using NcclGroups = std::vector<std::unique_ptr<NcclGroup>>;
using Joined = std::vector<absl::StatusOr<std::unique_ptr<NcclGroup>>>;

inline void OnThreads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

// Every rank joins in a thread of its own, rank r with device r; `adjust` changes a rank's options. `library`: of NCCL
// and the driver; empty: the machine's.
inline Joined JoinNccl(int size, absl::Duration timeout, const std::function<void(NcclGroup::Options&)>& adjust = {},
                       int absent = -1, const std::string& library = kStandInPath) {
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  const NcclLibrary nccl = NcclLibrary::Load(library).value();
  Joined groups;
  for (int rank = 0; rank < size; ++rank) groups.emplace_back(absl::UnknownError("absent"));
  OnThreads(size, [&](int rank) {
    if (rank == absent) return;
    NcclGroup::Options options;
    options.rank = rank;
    options.size = size;
    options.epoch = 5;
    options.name = "group";
    options.set = [rendezvous](const std::string& key, absl::string_view value) { return rendezvous->Set(key, value); };
    options.get = [rendezvous](const std::string& key, absl::Duration wait) { return rendezvous->Get(key, wait); };
    options.sum = nullptr;  // there is no device that could run a kernel
    if (adjust) adjust(options);
    auto device = DeviceRuntime::Open(rank, library).value();
    groups[rank] = NcclGroup::Join(nccl, std::move(device), std::move(options), timeout);
  });
  return groups;
}

inline NcclGroups MakeNcclGroups(int size, const std::function<void(NcclGroup::Options&)>& adjust = {}) {
  NcclGroups groups;
  for (auto& group : JoinNccl(size, absl::Seconds(60), adjust)) groups.push_back(std::move(group).value());
  return groups;
}

// A device's sum, where host memory stands for the device's.
inline const char* SumOnStandIn(Format format, const void* slots, int num_slots, int64_t elements, float* sum, void*) {
  std::vector<const void*> each;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    each.push_back(static_cast<const char*>(slots) + slot * elements * BytesPerElement(format));
  }
  SumSlots(format, each, elements, sum);
  return nullptr;
}

}  // namespace shardmesh
