// Random operations on the coordinator, with restarts, failing writes and repeated calls, against invariants that hold
// after each of them and a simple model of what was acknowledged. The seed is printed; SHARDMESH_SEED sets it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <set>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/mesh/reform.h"
#include "server/coordinator/coordinator.h"
#include "server/coordinator/testing/small_jobs.h"

namespace shardmesh {
namespace {

// Writes nothing while `fails` is set.
class FlakyStore final : public Store {
 public:
  FlakyStore(Store& store, bool& fails) : store_(store), fails_(fails) {}
  absl::Status Write(const StoreBatch& batch) override {
    if (fails_) return absl::UnavailableError("disk full");
    return store_.Write(batch);
  }
  absl::StatusOr<StoreContents> Load() override { return store_.Load(); }

 private:
  Store& store_;
  bool& fails_;
};

class Simulation {
 public:
  explicit Simulation(uint64_t seed) : random_(seed) { Restart(); }

  void Step() {
    fails_ = Pick(20) == 0;
    switch (Pick(14)) {
      case 0:
        return Create();
      case 1:
        return Delete();
      case 2:
        return Join();
      case 3:
        return Leave();
      case 4:
        return Advance();
      case 5:
        return Pick(3) == 0 ? Restart() : Heartbeat();
      case 6:
        return Resume();
      case 7:
        return Reshard();
      case 8:
        return AllHeartbeats();
      case 9:
        return HeartbeatAgain();
      default:
        return Heartbeat();
    }
  }

  void Check() {
    CheckStaleIncarnation(WorkerName());
    const std::vector<JobView> jobs = coordinator_->ListJobs(now_);
    std::set<std::string> names;
    for (const JobView& job : jobs) {
      names.insert(job.definition->spec().name);
      CheckJob(job);
    }
    std::set<std::string> wanted;
    for (const auto& [name, epoch] : jobs_) wanted.insert(name);
    EXPECT_EQ(names, wanted) << "acknowledged jobs are there, deleted ones are not";
    ASSERT_OK_AND_ASSIGN(const StoreContents stored, store_->Load());
    for (const JobView& job : jobs) {
      const JobRecord& record = stored.jobs.at(job.definition->spec().name);
      EXPECT_EQ(record.state, job.state);
      EXPECT_EQ(record.epoch, job.epoch);
      EXPECT_EQ(record.error, job.error);
      CheckReforms(record, job);
      EXPECT_LE(record.committed_step, job.committed_step);
      EXPECT_TRUE(std::equal(record.members.begin(), record.members.end(), job.members.begin(), job.members.end(),
                             [](const MemberRecord& a, const JobView::Member& b) { return a.worker == b.worker; }))
          << record.name;
    }
    EXPECT_EQ(stored.jobs.size(), jobs.size());
  }

  int reforming = 0;   // jobs that were seen re-forming
  int resharding = 0;  // and that moved to a mesh that they were told to
  int awaiting = 0;    // and that waited for a next incarnation
  int repeated = 0;    // heartbeats that were heard without coming whole

 private:
  int Pick(int n) { return static_cast<int>(random_() % n); }
  std::string JobName() { return absl::StrCat("j", Pick(4)); }
  std::string WorkerName() { return absl::StrCat("w", Pick(8)); }

