#include "bench/moves/host_trainer.h"

#include <cstring>
#include <iostream>
#include <optional>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "bench/harness/harness.h"
#include "client/cpp/session.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr int64_t kShifts = 4096;

// In the process. It writes a line for each thing that it did.
class Training {
 public:
  explicit Training(const HostTraining& training) : training_(training), pattern_(kLayerElements + kShifts) {
    for (size_t e = 0; e < pattern_.size(); ++e) {  // bf16 of either sign, of a few hundredths
      pattern_[e] = static_cast<uint16_t>(0x3c00 + (e * 7 + e / 977) % 128 + (e & 1) * 0x8000);
    }
    for (const int slot : training.slots) slots_.push_back(Slot(slot));
  }

  absl::Status Run() {
    ASSIGN_OR_RETURN(Client client, HostFleet::Connect(training_.coordinator, training_.folder));
    ASSIGN_OR_RETURN(std::shared_ptr<Job> job, client.OpenJob(training_.job));
    before_ = job->epoch();
    for (absl::Time until = MonotonicNow() + kPatience; MonotonicNow() < until;) {
      const int64_t acknowledged = acknowledged_;
      bool attached = false;
      const absl::Status status = TrainAt(*job, attached);
      const bool lost = absl::IsUnavailable(status) || absl::IsNotFound(status) || absl::IsAborted(status);
      if (!lost) return status;
      if (acknowledged_ != acknowledged) until = MonotonicNow() + kPatience;
      // Without a session the job may be at the right epoch, and a worker not there yet.
      auto next = attached ? client.Reopen(*job) : client.OpenJob(training_.job);
      RETURN_IF_ERROR(next.status());
      job = *std::move(next);
    }
    return absl::DeadlineExceededError(absl::StrCat("no step within ", absl::FormatDuration(kPatience)));
  }

 private:
  absl::Status TrainAt(Job& job, bool& attached) {
    ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, job.Attach(slots_));
    RETURN_IF_ERROR(session->AwaitWeights(kPatience));
    attached = true;
    const std::optional<v1::GoneBack> back = job.WentBackSince(before_);
    before_ = job.epoch();
    Say(absl::StrCat("open ", before_.value(), " ", session->committed_step().value(), " ",
                     back.has_value() ? back->checkpoint().step() : -1));
    while (training_.until == 0 || session->committed_step().value() < training_.until) {
      RETURN_IF_ERROR(WriteGradients(*session));
      absl::SleepFor(absl::Milliseconds(training_.rest_ms));
      RETURN_IF_ERROR(session->Step().status());
      const double now = MonotonicSeconds();
      acknowledged_ = session->committed_step().value();
      Say(absl::StrFormat("step %d %d %.6f", before_.value(), acknowledged_, now));
      if (training_.until == 0) continue;
      ASSIGN_OR_RETURN(const v1::DigestReply reply, job.Digest(kPatience));
      Say(absl::StrCat("digest ", reply.step(), " ", reply.digest()));
    }
    return absl::OkStatus();
  }
  absl::Status WriteGradients(Session& session) const {
    const int64_t step = session.committed_step().value() + 1;
    for (const Slot slot : slots_) {
      for (int i = 0; i < training_.layers; ++i) {
        ASSIGN_OR_RETURN(const TensorView view, session.gradient(slot, absl::StrCat("layers.", i)));
        const int64_t shift = (slot.value() * 131 + step * 977 + i * 61) % kShifts;
        std::memcpy(view.data, pattern_.data() + shift, kLayerElements * sizeof(uint16_t));
      }
    }
    return absl::OkStatus();
  }
  static void Say(const std::string& line) { std::cout << line << std::endl; }

  const HostTraining training_;
  std::vector<uint16_t> pattern_;
  std::vector<Slot> slots_;
  Epoch before_;  // at which it attached last
  int64_t acknowledged_ = -1;
};

}  // namespace

void AddHostTrainingFlags(CLI::App& app, HostTraining& training) {
  app.add_option("--job", training.job)->group("");
  app.add_option("--slot", training.slots)->group("");
  app.add_option("--layers", training.layers)->group("");
  app.add_option("--trainer-rest", training.rest_ms)->group("");
  app.add_option("--until", training.until)->group("");
  app.add_option("--coordinator", training.coordinator)->group("");
  app.add_option("--folder", training.folder)->group("");
}

int TrainOnHost(const HostTraining& training) {
  const absl::Status status = Training(training).Run();
  if (!status.ok()) std::cout << "error " << status << std::endl;
  return status.ok() ? 0 : 1;
}

absl::StatusOr<std::unique_ptr<HostTrainer>> HostTrainer::Start(const HostFleet& fleet, int host,
                                                                const std::string& program,
                                                                const HostTraining& training) {
  std::vector<std::string> command = {ProgramPath(program),
                                      "--coordinator",
                                      fleet.coordinator_address(),
                                      "--folder",
                                      fleet.folder(),
                                      "--job",
                                      training.job,
                                      "--layers",
                                      absl::StrCat(training.layers),
                                      "--trainer-rest",
                                      absl::StrCat(training.rest_ms),
                                      "--until",
                                      absl::StrCat(training.until)};
  for (const int slot : training.slots) command.insert(command.end(), {"--slot", absl::StrCat(slot)});
  std::unique_ptr<HostTrainer> trainer(new HostTrainer);
  ASSIGN_OR_RETURN(trainer->process_, fleet.StartOn(host, std::move(command)));
  return trainer;
}

absl::Status HostTrainer::AwaitStep(int64_t epoch, int64_t step) {
  while (done_.empty() || done_.back().epoch <= epoch || done_.back().step < step) RETURN_IF_ERROR(Read());
  return absl::OkStatus();
}

absl::Status HostTrainer::AwaitDigest(int64_t step) {
  while (digests_.count(step) == 0) RETURN_IF_ERROR(Read());
  return absl::OkStatus();
}

absl::Status HostTrainer::Read() {
  ASSIGN_OR_RETURN(const std::string line, process_->ReadLine(kPatience));
  std::istringstream words(line);
  std::string what;
  words >> what;
  if (what == "open") {
    Opened opened;
    words >> opened.epoch >> opened.committed >> opened.back;
    opened_.push_back(opened);
  } else if (what == "step") {
    Done done;
    words >> done.epoch >> done.step >> done.at;
    done_.push_back(done);
  } else if (what == "digest") {
    int64_t step = 0;
    uint64_t digest = 0;
    words >> step >> digest;
    digests_[step] = digest;
  } else {
    return absl::InternalError(absl::StrCat("a trainer ended: ", line));
  }
  return words.fail() ? absl::InternalError(absl::StrCat("a trainer wrote \"", line, "\"")) : absl::OkStatus();
}

}  // namespace shardmesh::bench
