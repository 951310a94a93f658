// digits_reader: follows a job's published versions and scores the held-out digits with each one it gets.
//
//   digits_reader --job digits --steps 400
//
// Prints one JSON object a line: {"event":"version","step":..,"accuracy":..,"loss":..,"bytes":..}. Ends after the
// last version that is published up to step --steps, or with an error as soon as there is one (a worker that is gone is
// named).
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/decimal_flags.h"
#include "core/base/status.h"
#include "examples/digits/flags_main.h"

namespace shardmesh::digits {
namespace {

absl::Status ScoreVersion(const Version& version, const Dataset& data) {
  std::vector<ConstTensorView> weights;
  for (const ParameterSpec& parameter : Parameters()) {
    ASSIGN_OR_RETURN(const shardmesh::ConstTensorView view, version.parameter(parameter.name));
    weights.push_back(ViewOf(view));
  }
  ASSIGN_OR_RETURN(const Evaluation score, Evaluate(data, data.held_out(), weights));
  const nlohmann::ordered_json line = {{"event", "version"},
                                       {"step", version.step().value()},
                                       {"accuracy", score.accuracy},
                                       {"loss", score.loss},
                                       {"bytes", version.num_bytes()}};
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status Follow(const JobFlags& flags) {
  ASSIGN_OR_RETURN(const Dataset data, Dataset::Load(flags.data));
  ClientOptions options;
  options.tls = flags.tls;
  ASSIGN_OR_RETURN(Client client, Client::Connect(flags.coordinator, options));
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.AwaitJob(flags.job, absl::Seconds(flags.timeout)));
  const int64_t last = LastVersion(flags.steps, job->spec().publish_every);
  int64_t next = 0;
  while (next <= last) {
    ASSIGN_OR_RETURN(const Version version,
                     job->Pull({VersionChoice::kAtLeast, Step(next)}, absl::Seconds(flags.timeout)));
    RETURN_IF_ERROR(ScoreVersion(version, data));
    next = version.step().value() + 1;
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace shardmesh::digits

int main(int argc, char** argv) {
  CLI::App app{"digits_reader: follows the digits job's versions and scores the held-out digits."};
  shardmesh::digits::JobFlags flags;
  shardmesh::digits::AddJobFlags(app, flags);
  app.footer("Example: digits_reader --job digits --steps 400");
  shardmesh::DecimalNumbersOnly(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const absl::Status status = shardmesh::digits::Follow(flags);
  if (status.ok()) return 0;
  std::fprintf(stderr, "digits_reader: %s\n", status.ToString().c_str());
  return 1;
}
