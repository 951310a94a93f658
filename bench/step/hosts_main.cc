// bench/hosts: the step of a job whose two workers are on two hosts, as network namespaces, against raw TCP streams of
// the same bytes between them in the same run; and the groups that carry them, over links of several speeds. Needs root.
//
//   bazel run -c opt //bench:hosts -- --quick --json hosts.json
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "bench/collectives/host_groups_job.h"
#include "bench/collectives/host_links.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/process.h"
#include "bench/harness/service.h"
#include "bench/harness/two_namespaces.h"
#include "bench/step/hosts_job.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(120);
constexpr double kOfStream = 0.8, kOfLimited = 0.9;  // goals

struct Flags : CommonFlags {
  int millions = 64;   // 2^20 elements
  int limit_mb = 100;  // 10^6 bytes a second
  int mebibytes = 32;  // of each rank of a group
  bool links = false;  // the groups alone
  // Of the processes that this one starts.
  int host = -1;
  int num_hosts = 2;
  std::string folder;
};

// A process that is one host, or (num_hosts 1) all of the job. It answers each line with one.
int Serve(const Flags& flags) {
  spdlog::set_level(spdlog::level::warn);  // standard output is for answers
  const std::string address = TwoNamespaces::kAddresses[flags.host];
  auto job = HostsJob::Start({flags.host, flags.num_hosts, address, flags.folder, int64_t{flags.millions} << 20});
  if (!job.ok()) std::cout << "error " << job.status() << std::endl;
  if (!job.ok()) return 1;
  std::cout << (*job)->BytesEachWay() << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "step") {
      const auto step = (*job)->Step();
      std::cout << (step.ok() ? absl::StrCat(step->seconds, " ", step->crossing, " ", step->hidden) : "error")
                << std::endl;
    } else if (line == "digest") {
      std::cout << absl::StrCat(absl::Hex((*job)->Digest().value_or(0))) << std::endl;
    } else {
      std::cout << (*job)->Stream((*job)->BytesEachWay()).value_or(-1) << std::endl;
    }
  }
  return 0;
}

// Both hosts.
class Pair {
 public:
  absl::Status Start(const Flags& flags, const std::string& program, const TwoNamespaces& namespaces) {
    ASSIGN_OR_RETURN(folder_, Folder::Make());
    RETURN_IF_ERROR(MakeCertificates(folder_->path()));
    for (int h : {0, 1}) {
      ASSIGN_OR_RETURN(hosts_[h], StartHost(flags, program, namespaces.name(h), h, 2, folder_->path()));
    }
    for (auto& host : hosts_) {
      ASSIGN_OR_RETURN(const std::string line, host->ReadLine(kPatience));
      if (!absl::SimpleAtoi(line, &bytes_)) return absl::InternalError(line);
    }
    return absl::OkStatus();
  }
  static absl::StatusOr<std::unique_ptr<Process>> StartHost(const Flags& flags, const std::string& program,
                                                            const std::string& name, int host, int num_hosts,
                                                            const std::string& folder) {
    return Process::Start(
        {"/usr/bin/env", "ip", "netns", "exec", name, program, "--host", absl::StrCat(host), "--num-hosts",
         absl::StrCat(num_hosts), "--folder", folder, "--millions", absl::StrCat(flags.millions)},
        Process::kEveryCore);
  }
  // Both do the same at once; what they answer.
  absl::StatusOr<std::vector<std::string>> Both(const std::string& line) {
    for (auto& host : hosts_) RETURN_IF_ERROR(host->WriteLine(line));
    std::vector<std::string> answers;
    for (auto& host : hosts_) {
      ASSIGN_OR_RETURN(std::string answer, host->ReadLine(kPatience));
      answers.push_back(std::move(answer));
    }
    return answers;
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<Folder> folder_;
  std::unique_ptr<Process> hosts_[2];
  int64_t bytes_ = 0;
};

// The slower host's seconds.
absl::StatusOr<double> Slower(Pair& pair, const std::string& line, std::vector<double>* hidden) {
  ASSIGN_OR_RETURN(const std::vector<std::string> answers, pair.Both(line));
  double slower = 0;
  for (const std::string& answer : answers) {
    const std::vector<std::string> words = absl::StrSplit(answer, ' ');
    double seconds = 0, crossing = 0, in_shadow = 0;
    if (!absl::SimpleAtod(words[0], &seconds) || seconds <= 0) return absl::InternalError(answer);
    slower = std::max(slower, seconds);
    if (hidden == nullptr || words.size() < 3) continue;
    if (absl::SimpleAtod(words[1], &crossing) && absl::SimpleAtod(words[2], &in_shadow) && crossing > 0) {
      hidden->push_back(in_shadow / crossing);
    }
  }
  return slower;
}

// After three steps the digest is that of one host.
absl::Status Verify(Pair& pair, Process& alone) {
  for (int step = 0; step < 3; ++step) {
    RETURN_IF_ERROR(Slower(pair, "step", nullptr).status());
    RETURN_IF_ERROR(alone.WriteLine("step"));
    RETURN_IF_ERROR(alone.ReadLine(kPatience).status());
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> digests, pair.Both("digest"));
  RETURN_IF_ERROR(alone.WriteLine("digest"));
  ASSIGN_OR_RETURN(const std::string digest, alone.ReadLine(kPatience));
  if (digests[0] == digest && digests[1] == digest && digest != "0") return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("verifying: digests are ", digests[0], " and ", digests[1], ", on one host ", digest));
}

