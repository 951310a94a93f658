// One way among many to train the same job: a mesh, and trainers that share its slots. Tests only; thread-safe
// functions.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "tests/testing/training/training.h"

namespace shardmesh::testing {

struct Trainer {
  std::vector<int> slots;
  bool attached = true;
};

struct Variant {
  std::string mesh;
  std::vector<Trainer> trainers;  // all slots, each once
  int64_t bucket_elements = 4096;
  // kBucket: trainers declare bucket by bucket, the last one first.
  Residency residency = Residency::kFull;
};

std::string Describe(const Variant& variant);

// Jobs of three slots: 1 to 8 workers, meshes of up to three dimensions, attached and connected trainers.
std::vector<Variant> VariantsOfThreeSlots();

// Creates the job `spec` on the variant's mesh and buckets, trains it to step `steps`, and deletes it. What it has
// learnt.
absl::StatusOr<Learnt> TrainVariant(Client& client, JobSpec spec, const Variant& variant, int64_t steps);

}  // namespace shardmesh::testing
