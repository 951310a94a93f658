#include "bench/checkpoint/checkpoint_rounds.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr int kFresh = 2;  // times its files: about the memory that a job takes
constexpr absl::Duration kComputing = absl::Milliseconds(250), kSettle = absl::Milliseconds(500),
                         kQuickSettle = absl::Milliseconds(100);

std::string LoadOn(int workers) { return absl::StrCat("load ", kSavingWorkers, " -> ", workers); }

}  // namespace

std::string CheckpointRounds::World(int workers) const { return absl::StrCat(optimizer_, " ", workers); }

std::vector<int> CheckpointRounds::Meshes() const {
  return quick_ ? std::vector<int>{2, 4} : std::vector<int>{2, 4, 3};
}

absl::StatusOr<std::string> CheckpointRounds::Clean(const std::string& name) const {
  const std::string path = absl::StrCat(sides_.folder, "/", name);
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
  sync();
  absl::SleepFor(quick_ ? kQuickSettle : kSettle);  // what was deleted is discarded on the disk
  return path;
}

absl::StatusOr<std::vector<double>> CheckpointRounds::Ask(const std::string& question) const {
  ASSIGN_OR_RETURN(const std::string answer, sides_.rival->Ask(question));
  std::vector<double> numbers;
  for (const absl::string_view word : absl::StrSplit(answer, ' ')) {
    numbers.emplace_back();
    if (!absl::SimpleAtod(word, &numbers.back())) {
      return absl::InternalError(absl::StrCat("\"", question, "\": no number but ", answer));
    }
  }
  return numbers;
}

void CheckpointRounds::Note(const std::string& what, double seconds) {
  if (warm_) seconds_[what].push_back(seconds);
  absl::FPrintF(stdout, "  %s %.3f;", what, seconds);
}

absl::Status CheckpointRounds::SaveRaw() {
  RETURN_IF_ERROR(Clean("raw").status());
  ASSIGN_OR_RETURN(const double seconds, sides_.disk->Write(job_->saved().bytes));
  Note("raw write", seconds);
  return absl::OkStatus();
}

absl::Status CheckpointRounds::SaveOurs() {
  ASSIGN_OR_RETURN(const std::string path, Clean("ours"));
  ASSIGN_OR_RETURN(const double seconds, job_->Save(path));
  Note("save", seconds);
  return absl::OkStatus();
}

absl::Status CheckpointRounds::SaveRival() {
  ASSIGN_OR_RETURN(const std::string path, Clean("torch"));
  ASSIGN_OR_RETURN(rival_digest_, sides_.rival->Ask(absl::StrCat("digest ", World(kSavingWorkers))));
  ASSIGN_OR_RETURN(const auto seconds, Ask(absl::StrCat("save ", World(kSavingWorkers), " ", path)));
  Note("torch save", seconds[0]);
  return absl::OkStatus();
}

absl::Status CheckpointRounds::SaveRivalAsync() {
  ASSIGN_OR_RETURN(const std::string path, Clean("torch-async"));
  ASSIGN_OR_RETURN(const auto seconds, Ask(absl::StrCat("async ", World(kSavingWorkers), " ", path)));
  Note("torch async_save", seconds[0]);
  Note("torch stopped", seconds[1]);
  return Clean("torch-async").status();
}

absl::Status CheckpointRounds::IterateOurs() {
  const std::pair<const char*, absl::Duration> kinds[] = {{"iteration", kComputing}, {"step", absl::ZeroDuration()}};
  for (const auto& [name, computing] : kinds) {
    ASSIGN_OR_RETURN(const std::string path, Clean("meanwhile"));
    ASSIGN_OR_RETURN(const auto seconds, job_->Iterate(path, quick_ ? 2 : 4, computing));
    Note(absl::StrCat(name, " while saving"), seconds.with);
    Note(name, seconds.without);
    Note(absl::StrCat(name, " longest"), std::max(seconds.longest - seconds.without, 1e-6));
  }
  return Clean("meanwhile").status();
}

absl::Status CheckpointRounds::IterateRival() {
  ASSIGN_OR_RETURN(const std::string path, Clean("meanwhile"));
  ASSIGN_OR_RETURN(const auto seconds, Ask(absl::StrCat("iterations ", World(kSavingWorkers), " ", path, " ",
                                                        quick_ ? 4 : 8, " ", absl::ToInt64Milliseconds(kComputing))));
  Note("torch iteration while saving", seconds[0]);
  Note("torch iteration", seconds[1]);
  return Clean("meanwhile").status();
}

absl::Status CheckpointRounds::Load(int workers) {
  ASSIGN_OR_RETURN(const double read, sides_.disk->ReadCached(job_->saved().bytes));
  RETURN_IF_ERROR(sides_.disk->TouchMemory(kFresh * job_->saved().bytes).status());
  ASSIGN_OR_RETURN(const CheckpointJob::LoadTimes seconds, job_->Load(workers));
  Note(absl::StrCat("page cache ", workers), read);
  Note(LoadOn(workers), seconds.load);
  Note(absl::StrCat("make and ", LoadOn(workers)), seconds.whole);
  return absl::OkStatus();
}

absl::Status CheckpointRounds::LoadRival(int workers) {
  const std::string world = World(workers);
  for (const char* what : {"restore", "load"}) {
    RETURN_IF_ERROR(sides_.disk->TouchMemory(kFresh * job_->saved().bytes).status());
    ASSIGN_OR_RETURN(const auto seconds, Ask(absl::StrCat(what, " ", world, " ", sides_.folder, "/torch")));
    ASSIGN_OR_RETURN(const std::string digest, sides_.rival->Ask(absl::StrCat("digest ", world)));
    if (digest != rival_digest_) {
      return absl::InternalError(absl::StrCat("verifying: torch on ", workers, " ranks loaded other numbers"));
    }
    Note(absl::StrCat("torch ", what == std::string("load") ? "" : "make and ", LoadOn(workers)), seconds[0]);
  }
  return absl::OkStatus();
}

