// Coordinator: the state machine of jobs and workers: who lives, who holds which job as which rank, and how the jobs
// are.
//
// No threads, no clock, no I/O but the store's: every call takes the time, and a mutation is in the store before the
// call returns. Later is written only what workers say again with every heartbeat: a job's progress by the next Tick,
// READY of single members when all are. On any error nothing changed, except where a method says so. A heartbeat that
// changes no job costs the same however many workers and ranks there are (place_index.h). Values are taken as valid
// (proto/validate.h). Not thread-safe: the caller holds one lock over all calls, and does what is costly and needs no
// state (DefineJob, ResolveNames) without it. States: records.h.
//
//   t=0.0  Join a, Join b         two live workers of one host
//   t=0.1  CreateJob j (2 ranks)  j PREPARING, epoch 1: a is rank 0, b is rank 1
//   t=0.5  Heartbeat a -> j       a learns its place and its peers; so does b
//   t=1.0  Heartbeat a: j READY, Heartbeat b: j READY     j READY
//   t=4.1  Tick                   b silent for 3.1 s: dead, j FAILED, naming b, its rank and its pid
// A READY job on one host whose mesh has replicas does not fail so, but re-forms (records.h, reform.h): it is PREPARING
// at a new epoch without that member, and whoever reports READY then has its shard from those that held it before.
// A job that would fail so, and whose specification says on_loss=checkpoint, goes back to its newest checkpoint: its
// members read their shards from there, and it is READY once the digests of all add up to the checkpoint's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/base/secret.h"
#include "core/job/support.h"
#include "core/mesh/mesh_spec.h"
#include "server/coordinator/state.h"
#include "server/jobs/job_definition.h"
#include "server/seats/assignment.h"
#include "server/seats/reform.h"
#include "server/store/records.h"
#include "server/store/store.h"

