#include "server/coordinator/testing/scenario.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "server/coordinator/testing/small_jobs.h"

namespace shardmesh {
namespace {

// Passes everything on to a store that somebody else keeps.
class BorrowedStore final : public Store {
 public:
  explicit BorrowedStore(Store& store) : store_(store) {}
  absl::Status Write(const StoreBatch& batch) override { return store_.Write(batch); }
  absl::StatusOr<StoreContents> Load() override { return store_.Load(); }

 private:
  Store& store_;
};

std::string Line(const absl::Status& status) { return absl::StrCat(status.ToString(), "\n"); }

int64_t Number(const std::map<std::string, std::string>& options, const std::string& key, int64_t otherwise) {
  const auto found = options.find(key);
  int64_t value = otherwise;
  if (found != options.end() && !absl::SimpleAtoi(found->second, &value)) return otherwise;
  return value;
}

std::string JoinNames(const SharedList<WorkerIdentity>& workers) {
  return absl::StrJoin(workers, " ", [](std::string* out, const WorkerIdentity& w) { absl::StrAppend(out, w.name); });
}

}  // namespace

ScenarioRunner::ScenarioRunner() : store_(NewMemoryStore()) { Restart(); }

void ScenarioRunner::Restart() {
  coordinator_ = Coordinator::Create({}, std::make_unique<BorrowedStore>(*store_), now_).value();
}

std::string ScenarioRunner::Run(const std::string& command) {
  std::vector<std::string> words = absl::StrSplit(command, ' ', absl::SkipEmpty());
  Options options;
  std::vector<std::string> plain;
  for (const std::string& word : words) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
    if (word.find('=') == std::string::npos) {
      plain.push_back(word);
    } else {
      options.insert(parts);
    }
  }
  if (plain.empty()) return "no command\n";
  const std::string verb = plain[0];
  plain.erase(plain.begin());
  if (plain.empty()) plain.push_back("");
  std::string out = Execute(verb, plain, options);
  for (const std::string& event : coordinator_->TakeEvents()) absl::StrAppend(&out, "  ", event, "\n");
  for (const JobView& view : coordinator_->ListJobs(now_)) {
    out = absl::StrReplaceAll(out, {{view.definition->plan().hash(), "HASH"}});
  }
  return out;
}

std::string ScenarioRunner::Execute(const std::string& verb, const std::vector<std::string>& words,
                                    const Options& options) {
  const std::string& name = words[0];
  if (verb == "join") {
    const auto host = options.find("host");
    return Line(coordinator_->Join(
        SmallWorker(name, Number(options, "inc", 1), host == options.end() ? "h1" : host->second), now_));
  }
  if (verb == "leave") return Line(coordinator_->Leave(name, Number(options, "inc", 1), now_));
  if (verb == "heartbeat") return Heartbeat(name, options);
  if (verb == "create") {
    JobSpec spec = SmallSpec(name, static_cast<int>(Number(options, "ranks", 1)));
    spec.num_slots = static_cast<int>(Number(options, "slots", 1));
    const auto definition = JobDefinition::Create(spec);
    if (!definition.ok()) return Line(definition.status());
    const absl::StatusOr<bool> created = coordinator_->CreateJob(*definition, now_);
    return created.ok() ? (*created ? "created\n" : "found\n") : Line(created.status());
  }
  if (verb == "delete") return Line(coordinator_->DeleteJob(name, now_));
  if (verb == "describe") return Describe(name);
  if (verb == "resolve") {
    const auto definition = coordinator_->Definition(name);
    if (!definition.ok()) return Line(definition.status());
    const auto names = ResolveNames(**definition, {words.begin() + 1, words.end()}, {});
    if (!names.ok()) return Line(names.status());
    std::string out;
    for (const ResolvedName& resolved : *names)
      absl::StrAppend(&out, resolved.canonical, " -> ", resolved.tensor, "\n");
    return out;
  }
  absl::Duration by;
  if (verb == "advance" && absl::ParseDuration(name, &by)) {
    absl::Status status;
    for (const absl::Time until = now_ + by; now_ < until && status.ok();) {
      now_ = std::min(until, now_ + absl::Milliseconds(500));
      status = coordinator_->Tick(now_);
    }
    return Line(status);
  }
  if (verb == "pause" && absl::ParseDuration(name, &by)) {
    now_ += by;
    return Line(coordinator_->Tick(now_));
  }
  if (verb == "restart") {
    Restart();
    return "";
  }
  return absl::StrCat("unknown command ", verb, "\n");
}

std::string ScenarioRunner::Heartbeat(const std::string& worker, const Options& options) {
  std::vector<MemberReport> reports;
  for (const Assignment& told : told_[worker]) {
    const auto said = options.find(told.definition->spec().name);
    if (said == options.end()) continue;
    MemberReport report = ReadyReport(told, Number(options, "step", -1));
    if (report.committed_step >= 0) report.published_steps = {report.committed_step};
    if (said->second == "preparing") report.state = MemberReport::State::kPreparing;
    if (said->second == "failed") report.state = MemberReport::State::kFailed;
    if (said->second == "failed") report.error = "out of memory";
    if (said->second == "other_plan") report.plan_hash = std::string(32, '0');
    reports.push_back(report);
  }
  auto assignments = coordinator_->Heartbeat(worker, Number(options, "inc", 1), reports, now_);
  if (!assignments.ok()) return Line(assignments.status());
  told_[worker] = *std::move(assignments);
  if (told_[worker].empty()) return "nothing to hold\n";
  std::string out;
  for (const Assignment& told : told_[worker]) {
    absl::StrAppend(&out, "hold ", told.definition->spec().name, ": epoch ", told.epoch, ", rank ", told.rank, " of ",
                    JoinNames(told.peers), "\n");
  }
  return out;
}

std::string ScenarioRunner::Describe(const std::string& job) {
  const absl::StatusOr<JobView> view = coordinator_->DescribeJob(job, now_);
  if (!view.ok()) return Line(view.status());
  std::string out =
      absl::StrCat(job, ": ", JobStateName(view->state), ", epoch ", view->epoch, ", committed step ",
                   view->committed_step, ", published [", absl::StrJoin(view->published_steps, " "), "]\n");
  for (size_t rank = 0; rank < view->members.size(); ++rank) {
    const JobView::Member& member = view->members[rank];
    absl::StrAppend(&out, "  rank ", rank, ": ", member.worker.name, " inc ", member.worker.incarnation,
                    member.alive ? ", alive" : ", gone", member.ready ? ", ready\n" : ", not ready\n");
  }
  if (!view->error.empty()) absl::StrAppend(&out, "  error: ", view->error, "\n");
  if (!view->waiting_for.empty()) absl::StrAppend(&out, "  waiting for: ", view->waiting_for, "\n");
  return out;
}

}  // namespace shardmesh
