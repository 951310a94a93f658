// Worker: the jobs of one worker process. The membership agent tells it what to hold (Reconcile) and asks how that goes
// (Statuses); the RPC adapters and the local socket find jobs in it.
//
// Building a job's memory takes time and peers, so each job is prepared by a thread of its own. On the lead (rank 0)
// the host's memory is created and handed to the peers that ask (ServePeer); on a peer it is fetched from the lead's
// socket, with a deadline. The connection between a peer and the lead stays open: when one of them dies, the other
// knows at once.
//
// Closing a job waits for nothing: a thread of the worker waits for the preparation to end and gives the memory back.
// A preparation looks whether its job is closed at every range of its storage, every segment, and every 200 ms while it
// waits for the lead.
//
// With a node (worker/node) the memory of jobs outlives a worker that is killed. Its next incarnation takes
// the jobs over as they were left there (Resume), without asking anybody; peers and trainers meanwhile wait, until the
// heartbeat time-out says that it will not come.
//
// Versions that are leased when an epoch ends, or its job is deleted, stay until their leases do (past_).
//
// A job that lost a member and goes on without it is assigned anew, with where its weights are (Assignment.from). Its
// members end the older epoch together, and keep what they held until the coordinator says that the job is READY. So
// does a job that is brought to another mesh, but its members build the memory of the new epoch first, beside the older
// one, which trains on (staged): one of them ends the older epoch when the coordinator says so, and the others see
// that.
//
// A job that lost a shard of which no copy is left may go back to a checkpoint (Assignment.back): it is a new one to its
// members, but each reads its shard from the checkpoint before it is READY. So does a job with copies=2, whose members
// keep its shards for each other in memory (worker/move/peer_copies.h): rank 0 has them copied, round after round.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/folder_access.h"
#include "core/base/sync.h"
#include "local/socket/socket.h"
#include "proto/shardmesh/v1/coordinator.pb.h"
#include "proto/shardmesh/v1/local.pb.h"
#include "worker/job/job_shard.h"
#include "worker/lead/hosts/host_meeting.h"
#include "worker/memory/host_capacity.h"
#include "worker/memory/memory.h"
#include "worker/move/kept_copies.h"
#include "worker/move/reform.h"
#include "worker/node/node_link.h"

namespace shardmesh {

// Asks another worker, or this one (Shard.Copy); returns the last answer.
using CopyFn = std::function<absl::StatusOr<v1::FileProgress>(const v1::Peer& to, const v1::CopyRequest& request,
                                                              const ReportProgress& told, absl::Duration timeout)>;

// Is told, after each Reconcile, the addresses of all workers that the jobs here name: their members, and whoever has
// what they go on from.
using PeersNamedFn = std::function<void(const std::set<std::string>& addresses)>;

struct WorkerOptions {
  std::string name;
  int threads = 1;                                      // of a step, for each job
  absl::Duration heartbeat_timeout = absl::Seconds(3);  // silence of a peer after which it counts as dead
  absl::Duration step_timeout = absl::Seconds(60);
  absl::Duration spin;                                 // EngineOptions::spin
  absl::Duration prepare_timeout = absl::Seconds(60);  // for a peer to get the lead's memory
  HostCapacity host_capacity;                          // what a job may take; as it is: anything
  std::optional<WorkerDevice> device;                  // on which steps run; unset: on processors
  std::string group_address;  // of this host, for workers of other hosts; empty: jobs on several hosts are refused
  HostTransport transport;    // between hosts; with group_address
  MeetCall meet;              // how their first lead is asked; with group_address
  FetchCall transfer;         // how members of a job that re-forms get what others hold; null: they cannot
  CopyFn copy;                // how rank 0 has members make copies; null: it does not
  PeersNamedFn peers_named;   // null: nobody is told
  FolderAccess checkpoint_folders;  // of Shard.Save and Shard.Load
  NodeLink* node = nullptr;         // of the host, outlives the worker; null: jobs end with this process
};

class Worker {
 public:
  Worker(WorkerOptions options, std::unique_ptr<Memory> memory);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  const WorkerOptions& options() const { return options_; }
  // "cpu", or "cuda:N" and the device's name.
  std::string DeviceText() const;
  void SetHeartbeatTimeout(absl::Duration timeout);  // as the coordinator says
  absl::Duration heartbeat_timeout() const;