namespace shardmesh {

struct CoordinatorOptions {
  absl::Duration heartbeat_timeout = absl::Seconds(3);  // silence after which a worker counts as dead
  // Silence of all workers of a host, since its node's call ended, after which the host counts as lost. What they say in
  // the first quarter of it does not count: a worker says at once that its node is gone, and may end next. One that does
  // not end speaks several times in it.
  absl::Duration host_timeout = absl::Milliseconds(750);
  int max_jobs = 1000;
  int max_workers = 4096;
  // How far ahead of this machine's wall clock a worker's incarnation may be, which is the wall time of its own; and
  // how far ahead of the last one of its name, since incarnations that a node counts need not have joined. What is
  // ahead of both is refused with one that is not, and is not stored: nobody can use the numbers of a name up.
  absl::Duration max_ahead = absl::Hours(24);
  int64_t max_incarnation_step = 1 << 20;
  // Members that a job may lose while it is being prepared, or while it re-forms without a step in between: it may be
  // what kills them. One more, and it fails.
  int max_lost_members = 8;
  // For the members to be of a job that is resharded to build their memory; then it stays where it is.
  absl::Duration reshard_timeout = absl::Minutes(10);
  // For the members of a job that goes back to a checkpoint to read it, beside the time of its bytes on a slow disk.
  absl::Duration read_timeout = absl::Minutes(2);
  std::function<std::string()> new_secret = RandomSecret;  // of each job, when it is made
};

// A job as it is now.
struct JobView {
  struct Member {
    WorkerIdentity worker;  // as it was assigned, or its next incarnation that took over
    bool alive = false;
    bool ready = false;
    bool retained = false;  // a node has its memory; of an incarnation that is not dead or gone, silent or not
  };
  std::shared_ptr<const JobDefinition> definition;  // with the mesh that it has now
  int64_t uid = 0;
  JobState state = JobState::kWaiting;
  int64_t epoch = 0;
  int64_t from_epoch = 0;       // as JobRecord
  std::vector<Member> members;  // by rank
  int64_t committed_step = -1;
  std::vector<int64_t> published_steps;
  std::string error;        // of FAILED
  std::string waiting_for;  // of WAITING, and while it re-forms of what it waits for besides its members
  absl::Duration heartbeat_timeout;
  std::shared_ptr<const NextMesh> next;  // while it is resharded, and trains on
  std::string reshard_error;             // why it was not, the last time
  std::vector<CheckpointRecord> checkpoints;  // as JobRecord
  GoneBackRecord gone_back;                   // as JobRecord
  CheckpointRecord copied;                    // the newest step that is on two hosts as a whole; not set: none is
};

// What a worker says of one of its jobs. Meanings: MemberStatus in coordinator.proto.
struct MemberReport {
  enum class State { kPreparing, kPrepared, kReady, kFailed };
  std::string job;
  int64_t epoch = 0;
  int32_t rank = 0;
  State state = State::kPreparing;
  std::string plan_hash;  // empty: not computed yet
  int64_t committed_step = -1;
  std::vector<int64_t> published_steps;
  std::string error;
  int32_t lost_rank = -1;  // of FAILED: the member whose end is the cause; -1: the cause is another
  std::optional<uint64_t> loaded_digest;  // of a member that goes back to a checkpoint: it has read its shard
  bool unreadable = false;                // of FAILED: the checkpoint cannot be read
};

// Where the copies are of a job that goes back to them. Meanings: Back in coordinator.proto.
struct CopiesPlace {
  CheckpointRecord checkpoint;
  std::string mesh;
  int32_t hosts = 0;
  std::vector<std::pair<WorkerIdentity, int32_t>> holders;  // each with its rank then; those in doubt last
  bool whole = false;  // they have each shard; a coordinator that restarted hears of them one after the other
};

// Where a job that re-forms has its weights. Meanings: Origin in coordinator.proto.
struct Origin {
  int64_t epoch = 0;  // 0: the job does not re-form
  std::string mesh;
  SharedList<int32_t> was;             // by rank
  SharedList<MemberRecord> departing;  // each with its rank then
};

// What a worker shall hold.
struct Assignment {
  std::shared_ptr<const JobDefinition> definition;
  int64_t epoch = 0;
  int32_t rank = 0;
  SharedList<WorkerIdentity> peers;  // by rank, the worker itself included; all assignments of the job share it
  Origin from;
  bool staged = false;  // the job is at from.epoch still, which the worker holds on
  bool leaves = false;  // of those: it will not be a member; `rank` is that of now
  std::string secret;   // of the job
  std::optional<CheckpointRecord> back;  // that the job goes back to
  CopiesPlace copies;                    // of one without a folder
  bool use = false;                      // it is whole: what was read of it is the job's
};

// A job that a worker's next incarnation holds as its last one did.
struct ResumedJob {
  std::string job;
  int64_t epoch = 0;
  int32_t rank = 0;
  std::string secret;  // of the job, which its members alone know; another one: the job counts as not resumed
};

// What a worker that joins knows of the incarnation of its name before it. Incarnations; 0: none.
struct LastIncarnation {
  int64_t dead = 0;  // found dead; counts where that was on the worker's host
  // Taken over; counts where that had the worker's host, address and local socket. It may be an incarnation that never
  // joined: then one before it is taken over of whose jobs one is `resumed`.
  int64_t resumes = 0;
  std::vector<ResumedJob> resumed;  // with what of its jobs
};

class Coordinator {
 public:
  // Reads the store. Every worker that was alive gets a full timeout to be heard again; READY jobs stay READY.
  // Errors as Store::Load; DataLoss: a stored specification is not valid.
  static absl::StatusOr<std::unique_ptr<Coordinator>> Create(const CoordinatorOptions& options,
                                                             std::unique_ptr<Store> store, absl::Time now);

  // Each method: Unavailable when the store failed.

