// bench/host_loss: how long a job is away that loses a host: from kill -9 of a node and all of its workers until the
// other hosts have done a step, of a job whose mesh has replicas and of one with copies=2. Needs root.
//
//   bazel run -c opt //bench:host_loss -- --quick
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "bench/collectives/host_groups_job.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/step_formats.h"
#include "bench/moves/host_fleet.h"
#include "bench/moves/host_trainer.h"
#include "client/cpp/client.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/format/numeric_formats.h"
#include "core/job/plan.h"
#include "core/mesh/mesh_spec.h"
#include "core/mesh/reform.h"

namespace shardmesh::bench {
namespace {

constexpr double kLimit = 2;  // seconds beyond the bytes' own time
constexpr absl::Duration kPatience = absl::Seconds(60), kLook = absl::Milliseconds(10);
constexpr int64_t kStepsBefore = 5, kStepsAfter = 3;
constexpr char kProgram[] = "bench/moves/host_loss";
constexpr int kHosts = 3, kTrainers = 2, kExchanges = 5;
constexpr double kGoldenRatio = 0.618;

struct Flags : CommonFlags {
  int mebi_elements = 16;
  double timeout = 3;     // the coordinator's own; seconds of silence after which a worker is lost
  double rest_ms = 50;    // between steps
  HostTraining training;  // of the processes that this one starts
};

struct Kind {
  const char* name;
  const char* mesh;
  int copies;
};
// By place in HostLossBench::lost_.
constexpr Kind kKinds[] = {{"replicas", "ddp=3,fsdp=2", 1}, {"copies", "fsdp=6", 2}};

JobSpec SpecOf(const Flags& flags, const std::string& name, const std::string& mesh, int copies) {
  JobSpec spec;
  spec.name = name;
  spec.mesh = ParseMeshSpec(mesh).value();
  spec.num_slots = kTrainers;
  spec.gradient_format = Format::kBf16;
  spec.copies = copies;
  for (int i = 0; i < flags.mebi_elements; ++i) {
    spec.parameters.push_back(
        {absl::StrCat("layers.", i), {kLayerElements}, WeightFormat::kBf16Sr, "", StateFormat::kDyn8});
  }
  return spec;
}

absl::StatusOr<std::shared_ptr<Job>> Create(Client& client, const JobSpec& spec) {
  ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client.CreateJob(spec));
  std::vector<float> weights(kLayerElements);
  for (int64_t i = 0; i < kLayerElements; ++i) weights[i] = StartWeight(static_cast<uint32_t>(i));
  std::map<std::string, std::vector<float>> all;
  for (const ParameterSpec& parameter : spec.parameters) all[parameter.name] = weights;
  RETURN_IF_ERROR(job->Initialize(all, kPatience));
  return job;
}

using Trainers = std::vector<std::unique_ptr<HostTrainer>>;

// Which of `parts` equal parts of a job's weights and states each host has, by its id.
using Parts = std::map<std::string, std::set<int64_t>>;

void AddShard(const Job& job, int rank, const std::string& host, int64_t parts, Parts& held) {
  const int64_t each = parts / job.plan().num_shards(), first = each * job.plan().PlaceOf(Rank(rank)).shard;
  for (int64_t part = first; part < first + each; ++part) held[host].insert(part);
}

std::string HostOf(const Job& job, int64_t rank) { return job.members()[rank].host_id(); }

// Of all shards once: weights and states as they are stored.
double ShardBytes(const Plan& plan) {
  double bytes = 0;
  for (const Bucket& bucket : plan.buckets()) {
    const StoredLayout weights = LayoutOf(bucket.weights, bucket.row_elements), state = LayoutOf(bucket.states);
    const int64_t n = bucket.num_elements;
    bytes += static_cast<double>(weights.codes.BytesOf(n) + weights.extra.BytesOf(n) +
                                 bucket.num_states * (state.codes.BytesOf(n) + state.extra.BytesOf(n)));
  }
  return bytes;
}

// What the host that gets most has to get from the others: the parts of weights and states that its members hold after
// the loss and that it did not have before, and the weights of all other parts for its window.
double BytesToMove(const Job& before, const Job& after) {
  const int64_t parts = std::lcm(int64_t{before.plan().num_shards()}, int64_t{after.plan().num_shards()});
  const int ranks = before.plan().num_ranks();
  Parts had, needed;
  for (int rank = 0; rank < ranks; ++rank) {
    AddShard(before, rank, HostOf(before, rank), parts, had);
    if (before.spec().copies < 2) continue;
    AddShard(before, rank, HostOf(before, CopyKeeper(rank, ranks, kHosts)), parts, had);
  }
  for (int rank = 0; rank < after.plan().num_ranks(); ++rank) {
    AddShard(after, rank, HostOf(after, rank), parts, needed);
  }
  double most = 0;
  for (const auto& [host, of_host] : needed) {
    const auto missing = std::count_if(of_host.begin(), of_host.end(),
                                       [&, &there = had[host]](int64_t part) { return there.count(part) == 0; });
    const double shards = ShardBytes(after.plan()) * static_cast<double>(missing);
    const double window =
        static_cast<double>(after.plan().window_bytes() * (parts - static_cast<int64_t>(of_host.size())));
    most = std::max(most, (shards + window) / static_cast<double>(parts));
  }
  return most;
}

class HostLossBench {
 public:
  explicit HostLossBench(const Flags& flags) : flags_(flags) {}

