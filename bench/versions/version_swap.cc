#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/versions/counting_job.h"
#include "bench/versions/version_rounds.h"
#include "client/cpp/version_reader.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr double kGoal = 1e-3;  // seconds

absl::StatusOr<std::unique_ptr<VersionReader>> Open(Service& service, ReaderOptions::Way way) {
  ReaderOptions options;
  options.way = way;
  return VersionReader::Open(service.client(), CountingJob::kName, options);
}

// Whether the version is the one asked for, by its first and last element.
absl::Status Look(const HeldVersion& version, Step step) {
  ASSIGN_OR_RETURN(const ConstTensorView view, version.parameter("w"));
  const auto* const values = static_cast<const float*>(view.data);
  const auto expected = static_cast<float>(step.value());
  if (values[0] == expected && values[view.num_elements - 1] == expected) return absl::OkStatus();
  return absl::InternalError("verifying: another version than the one that was taken");
}

// From `held` to the version of `next`, looked at; seconds.
absl::StatusOr<double> Swap(VersionReader& reader, HeldVersion& held, Step next) {
  const double begin = MonotonicSeconds();
  ASSIGN_OR_RETURN(held, reader.Take({VersionChoice::kExact, next}, kPatience));
  RETURN_IF_ERROR(Look(held, next));
  return MonotonicSeconds() - begin;
}

// The slowest one in a hundred of `count` swaps.
absl::StatusOr<double> SlowSwap(VersionReader& reader, HeldVersion& held, const std::vector<Step>& steps, int count) {
  std::vector<double> seconds;
  for (int i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(const double swap, Swap(reader, held, steps[i % 2]));
    seconds.push_back(swap);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() * 99 / 100];
}

}  // namespace

absl::Status AddSwap(Service& service, const VersionRounds& rounds, int64_t mebibytes, Report& report) {
  ASSIGN_OR_RETURN(const std::unique_ptr<CountingJob> job, CountingJob::Start(service.client(), mebibytes, 3));
  ASSIGN_OR_RETURN(const std::unique_ptr<VersionReader> attached, Open(service, ReaderOptions::Way::kAttached));
  ASSIGN_OR_RETURN(const std::unique_ptr<VersionReader> pulled, Open(service, ReaderOptions::Way::kPulled));
  std::vector<Step> steps;
  std::vector<HeldVersion> kept;  // so that both stay
  for (int i = 0; i < 2; ++i) {
    RETURN_IF_ERROR(job->Step().status());
    ASSIGN_OR_RETURN(HeldVersion version, attached->Take({}, kPatience));
    ASSIGN_OR_RETURN(const ConstTensorView view, version.parameter("w"));
    RETURN_IF_ERROR(CheckWhole(view, version.step()));
    steps.push_back(version.step());
    kept.push_back(std::move(version));
  }
  HeldVersion mapped, copied;
  Rounds measured;
  measured.Add("attached", [&] { return SlowSwap(*attached, mapped, steps, rounds.steps); });
  int turn = 0;
  measured.Add("pulled", [&] { return Swap(*pulled, copied, steps[turn++ % 2]); });
  RETURN_IF_ERROR(measured.Measure(1, rounds.rounds));
  const std::string size = mebibytes < 1024 ? absl::StrCat(mebibytes, " MiB") : absl::StrCat(mebibytes / 1024, " GiB");
  report.Add(CompareCost(absl::StrCat("swap to a version that is there, p99, ", size, ", us, times 1 ms"),
                         measured.seconds("attached"), std::vector<double>(rounds.rounds, kGoal), 1e6,
                         Goal::AtMost(1)));
  report.Add(Compare(absl::StrCat("the same, ", size, ", us: against a pull"), measured.seconds("attached"),
                     measured.seconds("pulled"), 1e6));
  return absl::OkStatus();
}

}  // namespace shardmesh::bench
