// What every benchmark shares: contestants measured in turns inside one run, ratios with their spread, an aligned
// table, and the same rows as JSON.
//
// A machine's speed drifts by tens of percent within minutes (other tenants, page placement), so times of different
// runs are not compared here: every round measures all contestants, one after the other, and a row's figure is the
// median of the rounds' ratios. Not thread-safe.
//
//   Rounds rounds;
//   rounds.Add("memcpy", [&] { return SecondsOf([&] { std::memcpy(to, from, n); }); });
//   rounds.Add("ours", ...);
//   rounds.Measure(/*warm_ups=*/1, /*rounds=*/9);
//   Report report("copying");
//   report.Add(Compare("copy of 1 GiB, ms", rounds.seconds("ours"), rounds.seconds("memcpy"), 1e3,
//   Goal::AtLeast(0.85))); report.Print(stdout);
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardmesh::bench {

struct Spread {
  double min = 0, median = 0, max = 0;
};

// Of an even number of values the median is the mean of the middle two. REQUIRES: `values` is not empty.
Spread SpreadOf(std::vector<double> values);

// What a ratio should be.
struct Goal {
  enum Kind { kNone, kAtLeast, kAtMost } kind = kNone;
  double value = 0;
  static Goal AtLeast(double value) { return {kAtLeast, value}; }
  static Goal AtMost(double value) { return {kAtMost, value}; }
  // Without a goal: true.
  bool MetBy(double ratio) const;
  std::string ToString() const;  // ">= 2", "<= 1.1", ""
};

// One line of a report: the times' medians, and the spread of the ratio over the rounds.
struct Row {
  std::string name;  // says the unit of `ours` and `rival`
  double ours = 0;
  double rival = 0;
  Spread ratio;  // rival / ours (CompareCost: ours / rival)
  Goal goal;
  std::string missing = "";  // why there are no figures; empty: they are there
};

// A row of two contestants' seconds, round by round; `scale` converts seconds to the unit in the name. The ratio is
// rival / ours: how many times faster ours is. REQUIRES: the same, not zero, number of rounds.
Row Compare(std::string name, const std::vector<double>& ours, const std::vector<double>& rival, double scale,
            Goal goal = {});
// The same with the ratio turned round: ours / rival, how much more ours costs than a bound.
Row CompareCost(std::string name, const std::vector<double>& ours, const std::vector<double>& bound, double scale,
                Goal goal = {});

// Contestants, and their seconds by round.
class Rounds {
 public:
  // `measure` runs once and returns its seconds, or an error, which ends Measure.
  void Add(std::string name, std::function<absl::StatusOr<double>()> measure);
  // Each round runs every contestant once, in the order they were added. Warm-up rounds are not kept. Progress is shown
  // on standard error, where that is a terminal.
  absl::Status Measure(int warm_ups, int rounds);
  // REQUIRES: a name that was added.
  const std::vector<double>& seconds(const std::string& name) const;

 private:
  struct Contestant {
    std::string name;
    std::function<absl::StatusOr<double>()> measure;
    std::vector<double> seconds;
  };
  std::vector<Contestant> contestants_;
};

class Report {
 public:
  explicit Report(std::string title) : title_(std::move(title)) {}

  void Add(Row row) { rows_.push_back(std::move(row)); }
  // A line under the table: what was verified, the bound, the machine.
  void Note(std::string note) { notes_.push_back(std::move(note)); }

  void Print(std::FILE* out) const;
  // [{"name", "ours", "rival", "ratio", "min", "max", "goal", "met"}]; goal is null where there is none. A row without
  // figures has null for them and for met, and "missing" says why.
  std::string ToJson() const;
  // PermissionDenied: the file cannot be written.
  absl::Status WriteJson(const std::string& path) const;
  // Prints it, and writes it to `path` if that is not empty. PermissionDenied: as WriteJson.
  absl::Status Publish(const std::string& path) const;

 private:
  const std::string title_;
  std::vector<Row> rows_;
  std::vector<std::string> notes_;
};

double MonotonicSeconds();
// Processor time that this process has used so far, by all of its threads, those that ended among them.
double ProcessorSeconds();

// By one of the clocks above.
template <typename Work>
double SecondsOf(const Work& work, double (*clock)() = MonotonicSeconds) {
  const double start = clock();
  work();
  return clock() - start;
}

// "2 cores, load 0.31 0.40 0.52": processors of this machine and its load averages.
std::string MachineNow();

// Binds this process (and the threads that it makes later) to one core, `core` modulo the number of cores.
void PinTo(int core);

}  // namespace shardmesh::bench
