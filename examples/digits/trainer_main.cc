// digits_trainer: one trainer of the digits job. Several trainers share the job's slots.
//
//   digits_trainer --slots 4 --my-slots 0,1 --create --mesh ddp=2,fsdp=2        (creates the job, gives it its weights)
//   digits_trainer --slots 4 --my-slots 2,3 --prefix _orig_mod.                 (names as a compiled module has them)
//   digits_trainer --slots 4 --my-slots 0,1,2,3 --create --mesh fsdp=1 --remote (through gRPC instead of shared memory)
//
// Prints one JSON object a line: {"event":"step","step":..,"loss":..,"skipped":..} and at the end {"event":"done",..}.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/decimal_flags.h"
#include "core/base/status.h"
#include "examples/digits/flags_main.h"

namespace shardmesh::digits {
namespace {

struct TrainerFlags {
  JobFlags job;
  std::string my_slots = "0";
  std::string prefix;
  bool create = false;
  bool remote = false;
};

void Print(const nlohmann::ordered_json& line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

// The job: created by one trainer, awaited by the others.
absl::StatusOr<std::shared_ptr<Job>> FindJob(Client& client, const TrainerFlags& flags) {
  if (flags.create) {
    ASSIGN_OR_RETURN(const JobSpec spec, SpecOf(flags.job, flags.prefix));
    return client.CreateJob(spec);
  }
  return client.AwaitJob(flags.job.job, absl::Seconds(flags.job.timeout));
}

absl::Status Initialize(Job& job, const JobFlags& flags, const std::string& prefix) {
  std::map<std::string, std::vector<float>> values;
  for (size_t i = 0; i < Parameters().size(); ++i) {
    ASSIGN_OR_RETURN(values[prefix + Parameters()[i].name], InitialValues(flags.seed, static_cast<int>(i)));
  }
  return job.Initialize(values, absl::Seconds(flags.timeout));
}

// What was said on the command line must be what the job is, also where another trainer created it.
absl::Status CheckFlags(const TrainerFlags& flags, const JobSpec& spec) {
  ASSIGN_OR_RETURN(const WeightFormat weights, ParseWeightFormat(flags.job.weights));
  if (flags.job.slots == spec.num_slots && flags.job.seed == spec.seed && weights == spec.parameters[0].format) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("job ", spec.name, " has slots ", spec.num_slots, ", seed ", spec.seed,
                                                 ", weights ", WeightFormatName(spec.parameters[0].format),
                                                 "; the flags say slots ", flags.job.slots, ", seed ", flags.job.seed,
                                                 ", weights ", flags.job.weights, ". Give every trainer the same"));
}

struct Views {
  std::vector<ConstTensorView> weights;
  std::vector<std::vector<TensorView>> gradients;  // by slot of this trainer
};

absl::StatusOr<Views> ViewsOf(const Session& session, const std::string& prefix) {
  Views views;
  views.gradients.resize(session.slots().size());
  for (const ParameterSpec& parameter : Parameters()) {
    ASSIGN_OR_RETURN(const shardmesh::ConstTensorView weight, session.parameter(prefix + parameter.name));
    views.weights.push_back(ViewOf(weight));
    for (size_t s = 0; s < session.slots().size(); ++s) {
      ASSIGN_OR_RETURN(const shardmesh::TensorView gradient,
                       session.gradient(session.slots()[s], prefix + parameter.name));
      views.gradients[s].push_back(ViewOf(gradient));
    }
  }
  return views;
}

absl::Status TrainStep(Session& session, const TrainerFlags& flags, const Dataset& data, const Views& views) {
  const int64_t step = session.committed_step().value() + 1;
  double loss = 0;
  for (size_t s = 0; s < session.slots().size(); ++s) {
    ASSIGN_OR_RETURN(const std::vector<int> batch,
                     BatchIndices(data.train(), {flags.job.seed, step, session.slots()[s].value(),
                                                 session.job().spec().num_slots, flags.job.batch}));
    ASSIGN_OR_RETURN(const double slot_loss, LossAndGradients(data, batch, views.weights, views.gradients[s]));
    loss += slot_loss / static_cast<double>(session.slots().size());
  }
  StepOptions options;
  options.learning_rates = {LearningRateOf(flags.job, step)};
  options.timeout = absl::Seconds(flags.job.timeout);
  ASSIGN_OR_RETURN(const v1::StepReply reply, session.Step(options));
  Print({{"event", "step"}, {"step", step}, {"loss", loss}, {"skipped", reply.skipped()}});
  return absl::OkStatus();
}

// Until the last step is committed, or the job's epoch ends. `first`: the step at which this trainer began.
absl::Status TrainAtEpoch(Job& job, const TrainerFlags& flags, const Dataset& data, std::optional<int64_t>& first) {
  ASSIGN_OR_RETURN(const std::vector<Slot> slots, ParseSlots(flags.my_slots));
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, flags.remote ? job.Connect(slots) : job.Attach(slots));
  RETURN_IF_ERROR(session->AwaitWeights(absl::Seconds(flags.job.timeout)));
  ASSIGN_OR_RETURN(const Views views, ViewsOf(*session, flags.prefix));
  if (!first.has_value()) first = session->committed_step().value();
  while (session->committed_step().value() < flags.job.steps) {
    RETURN_IF_ERROR(TrainStep(*session, flags, data, views));
  }
  return absl::OkStatus();
}

// Whether the job may go on at a later epoch, without a worker that it lost or on another mesh.
bool IsOver(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsAborted(status) || absl::IsNotFound(status);
}

absl::Status Train(const TrainerFlags& flags) {
  ASSIGN_OR_RETURN(const Dataset data, Dataset::Load(flags.job.data));
  ClientOptions options;
  options.tls = flags.job.tls;
  options.ready_timeout = absl::Seconds(flags.job.timeout);
  ASSIGN_OR_RETURN(Client client, Client::Connect(flags.job.coordinator, options));
  ASSIGN_OR_RETURN(std::shared_ptr<Job> job, FindJob(client, flags));
  RETURN_IF_ERROR(CheckFlags(flags, job->spec()));
  if (flags.create) RETURN_IF_ERROR(Initialize(*job, flags.job, flags.prefix));
  const absl::Time start = MonotonicNow();
  std::optional<int64_t> first;
  while (true) {
    const absl::Status status = TrainAtEpoch(*job, flags, data, first);
    if (status.ok()) break;
    if (!IsOver(status)) return status;
    absl::StatusOr<std::shared_ptr<Job>> next = client.Reopen(*job);
    if (!next.ok()) return Annotate(next.status(), status.message());
    job = *std::move(next);
    Print({{"event", "reopened"}, {"epoch", job->epoch().value()}, {"mesh", job->spec().mesh.ToString()}});
  }
  const double seconds = absl::ToDoubleSeconds(MonotonicNow() - start);
  const int64_t made = std::max<int64_t>(0, flags.job.steps - *first);
  Print({{"event", "done"},
         {"steps", flags.job.steps},
         {"seconds", seconds},
         {"steps_per_second", static_cast<double>(made) / seconds}});
  return absl::OkStatus();
}

}  // namespace
}  // namespace shardmesh::digits

