#include "worker/node/node_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/incarnation.h"
#include "core/base/status.h"
#include "core/job/job.h"

namespace shardmesh {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

absl::Status CheckText(absl::string_view what, absl::string_view text, size_t least, size_t most) {
  if (text.size() >= least && text.size() <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " \"", absl::CHexEscape(text.substr(0, 64)), "\" has ",
                                                 text.size(), " bytes; it has ", least, " to ", most));
}

// The rule of Segment::Map, without mapping: whoever finds the segment may touch all of it.
absl::Status CheckMemory(const v1::RetainSegment& keep, int fd) {
  struct stat info;
  if (fd < 0 || fstat(fd, &info) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment ", keep.name(), " came without a descriptor; send one with the request"));
  }
  if (keep.num_bytes() <= 0 || keep.data_offset() < 0 || keep.data_offset() > keep.num_bytes() ||
      info.st_size < keep.num_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("segment ", keep.name(), ", said to have ", keep.num_bytes(),
                                                   " bytes with data from ", keep.data_offset(), ", has ", info.st_size,
                                                   " bytes; say the size it was made with"));
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    return absl::InvalidArgumentError(absl::StrCat("segment ", keep.name(), " has seals ", seals,
                                                   "; its size must be sealed (F_SEAL_SHRINK and F_SEAL_GROW)"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::NodeReply> NodeStore::Hello(const v1::NodeHello& hello, pid_t pid) {
  RETURN_IF_ERROR(ValidateId("worker", hello.worker()));
  if (hello.incarnation() <= 0 || hello.incarnation() > kMaxIncarnation) {
    return absl::InvalidArgumentError(absl::StrCat("worker ", hello.worker(), ": incarnation ", hello.incarnation(),
                                                   "; it is positive, and at most ", kMaxIncarnation));
  }
  const auto known = workers_.find(hello.worker());
  if (known == workers_.end() && workers_.size() >= kMaxRetainedWorkers) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the node has ", kMaxRetainedWorkers, " workers; give this one another node (--socket)"));
  }
  Worker& worker = known == workers_.end() ? workers_[hello.worker()] : known->second;
  if (worker.pid != 0 && worker.pid != pid) {
    return absl::AlreadyExistsError(absl::StrCat("process ", worker.pid, " is worker ", hello.worker(),
                                                 " and lives; end it, or choose another --name"));
  }
  if (worker.pid == pid && (hello.incarnation() == worker.asked || hello.incarnation() == worker.granted)) {
    return worker.welcome;
  }
  if (worker.pid == pid && hello.incarnation() < worker.incarnation) {
    return absl::AbortedError(absl::StrCat("worker ", hello.worker(), " has incarnation ", worker.incarnation, "; ",
                                           hello.incarnation(), " is an older incarnation of it"));
  }
  DropUnfinished(worker);
  v1::NodeReply welcome;
  if (worker.incarnation != 0) {
    welcome.set_last_incarnation(worker.incarnation);
    *welcome.mutable_last_serving() = worker.serving;
    for (const auto& [key, job] : worker.whole) *welcome.add_jobs() = job;
    welcome.set_away_since_nanos(worker.away_since);
  }
  worker.pid = pid;
  worker.asked = hello.incarnation();
  worker.granted = worker.incarnation = std::max(worker.asked, worker.incarnation + 1);
  welcome.set_incarnation(worker.granted);
  worker.served = false;
  worker.welcome = welcome;
  return welcome;
}

void NodeStore::DropUnfinished(Worker& worker) {
  for (auto it = worker.segments.begin(); it != worker.segments.end();) {
    const auto& [job, epoch, name] = it->first;
    it = worker.whole.count({job, epoch}) == 0 ? worker.segments.erase(it) : std::next(it);
  }
}

void NodeStore::Ended(const std::string& name, pid_t pid, bool orderly, int64_t now_nanos) {
  const auto it = workers_.find(name);
  if (it == workers_.end() || it->second.pid != pid) return;
  it->second.pid = 0;
  if (it->second.served) it->second.away_since = now_nanos;
  if (orderly) workers_.erase(it);
}

bool NodeStore::Served(const std::string& worker, pid_t pid) const {
  const auto it = workers_.find(worker);
  return it != workers_.end() && it->second.pid == pid && it->second.served;
}

absl::Duration NodeStore::HeartbeatTimeout(const std::string& worker) const {
  const auto it = workers_.find(worker);
  return it == workers_.end() ? absl::ZeroDuration() : absl::Milliseconds(it->second.serving.heartbeat_timeout_ms());
}

pid_t NodeStore::Pid(const std::string& worker) const {
  const auto it = workers_.find(worker);
  return it == workers_.end() ? 0 : it->second.pid;
}

absl::StatusOr<NodeStore::Worker*> NodeStore::Alive(const std::string& worker) {
  const auto it = workers_.find(worker);
  if (it != workers_.end() && it->second.pid != 0) return &it->second;
  return absl::FailedPreconditionError(absl::StrCat("worker \"", worker, "\" did not say hello; do so first"));
}

absl::Status NodeStore::Serving(const std::string& name, const v1::NodeServing& serving) {
  ASSIGN_OR_RETURN(Worker* const worker, Alive(name));
  RETURN_IF_ERROR(CheckText("address", serving.address(), 0, kMaxRetainedAddressBytes));
  RETURN_IF_ERROR(CheckText("local_socket", serving.local_socket(), 0, kMaxRetainedAddressBytes));
  if (serving.incarnation() < 0 || serving.incarnation() > kMaxIncarnation || serving.heartbeat_timeout_ms() < 0) {
    return absl::InvalidArgumentError(absl::StrCat("worker ", name, " serves as incarnation ", serving.incarnation(),
                                                   " with a heartbeat time-out of ", serving.heartbeat_timeout_ms(),
                                                   " ms; neither is negative, and the first at most ",
                                                   kMaxIncarnation));
  }
  const int64_t timeout_ms = worker->serving.heartbeat_timeout_ms();
  worker->serving = serving;
  if (serving.heartbeat_timeout_ms() == 0) worker->serving.set_heartbeat_timeout_ms(timeout_ms);
  if (serving.incarnation() != 0) worker->incarnation = serving.incarnation();
  worker->served = true;
  return absl::OkStatus();
}

absl::Status NodeStore::Keep(const std::string& name, const v1::RetainSegment& keep, UniqueFd fd) {
  ASSIGN_OR_RETURN(Worker* const worker, Alive(name));
  RETURN_IF_ERROR(CheckText("job", keep.owner().job(), 1, kMaxRetainedNameBytes));
  RETURN_IF_ERROR(CheckText("segment name", keep.name(), 1, kMaxRetainedNameBytes));
  RETURN_IF_ERROR(CheckMemory(keep, fd.get()));
  const SegmentKey key(keep.owner().job(), keep.owner().epoch(), keep.name());
  if (worker->segments.size() >= kMaxRetainedSegments && worker->segments.count(key) == 0) {
    return absl::ResourceExhaustedError(absl::StrCat("worker ", name, " gave ", kMaxRetainedSegments,
                                                     " segments already; drop jobs that are not needed any more"));
  }
  worker->segments[key] = Segment{std::move(fd), keep.num_bytes(), keep.data_offset()};
  return absl::OkStatus();
}

absl::StatusOr<NodeStore::Found> NodeStore::Find(const std::string& asking, const v1::FindSegment& find) const {
  const SegmentKey key(find.owner().job(), find.owner().epoch(), find.name());
  const Segment* found = nullptr;
  for (const auto& [name, worker] : workers_) {
    const auto it = worker.segments.find(key);
    if (it != worker.segments.end() && (found == nullptr || name == asking)) found = &it->second;
  }
  if (found != nullptr) return Found{found->fd.get(), found->num_bytes, found->data_offset};
  return absl::NotFoundError(absl::StrCat("no worker gave segment \"", absl::CHexEscape(find.name()), "\" of ",
                                          absl::CHexEscape(find.owner().job()), "@", find.owner().epoch()));
}

absl::Status NodeStore::Whole(const std::string& name, const v1::RetainedJob& job) {
  ASSIGN_OR_RETURN(Worker* const worker, Alive(name));
  RETURN_IF_ERROR(CheckText("job", job.job(), 1, kMaxRetainedNameBytes));
  RETURN_IF_ERROR(CheckText("plan_hash", job.plan_hash(), 0, kMaxRetainedNameBytes));
  const JobKey key(job.job(), job.epoch());
  if (worker->whole.size() >= kMaxRetainedJobs && worker->whole.count(key) == 0) {
    return absl::ResourceExhaustedError(absl::StrCat("worker ", name, " has ", kMaxRetainedJobs,
                                                     " whole jobs already; drop those that are not needed any more"));
  }
  worker->whole[key] = job;
  return absl::OkStatus();
}

absl::Status NodeStore::Drop(const std::string& name, const v1::DropJob& drop) {
  ASSIGN_OR_RETURN(Worker* const worker, Alive(name));
  worker->whole.erase({drop.job(), drop.epoch()});
  const SegmentKey first(drop.job(), drop.epoch(), "");
  for (auto it = worker->segments.lower_bound(first); it != worker->segments.end();) {
    if (std::get<0>(it->first) != drop.job() || std::get<1>(it->first) != drop.epoch()) break;
    it = worker->segments.erase(it);
  }
  return absl::OkStatus();
}

}  // namespace shardmesh
