// CheckpointRounds: the rounds of bench/checkpoint for one format of states: each saves, trains while saving, and
// loads, ours and torch's in turns, and prints what it measured at once. For one thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/checkpoint/checkpoint_job.h"
#include "bench/checkpoint/disk_speed.h"
#include "bench/harness/harness.h"
#include "bench/harness/model_shapes.h"
#include "bench/harness/rival.h"

namespace shardmesh::bench {

inline constexpr int kSavingWorkers = 2;

// Who takes part, and where.
struct CheckpointSides {
  std::string folder;
  DiskSpeed* disk = nullptr;
  Rival* rival = nullptr;  // null: it is not there, because
  std::string missing;
};

class CheckpointRounds {
 public:
  // `optimizer`: that of checkpoint_rivals.py with the same states. `quick`: shorter pauses, fewer steps and meshes.
  CheckpointRounds(const ModelShapes& model, StateFormat states, std::string optimizer, int rounds, bool quick)
      : model_(model), states_(states), optimizer_(std::move(optimizer)), rounds_(rounds), quick_(quick) {}

  // Measures, and adds the rows. Internal: what somebody loaded is not what was saved. Errors of both sides.
  absl::Status Run(Service& service, const CheckpointSides& sides, Report& report);

 private:
  using Contestant = absl::Status (CheckpointRounds::*)();
  absl::Status Round(int number);
  absl::Status SaveRaw();
  absl::Status SaveOurs();
  absl::Status SaveRival();
  absl::Status SaveRivalAsync();
  absl::Status IterateOurs();
  absl::Status IterateRival();
  absl::Status Load(int workers);
  absl::Status LoadRival(int workers);

  // Removes a folder of `sides`, and waits until the disk has nothing to do.
  absl::StatusOr<std::string> Clean(const std::string& name) const;
  absl::StatusOr<std::vector<double>> Ask(const std::string& question) const;
  std::string World(int workers) const;
  std::vector<int> Meshes() const;  // that are loaded on
  void Note(const std::string& what, double seconds);
  void AddRows(Report& report) const;
  void AddAgainst(Report& report, const std::string& name, const std::string& ours, const std::string& rival,
                  Goal goal) const;
  void AddTimes(Report& report, const std::string& name, const std::string& ours, const std::string& other,
                Goal goal = {}) const;

  const ModelShapes& model_;
  const StateFormat states_;
  const std::string optimizer_;
  const int rounds_;
  const bool quick_;
  CheckpointSides sides_;
  std::unique_ptr<CheckpointJob> job_;
  std::string rival_digest_;
  std::map<std::string, std::vector<double>> seconds_;  // by what was measured, round by round
  bool warm_ = false;                                   // what is measured now is kept
};

}  // namespace shardmesh::bench