  void CheckJob(const JobView& job) {
    const std::string& name = job.definition->spec().name;
    const size_t ranks = job.definition->plan().num_ranks();
    EXPECT_EQ(job.members.size(), job.state == JobState::kWaiting ? 0u : ranks);
    EXPECT_EQ(!job.error.empty(), job.state == JobState::kFailed);
    std::set<std::string> workers, hosts;
    bool all_ready = true;
    for (const JobView::Member& member : job.members) {
      workers.insert(member.worker.name);
      hosts.insert(member.worker.host_id);
      all_ready = all_ready && member.ready;
    }
    EXPECT_EQ(workers.size(), job.members.size()) << "one rank per worker";
    EXPECT_LE(hosts.size(), 1u) << "all on one host";
    EXPECT_TRUE(job.state != JobState::kReady || all_ready);
    EXPECT_TRUE(job.state != JobState::kPreparing || !all_ready);
    EXPECT_GE(job.epoch, jobs_[name]) << "epochs never fall";
    if (job.epoch > 0 && jobs_[name] == 0) {
      EXPECT_TRUE(used_epochs_.insert({name, job.epoch}).second) << name << " epoch " << job.epoch << " is used twice";
    }
    jobs_[name] = job.epoch;
    EXPECT_GE(job.committed_step, steps_[name]) << "steps never fall but with a restart";
    steps_[name] = job.committed_step;
    // A job waits only while no host has enough workers that it accepts, or a tick has still to repeat a failed write.
    EXPECT_TRUE(job.state != JobState::kWaiting || retry_pending_ || !job.waiting_for.empty()) << name;
  }

  // What a job has is never lost: while it re-forms, its members hold every shard of the epoch at which it was READY
  // last, and those who are said to hold one were its members all the time since.
  void CheckReforms(const JobRecord& record, const JobView& job) {
    const MeshSpec& mesh = job.definition->spec().mesh;
    const MeshSpec& defined = meshes_.at(record.name);
    EXPECT_EQ(record.mesh, mesh == defined ? "" : mesh.ToString());
    const MeshSpec wanted = record.wanted_mesh.empty() ? defined : ParseMeshSpec(record.wanted_mesh).value();
    EXPECT_EQ(mesh, MeshFor(wanted, mesh.NumRanks()));
    CheckNext(record, job);
    std::vector<WorkerIdentity>& holders = holders_[record.name];
    std::set<std::string> members, shards;
    for (const MemberRecord& member : record.members) members.insert(NameAndIncarnation(member.worker));
    if (record.state == JobState::kReady) {
      holders.clear();
      for (const MemberRecord& member : record.members) holders.push_back(member.worker);
      ready_epochs_[record.name] = record.epoch;
    }
    for (const MemberRecord& member : record.members) {
      EXPECT_TRUE(member.was == -1 || record.from_epoch > 0);
      if (member.was < 0) continue;
      ASSERT_LT(member.was, static_cast<int>(holders.size()));
      ExpectHolder(member.worker, holders[member.was]);
      shards.insert(absl::StrCat(ShardOf(ParseMeshSpec(record.from_mesh).value(), member.was)));
    }
    EXPECT_EQ(record.from_epoch > 0, !record.from_mesh.empty());
    if (record.from_epoch == 0) return;
    EXPECT_EQ(record.from_epoch, ready_epochs_[record.name]);
    EXPECT_LT(record.from_epoch, record.epoch);
    EXPECT_TRUE(record.state == JobState::kPreparing || record.state == JobState::kFailed);
    EXPECT_GE(record.members[0].was, 0) << "rank 0 was there";
    // All others have dropped what they held.
    for (const MemberRecord& other : record.others) {
      ASSERT_GE(other.was, 0);
      ASSERT_LT(other.was, static_cast<int>(holders.size()));
      ExpectHolder(other.worker, holders[other.was]);
      shards.insert(absl::StrCat(ShardOf(ParseMeshSpec(record.from_mesh).value(), other.was)));
      EXPECT_TRUE(members.insert(NameAndIncarnation(other.worker)).second) << "it is a member";
    }
    EXPECT_EQ(shards.size(), ParseMeshSpec(record.from_mesh).value().NumRanks(DimRole::kShard));
    for (WorkerIdentity& holder : holders) {
      if (members.count(NameAndIncarnation(holder)) == 0) holder.name = "";
    }
    ++reforming;
  }
  // It is the one that held it all the time, or has its memory.
  void ExpectHolder(const WorkerIdentity& worker, WorkerIdentity& holder) {
    if (worker.name == holder.name && took_over_.count(NameAndIncarnation(worker)) > 0) holder = worker;
    EXPECT_EQ(NameAndIncarnation(worker), NameAndIncarnation(holder));
  }

