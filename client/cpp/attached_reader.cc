#include "client/cpp/attached_reader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/attached_channel.h"
#include "client/cpp/local_attachment.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "local/memory/file_hold.h"
#include "local/memory/futex.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kAsk = absl::Seconds(1);           // the coordinator, whatever time is left
constexpr absl::Duration kLook = absl::Milliseconds(50);    // at the link, while a version is waited for
constexpr absl::Duration kSlice = absl::Milliseconds(250);  // of the thread that renews: many readers wake seldom

std::string Names(const std::vector<Step>& steps) {
  if (steps.empty()) return "none";
  return absl::StrJoin(steps, ", ", [](std::string* out, Step step) { absl::StrAppend(out, step.value()); });
}

}  // namespace

absl::StatusOr<std::shared_ptr<ReaderLink>> ReaderLink::Attach(std::shared_ptr<Job> job, Rank rank, absl::Duration ttl,
                                                               bool again) {
  v1::AttachRequest request;
  request.set_reader_ttl_ms(absl::ToInt64Milliseconds(ttl));
  ASSIGN_OR_RETURN(LocalAttachment attached, AttachAtWorker(*job, rank, std::move(request)));
  const absl::Status said = attached.said();
  if (absl::IsPermissionDenied(said) && again) return Attach(std::move(job), rank, ttl, /*again=*/false);
  RETURN_IF_ERROR(said);
  std::shared_ptr<ReaderLink> link(new ReaderLink(std::move(job), std::move(attached.socket)));
  RETURN_IF_ERROR(link->Map(attached.welcome, std::move(attached.descriptors)));
  ASSIGN_OR_RETURN(link->renewer_,
                   StartThread("a reader's signs of life", [raw = link.get(), every = ttl / 3] { raw->Renew(every); }));
  return link;
}

ReaderLink::~ReaderLink() {
  stop_.store(true);
  socket_.Shutdown();
  if (getpid() != pid_) renewer_.detach();  // a forked child: it has no such thread
  if (renewer_.joinable()) renewer_.join();
}

absl::Status ReaderLink::Map(const v1::LocalWelcome& welcome, std::vector<UniqueFd> descriptors) {
  const size_t expected = 1 + static_cast<size_t>(job_->spec().publications);
  const bool on_device = welcome.device_segments_size() > 0;
  if (on_device) {
    ASSIGN_OR_RETURN(device_,
                     SessionDevice::MapPublications(welcome, descriptors, job_->plan(), expected - 1, job_->options()));
  }
  if (descriptors.size() != expected || welcome.segments_size() != static_cast<int>(expected) || welcome.seat() < 0 ||
      welcome.plan_hash() != job_->plan().hash()) {
    return absl::InternalError(absl::StrCat("the worker sent ", descriptors.size(), " publications of plan ",
                                            welcome.plan_hash(), "; ", expected, " of ", job_->plan().hash(),
                                            " expected"));
  }
  for (size_t i = 0; i < expected; ++i) {
    const v1::Segment& said = welcome.segments(static_cast<int>(i));
    const int64_t of_weights = on_device ? 0 : job_->plan().window_bytes();
    const int64_t needed = i == 0 ? static_cast<int64_t>(sizeof(VersionBoard)) : of_weights;
    if (said.data_offset() < 0 || said.num_bytes() - said.data_offset() < needed) {
      return absl::InternalError("a publication is smaller than the plan says");
    }
    ASSIGN_OR_RETURN(Segment segment, Segment::Map(std::move(descriptors[i]), said.num_bytes(), said.data_offset(),
                                                   Segment::Access::kReadOnly));
    if (i == 0) {
      board_ = std::move(segment);
    } else {
      ASSIGN_OR_RETURN(UniqueFd hold, segment.ReadOnlyFd());
      own_holds_.emplace_back(hold.get(), nullptr, 0);
      holds_.push_back(std::move(hold));
      publications_.push_back(std::move(segment));
    }
  }
  place_ = welcome.seat();
  MutexLock lock(mu_);
  uses_.assign(publications_.size(), 0);
  return absl::OkStatus();
}

