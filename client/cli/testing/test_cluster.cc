#include "client/cli/testing/test_cluster.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cpp/session.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh {

std::string Contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

bool Eventually(const std::function<bool()>& condition) {
  const absl::Time deadline = MonotonicNow() + kLong;
  while (!condition()) {
    if (MonotonicNow() > deadline) return false;
    poll(nullptr, 0, 20);
  }
  return true;
}

Watched::Watched(pid_t pid) : pid_(pid), fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}

bool Watched::EndsSoon() const {
  pollfd ended = {fd_.get(), POLLIN, 0};
  return fd_.valid() && poll(&ended, 1, static_cast<int>(absl::ToInt64Milliseconds(kLong))) == 1;
}

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Start(const std::string& name, std::vector<std::string> args) {
  std::unique_ptr<Cluster> cluster(new Cluster);
  cluster->output_ = absl::StrCat(::testing::TempDir(), "/", name, ".out");
  args.insert(args.begin(), {"up", "--listen", "127.0.0.1:0", "--bin-dir", ".", "--log-dir",
                             absl::StrCat(::testing::TempDir(), "/", name, "-logs")});
  ASSIGN_OR_RETURN(cluster->up_, ChildProcess::Start({"up", "client/cli/shardctl", args, cluster->output_}));
  if (!cluster->Prints("ready ")) return absl::DeadlineExceededError(cluster->output());
  for (const absl::string_view line : absl::StrSplit(cluster->output(), '\n')) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    int pid = 0;
    if (words[0] == "ready") cluster->address_ = words[1];
    if (words[0] == "started" && absl::SimpleAtoi(words[3], &pid)) cluster->processes_.emplace_back(pid);
  }
  return cluster;
}

bool Cluster::Prints(const std::string& text) const {
  return Eventually([&] { return absl::StrContains(output(), text) || up_->Ended().has_value(); }) &&
         absl::StrContains(output(), text);
}

bool Cluster::AllEndSoon() const {
  bool all = true;
  for (const Watched& process : processes_) all = process.EndsSoon() && all;
  return all;
}

// "started NAME pid PID".
pid_t Cluster::PidOf(const std::string& name) const {
  int pid = 0;
  for (const absl::string_view line : absl::StrSplit(output(), '\n')) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (words.size() == 4 && words[0] == "started" && words[1] == name) (void)absl::SimpleAtoi(words[3], &pid);
  }
  return pid;
}

JobSpec TinyJob(const std::string& name) {
  JobSpec spec;
  spec.name = name;
  spec.parameters = {{"embed", {10, 8}, WeightFormat::kFp32, ""},
                     {"head", {10, 8}, WeightFormat::kFp32, "embed"},
                     {"norm", {7}, WeightFormat::kBf16, ""},
                     {"w", {3, 5}, WeightFormat::kBf16Sr, ""}};
  spec.optimizer.lr = 0.01;
  return spec;
}

absl::StatusOr<std::shared_ptr<Job>> Train(const std::string& coordinator, const JobSpec& spec) {
  ASSIGN_OR_RETURN(Client client, Client::Connect(coordinator));
  ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client.CreateJob(spec));
  RETURN_IF_ERROR(job->Initialize({{"embed", std::vector<float>(80, 1.0f)},
                                   {"norm", std::vector<float>(7, -2.0f)},
                                   {"w", std::vector<float>(15, 0.5f)}},
                                  kLong));
  ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, job->Connect({Slot(0)}));
  RETURN_IF_ERROR(session->AwaitWeights(kLong));
  StepOptions options;
  options.timeout = kLong;
  for (int step = 0; step < 2; ++step) RETURN_IF_ERROR(session->Step(options).status());
  return job;
}

}  // namespace shardmesh