  // While a job is on its way to another mesh it is READY as it was, and nobody else gets the epoch that it will have.
  void CheckNext(const JobRecord& record, const JobView& job) {
    if (job.state == JobState::kPreparing && !job.waiting_for.empty()) ++awaiting;
    if (record.from_epoch > 0 && job.epoch == next_epochs_[record.name]) ++resharding;
    if (job.next == nullptr) return;
    EXPECT_EQ(job.state, JobState::kReady);
    EXPECT_GT(job.next->epoch, job.epoch);
    EXPECT_TRUE(job.reshard_error.empty());
    std::set<std::string> all;
    for (const std::vector<MemberRecord>* part : {&job.next->members, &job.next->departing}) {
      for (const MemberRecord& member : *part) {
        EXPECT_TRUE(all.insert(NameAndIncarnation(member.worker)).second);
        if (member.was < 0) continue;
        EXPECT_EQ(NameAndIncarnation(member.worker), NameAndIncarnation(job.members.at(member.was).worker));
      }
    }
    for (const JobView::Member& member : job.members) EXPECT_EQ(all.count(NameAndIncarnation(member.worker)), 1u);
    next_epochs_[record.name] = job.next->epoch;
  }
  static std::string NameAndIncarnation(const WorkerIdentity& worker) {
    return absl::StrCat(worker.name, "@", worker.incarnation);
  }

  void Restart() {
    fails_ = false;
    if (coordinator_ != nullptr) told_.clear();
    repeats_.clear();
    coordinator_ = Coordinator::Create({}, std::make_unique<FlakyStore>(*store_, fails_), now_).value();
    for (auto& [name, step] : steps_) step = -1;
    retry_pending_ = true;
  }

  void Create() {
    const std::string name = JobName();
    static const char* const kMeshes[] = {"fsdp=1", "fsdp=2",       "fsdp=3",       "ddp=2",
                                          "ddp=3",  "ddp=2,fsdp=2", "fsdp=2,ddp=2", "ddp=5"};
    const auto definition = SmallMeshJob(name, kMeshes[Pick(8)]);
    const absl::StatusOr<bool> created = coordinator_->CreateJob(definition, now_);
    Note(created.status());
    if (!created.ok()) return;
    EXPECT_EQ(*created, jobs_.count(name) == 0);
    if (*created) {
      jobs_[name] = 0;
      steps_[name] = -1;
      meshes_[name] = definition->spec().mesh;
    }
    EXPECT_FALSE(coordinator_->CreateJob(definition, now_).value()) << "repeated: found";
  }

  void Delete() {
    const std::string name = JobName();
    const absl::Status status = coordinator_->DeleteJob(name, now_);
    Note(status);
    EXPECT_EQ(absl::IsNotFound(status), jobs_.count(name) == 0);
    if (!status.ok()) return;
    jobs_.erase(name);
    steps_.erase(name);
  }

  void Reshard() {
    const std::string name = JobName();
    static const char* const kMeshes[] = {"fsdp=1", "fsdp=2", "fsdp=4", "ddp=2", "ddp=2,fsdp=2", "fsdp=3"};
    const absl::Status status = coordinator_->Reshard(name, ParseMeshSpec(kMeshes[Pick(6)]).value(), now_);
    EXPECT_EQ(absl::IsNotFound(status), jobs_.count(name) == 0) << status;
    EXPECT_TRUE(status.ok() || absl::IsNotFound(status) || absl::IsUnavailable(status) ||
                absl::IsFailedPrecondition(status))
        << status;
  }

  // Some have a node.
  static WorkerTraits TraitsOf(const std::string& worker) { return {false, false, worker < "w4"}; }