  // Takes over the jobs that the last incarnation of this worker left with the node, and says which, as JoinRequest
  // does. Once, before Reconcile.
  std::vector<v1::ResumedJob> Resume();

  // Starts what is new, closes what is gone, and waits for neither. Of a known epoch an assignment may say that it is
  // not staged any more, or needs nothing of an older one.
  void Reconcile(const std::vector<v1::Assignment>& assignments);
  std::vector<v1::MemberStatus> Statuses() const;
  std::vector<v1::KeptCopies> Copies() const;  // that it keeps
  // Called after a member's state changed (so that the next heartbeat goes out at once). When OnChange returns, the
  // callback before it is not running any more. The callback may not call OnChange.
  void OnChange(std::function<void()> callback);
  // For a heartbeat time-out the callback is called several times in each second: the coordinator has to hear often that
  // this worker is there, or may have something to say that is waited for.
  void Hurry();

  // NotFound: no such job here. Unavailable: it is being prepared, or failed to be.
  absl::StatusOr<std::shared_ptr<JobShard>> Find(const std::string& job) const;
  // Epochs of the job that are over, of which a version is leased.
  std::vector<std::shared_ptr<JobShard>> Past(const std::string& job) const;
  // To read versions from: of a job that is on its way to another epoch what it published before.
  absl::StatusOr<std::shared_ptr<JobShard>> FindToRead(const std::string& job) const;
  // Where that lease was granted, which may have been at an epoch that ended; else as FindToRead.
  absl::StatusOr<std::shared_ptr<JobShard>> FindLeased(const std::string& job, uint64_t lease) const;
  // What is held of the job of that epoch, which may be the one that ended before the newest, for a caller that shows
  // the job's secret (Assignment.secret). NotFound: nothing. PermissionDenied: not the secret. Unavailable: later.
  absl::StatusOr<std::shared_ptr<JobShard>> FindHeld(const std::string& job, int64_t epoch,
                                                     absl::string_view secret) const;
  std::vector<std::shared_ptr<JobShard>> Jobs() const;
  // What it keeps of that epoch of a job with copies=2. Errors as FindHeld.
  absl::StatusOr<std::shared_ptr<PeerCopies>> FindCopies(const std::string& job, int64_t epoch,
                                                         absl::string_view secret) const;
  // Shard.Copy. Errors as there, and those of `report`.
  absl::Status Copy(const v1::CopyRequest& request, const std::atomic<bool>& cancelled, const ReportProgress& report);

  // A peer asks the lead for the shared segments: answers, waits for its "mapped", then holds the connection until it
  // ends, the job is closed, or `stop`.
  void ServePeer(LocalSocket socket, const v1::PeerHello& hello, const std::atomic<bool>& stop);

  // The lead of another host writes or reads at the rendezvous of a job that this worker is rank 0 of. Errors of
  // Shard.Meet.
  absl::StatusOr<v1::MeetReply> Meet(const v1::MeetRequest& request) const;

  // Tells every job that this worker leaves, then closes all and hangs up on peers. Before the destructor, when the
  // stop is orderly.
  void Leave();

 private:
  struct Entry {
    v1::Assignment assignment;
    std::string plan_hash;
    v1::MemberState state = v1::MEMBER_STATE_PREPARING;
    std::string error;
    std::shared_ptr<JobShard> shard;
    bool resumed = false;               // from the node
    bool in_node = false;               // its memory comes from the node
    std::atomic<bool> retained{false};  // and is there as a whole
    std::vector<bool> mapped;           // on the lead: by rank of its host
    std::shared_ptr<Entry> before;      // of a job that re-forms: what this member held, until the job is READY
    std::atomic<bool> cutover{false};   // of a staged one: the older epoch may be ended
    std::optional<uint64_t> loaded_digest;  // of a job that goes back to a checkpoint: of this shard
    bool unreadable = false;                // the checkpoint cannot be read
    std::atomic<bool> use_loaded{false};    // all members have read theirs, and it is whole
    HostRanks ranks;
    const std::shared_ptr<MeetingPlace> meeting_place = std::make_shared<MeetingPlace>();  // of rank 0
    std::thread preparing;
    std::atomic<bool> closing{false};
  };

