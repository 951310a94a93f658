// What every subcommand that talks to a service shares: its options, its client, and the words for what comes back.
// Functions are thread-safe; ConnectionFlags is a plain value.
#pragma once

#include <google/protobuf/repeated_field.h>

#include <CLI/App.hpp>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cli/base/command.h"
#include "client/cli/base/seconds_flag.h"
#include "client/cpp/client.h"
#include "client/cpp/transport/shard_transport.h"
#include "rpc/tls/tls.h"

namespace shardmesh {

struct ConnectionFlags {
  std::string coordinator = "127.0.0.1:7000";
  TlsOptions tls;
  double timeout_seconds = 10;  // of one call
  bool json = false;

  absl::Duration timeout() const { return absl::Seconds(timeout_seconds); }
};

// Adds --coordinator, --timeout, --json and --tls-*. `flags` must outlive the parsing; its values are the defaults.
void AddConnectionOptions(CLI::App& command, ConnectionFlags& flags);

// Adds the positional JOB.
CLI::Option* AddJobArgument(CLI::App& command, std::string& job);

// Errors of Client::Connect. A job that is not ready is waited for `flags.timeout()`, but at most 10 s.
absl::StatusOr<Client> ConnectTo(const ConnectionFlags& flags);

// For one question to a worker; one that is silent for 3 s does not answer. Errors of ShardTransport::Dial.
absl::StatusOr<std::unique_ptr<ShardTransport>> DialWorker(const v1::Member& member, const ConnectionFlags& flags);

// NotFound: no such job.
absl::StatusOr<v1::JobDescription> DescribeJob(Client& client, const std::string& job, const ConnectionFlags& flags);

// "waiting", "preparing", "ready", "failed".
std::string JobStateName(v1::JobState state);

// "3,4,5"; "-" for none.
std::string StepList(const google::protobuf::RepeatedField<int64_t>& steps);
nlohmann::ordered_json StepsToJson(const google::protobuf::RepeatedField<int64_t>& steps);

// "512 B", "1.5 KiB", "2.0 GiB".
std::string HumanBytes(int64_t num_bytes);

}  // namespace shardmesh
