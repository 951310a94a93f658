// VersionReader: published versions, one after the other, for inference engines and evaluators.
//
//   ASSIGN_OR_RETURN(std::unique_ptr<VersionReader> reader, VersionReader::Open(client, "llama"));
//   RETURN_IF_ERROR(Follow(*reader, {}, [&](const HeldVersion& version) {
//     ... read version.parameter("layers.0.weight") until the next call ...
//   }));
//
// Two kinds, one interface, the same bytes. Attached (a worker of the job runs on this host): the reader maps the job's
// publications, copies nothing and asks nobody: it finds versions on the board that the workers write
// (local/memory/version_board.h) and keeps one where it is by a hold that the kernel knows (local/memory/file_hold.h).
// So a version is there as soon as it is committed, taking it costs a system call whatever its size, any number of
// readers share one memory, and what is held stays whole whoever dies. Pulled (any host): the version is copied over
// gRPC.
//
// A reader that is attached says to its worker in time that it is there (ReaderOptions::ttl). When the worker or the
// job's epoch ends, any reader goes to the worker's next incarnation or to the job's next epoch; so it does when the
// job was deleted and made again under its name, as a trainer that loads another state does. VersionReader is for one
// thread; HeldVersions may go in any other.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"

namespace shardmesh {

// One whole version that stays as it is while this object lives. Movable.
class HeldVersion {
 public:
  Step step() const { return step_; }
  Epoch epoch() const { return job_->epoch(); }
  // Borrowed from this object. NotFound: no such parameter.
  absl::StatusOr<ConstTensorView> parameter(absl::string_view name) const;
  const Job& job() const { return *job_; }

 private:
  friend class AttachedReader;
  friend class PulledReader;
  std::shared_ptr<Job> job_;
  Step step_;
  std::shared_ptr<const void> keeps_;  // the memory, and the hold on it
  const char* base_ = nullptr;         // buckets as the window has them
  bool compact_ = false;               // without gaps between buckets
  int device_ = -1;                    // whose memory it is, as ConstTensorView::device
};

struct ReaderOptions {
  enum class Way { kAny, kAttached, kPulled } way = Way::kAny;  // kAny: attached where that is possible
  // What is held by a reader that is silent for so long counts as abandoned; 100 ms to a day.
  absl::Duration ttl = absl::Seconds(30);
  NameRules names;  // of the names that HeldVersion::parameter is given
  // Where it is set, and becomes true, Take ends with Cancelled: attached at once, pulled once bytes come or its time
  // is up.
  std::shared_ptr<const std::atomic<bool>> stop;

  bool stopped() const { return stop != nullptr && stop->load(); }
};

class VersionReader {
 public:
  virtual ~VersionReader() = default;

  // Errors of Client::OpenJob. FailedPrecondition, with kAttached: no worker of the job is on this host. With kAttached, of
  // a job on CUDA devices, errors of SessionDevice::MapPublications; its versions are memory of the device.
  static absl::StatusOr<std::unique_ptr<VersionReader>> Open(Client client, const std::string& job,
                                                             ReaderOptions options = {});

  // The version that was chosen, of the job's newest epoch; all but an exact one are waited for.
  //   OutOfRange: an exact version that is not there; names those that are. DeadlineExceeded: it did not come in time.
  //   Unavailable: the job failed, or its workers cannot be reached, and what is there is not it. NotFound: the job was
  //   deleted. Cancelled: see ReaderOptions::stop.
  virtual absl::StatusOr<HeldVersion> Take(VersionChoice choice, absl::Duration timeout) = 0;
  virtual bool attached() const = 0;
  // The job that it reads from, of the newest epoch that it knows; between two calls of Take.
  virtual const Job& job() const = 0;
};

struct FollowOptions {
  // The first version.
  VersionChoice from;
  // For each of them; then it ends with DeadlineExceeded.
  absl::Duration timeout = absl::Minutes(10);
};

// Calls `use` with one version after the other, each newer than the one before (kNewer). That one is released when
// `use` has returned of the next: between two calls the caller may read the older one. Versions that come while `use`
// runs, but the newest, are passed over. Ends with the first error, of Take or of `use`; Cancelled is a good one to
// stop with.
absl::Status Follow(VersionReader& reader, const FollowOptions& options,
                    const std::function<absl::Status(const HeldVersion&)>& use);

}  // namespace shardmesh
