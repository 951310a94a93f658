#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/harness/process.h"
#include "bench/versions/counting_job.h"
#include "bench/versions/version_rounds.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr int kWarmUp = 5;

class Readers {
 public:
  // So many processes that hold the newest version of the job; each has read all of it.
  static absl::StatusOr<Readers> Hold(Service& service, CountingJob& job, int count) {
    Readers readers;
    for (int i = 0; i < count; ++i) {
      ASSIGN_OR_RETURN(std::unique_ptr<Process> reader,
                       Process::Start({ProgramPath("bench/versions/version_reader"), service.address(),
                                       CountingJob::kName, "attached"},
                                      Process::kEveryCore));
      RETURN_IF_ERROR(reader->WriteLine("hold"));
      readers.processes_.push_back(std::move(reader));
    }
    for (const std::unique_ptr<Process>& reader : readers.processes_) {
      ASSIGN_OR_RETURN(const std::string step, reader->ReadLine(kPatience));
      if (step != absl::StrCat(job.step())) {
        return absl::InternalError(absl::StrCat("a reader holds version ", step, ", not ", job.step()));
      }
    }
    return readers;
  }
  double ProcessorSeconds() const {
    double seconds = 0;
    for (const std::unique_ptr<Process>& reader : processes_) seconds += reader->ProcessorSeconds();
    return seconds;
  }

 private:
  std::vector<std::unique_ptr<Process>> processes_;
};

struct Arm {
  double elapsed = 0, processor = 0;  // seconds of a step: the median; the worker's, on average
};

absl::StatusOr<Arm> Steps(Service& service, CountingJob& job, int steps) {
  for (int i = 0; i < kWarmUp; ++i) RETURN_IF_ERROR(job.Step().status());
  const double before = service.WorkerSeconds();
  std::vector<double> seconds;
  for (int i = 0; i < steps; ++i) {
    ASSIGN_OR_RETURN(const double step, job.Step());
    seconds.push_back(step);
  }
  return Arm{SpreadOf(seconds).median, (service.WorkerSeconds() - before) / steps};
}

}  // namespace

absl::Status AddReaders(Service& service, const VersionRounds& rounds, int readers, int64_t mebibytes, Report& report) {
  ASSIGN_OR_RETURN(const std::unique_ptr<CountingJob> job, CountingJob::Start(service.client(), mebibytes, 3));
  std::vector<double> alone, watched, alone_processor, watched_processor;
  double growth = 0, readers_seconds = 0;
  const int steps = std::max(rounds.steps / 10, 5);
  for (int round = 0; round < rounds.rounds; ++round) {
    ASSIGN_OR_RETURN(const Arm without, Steps(service, *job, steps));
    ASSIGN_OR_RETURN(const int64_t before, job->ResidentPublications());
    ASSIGN_OR_RETURN(const Readers holding, Readers::Hold(service, *job, readers));
    const double begin = MonotonicSeconds(), used = holding.ProcessorSeconds();
    ASSIGN_OR_RETURN(const Arm with, Steps(service, *job, steps));
    readers_seconds += (holding.ProcessorSeconds() - used) / (MonotonicSeconds() - begin) / rounds.rounds;
    ASSIGN_OR_RETURN(const int64_t after, job->ResidentPublications());
    growth = std::max(growth, static_cast<double>(after - before));
    alone.push_back(without.elapsed);
    watched.push_back(with.elapsed);
    alone_processor.push_back(without.processor);
    watched_processor.push_back(with.processor);
  }
  const std::string title = absl::StrCat("step of ", mebibytes, " MiB with ", readers, " readers of one version");
  report.Add(CompareCost(title + ", ms, times without", watched, alone, 1e3, Goal::AtMost(1.02)));
  report.Add(CompareCost(title + ", worker's processor ms, times without", watched_processor, alone_processor, 1e3));
  report.Add(CompareCost("publications' memory with them, more than without, MiB, times one version", {growth},
                         {static_cast<double>(job->version_bytes())}, 1.0 / (1 << 20), Goal::AtMost(1)));
  report.Note(absl::StrFormat("All %d readers together used %.4f of a processor while they kept their version.",
                              readers, readers_seconds));
  return absl::OkStatus();
}

}  // namespace shardmesh::bench
