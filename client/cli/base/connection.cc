#include "client/cli/base/connection.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "rpc/tls/tls_flags.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLongestControlCall = absl::Seconds(10);
constexpr absl::Duration kPeerTimeout = absl::Seconds(3);

}  // namespace

void AddConnectionOptions(CLI::App& command, ConnectionFlags& flags) {
  command.add_option("--coordinator", flags.coordinator, "Address of the coordinator, host:port or unix:path")
      ->envname("SHARDMESH_COORDINATOR")
      ->capture_default_str();
  AddSeconds(command, "--timeout", flags.timeout_seconds, "Seconds until a call is given up");
  command.add_flag("--json", flags.json, "Print one line of JSON");
  AddTlsFlags(command, flags.tls);
}

CLI::Option* AddJobArgument(CLI::App& command, std::string& job) {
  return command.add_option("JOB", job, "Name of the job");
}

absl::StatusOr<Client> ConnectTo(const ConnectionFlags& flags) {
  ClientOptions options;
  options.tls = flags.tls;
  options.call_timeout = std::min(flags.timeout(), kLongestControlCall);
  options.ready_timeout = std::min(flags.timeout(), kLongestControlCall);
  return Client::Connect(flags.coordinator, std::move(options));
}

absl::StatusOr<std::unique_ptr<ShardTransport>> DialWorker(const v1::Member& member, const ConnectionFlags& flags) {
  return ShardTransport::Dial(member, flags.tls, kPeerTimeout);
}

absl::StatusOr<v1::JobDescription> DescribeJob(Client& client, const std::string& job, const ConnectionFlags& flags) {
  v1::DescribeJobRequest request;
  request.set_job(job);
  return client.coordinator().DescribeJob(request, flags.timeout());
}

std::string JobStateName(v1::JobState state) {
  const std::string name = v1::JobState_Name(state);
  if (name.empty()) return absl::StrCat("state ", static_cast<int>(state));  // of a newer coordinator
  return absl::AsciiStrToLower(absl::StripPrefix(name, "JOB_STATE_"));
}

std::string StepList(const google::protobuf::RepeatedField<int64_t>& steps) {
  return steps.empty() ? "-" : absl::StrJoin(steps, ",");
}

nlohmann::ordered_json StepsToJson(const google::protobuf::RepeatedField<int64_t>& steps) {
  auto list = nlohmann::ordered_json::array();
  for (const int64_t step : steps) list.push_back(step);
  return list;
}

std::string HumanBytes(int64_t num_bytes) {
  if (num_bytes < 1024) return absl::StrCat(num_bytes, " B");
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(num_bytes) / 1024;
  int unit = 0;
  for (; value >= 1023.95; ++unit) value /= 1024;
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

}  // namespace shardmesh