  absl::Status Run() {
    HostFleetOptions options;
    options.hosts = kHosts;
    options.heartbeat_timeout = absl::Seconds(flags_.timeout);
    ASSIGN_OR_RETURN(fleet_, HostFleet::Create(options));
    RETURN_IF_ERROR(MeasureLink());
    RETURN_IF_ERROR(fleet_->Start());
    ASSIGN_OR_RETURN(Client client, fleet_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    for (int round = 0; round < flags_.rounds; ++round) {
      for (size_t kind = 0; kind < std::size(kKinds); ++kind) {
        Show(absl::StrFormat("round %d of %d: a host is lost, %s", round + 1, flags_.rounds, kKinds[kind].name));
        RETURN_IF_ERROR(Annotate(Round(round, kKinds[kind], lost_[kind]), kKinds[kind].name));
      }
    }
    Show("the same steps without a loss");
    RETURN_IF_ERROR(VerifyDigests());
    Show("");
    return Publish();
  }

 private:
  // Of losses of one kind, by round.
  struct Lost {
    std::vector<double> next, further, goal, steps_back;
    double bytes = 0;  // of the bytes' own time, at most
    std::string mesh;  // after it
  };
  struct Digest {
    std::string what;
    int64_t step = 0;
    uint64_t digest = 0;
  };

  static void Show(const std::string& what) {
    if (isatty(STDERR_FILENO) == 1) std::fprintf(stderr, "\r%-79.79s%s", what.c_str(), what.empty() ? "\r" : "");
  }

  // Both ways at once, in the clear. Before this process has threads.
  absl::Status MeasureLink() {
    Show("the link between two hosts");
    const int64_t bytes = int64_t{32} << 20;
    ASSIGN_OR_RETURN(const auto link, HostGroupsJob::Create(bytes, {fleet_->name(0), fleet_->address(0)},
                                                            {fleet_->name(1), fleet_->address(1)}));
    RETURN_IF_ERROR(link->Run(HostGroupsJob::kCheck, HostWay::kRaw).status());
    std::vector<double> seconds;
    for (int i = 0; i < kExchanges; ++i) {
      ASSIGN_OR_RETURN(const double once, link->Run(HostGroupsJob::kBulk, HostWay::kRaw));
      seconds.push_back(once);
    }
    link_speed_ = static_cast<double>(bytes) / SpreadOf(seconds).median;
    return absl::OkStatus();
  }

  absl::StatusOr<v1::JobDescription> Describe(const std::string& job) {
    v1::DescribeJobRequest request;
    request.set_job(job);
    return client_->coordinator().DescribeJob(request, kPatience);
  }
  absl::Status AwaitCopies(const Job& job) {
    for (const absl::Time until = MonotonicNow() + kPatience; MonotonicNow() < until; absl::SleepFor(kLook)) {
      ASSIGN_OR_RETURN(const v1::JobDescription now, Describe(job.spec().name));
      if (now.has_copied() && now.copied().step() > 0) return absl::OkStatus();
    }
    return absl::DeadlineExceededError("no step got to two hosts");
  }
  // Waits until the job has another epoch; the newest step of this one that the coordinator knew to be on two hosts.
  absl::StatusOr<v1::StoredCheckpoint> NewestCopied(const Job& job) {
    v1::StoredCheckpoint newest;
    newest.set_step(-1);
    for (const absl::Time until = MonotonicNow() + kPatience; MonotonicNow() < until; absl::SleepFor(kLook)) {
      ASSIGN_OR_RETURN(const v1::JobDescription now, Describe(job.spec().name));
      if (now.epoch() != job.epoch().value()) return newest;
      if (now.has_copied() && now.copied().step() > newest.step()) newest = now.copied();
    }
    return absl::DeadlineExceededError("the job did not get another epoch");
  }

  absl::StatusOr<Trainers> StartTrainers(const std::string& job, int lost) {
    Trainers trainers;
    for (int t = 0; t < kTrainers; ++t) {
      ASSIGN_OR_RETURN(std::unique_ptr<HostTrainer> trainer,
                       HostTrainer::Start(*fleet_, (lost + 1 + t) % kHosts, kProgram,
                                          {job, {t}, flags_.mebi_elements, flags_.rest_ms}));
      trainers.push_back(std::move(trainer));
    }
    for (const auto& trainer : trainers) RETURN_IF_ERROR(trainer->AwaitStep(-1, kStepsBefore));
    return trainers;
  }

  // The host comes back, and the job goes, once the trainers have done some steps without it.
  absl::Status Round(int round, const Kind& kind, Lost& lost) {
    const int host = round % kHosts;
    const std::string name = absl::StrCat("host-loss-", kind.name, "-", round);
    ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, Create(*client_, SpecOf(flags_, name, kind.mesh, kind.copies)));
    ASSIGN_OR_RETURN(Trainers trainers, StartTrainers(name, host));
    if (kind.copies > 1) RETURN_IF_ERROR(AwaitCopies(*job));
    double whole;  // copies are made about once in a second: at another moment of it in each round
    absl::SleepFor(absl::Seconds(std::modf(round * kGoldenRatio, &whole)));
    ASSIGN_OR_RETURN(const double killed, fleet_->KillHost(host));
    std::optional<v1::StoredCheckpoint> copied;
    if (kind.copies > 1) {
      ASSIGN_OR_RETURN(copied, NewestCopied(*job));
      digests_.push_back({"what the job went back to", copied->step(), copied->digest()});
    }
    RETURN_IF_ERROR(NoteTimes(*job, trainers, killed, copied, lost));
    trainers.clear();
    ASSIGN_OR_RETURN(const std::shared_ptr<Job> after, client_->OpenJob(name));
    ASSIGN_OR_RETURN(const v1::DigestReply digest, after->Digest(kPatience));
    digests_.push_back({"the job after the loss", digest.step(), digest.digest()});
    const double bytes = BytesToMove(*job, *after);
    lost.bytes = std::max(lost.bytes, bytes);
    lost.goal.push_back(kLimit + bytes / link_speed_);
    lost.mesh = after->spec().mesh.ToString();
    RETURN_IF_ERROR(client_->DeleteJob(name, after->uid()));
    return fleet_->StartHost(host);
  }

