#include <algorithm>

#include "server/store/store.h"

namespace shardmesh {
namespace {

class MemoryStore final : public Store {
 public:
  absl::Status Write(const StoreBatch& batch) override {
    for (const WorkerRecord& worker : batch.put_workers) contents_.workers[worker.identity.name] = worker;
    for (const std::string& name : batch.delete_workers) contents_.workers.erase(name);
    for (const auto& [name, spec] : batch.put_specs) contents_.specs[name] = spec;
    for (const JobRecord& job : batch.put_jobs) contents_.jobs[job.name] = job;
    for (const std::string& name : batch.delete_jobs) {
      contents_.jobs.erase(name);
      contents_.specs.erase(name);
    }
    contents_.epoch_floor = std::max(contents_.epoch_floor, batch.epoch_floor);
    return absl::OkStatus();
  }

  absl::StatusOr<StoreContents> Load() override { return contents_; }

 private:
  StoreContents contents_;
};

}  // namespace

bool StoreBatch::empty() const {
  return put_workers.empty() && delete_workers.empty() && put_specs.empty() && put_jobs.empty() &&
         delete_jobs.empty() && epoch_floor == 0;
}

std::unique_ptr<Store> NewMemoryStore() { return std::make_unique<MemoryStore>(); }

}  // namespace shardmesh
