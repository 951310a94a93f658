#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/job/job.h"
#include "python/client_binding/await.h"
#include "python/client_binding/binding.h"
#include "python/client_binding/process.h"

namespace shardmesh::python {
namespace {

constexpr absl::Duration kGrace = absl::Seconds(1);  // from a call's deadline to when it is left alone

// A VersionReader whose waits can be given up: a Take that nobody waits for any more is stopped, and the next call
// begins when it has ended. Closed by any thread. The interpreter's lock guards its members.
class BoundReader {
 public:
  BoundReader(const BoundJob& job, const std::string& way, double ttl) : name_(job.job->spec().name) {
    ReaderOptions options;
    options.way = way == "attached" ? ReaderOptions::Way::kAttached
                  : way == "pulled" ? ReaderOptions::Way::kPulled
                                    : ReaderOptions::Way::kAny;
    options.ttl = absl::Seconds(ttl);
    options.names = job.names;
    options.stop = stop_;
    const auto open = [client = job.service->client(), name = name_,
                       options]() -> absl::StatusOr<std::shared_ptr<VersionReader>> {
      return VersionReader::Open(client, name, options);
    };
    reader_ = OfThisProcess(OrThrow(Await<std::shared_ptr<VersionReader>>(open)));
    attached_ = reader_->attached();
    NoteJob();
  }
  ~BoundReader() { stop_->store(true); }
  BoundReader(const BoundReader&) = delete;

  BoundVersion Take(const VersionChoice& choice, double timeout) {
    if (absl::Status status = EnterProcess(); !status.ok()) throw StatusError(status);
    if (std::exchange(taking_, true)) {
      throw StatusError(
          absl::FailedPreconditionError("another thread waits for a version; each needs a reader of its own"));
    }
    struct Leave {
      BoundReader& reader;
      ~Leave() {
        reader.taking_ = false;
        if (reader.closed_) reader.Drop();
      }
    } leave{*this};
    const absl::Duration duration = absl::Seconds(timeout);
    HeldVersion version = OrThrow(TakeUntil(choice, duration, MonotonicNow() + duration));
    const Step step = version.step();
    const Epoch epoch = version.epoch();
    return {OfThisProcess(std::make_shared<const HeldVersion>(std::move(version))), step, epoch, attached_};
  }

  // Ends a Take that waits, with Cancelled.
  void Close() {
    stop_->store(true);
    closed_ = true;
    if (!taking_) Drop();
  }

  bool attached() const { return attached_; }
  // Of the job that the newest call read from: one that is made again under its name may have others.
  int publications() const { return publications_; }
  int64_t publish_every() const { return publish_every_; }

 private:
  using Result = absl::StatusOr<HeldVersion>;

  Result TakeUntil(const VersionChoice& choice, absl::Duration timeout, absl::Time deadline);
  absl::Status EndPending(absl::Time deadline);
  // REQUIRES: no call is under way.
  void NoteJob() {
    publications_ = reader_->job().spec().publications;
    publish_every_ = reader_->job().spec().publish_every;
  }
  void Drop() {
    reader_ = nullptr;
    pending_ = nullptr;
  }

  const std::string name_;
  const std::shared_ptr<std::atomic<bool>> stop_ = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<VersionReader> reader_;
  std::shared_ptr<Pending<HeldVersion>> pending_;  // uses the reader, alone
  bool taking_ = false, closed_ = false, attached_ = false;
  int publications_ = 0;
  int64_t publish_every_ = 0;
};

// What was given up before lets go of the reader.
absl::Status BoundReader::EndPending(absl::Time deadline) {
  if (pending_ == nullptr) return absl::OkStatus();
  if (!AwaitEnd(pending_->ended(), deadline + kGrace, [this] { return !closed_; })) {
    return absl::DeadlineExceededError(
        absl::StrCat("the reader of job ", name_, " is still busy with a call that was given up; call again"));
  }
  pending_ = nullptr;
  stop_->store(closed_);
  return absl::OkStatus();
}

BoundReader::Result BoundReader::TakeUntil(const VersionChoice& choice, absl::Duration timeout, absl::Time deadline) {
  if (closed_) return absl::FailedPreconditionError(absl::StrCat("the reader of job ", name_, " is closed"));
  RETURN_IF_ERROR(EndPending(deadline));
  if (attached_) {  // it asks nobody: what is there is taken at once
    PyThreadState* const state = PyEval_SaveThread();
    Result there = reader_->Take(choice, absl::ZeroDuration());
    PyEval_RestoreThread(state);
    NoteJob();
    const bool later = absl::IsDeadlineExceeded(there.status()) || absl::IsUnavailable(there.status());
    if (!later || timeout <= absl::ZeroDuration()) return there;
  }
  ASSIGN_OR_RETURN(pending_, Pending<HeldVersion>::Start(
                                 [reader = reader_, choice, timeout] { return reader->Take(choice, timeout); }));
  bool ended = false;
  try {
    ended = AwaitEnd(pending_->ended(), deadline + kGrace, [this] { return !closed_; });
  } catch (...) {
    stop_->store(true);
    throw;
  }
  if (closed_) return absl::CancelledError("the reader was closed");
  if (!ended) {
    stop_->store(true);
    return absl::DeadlineExceededError(absl::StrCat("job ", name_, " gave no version within ",
                                                    absl::FormatDuration(timeout), "; its workers are looked for"));
  }
  NoteJob();
  return std::exchange(pending_, nullptr)->Take();
}

}  // namespace

VersionChoice ChoiceOf(const std::string& kind, int64_t step, int64_t epoch) {
  if (kind == "latest") return {VersionChoice::kLatest, Step()};
  if (step < 0 || step > kMaxStep) {
    throw StatusError(absl::InvalidArgumentError(absl::StrCat(step, " is no step; they lie from 0 to ", kMaxStep)));
  }
  if (kind == "newer") return {VersionChoice::kNewer, Step(step), Epoch(epoch)};
  return {kind == "exact" ? VersionChoice::kExact : VersionChoice::kAtLeast, Step(step)};
}

void BindReader(py::module_& module) {
  py::class_<BoundReader>(module, "Reader")
      .def(py::init<const BoundJob&, const std::string&, double>(), py::arg("job"), py::arg("way"), py::arg("ttl"))
      .def_property_readonly("attached", &BoundReader::attached)
      .def_property_readonly("publications", &BoundReader::publications)
      .def_property_readonly("publish_every", &BoundReader::publish_every)
      .def(
          "take",
          [](BoundReader& reader, const std::string& kind, Integer step, Integer epoch, double timeout) {
            return reader.Take(ChoiceOf(kind, step.value, epoch.value), timeout);
          },
          py::arg("kind"), py::arg("step"), py::arg("epoch") = py::int_(0), py::arg("timeout"))
      .def("close", &BoundReader::Close);
}

}  // namespace shardmesh::python