  // True: created, and assigned if there are workers, now or by an earlier call with this `uid`. False: the same job
  // was there already.
  // AlreadyExists: the name is taken by another job; the first difference is named. ResourceExhausted: too many jobs.
  // With `replaces` (CreateJobRequest.replaces_uid) NotFound: no job has the name; Aborted: another one has it.
  absl::StatusOr<bool> CreateJob(std::shared_ptr<const JobDefinition> definition, absl::Time now, int64_t uid = 0,
                                 int64_t replaces = 0);
  // NotFound: no such job; the message lists those there are. Also below.
  absl::StatusOr<JobView> DescribeJob(const std::string& name, absl::Time now) const;
  std::vector<JobView> ListJobs(absl::Time now) const;  // by name
  // `uid`: NotFound if another job has the name by now; 0: whichever has it.
  absl::Status DeleteJob(const std::string& name, absl::Time now, int64_t uid = 0);
  // The READY job is to go on on `mesh`, of its members and others of their host. While those build their memory it
  // trains on; then it re-forms, and is READY again at a later epoch. If one of them ends or fails before that, or it
  // takes longer than the options' reshard_timeout, it stays as it is (JobView::reshard_error). From then on it is
  // `mesh` that it goes back to after losses. Again, or to the mesh that it has: OK. While it is on its way to another
  // one, its present mesh calls that off.
  //   InvalidArgument, ResourceExhausted: a mesh that it cannot have. Unavailable: it is not READY, or a member does
  //   not answer: later. FailedPrecondition: it is on its way to another mesh; there are not enough workers; or it
  //   has failed. Unimplemented: it cannot where it is, or with what it has (core/job/support.h).
  absl::Status Reshard(const std::string& name, const MeshSpec& mesh, absl::Time now);
  // A checkpoint of the job is there whole (Coordinator.RecordCheckpoint). No effect on a job that fails on a loss.
  // NotFound: no such job of that uid. InvalidArgument: an epoch that it was never at. Aborted: it has gone back to a
  // checkpoint since then.
  absl::Status RecordCheckpoint(const std::string& name, int64_t uid, int64_t epoch,
                                const CheckpointRecord& checkpoint);
  absl::StatusOr<std::shared_ptr<const JobDefinition>> Definition(const std::string& name) const;
  // Of the host that has the most: workers on processors and on devices are not members of one job, and count apart.
  int64_t MostLiveWorkers(absl::Time now) const;

  // OK also when the same incarnation of the worker has joined before. `wall`: the wall clock of this machine.
  // `secret`: what Heartbeat and Leave of this incarnation must show.
  // PermissionDenied: this incarnation joined with another secret, and nothing more is told.
  // Aborted: a larger incarnation of the name was seen, this one has left, or it is too far ahead (CoordinatorOptions);
  // the status says which one would be taken (core/base/incarnation.h). AlreadyExists: another incarnation of the name
  // is alive, or this incarnation joined with other values. ResourceExhausted: too many workers.
  // An incarnation that is taken over and not marked dead yet: in its READY jobs that are `resumed` at
  // their epoch and rank the worker takes its place, and nothing else of them changes; its other jobs are as those of a
  // dead one. One that cannot be taken over, since it was elsewhere on the host, counts as found dead.
  absl::Status Join(const WorkerIdentity& worker, absl::Time now, const WorkerTraits& traits = {},
                    const LastIncarnation& last = {}, absl::Time wall = absl::InfiniteFuture(),
                    absl::string_view secret = {});

  // The worker is alive; its reports move its jobs; returns what it shall hold, jobs that failed included (it keeps
  // their memory until they are deleted). Reports of jobs that it does not hold at that epoch are stale and ignored.
  // Aborted: a stale incarnation, or one that left; the status says which one would be taken. NotFound: not joined.
  // PermissionDenied: not the secret that this incarnation joined with; it does not count as heard either.
  // InvalidArgument: a report with another rank than the worker has. FailedPrecondition, and all other reports count:
  //   a plan hash differs from the coordinator's; if the job was PREPARING, it waits for another worker in place of
  //   this one, and if it re-formed, it fails; or the worker holds a job that was never made in this store: it keeps
  //   it, since the store is a wrong one, or lost what it had. A worker that has not joined but holds jobs gets this
  //   instead of NotFound.
  absl::StatusOr<std::vector<Assignment>> Heartbeat(const std::string& name, int64_t incarnation,
                                                    const std::vector<MemberReport>& reports, absl::Time now,
                                                    const WorkerTraits& traits = {}, absl::string_view secret = {});

  // A heartbeat that may be heard again by HearAgain alone.
  struct Heard {
    uint64_t changes = 0;      // CoordinatorState::changes then
    uint64_t number = 0;       // of that heartbeat
    Worker* worker = nullptr;  // valid while `changes` is the same
    int64_t incarnation = 0;
    bool holds_jobs = false;  // it reported some
  };
  // Of the worker's last heartbeat, with these reports, answered with `told`. Unset: if it came again, it might do
  // something, or be answered with something else.
  std::optional<Heard> MayRepeat(const std::string& name, const std::vector<MemberReport>& reports,
                                 const std::vector<Assignment>& told);
  // The worker sends the same heartbeat again. False, and nothing happens: the whole of it has to be given, since a job has
  // changed, or another heartbeat of that worker came since, or it counts as silent or gone.
  bool HearAgain(const Heard& last, absl::Time now);

