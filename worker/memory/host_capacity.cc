#include "worker/memory/host_capacity.h"

#include <algorithm>
#include <fstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "worker/control/host_ranks.h"
#include "worker/memory/gradient_sums.h"
#include "worker/memory/host_memory.h"
#include "worker/memory/shard_storage.h"

namespace shardmesh {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

// Of bytes, which are never negative.
int64_t Product(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? kMax : product;
}

int64_t Sum(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? kMax : sum;
}

std::string Readable(int64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  for (; value >= 1024 && unit < 5; ++unit) value /= 1024;
  return absl::StrFormat("%.2f %s", value, kUnits[unit]);
}

void Lower(HostCapacity& capacity, int64_t bytes, const std::string& source) {
  if (bytes < capacity.bytes) capacity = {bytes, source};
}

// The limits of the group `path` and of those around it. Inside a container the path may be the host's, of which only
// the root is there.
void LowerToGroups(HostCapacity& capacity, const std::string& hierarchy, std::string path, const std::string& name) {
  while (true) {
    const std::string file = absl::StrCat(hierarchy, path, path == "/" ? "" : "/", name);
    std::string text;
    int64_t bytes;
    if (std::getline(std::ifstream(file), text) && absl::SimpleAtoi(text, &bytes)) {
      Lower(capacity, bytes, absl::StrCat("the control group's limit in ", file));
    }
    if (path.size() <= 1) return;
    path.resize(std::max<size_t>(path.rfind('/'), 1));
  }
}

}  // namespace

HostCapacity ReadHostCapacity(const std::string& root) {
  HostCapacity capacity;
  std::ifstream meminfo(root + "/proc/meminfo");
  std::string label;
  int64_t kib;
  if (meminfo >> label >> kib && label == "MemTotal:") Lower(capacity, Product(kib, 1024), "physical memory");
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));  // number, controllers, path
    if (parts.size() != 3 || parts[2].empty() || parts[2][0] != '/') continue;
    if (parts[1].empty()) LowerToGroups(capacity, root + "/sys/fs/cgroup", parts[2], "memory.max");
    for (absl::string_view controller : absl::StrSplit(parts[1], ',')) {
      if (controller != "memory") continue;
      LowerToGroups(capacity, root + "/sys/fs/cgroup/memory", parts[2], "memory.limit_in_bytes");
    }
  }
  return capacity;
}

namespace {

bool Owns(const Bucket& bucket) { return bucket.owned(); }

int64_t LargestShard(const Plan& plan) {
  const bool differ = std::any_of(plan.buckets().begin(), plan.buckets().end(), Owns);
  int64_t bytes = 0;
  for (int shard = 0; shard < (differ ? plan.num_shards() : 1); ++shard) {
    bytes = std::max(bytes, ShardStorage::NumBytes(plan, shard));
  }
  return bytes;
}

// Shards differ in the matrices that they own alone.
int64_t SumsOfAll(const Plan& plan) {
  if (std::none_of(plan.buckets().begin(), plan.buckets().end(), Owns))
    return Product(plan.num_ranks(), GradientSums::NumBytes(plan, 0));
  int64_t bytes = 0;
  for (int shard = 0; shard < plan.num_shards(); ++shard) bytes = Sum(bytes, GradientSums::NumBytes(plan, shard));
  return Product(plan.num_replicas(), bytes);
}

}  // namespace

int64_t JobMemory::total() const {
  return Sum(shards, Sum(window, Sum(publications, Sum(slots, Sum(control, Sum(sums, copies))))));
}

