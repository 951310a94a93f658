// bench/host_groups: what carries bytes between hosts: SecureGroup over TLS and in the clear against Gloo and raw TCP,
// over loopback, in turns inside one run.
//
//   bazel run -c opt //bench:host_groups -- --quick
#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/collectives/host_groups_job.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

struct Flags : CommonFlags {
  int mebibytes = 64;
};

constexpr HostWay kWays[] = {HostWay::kRaw, HostWay::kGloo, HostWay::kClear, HostWay::kTls};
const char* NameOf(HostWay way) { return kHostWayNames[static_cast<int>(way)]; }

struct Question {
  HostGroupsJob::Task task;
  bool processor;  // the processor time of both ranks instead of elapsed time
  std::string name;
  double scale, calls;
};

absl::Status Measure(HostGroupsJob& job, const Question& question, int rounds_wanted, Report& report) {
  Rounds rounds;
  for (const HostWay way : kWays) {
    rounds.Add(NameOf(way), [&job, &question, way]() -> absl::StatusOr<double> {
      const double before = job.ProcessorSeconds();
      ASSIGN_OR_RETURN(const double passed, job.Run(question.task, way));
      return (question.processor ? job.ProcessorSeconds() - before : passed) / question.calls;
    });
  }
  RETURN_IF_ERROR(rounds.Measure(2, rounds_wanted));
  for (const auto& [ours, rival] : {std::pair(HostWay::kClear, HostWay::kGloo),
                                    {HostWay::kTls, HostWay::kGloo},
                                    {HostWay::kClear, HostWay::kRaw},
                                    {HostWay::kTls, HostWay::kRaw}}) {
    report.Add(Compare(absl::StrCat(question.name, ": ", NameOf(ours), " / ", NameOf(rival)),
                       rounds.seconds(NameOf(ours)), rounds.seconds(NameOf(rival)), question.scale));
  }
  return absl::OkStatus();
}

absl::Status RunAll(const Flags& flags) {
  const int64_t bytes = int64_t{flags.mebibytes} << 20;
  ASSIGN_OR_RETURN(const auto job, HostGroupsJob::Create(bytes));
  for (const HostWay way : kWays) {
    RETURN_IF_ERROR(Annotate(job->Run(HostGroupsJob::kCheck, way).status(), absl::StrCat("verifying ", NameOf(way))));
  }
  Report report(absl::StrCat("bench/host_groups: two processes of one thread each, ", flags.mebibytes,
                             " MiB of each to the other at the same time, over loopback"));
  report.Note(absl::StrCat("Verified first: every byte of every way. ", flags.rounds,
                           " rounds. Machine at the start: ", MachineNow(), "."));
  const std::string size = absl::StrCat(flags.mebibytes, " MiB each way, ");
  const double both = 2 * static_cast<double>(bytes) / 1e9;
  const Question questions[] = {{HostGroupsJob::kBulk, false, size + "ms", 1e3, 1},
                                {HostGroupsJob::kBulk, true, size + "processor seconds for a GB", 1, both},
                                {HostGroupsJob::kBarrier, false, "barrier, us", 1e6, HostGroupsJob::kCalls},
                                {HostGroupsJob::kGather, false, "64 bytes each way, us", 1e6, HostGroupsJob::kCalls}};
  for (const Question& question : questions) RETURN_IF_ERROR(Measure(*job, question, flags.rounds, report));
  report.Note(
      "Raw TCP: one connection without frames, sent and received by one thread that polls. Its barrier is a byte each "
      "way.\nProcessor seconds are of both ranks, the kernel's work for them among it.");
  return report.Publish(flags.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/host_groups: groups between hosts over loopback, over TLS and in the clear, against Gloo and raw TCP."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "16 MiB each way: seconds", flags);
  app.add_option("--mebibytes", flags.mebibytes, "MiB that each rank sends")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) flags.mebibytes = 16;
  return shardmesh::bench::ExitStatus("host_groups", shardmesh::bench::RunAll(flags));
}