// Who is first changes from round to round: the disk is faster for a while after a pause.
absl::Status CheckpointRounds::Round(int number) {
  std::vector<Contestant> savers = {&CheckpointRounds::SaveRaw, &CheckpointRounds::SaveOurs};
  if (sides_.rival != nullptr) savers.push_back(&CheckpointRounds::SaveRival);
  if (sides_.rival != nullptr && states_ == StateFormat::kFp32) savers.push_back(&CheckpointRounds::SaveRivalAsync);
  if (warm_) std::rotate(savers.begin(), savers.begin() + number % static_cast<int>(savers.size()), savers.end());
  const bool fp32 = states_ == StateFormat::kFp32;
  if (fp32 && warm_) savers.push_back(&CheckpointRounds::IterateOurs);
  if (fp32 && warm_ && !quick_ && sides_.rival != nullptr) savers.push_back(&CheckpointRounds::IterateRival);
  for (const Contestant saver : savers) RETURN_IF_ERROR((this->*saver)());
  if (quick_ && !warm_) return absl::OkStatus();
  for (const int workers : Meshes()) {
    if (sides_.rival != nullptr) RETURN_IF_ERROR(LoadRival(workers));
    RETURN_IF_ERROR(Load(workers));
  }
  return absl::OkStatus();
}

absl::Status CheckpointRounds::Run(Service& service, const CheckpointSides& sides, Report& report) {
  sides_ = sides;
  ASSIGN_OR_RETURN(job_, CheckpointJob::Start(service, model_, states_, kSavingWorkers));
  RETURN_IF_ERROR(SaveOurs());
  for (int round = -1; round < rounds_; ++round) {
    warm_ = round >= 0;
    absl::FPrintF(stdout, "%s, %s, s:", StateFormatName(states_),
                  warm_ ? absl::StrCat("round ", round + 1) : "warming up");
    RETURN_IF_ERROR(Round(std::max(round, 0)));
    absl::FPrintF(stdout, "\n");
    std::fflush(stdout);
  }
  AddRows(report);
  for (const int workers : Meshes()) {
    if (sides_.rival != nullptr) RETURN_IF_ERROR(sides_.rival->Ask(absl::StrCat("end ", World(workers))).status());
  }
  return Clean("ours").status();
}

void CheckpointRounds::AddAgainst(Report& report, const std::string& name, const std::string& ours,
                                  const std::string& rival, Goal goal) const {
  const std::string full = absl::StrCat(StateFormatName(states_), ": ", name, ", s");
  if (sides_.rival == nullptr) return report.Add({full, 0, 0, {}, goal, sides_.missing});
  report.Add(Compare(full, seconds_.at(ours), seconds_.at(rival), 1, goal));
}

void CheckpointRounds::AddTimes(Report& report, const std::string& name, const std::string& ours,
                                const std::string& other, Goal goal) const {
  const std::string full = absl::StrCat(StateFormatName(states_), ": ", name, ", s");
  report.Add(CompareCost(full, seconds_.at(ours), seconds_.at(other), 1, goal));
}

void CheckpointRounds::AddRows(Report& report) const {
  AddAgainst(report, "save / torch save", "save", "torch save", Goal::AtLeast(1));
  if (states_ == StateFormat::kFp32) {  // torchao's states cannot: OptimState8bit has no new_empty, which it calls
    AddAgainst(report, "save / torch async_save, until it is there", "save", "torch async_save", Goal::AtLeast(1));
  }
  AddTimes(report, "save, times raw write + fsync", "save", "raw write", Goal::AtMost(2));
  if (states_ == StateFormat::kFp32) {
    const std::string computing = absl::StrCat("iteration of ", absl::ToInt64Milliseconds(kComputing), " ms + step");
    AddTimes(report, absl::StrCat(computing, " while saving, times without"), "iteration while saving", "iteration",
             Goal::AtMost(1.05));
    AddTimes(report, "step while saving, times without", "step while saving", "step", Goal::AtMost(1.05));
    AddAgainst(report, "longest iteration, beyond the median / torch async_save's call", "iteration longest",
               "torch stopped", Goal());
    if (seconds_.count("torch iteration") > 0) {
      AddTimes(report, absl::StrCat("torch: ", computing, " while saving, times without"),
               "torch iteration while saving", "torch iteration");
    }
  }
  for (const int workers : Meshes()) {
    const std::string load = LoadOn(workers), rival = absl::StrCat("torch ", load);
    AddAgainst(report, absl::StrCat(load, " / torch"), load, rival, Goal::AtLeast(5));
    AddAgainst(report, absl::StrCat("make the job and ", load, " / torch, the model"), absl::StrCat("make and ", load),
               absl::StrCat("torch make and ", load), Goal());
    AddTimes(report, absl::StrCat(load, ", times reading the page cache"), load, absl::StrCat("page cache ", workers));
  }
  report.Note(
      absl::StrFormat("%s: %d rounds; %.0f MB of files. Before each load, memory is touched and given back, so that it "
                      "is there. Every save and load was verified: ours by the job's digest, "
                      "torch's by a digest\n"
                      "over all weights and states, saved and loaded.",
                      StateFormatName(states_), rounds_, static_cast<double>(job_->saved().bytes) / 1e6));
}

}  // namespace shardmesh::bench
