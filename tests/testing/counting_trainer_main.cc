// counting_trainer COORDINATOR JOB [PUBLICATIONS [MESH]]: makes a job whose weights are all equal to its committed
// step, in every kind of format, and trains it as it is told, for tests in other languages.
//
// Reads lines "STEP [MS]": trains to that step, with pauses of MS between steps, and prints "step STEP". Ends when
// there is none any more; with status 1 and the error when there is one.
#include <algorithm>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/session.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

absl::StatusOr<JobSpec> CountingJob(int argc, char** argv) {
  JobSpec spec;
  spec.name = argv[2];
  if (argc > 3) spec.publications = std::atoi(argv[3]);
  ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec(argc > 4 ? argv[4] : "fsdp=2"));
  spec.parameters = {{"w", {500, 400}},
                     {"embed.w", {64, 48}, WeightFormat::kBf16},
                     {"head.w", {64, 48}, WeightFormat::kBf16, "embed.w"},
                     {"rows.w", {128, 128}, WeightFormat::kBf16},
                     {"four.w", {100, 70}}};
  spec.parameters[3].gather = GatherFormat::kFp8Row;
  spec.parameters[4].gather = GatherFormat::kNf4;
  spec.gradient_format = Format::kFp32;
  spec.optimizer = OptimizerHyper::Defaults(OptimizerKind::kSgd);
  spec.optimizer.lr = 1;
  spec.optimizer.momentum = 0;
  return spec;
}

absl::Status Train(Session& session) {
  for (const ParameterSpec& parameter : session.job().spec().parameters) {
    ASSIGN_OR_RETURN(const TensorView gradient, session.gradient(Slot(0), parameter.name));
    std::fill_n(static_cast<float*>(gradient.data), gradient.num_elements, -1.0f);
  }
  for (std::string line; std::getline(std::cin, line);) {
    int64_t step = 0, pause_ms = 0;
    std::istringstream(line) >> step >> pause_ms;
    while (session.committed_step().value() < step) {
      RETURN_IF_ERROR(session.Step({}).status());
      absl::SleepFor(absl::Milliseconds(pause_ms));
    }
    std::cout << "step " << session.committed_step().value() << std::endl;
  }
  return absl::OkStatus();
}

absl::Status RunTrainer(int argc, char** argv) {
  ASSIGN_OR_RETURN(Client client, Client::Connect(argv[1]));
  ASSIGN_OR_RETURN(const JobSpec spec, CountingJob(argc, argv));
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  std::map<std::string, std::vector<float>> zeros;
  for (const ParameterSpec& parameter : spec.parameters) {
    if (parameter.tied_to.empty()) zeros[parameter.name].resize(parameter.NumElements());
  }
  RETURN_IF_ERROR(job->Initialize(zeros, kLong));
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, job->Attach({Slot(0)}));
  RETURN_IF_ERROR(session->AwaitWeights(kLong));
  return Train(*session);
}

}  // namespace
}  // namespace shardmesh

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const absl::Status status = shardmesh::RunTrainer(argc, argv);
  if (!status.ok()) std::cout << status << std::endl;
  return status.ok() ? 0 : 1;
}