// No sum in here comes near 2^63 but the shards': at most 2^42 elements and 128 slots, but 2^20 ranks.
JobMemory MemoryOf(const Plan& plan, HostShape shape, std::optional<int> ranks_here) {
  const HostMemory::Sizes host = HostMemory::SizesOf(plan, shape);
  JobMemory memory;
  const int ranks = ranks_here.value_or(plan.num_ranks());
  memory.shards = ranks < plan.num_ranks() ? Product(ranks, LargestShard(plan)) : StorageBytesOfAll(plan);
  memory.window = host.window;
  memory.publications = host.publications;
  memory.slots = host.slots;
  memory.control = Sum(host.control, FarMaximaBytes(plan, ranks > 0 ? plan.num_ranks() / ranks : 1));
  memory.sums = SumsOfAll(plan);
  if (shape.copies > 1 && ranks < plan.num_ranks()) memory.copies = Product(4, memory.shards);
  if (!plan.bucketed()) return memory;
  int64_t weights = kPageBytes, gradients = kPageBytes;  // of the largest bucket
  for (int b = 0; b < static_cast<int>(plan.buckets().size()); ++b) {
    weights = std::max(weights, plan.WeightPageBytes(b));
    gradients = std::max(gradients, plan.GradientPageBytes(b));
  }
  const int64_t each = Product(shape.num_writers, 1 + plan.slots().prefetch_buckets);
  memory.window = std::min(memory.window, Product(each, weights));
  if (plan.pulled()) return memory;  // what is written are whole slots
  const int64_t mailbox = (static_cast<int64_t>(sizeof(Mailbox)) + kPageBytes - 1) / kPageBytes * kPageBytes;
  memory.slots = std::min(memory.slots, Sum(Product(each, gradients), Product(shape.num_writers, mailbox)));
  return memory;
}

absl::Status CheckFits(const JobSpec& job, const Plan& plan, const HostCapacity& capacity,
                       std::optional<int> ranks_here, int64_t beside) {
  const JobMemory memory = MemoryOf(plan, job, ranks_here);
  if (Sum(memory.total(), beside) <= capacity.bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "job ", job.name, " takes ", Readable(memory.total()), " of its host's memory: ", Readable(memory.shards),
      " for the shards of ", ranks_here.value_or(plan.num_ranks()),
      " workers (weights, states, spare chunks, scratch of muon), ", Readable(memory.window),
      " for the parameter window, ", Readable(memory.publications), " for publications, ", Readable(memory.slots),
      " for the windows of ", job.num_writers(), job.pulled() ? " trainers, " : " slots, ", Readable(memory.control),
      " for the control block",
      GradientSums::Has(plan) ? absl::StrCat(", ", Readable(memory.sums), " for summed gradients") : "",
      memory.copies > 0 ? absl::StrCat(", ", Readable(memory.copies), " for copies of shards (copies=2)") : "",
      beside > 0 ? absl::StrCat(", beside ", Readable(beside), " that it has on its present mesh meanwhile") : "",
      "; this host has ", Readable(capacity.bytes), " (", capacity.source, "); use fewer ",
      job.pulled() ? "trainers" : "slots", ", fewer publications, fewer replicas, bf16 weights or gradients, ",
      plan.pulled()     ? "assigned slots"
      : plan.bucketed() ? "smaller buckets"
                        : "bucket residency",
      ", or a host with more memory"));
}

int64_t CopyBytesOf(const Plan& plan, std::optional<int> ranks_here) {
  const int ranks = ranks_here.value_or(plan.num_ranks());
  if (ranks == plan.num_ranks()) return StorageBytesOfAll(plan) / plan.num_replicas();
  return Product(std::min(ranks, plan.num_shards()), LargestShard(plan));
}

absl::Status CheckCopyFits(const JobSpec& job, const Plan& plan, const HostCapacity& capacity,
                           std::optional<int> ranks_here, bool on_device) {
  const int64_t has = on_device ? 0 : MemoryOf(plan, job, ranks_here).total(), copies = CopyBytesOf(plan, ranks_here);
  if (Sum(has, copies) <= capacity.bytes) return absl::OkStatus();
  if (on_device) {
    return absl::ResourceExhaustedError(
        absl::StrCat("to save or restore job ", job.name, ", which is on a CUDA device, takes ", Readable(copies),
                     " of this host's memory for copies of its shards; the host has ", Readable(capacity.bytes), " (",
                     capacity.source, "); use more shards on other hosts, or a host with more memory"));
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("to save job ", job.name, " takes ", Readable(copies), " for copies of its shards, beside the ",
                   Readable(has), " of the job; this host has ", Readable(capacity.bytes), " (", capacity.source,
                   "); use fewer slots, fewer publications, fewer replicas, or a host with more memory"));
}

}  // namespace shardmesh