// Says in time that this reader is there, and hears when the worker is not.
void ReaderLink::Renew(absl::Duration every) {
  absl::Time next = MonotonicNow() + every;
  while (!stop_.load()) {
    const absl::StatusOr<LocalMessage> message = socket_.Receive(std::min(kSlice, every));
    v1::TrainerReply reply;
    if (message.ok() && reply.ParseFromString(message->bytes) && reply.code() != 0) {
      End(absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.message()));
    } else if (!message.ok() && !absl::IsDeadlineExceeded(message.status())) {
      End(message.status());
      hung_up_.store(true);
      return;
    }
    const bool over = this->over() != BoardOver::kNo && Health().ok();
    if (MonotonicNow() < next && !over) continue;
    next = MonotonicNow() + every;
    v1::TrainerRequest request;
    request.set_renew(true);
    socket_.Send(request.SerializeAsString(), {}, kSlice).IgnoreError();  // a worker that is gone is heard next
  }
}

void ReaderLink::End(const absl::Status& why) {
  MutexLock lock(mu_);
  if (health_.ok()) health_ = why;
}

absl::Status ReaderLink::Health() const {
  MutexLock lock(mu_);
  return health_;
}

std::vector<Step> ReaderLink::Published() const {
  std::vector<Step> steps;
  for (size_t b = 0; b < publications_.size(); ++b) {
    if (const int64_t version = board().version_plus_one[b].load(); version > 0) steps.push_back(Step(version - 1));
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

// The hold first, then the look: the lead takes the version away first and then looks for holds.
std::optional<int> ReaderLink::Hold(Step step) {
  MutexLock lock(mu_);
  for (int b = 0; b < static_cast<int>(publications_.size()); ++b) {
    const std::atomic<int64_t>& version = board().version_plus_one[b];
    if (version.load() - 1 != step.value()) continue;
    if (uses_[b] == 0 && !HoldFile(holds_[b].get(), place_).ok()) return std::nullopt;
    if (version.load() - 1 == step.value()) {
      ++uses_[b];
      return b;
    }
    if (uses_[b] == 0) LetFileGo(holds_[b].get(), place_);
  }
  return std::nullopt;
}

void ReaderLink::Release(int buffer) {
  MutexLock lock(mu_);
  if (--uses_[buffer] == 0) LetFileGo(holds_[buffer].get(), place_);
}

std::optional<HeldVersion> AttachedReader::TryTake(const VersionChoice& choice) {
  const bool exact = choice.kind == VersionChoice::kExact;
  const std::vector<Step> published = link_->Published();
  if (!exact && published.empty()) return std::nullopt;
  const Step step = exact ? choice.step : published.back();
  if (!exact && step.value() < choice.LowestAt(job_->epoch())) return std::nullopt;
  const std::optional<int> buffer = link_->Hold(step);
  if (!buffer.has_value()) return std::nullopt;
  HeldVersion version;
  version.job_ = job_;
  version.step_ = step;
  version.base_ = link_->data(*buffer);
  version.device_ = link_->device();
  version.keeps_ =
      std::shared_ptr<const void>(version.base_, [link = link_, b = *buffer](const void*) { link->Release(b); });
  return version;
}

// At the same epoch.
bool AttachedReader::AttachToNextIncarnation() {
  const absl::StatusOr<Rank> rank = RankToAttachTo(*job_, 0);
  if (!rank.ok()) return false;
  absl::StatusOr<std::shared_ptr<ReaderLink>> link = ReaderLink::Attach(job_, *rank, options_.ttl);
  if (!link.ok() || (*link)->over() != BoardOver::kNo) return false;
  link_ = *std::move(link);
  return true;
}

// A job that is not ready yet, or a worker that is gone again, is looked for later.
absl::StatusOr<AttachedReader::After> AttachedReader::AttachToNextEpoch() {
  absl::StatusOr<std::shared_ptr<Job>> job = client_.Reopen(*job_, JobUse::kRead, absl::ZeroDuration());
  if (absl::IsDeadlineExceeded(job.status())) return After{};
  RETURN_IF_ERROR(job.status());
  ASSIGN_OR_RETURN(const Rank at, RankToAttachTo(**job, 0));
  absl::StatusOr<std::shared_ptr<ReaderLink>> link = ReaderLink::Attach(*job, at, options_.ttl);
  if (absl::IsUnavailable(link.status()) || absl::IsAborted(link.status()) || absl::IsNotFound(link.status())) {
    return After{};
  }
  RETURN_IF_ERROR(link.status());
  link_ = *std::move(link);
  job_ = *std::move(job);
  return After{true};
}

// Goes to the worker's next incarnation, or to the job's next epoch. Until there is one, what the link has is read only
// where it is of the newest epoch: a job that was deleted and made again has left it behind.
absl::StatusOr<AttachedReader::After> AttachedReader::MoveOn(absl::Time deadline) {
  const bool closed = link_->over() == BoardOver::kClosed;
  if (link_->hung_up() && !closed && AttachToNextIncarnation()) return After{true};
  v1::DescribeJobRequest request;
  request.set_job(job_->spec().name);
  const absl::StatusOr<v1::JobDescription> now = client_.coordinator().DescribeJob(
      request, std::min(job_->options().call_timeout, std::max(deadline - MonotonicNow(), kAsk)));
  if (absence_.Lasts(absl::IsNotFound(now.status()))) return now.status();
  if (absl::IsNotFound(now.status())) return After{};
  if (!now.ok()) {
    After after{false, !closed};
    if (closed || link_->hung_up()) {
      after.unknown = absl::UnavailableError(
          absl::StrCat("job ", job_->spec().name, ": its worker has ended, and the coordinator does not answer: ",
                       now.status().message()));
    }
    return after;
  }
  const int64_t epoch = job_->epoch().value();
  const bool failed = now->state() == v1::JOB_STATE_FAILED;
  After after{false, now->epoch() == epoch ? failed || !closed : now->from_epoch() == epoch};
  if (now->epoch() != epoch && (now->state() == v1::JOB_STATE_READY || (failed && !after.readable))) {
    ASSIGN_OR_RETURN(after, AttachToNextEpoch());
  }
  if (failed && !after.moved) {
    after.failed = absl::UnavailableError(absl::StrCat("job ", job_->spec().name, " failed: ", now->error()));
  }
  return after;
}

absl::Status AttachedReader::Late(const VersionChoice& choice, absl::Duration timeout) const {
  const absl::Status health = link_->Health();
  return absl::DeadlineExceededError(
      absl::StrCat("job ", job_->spec().name, " published no version >= ", choice.LowestAt(job_->epoch()), " within ",
                   absl::FormatDuration(timeout), "; there: ", Names(link_->Published()),
                   health.ok() ? "" : absl::StrCat("; ", health.message())));
}

absl::StatusOr<HeldVersion> AttachedReader::Take(VersionChoice choice, absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (true) {
    const uint32_t seen = link_->board().notifier.load();
    if (options_.stopped()) return absl::CancelledError("the reader was stopped");
    After after{false, true};
    if (link_->over() != BoardOver::kNo || !link_->Health().ok()) {
      ASSIGN_OR_RETURN(after, MoveOn(deadline));
      if (after.moved) continue;
    }
    bool is_there = false;
    if (after.readable) {
      if (std::optional<HeldVersion> version = TryTake(choice)) return *std::move(version);
      const std::vector<Step> published = link_->Published();
      is_there = std::find(published.begin(), published.end(), choice.step) != published.end();
      if (choice.kind == VersionChoice::kExact && !is_there) {
        return absl::OutOfRangeError(absl::StrCat("version ", choice.step.value(), " of job ", job_->spec().name,
                                                  " is not there; published: ", Names(published)));
      }
    }
    RETURN_IF_ERROR(after.failed);
    const absl::Duration left = deadline - MonotonicNow();
    if (left <= absl::ZeroDuration()) return after.unknown.ok() ? Late(choice, timeout) : after.unknown;
    if (is_there && choice.kind == VersionChoice::kExact) continue;  // taken for a moment
    FutexWait(link_->board().notifier, seen, std::min(left, kLook));
  }
}

}  // namespace shardmesh