  // A heartbeat of the worker came in this call of its host's node, of which each has another number: it is the newest.
  void HearInCall(const std::string& worker, uint64_t call);
  // The call has ended. If it is the newest of its host, none begins, and the host's workers are silent for the
  // host_timeout, TickHosts counts all of them as dead.
  void EndCall(uint64_t call, absl::Time now);

  // What a worker keeps of jobs with copies=2, in whatever jobs it is now; before its heartbeat. No effect where that is
  // refused.
  void TakeCopies(const std::string& name, int64_t incarnation, absl::string_view secret,
                  const std::vector<KeptCopies>& kept);

  // Aborted, NotFound, PermissionDenied as Heartbeat; leaving twice is OK. The worker's jobs re-form, or fail with its
  // name, but those that were never READY: they are assigned anew.
  absl::Status Leave(const std::string& name, int64_t incarnation, absl::Time now, absl::string_view secret = {});

  // Workers silent for longer than the timeout are dead, and their jobs re-form or fail, or are assigned anew if they
  // were never READY; progress is stored. Call it several times within a timeout. After a pause of more than half a
  // timeout between two calls it was this process that was held up: the workers then get a full timeout to be heard
  // again.
  absl::Status Tick(absl::Time now);
  // The same for hosts whose node's call ended: nothing to do but where there are some. Call it several times within a
  // host_timeout. After a pause of more than half of one it was this process that was held up: hosts then get a full
  // host_timeout to be heard again.
  absl::Status TickHosts(absl::Time now);

  // The log lines since the last call: transitions, as key=value with quoted values.
  std::vector<std::string> TakeEvents();

 private:
  Coordinator(const CoordinatorOptions& options, std::unique_ptr<Store> store)
      : options_(options), store_(std::move(store)) {}
  absl::Status Load(absl::Time now);
  Transaction NewTransaction() { return Transaction(state_, *store_, events_); }
  absl::Status Commit(Transaction& transaction);

  // coordinator_jobs.cc
  JobView View(const Job& job, absl::Time now) const;
  absl::Status NoSuchJob(const std::string& name) const;
  static std::string IsAnother(const JobRecord& job, int64_t uid);
  std::vector<Candidate> Candidates(const JobRecord& job, absl::Time now) const;
  // Of this incarnation, by the job's name.
  using Places = absl::InlinedVector<Place, 4>;
  Places PlacesOf(const WorkerIdentity& worker) const;
  int64_t NextEpoch(const JobRecord& job) const;
  void AssignWaitingJobs(Transaction& transaction, absl::Time now);
  void FailJob(Transaction& transaction, const std::string& name, const std::string& cause);
  // The job has no members any more, and waits for others.
  void Unassign(Transaction& transaction, const std::string& name);
  // The member at `rank` of the job is lost, `cause` says how; `died`: without having been told to stop.
  void LoseMember(Transaction& transaction, const std::string& name, size_t rank, const std::string& cause,
                  absl::Time now, bool died = true);

  // coordinator_reform.cc
  bool IsThere(const Worker& worker, absl::Time now) const;
  const Worker* WorkerOf(const MemberRecord& member) const;  // null: that incarnation is not the worker's newest
  // CheckSupported of a job that has members, or had them: traits of workers are not stored, and one of an incarnation
  // that is known says what all are on.
  absl::Status CheckSupportedNow(const Job& job, Feature feature) const;
  static constexpr size_t kNobody = SIZE_MAX;
  // Members that have what the job had when it was READY last, each with its rank then, without the one at `lost`.
  std::vector<MemberRecord> Holders(const Job& job, size_t lost, absl::Time now) const;
  // Those, and the workers that may join them: of their host alone, or of any. `moves`: the job is to be resharded, which
  // may take it to other hosts; one that re-forms on one host stays there.
  Pool PoolOf(const Job& job, size_t lost, bool moves, absl::Time now) const;
  absl::StatusOr<Reformed> FormWithout(const Job& job, size_t lost, absl::Time now) const;
  // The job, READY or re-forming, goes on without a member. On an error, whose message ends a sentence, nothing
  // changed.
  absl::Status ReformJob(Transaction& transaction, const std::string& name, size_t lost, const std::string& cause,
                         absl::Time now);
  // `worker` held what a job that re-forms had, and is no member any more: the job begins again without it, or fails.
  void LoseDeparting(Transaction& transaction, const WorkerIdentity& worker, const std::string& cause, absl::Time now);
  // The same of one job, as it says itself.
  void LoseDeparted(Transaction& transaction, const MemberReport& report, const WorkerIdentity& worker, absl::Time now);
  void FormWithoutDeparted(Transaction& transaction, const std::string& name, const WorkerIdentity& worker,
                           const std::string& cause, absl::Time now);
  // The job re-forms, and the member at `rank` is lost, whose shard nobody else has and whose next incarnation a node
  // will start soon: it waits for that.
  bool AwaitsIncarnation(const Job& job, size_t rank, absl::Time now) const;
  // `worker`, of a job that waits so, is there again.
  void FormAgain(Transaction& transaction, const WorkerIdentity& worker, absl::Time now);
  // Of jobs that re-form: the memory of `last` is `incarnation`'s. The job's names.
  std::vector<std::string> TakeOverHeld(Transaction& transaction, const WorkerIdentity& last,
                                        const WorkerIdentity& next, const std::vector<ResumedJob>& resumed);
  static void MakeReady(Transaction& transaction, const std::string& name);
  static absl::Status LoadMeshes(Job& job);
  Origin OriginOf(const Job& job) const;