  void Join() {
    const std::string name = WorkerName();
    const int64_t incarnation = std::max<int64_t>(1, incarnations_[name] + Pick(3) - 1);
    const absl::Status status = coordinator_->Join(NewIncarnation(name, incarnation), now_, TraitsOf(name),
                                                   {Pick(3) == 0 ? incarnations_[name] : 0});
    Note(status);
    if (status.ok()) {
      EXPECT_GE(incarnation, incarnations_[name]);
      incarnations_[name] = incarnation;
    }
    EXPECT_TRUE(incarnation >= incarnations_[name] || absl::IsAborted(status)) << status;
  }
  std::string HostOf(const std::string& worker) { return worker < "w5" ? "h1" : "h2"; }
  // At the place of the incarnation before, but for some on another host or at another address.
  WorkerIdentity NewIncarnation(const std::string& name, int64_t incarnation) {
    WorkerIdentity worker = SmallWorker(name, incarnation, Pick(4) == 0 ? "h2" : HostOf(name));
    worker.address = incarnation % 5 == 4 ? "localhost:2" : "localhost:1";
    return worker;
  }

  // What a next incarnation takes over goes on, unchanged but for its identity; all else that the last one held fails.
  void Resume() {
    const std::string name = WorkerName();
    const int64_t was = incarnations_[name];
    const int64_t last = was + (Pick(4) == 0);  // that one may never have joined
    const WorkerIdentity worker = NewIncarnation(name, last + 1 + Pick(2));
    std::vector<ResumedJob> resumed;
    for (const Assignment& told : told_[name]) {
      if (Pick(5) == 0) continue;
      resumed.push_back({told.definition->spec().name, told.epoch + (Pick(8) == 0), told.rank + (Pick(8) == 0),
                         told.secret});
      if (told.from.epoch == 0 || told.staged || told.from.was.empty() || Pick(3) == 0) continue;
      if (told.epoch == told.from.epoch) continue;  // it is to end that epoch; its rank is the one there
      resumed.push_back({told.definition->spec().name, told.from.epoch, told.from.was[told.rank], told.secret});
    }
    const std::vector<JobView> before = coordinator_->ListJobs(now_);
    const StoreContents stored = store_->Load().value();
    std::set<std::string> reformed;
    for (const auto& [job, record] : stored.jobs) {
      if (record.from_epoch > 0) reformed.insert(job);
    }
    coordinator_->TakeEvents();
    const absl::Status status = coordinator_->Join(worker, now_, TraitsOf(name), {0, last, resumed});
    Note(status);
    if (status.ok()) took_over_.insert(NameAndIncarnation(worker));
    const std::vector<std::string> events = coordinator_->TakeEvents();
    const bool took_over = absl::c_any_of(
        events, [](const std::string& event) { return absl::StartsWith(event, "event=worker_resumed"); });
    EXPECT_TRUE(status.ok() || !took_over);
    for (const JobView& job : before) CheckResumed(job, worker, was, resumed, status.ok(), took_over, reformed);
    if (status.ok()) incarnations_[name] = worker.incarnation;
  }

