#include "client/cli/top/top_table.h"

#include <ctime>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/base/table.h"

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

constexpr absl::string_view kHomeAndClear = "\x1b[H\x1b[2J";

template <typename T>
Json OrNull(const std::optional<T>& value) {
  return value.has_value() ? Json(*value) : Json();
}

// "2026-01-31T12:00:00Z".
std::string UtcText(absl::Time time) {
  const std::time_t seconds = absl::ToTimeT(time);
  std::tm parts = {};
  char text[64] = "";
  if (gmtime_r(&seconds, &parts) == nullptr || std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts) == 0) {
    return "-";
  }
  return text;
}

std::string Millis(const std::optional<double>& seconds) {
  return seconds.has_value() ? absl::StrFormat("%.3f", 1e3 * *seconds) : "-";
}

std::string Percent(const std::optional<double>& share) {
  return share.has_value() ? absl::StrFormat("%.1f%%", 100 * *share) : "-";
}

std::string StepText(int64_t step) { return step < 0 ? "-" : absl::StrCat(step); }

std::string OrDash(const std::string& text) { return text.empty() ? "-" : text; }

std::string JobRows(const std::vector<JobView>& jobs) {
  Table table(
      {"job", "state", "epoch", "committed", "steps/s", "step ms", "longest ms", "pause ms", "before step", "note"});
  for (const JobView& job : jobs) {
    const std::string rate = job.steps_per_second.has_value() ? absl::StrFormat("%.2f", *job.steps_per_second) : "-";
    table.AddRow({job.name, job.state, absl::StrCat(job.epoch), StepText(job.committed_step), rate,
                  Millis(job.median_period), Millis(job.longest_period), Millis(job.longest_pause),
                  StepText(job.pause_before_step), OrDash(job.note)});
  }
  return table.ToString();
}

std::string WorkerRows(const std::vector<JobView>& jobs) {
  Table table({"job", "worker", "rank", "pid", "device", "transport", "epoch", "busy", "waiting", "restarts",
               "last pause ms", "state"});
  bool any = false;
  for (const JobView& job : jobs) {
    for (const WorkerView& worker : job.workers) {
      any = true;
      const std::string state = !worker.answered ? "no answer" : worker.error.empty() ? "ok" : worker.error;
      table.AddRow({job.name, worker.name, absl::StrCat(worker.rank), absl::StrCat(worker.pid), OrDash(worker.device),
                    OrDash(worker.transport), worker.epoch.has_value() ? absl::StrCat(*worker.epoch) : "-",
                    Percent(worker.busy), Percent(worker.waiting),
                    worker.restarts.has_value() ? absl::StrCat(*worker.restarts) : "-", Millis(worker.last_pause),
                    state});
    }
  }
  return any ? absl::StrCat("\n", table.ToString()) : "";
}

std::string SlotRows(const std::vector<JobView>& jobs) {
  Table table({"job", "slot", "last step", "idle", "waited for"});
  bool any = false;
  for (const JobView& job : jobs) {
    for (const SlotView& slot : job.slots) {
      any = true;
      table.AddRow({job.name, absl::StrCat(slot.slot), StepText(slot.last_step), Percent(slot.idle),
                    slot.waited_for ? "by the others" : "-"});
    }
  }
  return any ? absl::StrCat("\n", table.ToString()) : "";
}

std::string TrainerRows(const std::vector<JobView>& jobs) {
  Table table({"job", "trainer", "pid", "slots finished", "idle"});
  bool any = false;
  for (const JobView& job : jobs) {
    for (const TrainerView& trainer : job.trainers) {
      any = true;
      table.AddRow({job.name, absl::StrCat(trainer.seat), absl::StrCat(trainer.pid),
                    absl::StrCat(trainer.slots_finished), Percent(trainer.idle)});
    }
  }
  return any ? absl::StrCat("\n", table.ToString()) : "";
}

Json WorkerJson(const WorkerView& worker) {
  return {{"name", worker.name},
          {"rank", worker.rank},
          {"pid", worker.pid},
          {"device", worker.device},
          {"transport", worker.transport},
          {"epoch", OrNull(worker.epoch)},
          {"answered", worker.answered},
          {"error", worker.error},
          {"busy_share", OrNull(worker.busy)},
          {"waiting_share", OrNull(worker.waiting)},
          {"restarts", OrNull(worker.restarts)},
          {"last_pause_seconds", OrNull(worker.last_pause)}};
}

Json JobJson(const JobView& job) {
  Json json = {{"name", job.name},
               {"state", job.state},
               {"note", job.note},
               {"epoch", job.epoch},
               {"committed_step", job.committed_step},
               {"steps_per_second", OrNull(job.steps_per_second)},
               {"periods", job.periods},
               {"median_period_seconds", OrNull(job.median_period)},
               {"longest_period_seconds", OrNull(job.longest_period)},
               {"longest_pause_seconds", OrNull(job.longest_pause)},
               {"pause_before_step", job.pause_before_step < 0 ? Json() : Json(job.pause_before_step)}};
  Json& workers = json["workers"] = Json::array();
  for (const WorkerView& worker : job.workers) workers.push_back(WorkerJson(worker));
  Json& slots = json["slots"] = Json::array();
  for (const SlotView& slot : job.slots) {
    slots.push_back({{"slot", slot.slot},
                     {"last_step", slot.last_step},
                     {"idle_share", OrNull(slot.idle)},
                     {"waited_for", slot.waited_for}});
  }
  Json& trainers = json["trainers"] = Json::array();
  for (const TrainerView& trainer : job.trainers) {
    trainers.push_back({{"seat", trainer.seat},
                        {"pid", trainer.pid},
                        {"slots_finished", trainer.slots_finished},
                        {"idle_seconds", trainer.idle_seconds},
                        {"idle_share", OrNull(trainer.idle)}});
  }
  return json;
}

}  // namespace

std::string TopText(const TopView& view) {
  std::string out = absl::StrCat(UtcText(view.time), "\n");
  if (!view.coordinator_error.empty()) {  // a table of its own, for what it does with control bytes
    absl::StrAppend(
        &out, Table({"the coordinator does not answer, jobs are as before: " + view.coordinator_error}).ToString());
  }
  if (view.jobs.empty()) return absl::StrCat(out, "no jobs\n");
  return absl::StrCat(out, JobRows(view.jobs), WorkerRows(view.jobs), SlotRows(view.jobs), TrainerRows(view.jobs));
}

Json TopJson(const TopView& view) {
  Json jobs = Json::array();
  for (const JobView& job : view.jobs) jobs.push_back(JobJson(job));
  return {{"time", UtcText(view.time)}, {"coordinator_error", view.coordinator_error}, {"jobs", jobs}};
}

std::string Redraw(absl::string_view block, bool terminal, bool first) {
  return absl::StrCat(terminal ? kHomeAndClear : first ? "" : "\n", block);
}

}  // namespace shardmesh
