// The command-line flags that digits_trainer and digits_reader share. Included by their mains only.
#pragma once

#include <CLI/CLI.hpp>

#include "client/cli/base/seconds_flag.h"
#include "client/cli/base/tls_flags.h"
#include "examples/digits/job.h"

namespace shardmesh::digits {

inline void AddJobFlags(CLI::App& app, JobFlags& flags) {
  app.add_option("--coordinator", flags.coordinator, "address of the coordinator")
      ->envname("SHARDMESH_COORDINATOR")
      ->capture_default_str();
  app.add_option("--job", flags.job, "name of the job")->capture_default_str();
  app.add_option("--data", flags.data, "the digits file")->capture_default_str();
  app.add_option("--steps", flags.steps, "steps of the whole training")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000000));
  AddSeconds(app, "--timeout", flags.timeout, "Seconds to wait for the job, a step, a version");
  AddTlsFlags(app, flags.tls);
}

}  // namespace shardmesh::digits