int main(int argc, char** argv) {
  CLI::App app{"digits_trainer: trains a small perceptron on handwritten digits through shardmesh."};
  shardmesh::digits::TrainerFlags flags;
  shardmesh::digits::AddJobFlags(app, flags.job);
  app.add_option("--slots", flags.job.slots, "gradient slots of the job")
      ->capture_default_str()
      ->check(CLI::Range(1, 128));
  app.add_option("--my-slots", flags.my_slots, "slots of this trainer, comma separated")->capture_default_str();
  app.add_option("--mesh", flags.job.mesh, "mesh of the job, e.g. ddp=2,fsdp=2");
  app.add_option("--weights", flags.job.weights, "fp32, bf16 or bf16_sr")->capture_default_str();
  app.add_option("--batch", flags.job.batch, "images of a slot")->capture_default_str()->check(CLI::Range(1, 1437));
  app.add_option("--seed", flags.job.seed, "of weights, batches and rounding")->capture_default_str();
  app.add_option("--publish-every", flags.job.publish_every, "steps between published versions")->capture_default_str();
  app.add_option(
         "--check-every", flags.job.check_every,
         "look for silent corruption: in one of so many chunks in each step, and in replicas after so many steps")
      ->capture_default_str();
  app.add_option("--prefix", flags.prefix, "put before every parameter's name, e.g. _orig_mod.");
  app.add_flag("--create", flags.create, "create the job and give it its weights (one trainer does)");
  app.add_flag("--remote", flags.remote, "through gRPC instead of shared memory");
  app.footer("Example: digits_trainer --create --mesh ddp=2,fsdp=2 --slots 4 --my-slots 0,1,2,3");
  shardmesh::DecimalNumbersOnly(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const absl::Status status = shardmesh::digits::Train(flags);
  if (status.ok()) return 0;
  std::fprintf(stderr, "digits_trainer: %s\n", status.ToString().c_str());
  return 1;
}