  void CheckResumed(const JobView& before, const WorkerIdentity& worker, int64_t was,
                    const std::vector<ResumedJob>& resumed, bool joined, bool took_over,
                    const std::set<std::string>& reformed) {
    const JobView after = coordinator_->DescribeJob(before.definition->spec().name, now_).value();
    const bool reforms = before.state == JobState::kPreparing && reformed.count(before.definition->spec().name) > 0;
    for (size_t rank = 0; rank < before.members.size(); ++rank) {
      const WorkerIdentity& last = before.members[rank].worker;
      if (last.name != worker.name || last.incarnation != was) continue;
      const bool same_place = last.host_id == worker.host_id && last.address == worker.address;
      EXPECT_TRUE(!took_over || same_place);
      EXPECT_TRUE(took_over || !joined || !same_place || !before.members[rank].alive);
      const bool named = absl::c_any_of(resumed, [&](const ResumedJob& job) {
        return job.job == before.definition->spec().name && job.epoch == before.epoch &&
               job.rank == static_cast<int32_t>(rank);
      });
      const bool goes_on = took_over && named && before.state == JobState::kReady;
      if (joined && !goes_on && (before.state == JobState::kReady || reforms)) return CheckReformed(before, after);
      if (joined && before.state == JobState::kPreparing && before.committed_step < 0) return CheckLost(before, after);
      EXPECT_EQ(after.state, joined && !goes_on ? JobState::kFailed : before.state);
      EXPECT_TRUE(after.error == before.error || before.state != JobState::kFailed) << "the first cause is kept";
      EXPECT_EQ(after.epoch, before.epoch);
      EXPECT_EQ(after.committed_step, before.committed_step);
      ASSERT_EQ(after.members.size(), before.members.size());
      for (size_t i = 0; i < after.members.size(); ++i) {
        EXPECT_TRUE(after.members[i].worker == (goes_on && i == rank ? worker : before.members[i].worker));
        EXPECT_EQ(after.members[i].ready, before.members[i].ready);
      }
    }
  }

  // It lost a member while it was being prepared.
  void CheckLost(const JobView& before, const JobView& after) {
    const bool again = after.state == JobState::kPreparing && after.epoch > before.epoch;
    const bool waits = after.state == JobState::kWaiting && after.epoch == before.epoch;
    EXPECT_TRUE(again || waits || ::testing::Value(after.error, ::testing::HasSubstr("before it the job lost 8")))
        << after.error;
  }

  // It lost a member that had a part of what it is.
  void CheckReformed(const JobView& before, const JobView& after) {
    EXPECT_EQ(after.committed_step, before.committed_step);
    if (after.state == JobState::kPreparing) {
      EXPECT_GT(after.epoch, before.epoch);
      return;
    }
    EXPECT_EQ(after.state, JobState::kFailed);
    EXPECT_EQ(after.epoch, before.epoch);
    EXPECT_TRUE(absl::StrContains(after.error, "; it cannot re-form: ") ||
                absl::StrContains(after.error, "; before it the job lost 8"))
        << after.error;
  }

  void CheckStaleIncarnation(const std::string& name) {
    const int64_t now = incarnations_[name];
    if (now == 0) return;
    EXPECT_TRUE(absl::IsAborted(coordinator_->Heartbeat(name, now - 1, {}, now_).status()));
    EXPECT_TRUE(absl::IsAborted(coordinator_->Leave(name, now - 1, now_)));
    EXPECT_TRUE(absl::IsAborted(coordinator_->Join(SmallWorker(name, now - 1), now_, {}, {now, now, {}})));
  }

  void Leave() {
    if (Pick(3) != 0) return;
    const std::string name = WorkerName();
    Note(coordinator_->Leave(name, incarnations_[name], now_));
  }

  void Advance() {
    if (Pick(3) == 0) {  // late ticks, and a clock that is set back
      const absl::Duration by = absl::Milliseconds(Pick(6000) - 500);
      now_ += by;
      retry_pending_ = retry_pending_ || by < absl::ZeroDuration();
    }
    for (int i = Pick(5); i > 0; --i) {
      now_ += absl::Milliseconds(500);
      const absl::Status status = coordinator_->Tick(now_);
      retry_pending_ = false;
      Note(status);
    }
  }

  void AllHeartbeats() {
    for (int i = 0; i < 8; ++i) {
      Heartbeat(absl::StrCat("w", i));
      Check();
    }
  }

  // A late report is of fewer steps than are known, and the same incarnation's next one that is taken is not late.
  // `sender`: which incarnation, of which job, at which epoch.
  int64_t ReportedStep(const Assignment& told, const std::string& sender) {
    const auto known = steps_.find(told.definition->spec().name);
    const int64_t step = Pick(100) - 1, least = known == steps_.end() ? -1 : known->second;
    return step >= least || late_.insert(sender).second ? step : least;
  }

