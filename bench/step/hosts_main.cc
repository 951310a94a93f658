// bench/hosts: the step of a job whose two workers are on two hosts, as network namespaces, against raw TCP streams of
// the same bytes between them in the same run. Needs root.
//
//   bazel run -c opt //bench:hosts -- --quick --json hosts.json
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/process.h"
#include "bench/harness/service.h"
#include "bench/step/hosts_job.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(120);
constexpr double kOfStream = 0.8, kOfLimited = 0.9;  // goals
constexpr const char* kAddresses[] = {"10.213.78.1", "10.213.78.2"};

struct Flags : CommonFlags {
  int millions = 64;   // 2^20 elements
  int limit_mb = 100;  // 10^6 bytes a second
  // Of the processes that this one starts.
  int host = -1;
  int num_hosts = 2;
  std::string folder;
};

// Two namespaces joined by a pair of virtual interfaces; they go with the object.
class Namespaces {
 public:
  absl::Status Create() {
    if (geteuid() != 0) return absl::PermissionDeniedError("only root may make network namespaces");
    for (int h : {0, 1}) RETURN_IF_ERROR(Run(absl::StrCat("netns add ", name(h))));
    RETURN_IF_ERROR(Run(absl::StrCat("-n ", name(0), " link add veth0 type veth peer name veth0 netns ", name(1))));
    for (int h : {0, 1}) {
      RETURN_IF_ERROR(Run(absl::StrCat("-n ", name(h), " link set lo up")));
      RETURN_IF_ERROR(Run(absl::StrCat("-n ", name(h), " addr add ", kAddresses[h], "/24 dev veth0")));
      RETURN_IF_ERROR(Run(absl::StrCat("-n ", name(h), " link set veth0 up")));
    }
    return absl::OkStatus();
  }
  ~Namespaces() {
    for (int h : {0, 1}) Run(absl::StrCat("netns del ", name(h))).IgnoreError();
  }
  // From now on the link carries so much each way, all connections together.
  absl::Status Limit(int megabytes) {
    for (int h : {0, 1}) {
      RETURN_IF_ERROR(Run(absl::StrCat("netns exec ", name(h), " tc qdisc replace dev veth0 root tbf rate ",
                                       8 * megabytes, "mbit burst 512kb latency 10ms")));
    }
    return absl::OkStatus();
  }
  static std::string name(int host) { return absl::StrCat("shardmesh-bench-", getpid(), "-", host); }

 private:
  static absl::Status Run(const std::string& arguments) {
    if (std::system(absl::StrCat("ip ", arguments, " 2>/dev/null").c_str()) == 0) return absl::OkStatus();
    return absl::PermissionDeniedError(absl::StrCat("`ip ", arguments, "` failed"));
  }
};