  static absl::StatusOr<MeshSpec> WantedMesh(const Job& job);  // that it goes back to when workers are there again

  // coordinator_copies.cc
  // Workers whose copies count: those that are heard, or only those of them that no peer says are gone.
  enum class CopyHolders { kHeard, kCertain };
  // The newest copies of the job that these workers have as a whole, of each shard so many.
  std::optional<CopiesPlace> FindCopies(const Job& job, absl::Time now, CopyHolders holders, size_t times = 1) const;
  // Those of one step, whether they are whole any more or not.
  CopiesPlace CopiesOf(const Job& job, const CheckpointRecord& checkpoint, absl::Time now,
                       CopyHolders holders = CopyHolders::kHeard) const;

  // coordinator_back.cc
  // Where a job goes back to that loses a shard: the newest of its copies and, if it may, its checkpoints. Unset: nowhere.
  std::optional<CheckpointRecord> BackOf(const Job& job, absl::Time now) const;
  // The job lost what nobody else has: it goes back, if it has where to; else it fails.
  void LoseJob(Transaction& transaction, const std::string& name, const std::string& cause, absl::Time now);
  void GoBack(Transaction& transaction, const std::string& name, const CheckpointRecord& checkpoint,
              const std::string& cause, absl::Time now);
  // The checkpoint that the job goes back to cannot be read, `cause` says why: it takes the next one, or fails.
  void PassOverCheckpoint(Transaction& transaction, const std::string& name, const std::string& cause, absl::Time now);
  bool MayShrink(const Job& job, absl::Time now) const;
  // Gives a WAITING job that goes back the mesh that it wants or, after some patience, the largest that there are
  // workers for.
  absl::Status FitToWorkers(Transaction& transaction, const std::string& name, absl::Time now);
  // A member has read its shard, or cannot. When all have said so, what they read is the checkpoint, and the job begins
  // with it; or those that cannot read it are replaced; or, if nobody can or it has changed, it is passed over.
  void ApplyRead(Transaction& transaction, const MemberReport& report, const Job& there, const WorkerIdentity& worker,
                 absl::Time now);
  void DecideRead(Transaction& transaction, const std::string& name, absl::Time now);
  // Of jobs that go back: copies that are whole no more are passed over, and members that have said nothing for too long
  // count as such that cannot read it.
  void GiveUpReading(Transaction& transaction, const std::string& name, absl::Time now);

  // coordinator_reshard.cc
  absl::Status CheckReshards(const Job& job, const MeshSpec& mesh, absl::Time now) const;
  void GiveUpReshard(Transaction& transaction, const std::string& name, const std::string& cause);
  // Reshardings that have `worker` are given up.
  void LoseFromReshards(Transaction& transaction, const WorkerIdentity& worker, const std::string& cause);
  // A report of a member to be. False: it is not of one.
  bool ApplyStaged(Transaction& transaction, const MemberReport& report, const WorkerIdentity& worker);
  void MoveToNext(Transaction& transaction, const std::string& name);
  static Assignment StagedAt(const Place& place);

  // How a worker ended.
  struct Ending {
    std::string cause;  // what is said of it in its jobs' error
    std::string seen;   // in the event
  };

