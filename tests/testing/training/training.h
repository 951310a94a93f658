// Small jobs for tests: a specification with odd sizes and every format, weights and gradients that are pure functions
// of (seed, slot, step, parameter, element), and what a job has learnt as comparable bytes. Thread-safe functions.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/pulling_session.h"
#include "client/cpp/session.h"
#include "core/job/job.h"

namespace shardmesh::testing {

// Sizes no shard count divides, a scalar, an empty tensor, a tie; fp32, bf16 and bf16_sr.
// REQUIRES: `mesh` is a valid specification ("ddp=2,fsdp=2").
JobSpec OddJob(const std::string& name, const std::string& mesh, int slots);
// One fp32 tensor "w" of `elements`.
JobSpec TinyJob(const std::string& name, const std::string& mesh, int slots, int64_t elements = 1000);

// Of an element; gradients as their format holds them.
float InitialValue(int tensor, int64_t element);
float GradientValue(Format format, int slot, int64_t step, int tensor, int64_t element);
// Of a slot of a job with token weights: 0 for some, whose gradients are zeros. Of three slots or more some has more.
int64_t TokensOf(int slot, int64_t step);
// By canonical name, owners only; in [-1, 1).
std::map<std::string, std::vector<float>> InitialWeights(const JobSpec& spec);
// Gives the job these weights and waits until they are there.
absl::Status Initialize(Job& job);

// Writes the gradients of `step` into all windows of the session: in [-1, 1), rounded to the job's gradient format.
absl::Status WriteGradients(Session& session, Step step);
// The same of one bucket.
absl::Status WriteBucketGradients(Session& session, Step step, int bucket);
// The same gradient shard as bytes: what a raw Push of (slot, step, shard) carries.
std::string GradientShard(const Job& job, Slot slot, Step step, int shard);

// Steps until `last` is committed, each with its own gradients and learning rates.
absl::Status TrainTo(Session& session, int64_t last, absl::Duration step_timeout = absl::Seconds(30));
// Writes the gradients of a slot that was taken, and says what it is finished with.
absl::StatusOr<FinishOptions> WriteTaken(PullingSession& session, const PullingSession::Work& work);
// Takes slots, writes and finishes them, until step `last` is committed. No slot may be taken back; Internal:
// one was, and finished by another trainer.
absl::Status PullTo(PullingSession& session, int64_t last, absl::Duration timeout = absl::Seconds(30));
// Calls `train` with the job, and where it ended since a member was lost, or the job moved, with the job as it is then,
// again and again; for at most a minute at one epoch.
absl::Status TrainOver(Client& client, std::shared_ptr<Job> job, const std::function<absl::Status(Job&)>& train);
// The learning rate of a step, in a parameter group.
double LearningRate(int64_t step, int group = 0);
// Of all groups of a job.
std::vector<double> LearningRates(const JobSpec& spec, int64_t step);

// What a job holds after a step: every parameter's bytes, and the digest over weights and states.
struct Learnt {
  int64_t step = -1;
  uint64_t digest = 0;
  std::map<std::string, std::string> weights;
};
bool operator==(const Learnt& a, const Learnt& b);
std::ostream& operator<<(std::ostream& out, const Learnt& learnt);
// Waits for the version of `step`.
absl::StatusOr<Learnt> Learn(Job& job, int64_t step);

// Options with the certificate files that SHARDMESH_TEST_TLS names: a prefix with .pem, .key and .ca behind it; else
// none.
ClientOptions TlsOfEnvironment();

// The number that an environment variable has; `otherwise`: it is not set.
int64_t NumberOfEnvironment(const char* name, int64_t otherwise);

// Deletes the job.
absl::Status Delete(Client& client, const std::string& job);

// How a job of `spec` ends that one attached trainer holding all slots trains for `steps` steps, undisturbed. Pulled
// slots are assigned there, to the same end.
absl::StatusOr<Learnt> Undisturbed(Client& client, JobSpec spec, int64_t steps);

}  // namespace shardmesh::testing