  // Until all trainers are some steps beyond the newest one that one was told of.
  absl::Status NoteTimes(const Job& job, const Trainers& trainers, double killed,
                         const std::optional<v1::StoredCheckpoint>& copied, Lost& lost) {
    const int64_t epoch = job.epoch().value();
    for (const auto& trainer : trainers) RETURN_IF_ERROR(trainer->AwaitStep(epoch, 0));
    int64_t newest = 0;
    for (const auto& trainer : trainers) {
      for (const HostTrainer::Done& done : trainer->done()) {
        if (done.epoch <= epoch) newest = std::max(newest, done.step);
      }
    }
    for (const auto& trainer : trainers) {
      RETURN_IF_ERROR(trainer->AwaitStep(epoch, newest + kStepsAfter));
      RETURN_IF_ERROR(CheckOpened(*trainer, epoch, newest, copied));
    }
    double next = HUGE_VAL, further = HUGE_VAL;
    for (const auto& trainer : trainers) {
      for (const HostTrainer::Done& done : trainer->done()) {
        if (done.epoch <= epoch) continue;
        next = std::min(next, done.at - killed);
        if (done.step > newest) further = std::min(further, done.at - killed);
      }
    }
    lost.next.push_back(next);
    lost.further.push_back(further);
    lost.steps_back.push_back(copied.has_value() ? static_cast<double>(newest - copied->step()) : 0);
    return absl::OkStatus();
  }

  // A trainer attached again at what the job may be at: every step that a trainer was told of, or the newest copies.
  static absl::Status CheckOpened(const HostTrainer& trainer, int64_t epoch, int64_t newest,
                                  const std::optional<v1::StoredCheckpoint>& copied) {
    for (const HostTrainer::Opened& opened : trainer.opened()) {
      if (opened.epoch <= epoch) continue;
      if (copied.has_value() && opened.back != copied->step()) {
        return absl::InternalError(absl::StrCat("verifying: the job went back to step ", opened.back, "; step ",
                                                copied->step(), " is the newest that was on two hosts"));
      }
      if (!copied.has_value() && (opened.back >= 0 || opened.committed < newest)) {
        return absl::InternalError(absl::StrCat("verifying: a trainer was told of step ", newest,
                                                "; the job continued at step ", opened.committed));
      }
      return absl::OkStatus();
    }
    return absl::InternalError("verifying: a trainer did not attach again");
  }