// A process that is one host, or (num_hosts 1) all of the job. It answers each line with one.
int Serve(const Flags& flags) {
  const std::string address = kAddresses[flags.host];
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
  absl::Status Start(const Flags& flags, const std::string& program) {
    ASSIGN_OR_RETURN(folder_, Folder::Make());
    for (int h : {0, 1}) {
      ASSIGN_OR_RETURN(hosts_[h], StartHost(flags, program, h, 2, folder_->path()));
    }
    for (auto& host : hosts_) {
      ASSIGN_OR_RETURN(const std::string line, host->ReadLine(kPatience));
      if (!absl::SimpleAtoi(line, &bytes_)) return absl::InternalError(line);
    }
    return absl::OkStatus();
  }
  static absl::StatusOr<std::unique_ptr<Process>> StartHost(const Flags& flags, const std::string& program, int host,
                                                            int num_hosts, const std::string& folder) {
    return Process::Start(
        {"/usr/bin/env", "ip", "netns", "exec", Namespaces::name(host), program, "--host", absl::StrCat(host),
         "--num-hosts", absl::StrCat(num_hosts), "--folder", folder, "--millions", absl::StrCat(flags.millions)},
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

absl::Status RunHosts(const Flags& flags, const std::string& program) {
  Namespaces namespaces;
  RETURN_IF_ERROR(namespaces.Create());
  Pair pair;
  RETURN_IF_ERROR(pair.Start(flags, program));
  ASSIGN_OR_RETURN(const auto alone, Pair::StartHost(flags, program, 0, 1, "unused"));
  RETURN_IF_ERROR(alone->ReadLine(kPatience).status());
  RETURN_IF_ERROR(Verify(pair, *alone));
  std::vector<double> hidden;
  Rounds rounds;
  rounds.Add("step", [&] { return Slower(pair, "step", &hidden); });
  rounds.Add("stream", [&] { return Slower(pair, "stream", nullptr); });
  rounds.Add("one host", [&]() -> absl::StatusOr<double> {
    RETURN_IF_ERROR(alone->WriteLine("step"));
    ASSIGN_OR_RETURN(const std::string answer, alone->ReadLine(kPatience));
    double seconds = 0;
    const std::vector<std::string> words = absl::StrSplit(answer, ' ');
    return absl::SimpleAtod(words[0], &seconds) ? absl::StatusOr<double>(seconds) : absl::InternalError(answer);
  });
  RETURN_IF_ERROR(rounds.Measure(2, flags.rounds));
  Report report(absl::StrCat("bench/hosts: ", flags.millions,
                             " Mi elements, bf16_sr weights, bf16 gradients, mesh fsdp=2 ",
                             "over two hosts, a slot on each"));
  report.Add(Compare("step / raw TCP of its bytes both ways, ms", rounds.seconds("step"), rounds.seconds("stream"), 1e3,
                     Goal::AtLeast(kOfStream)));
  report.Add(CompareCost("step, times that of both workers on one host, ms", rounds.seconds("step"),
                         rounds.seconds("one host"), 1e3));
  const std::string limited = absl::StrCat("step / raw TCP, over a link of ", flags.limit_mb, " MB/s, ms");
  if (const absl::Status limit = namespaces.Limit(flags.limit_mb); limit.ok()) {
    Rounds slow;
    slow.Add("step", [&] { return Slower(pair, "step", nullptr); });
    slow.Add("stream", [&] { return Slower(pair, "stream", nullptr); });
    RETURN_IF_ERROR(slow.Measure(1, flags.rounds));
    report.Add(Compare(limited, slow.seconds("step"), slow.seconds("stream"), 1e3, Goal::AtLeast(kOfLimited)));
  } else {
    Row row{limited, 0, 0, {}, Goal::AtLeast(kOfLimited), "the link cannot be limited here (tc, with tbf)"};
    report.Add(std::move(row));
  }
  const Spread shadow = SpreadOf(hidden);
  report.Note(
      absl::StrFormat("%d MiB each way in a step; hidden behind the stepping of ranges: %.2f of the time in which "
                      "bulk bytes cross (%.2f to %.2f).",
                      pair.bytes() >> 20, shadow.median, shadow.min, shadow.max));
  report.Note("Verified first: the digest of weights and states after three steps is that of one host.");
  report.Note(absl::StrCat(flags.rounds, " rounds. All processes share the machine's cores: ", MachineNow(), "."));
  return report.Publish(flags.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/hosts: the step of a job on two hosts (network namespaces, a worker and a slot on each) against raw TCP\n"
      "streams of the same bytes between them. Checks the digest first. Needs root."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "16 Mi elements: under a minute on two cores", flags);
  app.add_option("--millions", flags.millions, "Mi elements of the model, a multiple of 8")
      ->capture_default_str()
      ->check(CLI::Range(8, 1024));
  app.add_option("--limit", flags.limit_mb, "of the limited link each way, in 10^6 bytes a second")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  app.add_option("--host", flags.host)->group("");
  app.add_option("--num-hosts", flags.num_hosts)->group("");
  app.add_option("--folder", flags.folder)->group("");
  app.footer("Example:\n  bazel run -c opt //bench:hosts -- --quick --json $PWD/hosts.json");
  CLI11_PARSE(app, argc, argv);
  if (flags.host >= 0) return shardmesh::bench::Serve(flags);
  if (flags.quick) flags.millions = 16;
  return shardmesh::bench::ExitStatus("hosts", shardmesh::bench::RunHosts(flags, argv[0]));
}
