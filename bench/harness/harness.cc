#include "bench/harness/harness.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

Row RowOf(std::string name, const std::vector<double>& ours, const std::vector<double>& rival, double scale, Goal goal,
          bool ours_on_top) {
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours_on_top ? ours[i] / rival[i] : rival[i] / ours[i]);
  return {std::move(name), SpreadOf(ours).median * scale, SpreadOf(rival).median * scale, SpreadOf(std::move(ratios)),
          goal};
}

}  // namespace

Spread SpreadOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return {values.front(), (values[(n - 1) / 2] + values[n / 2]) / 2, values.back()};
}

bool Goal::MetBy(double ratio) const {
  switch (kind) {
    case kAtLeast:
      return ratio >= value;
    case kAtMost:
      return ratio <= value;
    case kNone:
      break;
  }
  return true;
}

std::string Goal::ToString() const {
  if (kind == kNone) return "";
  return absl::StrCat(kind == kAtLeast ? ">= " : "<= ", value);
}

Row Compare(std::string name, const std::vector<double>& ours, const std::vector<double>& rival, double scale,
            Goal goal) {
  return RowOf(std::move(name), ours, rival, scale, goal, false);
}

Row CompareCost(std::string name, const std::vector<double>& ours, const std::vector<double>& bound, double scale,
                Goal goal) {
  return RowOf(std::move(name), ours, bound, scale, goal, true);
}

void Rounds::Add(std::string name, std::function<absl::StatusOr<double>()> measure) {
  contestants_.push_back({std::move(name), std::move(measure), {}});
}

namespace {

// A bar on standard error, where that is a terminal; it goes when the object does.
class Progress {
 public:
  explicit Progress(int steps) : steps_(steps), shown_(isatty(STDERR_FILENO) == 1) {}
  ~Progress() {
    if (shown_) std::fprintf(stderr, "\r%79s\r", "");
  }
  void Next(const std::string& what) {
    const int filled = kWidth * done_++ / steps_;
    if (shown_) {
      std::fprintf(stderr, "\r[%s%s] %-45.45s", std::string(filled, '#').c_str(),
                   std::string(kWidth - filled, ' ').c_str(), what.c_str());
    }
  }

 private:
  static constexpr int kWidth = 30;
  const int steps_;
  const bool shown_;
  int done_ = 0;
};

}  // namespace

absl::Status Rounds::Measure(int warm_ups, int rounds) {
  Progress progress((warm_ups + rounds) * static_cast<int>(contestants_.size()));
  for (int round = -warm_ups; round < rounds; ++round) {
    for (Contestant& contestant : contestants_) {
      progress.Next(contestant.name);
      absl::StatusOr<double> seconds = contestant.measure();
      if (!seconds.ok()) return Annotate(seconds.status(), contestant.name);
      if (round >= 0) contestant.seconds.push_back(*seconds);
    }
  }
  return absl::OkStatus();
}

const std::vector<double>& Rounds::seconds(const std::string& name) const {
  const auto it =
      std::find_if(contestants_.begin(), contestants_.end(), [&](const Contestant& c) { return c.name == name; });
  return it->seconds;
}

void Report::Print(std::FILE* out) const {
  size_t width = 0;
  for (const Row& row : rows_) width = std::max(width, row.name.size());
  absl::FPrintF(out, "%s\n%-*s  %9s  %9s  %7s  %15s  %7s  %s\n", title_, width, "", "ours", "other", "ratio",
                "min - max", "goal", "met");
  for (const Row& row : rows_) {
    if (!row.missing.empty()) {
      absl::FPrintF(out, "%-*s  not measured: %s\n", width, row.name, row.missing);
      continue;
    }
    absl::FPrintF(out, "%-*s  %9.2f  %9.2f  %7.2f  %6.2f - %6.2f  %7s  %s\n", width, row.name, row.ours, row.rival,
                  row.ratio.median, row.ratio.min, row.ratio.max, row.goal.ToString(),
                  row.goal.kind == Goal::kNone       ? ""
                  : row.goal.MetBy(row.ratio.median) ? "yes"
                                                     : "NO");
  }
  for (const std::string& note : notes_) absl::FPrintF(out, "%s\n", note);
  std::fflush(out);
}

std::string Report::ToJson() const {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Row& row : rows_) {
    nlohmann::ordered_json json = {{"name", row.name},          {"ours", row.ours},     {"rival", row.rival},
                                   {"ratio", row.ratio.median}, {"min", row.ratio.min}, {"max", row.ratio.max}};
    if (row.goal.kind == Goal::kNone) {
      json["goal"] = nullptr;
    } else {
      json["goal"] = row.goal.ToString();
    }
    json["met"] = row.goal.MetBy(row.ratio.median);
    if (!row.missing.empty()) {
      for (const char* figure : {"ours", "rival", "ratio", "min", "max", "met"}) json[figure] = nullptr;
      json["missing"] = row.missing;
    }
    rows.push_back(std::move(json));
  }
  return rows.dump(2) + "\n";
}

absl::Status Report::WriteJson(const std::string& path) const {
  std::ofstream file(path);
  file << ToJson();
  file.flush();
  if (file.good()) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("cannot write ", path));
}

absl::Status Report::Publish(const std::string& path) const {
  Print(stdout);
  return path.empty() ? absl::OkStatus() : WriteJson(path);
}

double MonotonicSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double ProcessorSeconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

std::string MachineNow() {
  double load[3] = {0, 0, 0};
  if (getloadavg(load, 3) != 3) load[0] = load[1] = load[2] = 0;
  return absl::StrFormat("%d cores, load %.2f %.2f %.2f", sysconf(_SC_NPROCESSORS_ONLN), load[0], load[1], load[2]);
}

void PinTo(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core % static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)), &set);
  sched_setaffinity(0, sizeof(set), &set);  // a wish: without it the figures spread more
}

}  // namespace shardmesh::bench