  // What follows from an assignment and this worker alone.
  struct Task {
    JobSpec spec;
    Plan plan;
    HostRanks ranks;
    Topology topology;
    bool lead = false;
    bool restores = false;   // the shard is filled with that of an older epoch
    bool goes_back = false;  // or with that of a checkpoint
  };
  // InvalidArgument: an assignment that is none.
  absl::StatusOr<Task> TaskOf(const Entry& entry) const;
  // Unimplemented, ResourceExhausted: this worker cannot. FailedPrecondition: the coordinator is of another build.
  absl::Status CheckTask(const Entry& entry, const Task& task) const;
  // The shard in its memory, which is the entry's from then on.
  absl::StatusOr<std::shared_ptr<JobShard>> OpenShard(const std::shared_ptr<Entry>& entry, const Task& task,
                                                      std::unique_ptr<LocalSocket>& link);
  // Meets the others, takes weights over, and says that the member is READY.
  absl::Status BecomeReady(const std::shared_ptr<Entry>& entry, const Task& task, JobShard& shard);
  void Prepare(std::shared_ptr<Entry> entry);
  // `link`: to the lead, of a member that has its memory from there.
  absl::Status Build(const std::shared_ptr<Entry>& entry, std::unique_ptr<LocalSocket>& link);
  std::shared_ptr<DeviceRuntime> copies() const {
    return options_.device.has_value() ? options_.device->copies : nullptr;
  }
  // worker_reform.cc. Takes the entry that the assignment goes on from out of what is held under the job's name.
  static std::shared_ptr<Entry> TakeBefore(const v1::Assignment& assignment, std::shared_ptr<Entry>& held);
  // The entry of that epoch, out of `held` or what was before it.
  static std::shared_ptr<Entry> TakeHeld(int64_t epoch, std::shared_ptr<Entry>& held);
  using Entries = std::map<std::string, std::shared_ptr<Entry>>;
  // Reconcile's: what one assignment says of what is held under its name, or staged there, goes to `keep`.
  void Keep(const v1::Assignment& assignment, Entries& keep, Entries& keep_staged,
            std::vector<std::shared_ptr<Entry>>& gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void KeepStaged(const v1::Assignment& assignment, Entries& keep, Entries& keep_staged)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::set<std::string> PeerAddresses() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Of a departing member, or one that has left: ends what it holds with the others.
  void KeepLeaving(const v1::Assignment& assignment, const Entries& keep, Entries& keep_staged)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void BeginPreparing(const std::shared_ptr<Entry>& entry);
  // worker_past.cc. Of an entry that is not needed any more, but for what is leased of it: that stays.
  void KeepLeased(const std::shared_ptr<Entry>& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Of an entry that is closed: gives back what its leased versions do not need. False: nothing of it is leased.
  bool LeaveVersions(const Entry& entry);
  // Closes those that nobody leases any more, or all.
  void SweepPast(bool all = false);
  // The entry's job has not gone on at this epoch yet.
  static bool Moves(const Entry& entry);
  // Of a staged assignment: builds no more than what the older epoch may stand beside, says so, and waits for its end.
  absl::Status AwaitCutover(const std::shared_ptr<Entry>& entry, JobShard& shard);
  // Of a departing member: ends the older epoch at the cutover, and then holds what it has.
  absl::Status EndAtCutover(const std::shared_ptr<Entry>& entry);
  absl::Status AwaitCutoverOf(const Entry& entry, JobShard* shard) const;
  void TellPrepared(Entry& entry);
  // From now on it is the job.
  void CutOver(const std::shared_ptr<Entry>& entry);
  // What was held before an entry that is needed alone from now on.
  static void DropOlder(Entry& entry, std::vector<std::shared_ptr<Entry>>& gone) {
    if (entry.before != nullptr) gone.push_back(std::exchange(entry.before, nullptr));
  }
  // InvalidArgument: `assignment.from` contradicts the assignment.
  static absl::Status CheckOrigin(const v1::Assignment& assignment);
  // Waits until what was held before is built, if that is a next incarnation's. Null: nothing was held.
  absl::StatusOr<std::shared_ptr<JobShard>> AwaitHeldBefore(const Entry& entry) const;
  // Ends the epoch that this one goes on from, with the other members that were in it.
  absl::Status EndBefore(const Entry& entry);
  EndingCall CallOf(const Entry& entry) const;
  // What the lead of a host says of the older epoch.
  absl::StatusOr<Bequest> BequestFor(const Entry& entry, const JobShard* before) const;
  // Fills the shard and waits until all members' are, and the weights are in place.
  absl::Status RestoreFrom(const Entry& entry, JobShard& shard);
  std::shared_ptr<JobShard> HeldBefore(const Entry& entry) const;
  // worker_back.cc. Reads this shard of the checkpoint that the job goes back to, and tells its digest.
  absl::Status ReadBack(Entry& entry, JobShard& shard);
  // And begins with it together with the other members, once the coordinator knows that all have read theirs.
  absl::Status GoBack(const std::shared_ptr<Entry>& entry, JobShard& shard);
  // worker_copies.cc. Of a job with copies=2 on several hosts: room for this epoch's.
  void BeginCopies(const Entry& entry, const Task& task);
  // Of jobs that this worker is in no more, or that others took the name of: gives up what it keeps, after a while.
  void DropCopies(const std::vector<v1::Assignment>& assignments) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndCopies(const std::string& job, int64_t before);  // those of epochs before that one
  // On rank 0: round after round, until the job is closed.
  void RunCopies(const std::shared_ptr<Entry>& entry, JobShard& shard);
  // worker_retained.cc. What the last incarnation left of a job at one epoch; null: it is of no use.
  std::shared_ptr<Entry> ResumeOne(const RetainedJob& left);
  // The node's memory, if the job supports restarts where it is and there is a node; else what ends with the process.
  std::unique_ptr<Memory> MemoryFor(Entry& entry, bool restarts);
  // All of the job's memory is opened: the next incarnation may take it over. Of more jobs than a node retains for one
  // worker the last ones go on without it.
  absl::Status KeepWhole(Entry& entry);
  bool IsRetained(const Entry& entry) const;
  void TellWhetherRetained();
  std::vector<std::pair<std::shared_ptr<JobShard>, bool>> JobsAndWhetherRetained() const;
  bool Hurries() const;
  // Waits for the trainers of the last incarnation; slots of those that do not come are free then.
  void AwaitClaims(const std::shared_ptr<Entry>& entry, JobShard& shard);
  void Drop(const Entry& entry);
  // What a member that hung up means: an abort, unless it comes back.
  void PeerGone(const std::shared_ptr<Entry>& entry, int rank);
  absl::StatusOr<HostMemory> FetchFromLead(Entry& entry, const JobSpec& spec, const Plan& plan,
                                           std::unique_ptr<LocalSocket>& link);
  void WatchLead(const std::shared_ptr<Entry>& entry, LocalSocket& link);
  // The job whose lead `hello` may ask: of its host, or rank 0 if it is the lead of another.
  absl::StatusOr<std::shared_ptr<Entry>> FindLead(const v1::PeerHello& hello, bool other_host) const;
  // Meets the leads of the other hosts. An error fails the job on this host.
  absl::Status MeetHosts(const std::shared_ptr<Entry>& entry, JobShard& shard);
  absl::StatusOr<HostGroups> MeetLeadsOf(const Entry& entry, bool again, absl::Duration timeout,
                                         const std::function<absl::Status()>& goes_on) const;
  void PeerMapped(const std::shared_ptr<Entry>& entry, int rank);
  void Close(const std::shared_ptr<Entry>& entry);
  void Reap();
  void Monitor();
  void Changed();

  const WorkerOptions options_;
  const std::unique_ptr<Memory> memory_;
  mutable Mutex mu_;
  Entries jobs_ ABSL_GUARDED_BY(mu_);
  // What it keeps of an epoch, and since when it is not in the job.
  struct Kept {
    std::shared_ptr<PeerCopies> copies;
    absl::Time left = absl::InfiniteFuture();
  };
  std::map<std::string, std::vector<Kept>> copies_ ABSL_GUARDED_BY(mu_);  // by job, the newest epoch first
  Entries staged_ ABSL_GUARDED_BY(mu_);  // what jobs will be, while they are at an older epoch
  std::vector<std::shared_ptr<Entry>> past_ ABSL_GUARDED_BY(mu_);   // closed ones of which a version is leased
  std::deque<std::shared_ptr<Entry>> closed_ ABSL_GUARDED_BY(mu_);  // for the reaper
  absl::Duration heartbeat_timeout_ ABSL_GUARDED_BY(mu_);
  absl::Time hurries_until_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  CondVar stopped_, reap_;
  Mutex round_mu_;     // held in a round of the monitor, before mu_: no shard goes that it looks at
  Mutex callback_mu_;  // held during the callback; never with mu_
  std::function<void()> on_change_ ABSL_GUARDED_BY(callback_mu_);
  std::thread monitor_, reaper_;
};

}  // namespace shardmesh
