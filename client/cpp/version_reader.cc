#include "client/cpp/version_reader.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/attached_channel.h"
#include "client/cpp/attached_reader.h"
#include "client/cpp/next_incarnation.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kPollJob = absl::Milliseconds(20);
}  // namespace

absl::StatusOr<ConstTensorView> HeldVersion::parameter(absl::string_view name) const {
  ASSIGN_OR_RETURN(const int tensor, job_->Resolve(name));
  const Plan& plan = job_->plan();
  const int bucket = plan.placements()[tensor].bucket;
  int64_t begin = plan.buckets()[bucket].weight_offset;
  if (compact_) {
    begin = 0;
    for (int b = 0; b < bucket; ++b) begin += plan.buckets()[b].weight_bytes;
  }
  ConstTensorView view = WeightsIn(plan, tensor, base_ + begin);
  view.device = device_;
  return view;
}

// Copies each version over gRPC.
class PulledReader final : public VersionReader {
 public:
  PulledReader(Client client, std::shared_ptr<Job> job, ReaderOptions options)
      : client_(std::move(client)), job_(std::move(job)), options_(std::move(options)) {}

  bool attached() const override { return false; }
  const Job& job() const override { return *job_; }

  absl::StatusOr<HeldVersion> Take(VersionChoice choice, absl::Duration timeout) override {
    const absl::Time deadline = MonotonicNow() + timeout;
    while (true) {
      absl::StatusOr<Version> pulled = job_->Pull(choice, deadline - MonotonicNow(), options_.stop.get());
      if (pulled.ok()) return Keep(*std::move(pulled));
      if (options_.stopped()) return absl::CancelledError("the reader was stopped");
      if (absl::IsDeadlineExceeded(pulled.status())) {
        return Annotate(pulled.status(), absl::StrCat("job ", job_->spec().name, " published no version >= ",
                                                      choice.LowestAt(job_->epoch()), " within ",
                                                      absl::FormatDuration(timeout)));
      }
      const bool lost = absl::IsUnavailable(pulled.status()) || absl::IsAborted(pulled.status()) ||
                        absl::IsNotFound(pulled.status());  // that worker has it no more
      if (!lost) return pulled.status();
      absl::StatusOr<std::shared_ptr<Job>> next =
          client_.Reopen(*job_, JobUse::kTrain, deadline - MonotonicNow());  // not a failed one
      if (absl::IsNotFound(next.status()) && !absence_.Lasts(true)) {
        Pause(kPollJob);
        continue;
      }
      if (!next.ok()) return Annotate(next.status(), pulled.status().message());
      absence_.Lasts(false);
      job_ = *std::move(next);
    }
  }

 private:
  HeldVersion Keep(Version pulled) const {
    const auto bytes = std::make_shared<const Version>(std::move(pulled));
    HeldVersion version;
    version.job_ = job_;
    version.step_ = bytes->step();
    version.base_ = bytes->bytes_.data();
    version.compact_ = true;
    version.keeps_ = bytes;
    return version;
  }

  Client client_;
  std::shared_ptr<Job> job_;
  const ReaderOptions options_;
  Absence absence_;
};

absl::StatusOr<std::unique_ptr<VersionReader>> VersionReader::Open(Client client, const std::string& name,
                                                                   ReaderOptions options) {
  ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client.OpenJob(name, options.names, JobUse::kRead));
  absl::StatusOr<std::shared_ptr<ReaderLink>> link = absl::UnimplementedError("not asked for");
  if (options.way != ReaderOptions::Way::kPulled) {
    const auto any = static_cast<int>(absl::ToUnixMicros(MonotonicNow()) % 1024);
    ASSIGN_OR_RETURN(const Rank rank, RankToAttachTo(*job, any));
    link = CallAgain(*job, rank, job->peer_timeout(), [&] { return ReaderLink::Attach(job, rank, options.ttl); });
    if (link.ok()) {
      return std::make_unique<AttachedReader>(std::move(client), std::move(job), *std::move(link), std::move(options));
    }
    if (options.way == ReaderOptions::Way::kAttached) return link.status();
  }
  return std::make_unique<PulledReader>(std::move(client), std::move(job), std::move(options));
}

absl::Status Follow(VersionReader& reader, const FollowOptions& options,
                    const std::function<absl::Status(const HeldVersion&)>& use) {
  VersionChoice choice = options.from;
  absl::StatusOr<HeldVersion> last = absl::NotFoundError("no version yet");
  while (true) {
    ASSIGN_OR_RETURN(HeldVersion next, reader.Take(choice, options.timeout));
    RETURN_IF_ERROR(use(next));
    choice = {VersionChoice::kNewer, next.step(), next.epoch()};
    last = std::move(next);
  }
}

}  // namespace shardmesh