  // All are those of a job that nothing happened to.
  absl::Status VerifyDigests() {
    int64_t last = 0;
    for (const Digest& digest : digests_) last = std::max(last, digest.step);
    const std::string name = "host-loss-none";
    RETURN_IF_ERROR(Create(*client_, SpecOf(flags_, name, "fsdp=6", 1)).status());
    ASSIGN_OR_RETURN(const auto trainer,
                     HostTrainer::Start(*fleet_, 0, kProgram, {name, {0, 1}, flags_.mebi_elements, 0, last}));
    RETURN_IF_ERROR(trainer->AwaitDigest(last));
    for (const Digest& digest : digests_) {
      const auto expected = trainer->digests().find(digest.step);
      if (expected != trainer->digests().end() && expected->second == digest.digest) continue;
      return absl::InternalError(absl::StrCat("verifying: ", digest.what, " has other bits at step ", digest.step,
                                              " than a job without a loss"));
    }
    return absl::OkStatus();
  }

  absl::Status Publish() const {
    const Lost &replicas = lost_[0], &copies = lost_[1];
    Report report(
        absl::StrFormat("bench/host_loss: a job of %d Mi elements on three hosts of two workers, one of which "
                        "is killed; heartbeat time-out %g s",
                        flags_.mebi_elements, flags_.timeout));
    const std::string against = ": until the next step, against 2 s and the bytes' own time, s";
    report.Add(CompareCost("host lost, replicas" + against, replicas.next, replicas.goal, 1, Goal::AtMost(1)));
    report.Add(CompareCost("host lost, copies=2" + against, copies.next, copies.goal, 1, Goal::AtMost(1)));
    report.Add(CompareCost("host lost, copies=2: until a step that was not done before, against the same, s",
                           copies.further, copies.goal, 1));
    report.Add(CompareCost("host lost, copies=2: steps that the job went back, times one", copies.steps_back,
                           std::vector<double>(copies.steps_back.size(), 1), 1));
    report.Note(absl::StrFormat(
        "Verified in each round: the digest after the loss, and that of the copies, are those of a job "
        "without a loss at\nthe same step. With replicas the job continued at every step that a "
        "trainer was told of. With copies=2 it\ncontinued at the newest step that was on two hosts.\n"
        "Times are from kill -9 of the host's node and workers to the end of a step, with %g ms between "
        "steps.\nMeshes: %s, then %s; %s, then %s. The trainers are on the hosts that are left.",
        flags_.rest_ms, kKinds[0].mesh, replicas.mesh, kKinds[1].mesh, copies.mesh));
    report.Note(absl::StrFormat(
        "The bytes' own time: what one host has to get from the others (%.1f MiB; copies=2: %.1f MiB), at the %.0f "
        "MB/s "
        "of\nraw TCP between two hosts. bf16_sr weights, two dyn8 states, two slots. %d rounds, the hosts in turn. All "
        "hosts\nshare the machine's cores: %s.",
        replicas.bytes / (1 << 20), copies.bytes / (1 << 20), link_speed_ / 1e6, flags_.rounds, MachineNow()));
    return report.Publish(flags_.json);
  }

  const Flags flags_;
  std::unique_ptr<HostFleet> fleet_;
  std::unique_ptr<Client> client_;
  double link_speed_ = 0;  // bytes in a second, each way
  Lost lost_[std::size(kKinds)];
  std::vector<Digest> digests_;  // to be compared
};

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/host_loss: how long a job is away that loses one of its three hosts (network namespaces, a node and two\n"
      "workers on each): from kill -9 of the host until the others have done a step. Measures a job whose mesh has\n"
      "replicas, and one with copies=2. Checks the digests of both against a job without a loss. Needs root."};
  shardmesh::bench::Flags flags;
  flags.rounds = 5;
  shardmesh::bench::AddCommonFlags(app, "2 rounds of 4 Mi elements: under a minute on two cores", flags);
  app.add_option("--mebi-elements", flags.mebi_elements, "Mi elements of the model")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("--timeout", flags.timeout, "seconds of silence after which the coordinator counts a worker as lost")
      ->capture_default_str()
      ->check(CLI::Range(0.2, 60.0));
  app.add_option("--rest", flags.rest_ms, "between steps, in ms: the model's own work")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 10000.0));
  shardmesh::bench::AddHostTrainingFlags(app, flags.training);
  app.footer(
      "Examples:\n"
      "  bazel run -c opt //bench:host_loss -- --quick                            under a minute\n"
      "  bazel run -c opt //bench:host_loss -- --json $PWD/host_loss.json         two minutes\n"
      "  bazel run -c opt //bench:host_loss -- --timeout 5                        as a fleet on a slow network has it");
  CLI11_PARSE(app, argc, argv);
  if (!flags.training.slots.empty()) return shardmesh::bench::TrainOnHost(flags.training);
  if (flags.quick) {
    flags.mebi_elements = 4;
    flags.rounds = 2;
  }
  return shardmesh::bench::ExitStatus("host_loss", shardmesh::bench::HostLossBench(flags).Run());
}
