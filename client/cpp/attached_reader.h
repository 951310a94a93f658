// AttachedReader: the VersionReader that maps publications. One ReaderLink is one attachment to one worker: it lives as
// long as a version that was taken through it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/cpp/session_device.h"
#include "client/cpp/version_reader.h"
#include "core/base/clock.h"
#include "core/base/sync.h"
#include "local/memory/segment.h"
#include "local/memory/version_board.h"
#include "local/process/not_in_children.h"
#include "local/socket/socket.h"
#include "proto/shardmesh/v1/local.pb.h"

namespace shardmesh {

// A job that is deleted to be made again, as with other weights, is missing for a moment: a reader waits for that long.
class Absence {
 public:
  // Whether the job, which is `missing` now or not, has been for longer.
  bool Lasts(bool missing) {
    if (!missing || since_ == absl::InfiniteFuture()) since_ = missing ? MonotonicNow() : absl::InfiniteFuture();
    return MonotonicNow() > since_ + absl::Seconds(1);
  }

 private:
  absl::Time since_ = absl::InfiniteFuture();
};

// A process that is forked from the one that attached may read what it inherited while that one holds it; it holds
// nothing itself, so that what a killed reader held is free at once, whatever its children do. Thread-safe.
class ReaderLink {
 public:
  // Errors of AttachAtWorker, and what the worker says. Internal: what the worker sent does not fit the plan.
  // `again`: once more if it is refused, since a worker's next incarnation does not know what the last one granted.
  static absl::StatusOr<std::shared_ptr<ReaderLink>> Attach(std::shared_ptr<Job> job, Rank rank, absl::Duration ttl,
                                                            bool again = true);
  ~ReaderLink();

  // The publication of the version, held; released with Release. nullopt: it is not there.
  std::optional<int> Hold(Step step);
  void Release(int buffer);
  const char* data(int buffer) const {
    return device_ != nullptr ? device_->publication(static_cast<size_t>(buffer)) : publications_[buffer].data();
  }
  int device() const { return device_ != nullptr ? device_->device() : -1; }  // where data lies, as TensorView::device

  std::vector<Step> Published() const;  // ascending
  VersionBoard& board() const { return *reinterpret_cast<VersionBoard*>(board_.data()); }
  // OK while the worker is there and the epoch goes on: else no new version may come through this link.
  absl::Status Health() const;
  // Whether the worker has ended the connection, or its process has ended.
  bool hung_up() const { return hung_up_.load(); }
  BoardOver over() const { return static_cast<BoardOver>(board().over.load()); }

 private:
  ReaderLink(std::shared_ptr<Job> job, LocalSocket socket) : job_(std::move(job)), socket_(std::move(socket)) {}
  absl::Status Map(const v1::LocalWelcome& welcome, std::vector<UniqueFd> descriptors);
  void Renew(absl::Duration every);
  void End(const absl::Status& why);

  const std::shared_ptr<Job> job_;
  LocalSocket socket_;
  Segment board_;
  std::vector<Segment> publications_;      // of a job on a device without data: they are held
  std::unique_ptr<SessionDevice> device_;  // of that, where the data is
  std::vector<UniqueFd> holds_;  // by publication: the description that holds it, which maps nothing
  std::vector<NotInChildren> own_holds_;
  int place_ = 0;
  const pid_t pid_ = getpid();
  std::thread renewer_;
  std::atomic<bool> stop_{false}, hung_up_{false};
  mutable Mutex mu_;
  std::vector<int> uses_ ABSL_GUARDED_BY(mu_);  // by publication
  absl::Status health_ ABSL_GUARDED_BY(mu_);
};

class AttachedReader final : public VersionReader {
 public:
  AttachedReader(Client client, std::shared_ptr<Job> job, std::shared_ptr<ReaderLink> link, ReaderOptions options)
      : client_(std::move(client)), job_(std::move(job)), link_(std::move(link)), options_(std::move(options)) {}

  absl::StatusOr<HeldVersion> Take(VersionChoice choice, absl::Duration timeout) override;
  bool attached() const override { return true; }
  const Job& job() const override { return *job_; }

 private:
  // What is known of the job, once the link gives no new version.
  struct After {
    bool moved = false;     // there is another link
    bool readable = false;  // there is none yet, and what this one has is of the job's newest epoch
    absl::Status failed;    // the job has failed, so that nothing more comes
    absl::Status unknown;   // nobody answers who could tell
  };

  std::optional<HeldVersion> TryTake(const VersionChoice& choice);
  absl::StatusOr<After> MoveOn(absl::Time deadline);
  bool AttachToNextIncarnation();
  absl::StatusOr<After> AttachToNextEpoch();
  absl::Status Late(const VersionChoice& choice, absl::Duration timeout) const;

  Client client_;
  std::shared_ptr<Job> job_;
  std::shared_ptr<ReaderLink> link_;
  const ReaderOptions options_;
  Absence absence_;
};

}  // namespace shardmesh
