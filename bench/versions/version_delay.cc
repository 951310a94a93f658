#include <algorithm>
#include <map>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "bench/harness/process.h"
#include "bench/versions/counting_job.h"
#include "bench/versions/version_rounds.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr absl::Duration kPace = absl::Milliseconds(2);
constexpr double kGoal = 1e-3;  // seconds

// In the order of the steps, and by their reader.
struct Delays {
  std::vector<double> after_commit, after_call;  // of the trainer's call of Step
  int passed_over = 0;                           // versions that were not taken, since a newer one was there
};

struct Percentiles {
  std::vector<double> median, p99;  // by round
  void Add(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    median.push_back(values[values.size() / 2]);
    p99.push_back(values[values.size() * 99 / 100]);
  }
};

absl::StatusOr<std::map<int64_t, double>> ParseTimes(const std::string& line) {
  std::map<int64_t, double> times;
  for (const absl::string_view word : absl::StrSplit(line, ' ', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> pair = absl::StrSplit(word, ':');
    int64_t step = 0;
    double seconds = 0;
    if (!absl::SimpleAtoi(pair.first, &step) || !absl::SimpleAtod(pair.second, &seconds)) {
      return absl::InternalError(absl::StrCat("a reader answered \"", line, "\""));
    }
    times[step] = seconds;
  }
  return times;
}

absl::StatusOr<Delays> Watch(CountingJob& job, Process& reader, int steps) {
  const int64_t first = job.step() + 1;
  RETURN_IF_ERROR(reader.WriteLine(absl::StrCat("watch ", first, " ", first + steps - 1)));
  RETURN_IF_ERROR(reader.ReadLine(kPatience).status());
  std::vector<double> called, committed;
  for (int i = 0; i < steps; ++i) {
    absl::SleepFor(kPace);
    called.push_back(MonotonicSeconds());
    RETURN_IF_ERROR(job.Step().status());
    committed.push_back(MonotonicSeconds());
  }
  ASSIGN_OR_RETURN(const std::string answer, reader.ReadLine(kPatience));
  ASSIGN_OR_RETURN(const auto times, ParseTimes(answer));
  Delays delays;
  for (int i = 0; i < steps; ++i) {
    const auto seen = times.lower_bound(first + i);
    if (seen == times.end()) return absl::InternalError("a reader did not see the last version");
    delays.after_commit.push_back(seen->second - committed[i]);
    delays.after_call.push_back(seen->second - called[i]);
    delays.passed_over += seen->first != first + i;
  }
  return delays;
}

}  // namespace

absl::Status AddCommitToVisible(Service& service, const VersionRounds& rounds, Report& report) {
  // The trainer looks for the commit without sleeping, so that its time is the commit's.
  ClientOptions options;
  options.spin = absl::Seconds(1);
  ASSIGN_OR_RETURN(Client client, Client::Connect(service.address(), std::move(options)));
  ASSIGN_OR_RETURN(const std::unique_ptr<CountingJob> job, CountingJob::Start(std::move(client), 1, 3));
  std::map<std::string, Percentiles> after_commit, after_call;
  std::map<std::string, int> passed_over;
  std::map<std::string, std::unique_ptr<Process>> readers;
  for (int round = -1; round < rounds.rounds; ++round) {
    for (const std::string way : {"attached", "pulled"}) {
      ASSIGN_OR_RETURN(
          const std::unique_ptr<Process> reader,
          Process::Start({ProgramPath("bench/versions/version_reader"), service.address(), CountingJob::kName, way},
                         Process::kEveryCore));
      ASSIGN_OR_RETURN(const Delays delays, Watch(*job, *reader, rounds.steps));
      if (round < 0) continue;
      after_commit[way].Add(delays.after_commit);
      after_call[way].Add(delays.after_call);
      passed_over[way] += delays.passed_over;
    }
  }
  const std::vector<double> goal(rounds.rounds, kGoal);
  report.Add(CompareCost("commit to visible, p99, attached, ms, times 1 ms", after_commit["attached"].p99, goal, 1e3,
                         Goal::AtMost(1)));
  report.Add(CompareCost("commit to visible, p99, pulled, ms, times 1 ms", after_commit["pulled"].p99, goal, 1e3));
  report.Add(Compare("Step called to visible, median, us: attached against pulled", after_call["attached"].median,
                     after_call["pulled"].median, 1e6));
  report.Note(
      absl::StrCat("Commit to visible: 1 MiB, steps 2 ms apart, ", rounds.steps,
                   " a round; negative where the reader saw the version before the trainer heard of the commit. ",
                   "Passed over, since a newer one was there: ", passed_over["attached"], " attached, ",
                   passed_over["pulled"], " pulled."));
  return absl::OkStatus();
}

}  // namespace shardmesh::bench
