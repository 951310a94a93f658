// The digits job as the service sees it: specification and the flags that trainer and reader share.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/session.h"
#include "core/job/job.h"
#include "examples/digits/mlp.h"

namespace shardmesh::digits {

struct JobFlags {
  std::string coordinator = "127.0.0.1:7000";
  std::string job = "digits";
  std::string mesh;  // "ddp=2,fsdp=2"; empty: the coordinator's default
  std::string weights = "bf16_sr";
  std::string data = "examples/digits/digits.bin";
  int slots = 4;
  int steps = 400;
  int batch = 32;  // images of a slot
  uint64_t seed = 7;
  double learning_rate = 3e-3;  // at the first step; it falls linearly to a tenth at the last
  int publish_every = 1;
  int check_every = 0;
  int64_t bucket_elements = 4096;  // small, so that this small model has several buckets
  double timeout = 120;            // seconds for one step
  TlsOptions tls;
};

// The model's parameters, with `prefix` before each name ("_orig_mod." as a compiled module has it).
absl::StatusOr<shardmesh::JobSpec> SpecOf(const JobFlags& flags, const std::string& prefix);

// The slots of a command line, "0,2". InvalidArgument: none, or something that is no number (it is named).
absl::StatusOr<std::vector<Slot>> ParseSlots(absl::string_view text);

// The step of the last version that a training of `steps` steps publishes; 0 is that of the initial weights.
int64_t LastVersion(int64_t steps, int64_t publish_every);

// The learning rate of a step, the same number in every process.
double LearningRateOf(const JobFlags& flags, int64_t step);

// A view of the service's memory as the model reads or writes it.
// A view without memory, which no function of mlp.h takes, where the weights are gathered in codes.
ConstTensorView ViewOf(const shardmesh::ConstTensorView& view);
TensorView ViewOf(const shardmesh::TensorView& view);

}  // namespace shardmesh::digits