absl::StatusOr<double> StepAlone(Process& alone) {
  RETURN_IF_ERROR(alone.WriteLine("step"));
  ASSIGN_OR_RETURN(const std::string answer, alone.ReadLine(kPatience));
  double seconds = 0;
  const std::vector<std::string> words = absl::StrSplit(answer, ' ');
  return absl::SimpleAtod(words[0], &seconds) ? absl::StatusOr<double>(seconds) : absl::InternalError(answer);
}

absl::Status AddLimitedRow(const Flags& flags, TwoNamespaces& namespaces, Pair& pair, Report& report) {
  const std::string limited = absl::StrCat("step / raw TCP, over a link of ", flags.limit_mb, " MB/s, ms");
  if (!namespaces.Limit(flags.limit_mb).ok()) {
    report.Add({limited, 0, 0, {}, Goal::AtLeast(kOfLimited), "the link cannot be limited here (tc, with tbf)"});
    return absl::OkStatus();
  }
  Rounds slow;
  slow.Add("step", [&] { return Slower(pair, "step", nullptr); });
  slow.Add("stream", [&] { return Slower(pair, "stream", nullptr); });
  RETURN_IF_ERROR(slow.Measure(1, flags.rounds));
  report.Add(Compare(limited, slow.seconds("step"), slow.seconds("stream"), 1e3, Goal::AtLeast(kOfLimited)));
  return namespaces.Limit(0);
}

absl::Status AddStepRows(const Flags& flags, const std::string& program, TwoNamespaces& namespaces, Report& report) {
  Pair pair;
  RETURN_IF_ERROR(pair.Start(flags, program, namespaces));
  ASSIGN_OR_RETURN(const auto alone, Pair::StartHost(flags, program, namespaces.name(0), 0, 1, "unused"));
  RETURN_IF_ERROR(alone->ReadLine(kPatience).status());
  RETURN_IF_ERROR(Verify(pair, *alone));
  std::vector<double> hidden;
  Rounds rounds;
  rounds.Add("step", [&] { return Slower(pair, "step", &hidden); });
  rounds.Add("stream", [&] { return Slower(pair, "stream", nullptr); });
  rounds.Add("one host", [&] { return StepAlone(*alone); });
  RETURN_IF_ERROR(rounds.Measure(2, flags.rounds));
  report.Add(Compare("step / raw TCP of its bytes both ways, ms", rounds.seconds("step"), rounds.seconds("stream"), 1e3,
                     Goal::AtLeast(kOfStream)));
  report.Add(CompareCost("step, times that of both workers on one host, ms", rounds.seconds("step"),
                         rounds.seconds("one host"), 1e3));
  RETURN_IF_ERROR(AddLimitedRow(flags, namespaces, pair, report));
  const Spread shadow = SpreadOf(hidden);
  report.Note(
      absl::StrFormat("%d MiB each way in a step; hidden behind the stepping of ranges: %.2f of the time in which "
                      "bulk bytes cross (%.2f to %.2f).",
                      pair.bytes() >> 20, shadow.median, shadow.min, shadow.max));
  return absl::OkStatus();
}

absl::Status RunHosts(const Flags& flags, const std::string& program) {
  TwoNamespaces namespaces;
  RETURN_IF_ERROR(namespaces.Create());
  Report report(absl::StrCat("bench/hosts: over two hosts, steps of ", flags.millions,
                             " Mi elements, bf16_sr weights, bf16 gradients, mesh fsdp=2, a slot on each; and groups"));
  if (!flags.links) RETURN_IF_ERROR(AddStepRows(flags, program, namespaces, report));
  RETURN_IF_ERROR(AddLinkRows(namespaces, int64_t{flags.mebibytes} << 20, flags.rounds, report));
  report.Note(
      "Verified first: the digest of weights and states after three steps is that of one host; every byte of every "
      "group.\nSteps cross over TLS. Processor seconds are of both processes, with what the kernel does for them.");
  report.Note(absl::StrCat(flags.rounds, " rounds. All processes share the machine's cores: ", MachineNow(), "."));
  return report.Publish(flags.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/hosts: the step of a job on two hosts (network namespaces, a worker and a slot on each) against raw TCP\n"
      "streams of the same bytes between them, and the groups that carry them over links of several speeds. Checks "
      "the\n"
      "digest, and every byte of the groups, first. Needs root."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "16 Mi elements: under a minute on two cores", flags);
  app.add_option("--millions", flags.millions, "Mi elements of the model, a multiple of 8")
      ->capture_default_str()
      ->check(CLI::Range(8, 1024));
  app.add_option("--limit", flags.limit_mb, "of the limited link each way, in 10^6 bytes a second")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  app.add_option("--mebibytes", flags.mebibytes, "MiB that each rank of a group sends over each link")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_flag("--links", flags.links, "the groups over links of several speeds alone, without steps");
  app.add_option("--host", flags.host)->group("");
  app.add_option("--num-hosts", flags.num_hosts)->group("");
  app.add_option("--folder", flags.folder)->group("");
  app.footer("Example:\n  bazel run -c opt //bench:hosts -- --quick --json $PWD/hosts.json");
  CLI11_PARSE(app, argc, argv);
  if (flags.host >= 0) return shardmesh::bench::Serve(flags);
  if (flags.quick) flags.millions = 16;
  if (flags.quick) flags.mebibytes = 8;
  return shardmesh::bench::ExitStatus("hosts", shardmesh::bench::RunHosts(flags, argv[0]));
}