  // coordinator_hosts.cc
  // Whether a loss that another host says waits until the members of the lost one's host were heard, or not.
  bool AwaitsHost(Transaction& transaction, const MemberReport& report, const WorkerIdentity& reporter, absl::Time now);
  // Hosts whose node's call ended a host_timeout ago, and when; they are forgotten. `steady`: this process was not held up.
  std::map<std::string, absl::Time> TakeLateHosts(bool steady, absl::Time now);

  // coordinator_membership.cc
  bool IsAsAt(const Worker& worker, const Heard& last, absl::Time now) const;
  bool IsSilent(const Worker& worker, absl::Time now) const;
  void Hear(Worker& worker, absl::Time now);
  void TakeTraits(Worker& worker, const WorkerTraits& traits);
  // `there`: the worker of that name, null if there is none; also below.
  Worker* FindWorker(const std::string& name);
  static absl::Status CheckIncarnation(const Worker* there, const std::string& name, int64_t incarnation);
  // `call`: "heartbeat", of an incarnation that may have joined.
  static absl::Status CheckSecretOf(const Worker* there, int64_t incarnation, absl::string_view secret,
                                    absl::string_view call);
  absl::Status CheckMembersJoined(const JobRecord& job) const;
  bool TakesOver(const LastIncarnation& last, const WorkerIdentity& old) const;
  absl::Status CheckJoin(const Worker& there, const WorkerIdentity& worker, absl::Time now,
                         const LastIncarnation& last) const;
  bool IsUsedUp(const Worker& worker, absl::Time now) const;
  absl::Status CheckAhead(const WorkerIdentity& worker, int64_t last, absl::Time wall) const;
  absl::Status MakeRoomForWorker(Transaction& transaction) const;
  // `worker` takes over the incarnation of its name that is there.
  void Resume(Transaction& transaction, const Worker& worker, const std::vector<ResumedJob>& resumed, absl::Time now);
  // `worker` joined; the incarnation of its name that is there, if any, ended.
  void PutNextIncarnation(Transaction& transaction, const Worker& worker, absl::Time now);
  // Its jobs lose it.
  void LoseWorker(Transaction& transaction, const WorkerIdentity& worker, const std::string& cause, absl::Time now,
                  bool died = true);
  void ApplyFailure(Transaction& transaction, const MemberReport& report, const Job& job, const WorkerIdentity& worker,
                    absl::Time now);
  absl::Status CheckJobsKnown(const std::string& name, int64_t incarnation, bool joined,
                              const std::vector<MemberReport>& reports);
  Ending SilenceOf(const Worker& worker, absl::Time now) const;
  // They are dead, and their jobs lose them; none of them counts when the first is lost.
  void MarkDead(Transaction& transaction, const std::map<std::string, Ending>& workers, absl::Time now);
  // Where `worker` is the member that `report` is about; no job: the report is stale.
  Place PlaceIn(const MemberReport& report, const WorkerIdentity& worker) const;
  absl::Status CheckRanks(const std::vector<MemberReport>& reports, const WorkerIdentity& worker) const;
  absl::Status ApplyReport(Transaction& transaction, const MemberReport& report, const WorkerIdentity& worker,
                           absl::Time now);
  absl::Status ApplyOtherPlan(Transaction& transaction, const MemberReport& report, const Job& there,
                              const WorkerIdentity& worker);
  void ApplyProgress(const MemberReport& report, const WorkerIdentity& worker, absl::Time now);
  std::vector<Assignment> AssignmentsOf(const WorkerIdentity& worker, absl::Time now) const;

  const CoordinatorOptions options_;
  const std::unique_ptr<Store> store_;
  CoordinatorState state_;
  std::vector<std::string> events_;
  struct NodeCall {
    uint64_t number = 0;
    std::optional<absl::Time> ended;
  };
  std::map<std::string, NodeCall> node_calls_;  // by host: the newest one
  // Incarnations of workers that were said to hold jobs of another store; at most max_workers.
  std::set<std::string> foreign_;
  absl::Time last_tick_ = absl::InfinitePast(), last_hosts_tick_ = absl::InfinitePast();
  absl::Time last_come_ = absl::InfinitePast();  // when a worker joined last, or was heard again
  bool assign_ = true;  // something happened since the last attempt that may let a WAITING job start
};

}  // namespace shardmesh