  void Heartbeat() { Heartbeat(WorkerName()); }
  void Heartbeat(const std::string& name) {
    std::vector<MemberReport> reports;
    std::vector<std::string> in_time;
    for (const Assignment& told : told_[name]) {
      const std::string& job = told.definition->spec().name;
      const std::string sender = absl::StrCat(job, " ", told.epoch, " ", name, "@", incarnations_[name]);
      MemberReport report = ReadyReport(told, ReportedStep(told, sender));
      if (steps_.count(job) == 0 || report.committed_step >= steps_[job]) in_time.push_back(sender);
      if (Pick(15) == 0) report.plan_hash = std::string(32, '0');
      if (told.leaves) report.plan_hash.clear();
      if (told.staged) report.state = MemberReport::State::kPrepared;
      if (Pick(4) == 0) report.state = MemberReport::State::kPreparing;
      const bool moves = told.from.epoch > 0 && !told.staged;
      if (Pick(moves ? 6 : 30) == 0) report.state = MemberReport::State::kFailed;
      report.lost_rank = Pick(5) - 1;  // read of those that failed
      reports.push_back(report);
    }
    const auto assignments = coordinator_->Heartbeat(name, incarnations_[name], reports, now_, TraitsOf(name));
    Note(assignments.status());
    EXPECT_THAT(std::string(assignments.status().message()), ::testing::Not(::testing::HasSubstr("state file")))
        << "it is always this one";
    if (!assignments.ok()) return;
    for (const std::string& sender : in_time) late_.erase(sender);
    told_[name] = *assignments;
    repeats_.erase(name);
    if (const auto heard = coordinator_->MayRepeat(name, reports, *assignments); heard.has_value()) {
      repeats_[name] = {reports, incarnations_[name], *heard};
    }
    for (const Assignment& assignment : *assignments) {
      if (assignment.from.epoch == assignment.epoch) {  // it only keeps what it held, and ends that with the others
        EXPECT_EQ(assignment.peers.size(), assignment.from.was.size());
        continue;
      }
      if (assignment.leaves) continue;
      ASSERT_GT(static_cast<int>(assignment.peers.size()), assignment.rank);
      EXPECT_EQ(assignment.peers[assignment.rank].name, name);
      EXPECT_EQ(assignment.peers[assignment.rank].incarnation, incarnations_[name]);
    }
  }

  // Where a worker's last heartbeat need not come whole again, it would have done nothing and been answered the same.
  void HeartbeatAgain() {
    const std::string name = WorkerName();
    const auto last = repeats_.find(name);
    if (last == repeats_.end() || retry_pending_) return;
    if (!coordinator_->HearAgain(last->second.heard, now_)) return;
    fails_ = false;
    coordinator_->TakeEvents();
    const std::vector<std::string> before = JobTexts();
    const auto whole =
        coordinator_->Heartbeat(name, last->second.incarnation, last->second.reports, now_, TraitsOf(name));
    ASSERT_OK(whole);
    EXPECT_EQ(Texts(*whole), Texts(told_[name]));
    EXPECT_EQ(JobTexts(), before);
    EXPECT_THAT(coordinator_->TakeEvents(), ::testing::IsEmpty());
    repeats_.erase(last);  // another one came
    ++repeated;
  }
  std::vector<std::string> JobTexts() {
    std::vector<std::string> texts;
    for (const JobView& job : coordinator_->ListJobs(now_)) {
      std::string text = absl::StrCat(job.definition->spec().name, " ", static_cast<int>(job.state), " ", job.epoch,
                                      " ", job.committed_step, " ", job.error, job.waiting_for, job.reshard_error);
      for (const int64_t step : job.published_steps) absl::StrAppend(&text, " ", step);
      for (const JobView::Member& member : job.members) {
        absl::StrAppend(&text, " ", NameAndIncarnation(member.worker), member.alive, member.ready);
      }
      texts.push_back(std::move(text));
    }
    return texts;
  }
  static std::vector<std::string> Texts(const std::vector<Assignment>& assignments) {
    std::vector<std::string> texts;
    for (const Assignment& told : assignments) {
      std::string text =
          absl::StrCat(told.definition->spec().name, " ", told.definition->spec().mesh.ToString(), " ", told.epoch, " ",
                       told.rank, " ", told.staged, told.leaves, " ", told.from.epoch, " ", told.from.mesh);
      for (const WorkerIdentity& peer : told.peers) absl::StrAppend(&text, " ", NameAndIncarnation(peer));
      for (const int32_t was : told.from.was) absl::StrAppend(&text, " ", was);
      for (const MemberRecord& other : told.from.departing)
        absl::StrAppend(&text, " ", NameAndIncarnation(other.worker));
      texts.push_back(std::move(text));
    }
    return texts;
  }

  // Every error is a typed one that this operation may give; a broken store shows as Unavailable alone.
  void Note(const absl::Status& status) {
    EXPECT_FALSE(absl::IsInternal(status) || absl::IsUnknown(status) || absl::IsDataLoss(status)) << status;
    EXPECT_TRUE(fails_ || !absl::IsUnavailable(status)) << status;
    retry_pending_ = retry_pending_ || absl::IsUnavailable(status);
  }

  std::mt19937_64 random_;
  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  std::unique_ptr<Store> store_ = NewMemoryStore();
  bool fails_ = false;
  bool retry_pending_ = false;
  std::unique_ptr<Coordinator> coordinator_;
  // The model: what was acknowledged.
  std::map<std::string, int64_t> jobs_;                         // name -> epoch last seen
  std::set<std::string> late_;                                  // senders of a late report, and of none since
  std::map<std::string, int64_t> steps_;                        // name -> committed step last seen
  std::map<std::string, int64_t> incarnations_;                 // worker -> its largest incarnation
  std::map<std::string, MeshSpec> meshes_;                      // of jobs, as they were created
  std::map<std::string, int64_t> ready_epochs_;                 // at which a job was READY last
  std::map<std::string, std::vector<WorkerIdentity>> holders_;  // by rank then; no name: no member any more
  std::set<std::pair<std::string, int64_t>> used_epochs_;
  std::set<std::string> took_over_;             // incarnations that said so when they joined
  std::map<std::string, int64_t> next_epochs_;  // last seen
  std::map<std::string, std::vector<Assignment>> told_;
  struct Repeatable {
    std::vector<MemberReport> reports;
    int64_t incarnation = 0;
    Coordinator::Heard heard;
  };
  std::map<std::string, Repeatable> repeats_;  // by worker: its last heartbeat, if it may be heard again
};

TEST(CoordinatorProperty, RandomOperationsWithRestartsAndFailingWrites) {
  uint64_t seed = std::random_device{}();
  if (const char* given = getenv("SHARDMESH_SEED"); given != nullptr) {
    ASSERT_TRUE(absl::SimpleAtoi(given, &seed));
  }
  int reforming = 0, resharding = 0, awaiting = 0, repeated = 0;
  for (int round = 0; round < 150 && !HasFailure(); ++round) {
    SCOPED_TRACE(absl::StrCat("SHARDMESH_SEED=", seed, ", round ", round));
    Simulation simulation(seed + round);
    for (int step = 0; step < 500 && !HasFailure(); ++step) {
      simulation.Step();
      simulation.Check();
    }
    reforming += simulation.reforming;
    resharding += simulation.resharding;
    awaiting += simulation.awaiting;
    repeated += simulation.repeated;
  }
  EXPECT_GT(reforming, 5) << "it is tested";
  EXPECT_GT(resharding, 5);
  EXPECT_GT(awaiting, 0);
  EXPECT_GT(repeated, 5);
}

}  // namespace
}  // namespace shardmesh
