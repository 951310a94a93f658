// bench/slots: what pulling slots costs beyond the gradients: an attached trainer and one worker, a core each. How long
// it takes to finish a slot and to have the next; and from a trainer's finish to the sum that has the result.
//
//   bazel run -c opt //bench:slots -- --quick
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/service.h"
#include "bench/harness/step_context.h"
#include "client/cpp/pulling_session.h"
#include "client/cpp/session.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"
#include "local/memory/futex.h"

namespace shardmesh::bench {
namespace {

constexpr int kTrainerCore = 0, kWorkerCore = 1;
constexpr double kTakeLimit = 50e-6, kMergeLimit = 20e-6;  // seconds
constexpr absl::Duration kSpin = absl::Milliseconds(3);    // longer than a slot
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr char kTensor[] = "weight";

struct Flags : CommonFlags {
  int64_t elements = 1000;
  int slots = 16;
  int steps = 200;
};

// Gradients of a slot, the same in every step.
float GradientOf(int slot, int64_t element) {
  return StartGradient(static_cast<uint32_t>(element)) / static_cast<float>(slot + 1);
}

// A service with a pulled job, its one trainer, and an assigned job that has to learn the same.
class Side {
 public:
  absl::Status SetUp(const Flags& flags, absl::Duration spin) {
    ASSIGN_OR_RETURN(folder_, Folder::Make());
    ASSIGN_OR_RETURN(service_, Service::Start(folder_->path(), "127.0.0.1:0", kWorkerCore, spin));
    JobSpec spec;
    spec.name = "bench-slots";
    ASSIGN_OR_RETURN(spec.mesh, ParseMeshSpec("fsdp=1"));
    spec.gradient_format = Format::kFp32;
    spec.num_slots = flags.slots;
    spec.parameters.push_back({kTensor, {flags.elements}, WeightFormat::kFp32, ""});
    std::vector<float> weights;
    for (int64_t i = 0; i < flags.elements; ++i) weights.push_back(StartWeight(static_cast<uint32_t>(i)));
    JobSpec pulled = spec;
    pulled.name += "-pulled";
    pulled.slot_mode = SlotMode::kPulled;
    pulled.num_trainers = 1;
    ASSIGN_OR_RETURN(assigned_, service_->client().CreateJob(spec));
    ASSIGN_OR_RETURN(pulled_, service_->client().CreateJob(pulled));
    RETURN_IF_ERROR(assigned_->Initialize({{kTensor, weights}}, kPatience));
    RETURN_IF_ERROR(pulled_->Initialize({{kTensor, weights}}, kPatience));
    ASSIGN_OR_RETURN(session_, pulled_->AttachPulling());
    RETURN_IF_ERROR(session_->AwaitWeights(kPatience));
    ASSIGN_OR_RETURN(work_, session_->Take(kPatience));
    return absl::OkStatus();
  }

  // A slot of every step is written and finished, `steps` steps: seconds of FinishAndTake where a slot followed, and
  // from there to the end of the merge, where the slot was the second of two.
  struct Times {
    std::vector<double> take, merge;
  };
  absl::StatusOr<Times> Run(int steps) {
    Times times;
    std::vector<std::pair<int64_t, int64_t>> finished;  // step, when its slot 1 was
    const Step last(session_->committed_step().value() + steps);
    while (session_->committed_step() < last) {
      if (!work_.slot.has_value()) {
        ASSIGN_OR_RETURN(work_, session_->Take(kPatience));
        continue;
      }
      RETURN_IF_ERROR(Write());
      const int64_t begin = MonotonicNanos();
      if (*work_.slot == Slot(1)) finished.emplace_back(work_.step.value(), begin);
      ASSIGN_OR_RETURN(PullingSession::Next next, session_->FinishAndTake({}));
      if (next.work.slot.has_value()) times.take.push_back(1e-9 * static_cast<double>(MonotonicNanos() - begin));
      work_ = std::move(next.work);
    }
    ASSIGN_OR_RETURN(const v1::GetTraceReply trace, pulled_->worker(Rank(0)).GetTrace(pulled_->spec().name, kPatience));
    for (const auto& [step, begin] : finished) {
      for (const v1::TraceSpan& span : trace.spans()) {
        const int64_t elapsed = static_cast<int64_t>(span.end_nanos()) - begin;
        if (span.name() != "merge" || span.step() != step || elapsed < 0) continue;
        times.merge.push_back(1e-9 * static_cast<double>(elapsed));
        break;
      }
    }
    if (times.merge.empty()) return absl::InternalError("the worker's trace has no merge");
    return times;
  }

  // The assigned job is brought to the same step: the same digest of weights and states.
  absl::Status Verify() {
    std::vector<Slot> slots;
    for (int s = 0; s < assigned_->spec().num_slots; ++s) slots.push_back(Slot(s));
    ASSIGN_OR_RETURN(const auto session, assigned_->Attach(slots));
    RETURN_IF_ERROR(session->AwaitWeights(kPatience));
    for (const Slot slot : slots) {
      ASSIGN_OR_RETURN(const TensorView gradient, session->gradient(slot, kTensor));
      for (int64_t i = 0; i < gradient.num_elements; ++i) {
        static_cast<float*>(gradient.data)[i] = GradientOf(slot.value(), i);
      }
    }
    while (session->committed_step() < session_->committed_step()) RETURN_IF_ERROR(session->Step().status());
    ASSIGN_OR_RETURN(const v1::DigestReply there, assigned_->Digest(kPatience));
    ASSIGN_OR_RETURN(const v1::DigestReply here, pulled_->Digest(kPatience));
    if (there.digest() == here.digest() && there.step() == here.step()) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("verifying: after step ", here.step(), " the pulled job has other bits than the assigned one"));
  }
  int64_t step() const { return session_->committed_step().value(); }

 private:
  absl::Status Write() {
    ASSIGN_OR_RETURN(const TensorView gradient, session_->gradient(kTensor));
    for (int64_t i = 0; i < gradient.num_elements; ++i) {
      static_cast<float*>(gradient.data)[i] = GradientOf(work_.slot->value(), i);
    }
    return absl::OkStatus();
  }

  std::unique_ptr<Folder> folder_;
  std::unique_ptr<Service> service_;
  std::shared_ptr<Job> assigned_, pulled_;
  std::unique_ptr<PullingSession> session_;
  PullingSession::Work work_;
};

class SlotsBench {
 public:
  explicit SlotsBench(const Flags& flags) : flags_(flags) {}

  absl::Status Run() {
    PinTo(kTrainerCore);
    RETURN_IF_ERROR(spinning_.SetUp(flags_, kSpin));
    RETURN_IF_ERROR(sleeping_.SetUp(flags_, absl::ZeroDuration()));
    for (Side* side : {&spinning_, &sleeping_}) {
      RETURN_IF_ERROR(side->Run(3).status());
      RETURN_IF_ERROR(side->Verify());
    }
    for (int round = 0; round < flags_.rounds; ++round) {
      RETURN_IF_ERROR(Round(spinning_, spinning_take_, spinning_merge_));
      RETURN_IF_ERROR(Round(sleeping_, sleeping_take_, sleeping_merge_));
    }
    RETURN_IF_ERROR(spinning_.Verify());
    RETURN_IF_ERROR(sleeping_.Verify());
    return Publish();
  }

 private:
  absl::Status Round(Side& side, std::vector<double>& take, std::vector<double>& merge) const {
    ASSIGN_OR_RETURN(Side::Times times, side.Run(flags_.steps));
    take.push_back(SpreadOf(std::move(times.take)).median);
    merge.push_back(SpreadOf(std::move(times.merge)).median);
    return absl::OkStatus();
  }

  absl::Status Publish() const {
    Report report(absl::StrCat("bench/slots: ", flags_.slots, " slots of ", flags_.elements,
                               " fp32 gradients, one trainer that pulls them, one worker, a core each"));
    const auto limit = [this](double seconds) { return std::vector<double>(flags_.rounds, seconds); };
    report.Add(CompareCost("finish and take, spinning, times its limit of 50 us, us", spinning_take_, limit(kTakeLimit),
                           1e6, Goal::AtMost(1)));
    report.Add(CompareCost("finish to merged, spinning, times its limit of 20 us, us", spinning_merge_,
                           limit(kMergeLimit), 1e6, Goal::AtMost(1)));
    report.Add(CompareCost("finish and take, sleeping, times 50 us, us", sleeping_take_, limit(kTakeLimit), 1e6));
    report.Add(CompareCost("finish to merged, sleeping, times 20 us, us", sleeping_merge_, limit(kMergeLimit), 1e6));
    report.Note(absl::StrFormat(
        "Verified first and at the end (step %d): digests of weights and states equal those of a job whose slots are\n"
        "assigned and which was given the same gradients.",
        spinning_.step()));
    report.Note(absl::StrFormat(
        "A round's figure is the median over the slots of %d steps. Finish and take: PullingSession::FinishAndTake,\n"
        "with the client's check and digest of the gradients. Finish to merged: to the end of the merge with its\n"
        "neighbour, by the worker's trace. Spinning: worker and client poll for %s before they sleep. %d rounds.\n"
        "Machine: %s.",
        flags_.steps, absl::FormatDuration(kSpin), flags_.rounds, MachineNow()));
    return report.Publish(flags_.json);
  }

  const Flags flags_;
  Side spinning_, sleeping_;
  std::vector<double> spinning_take_, spinning_merge_, sleeping_take_, sleeping_merge_;
};

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/slots: what pulling slots costs beyond the gradients: an attached trainer and one worker process, a core\n"
      "each. How long it takes to finish a slot and have the next, and from there to the sum that has it."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "50 steps a round", flags);
  app.add_option("--elements", flags.elements, "parameters of the model")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 24));
  app.add_option("--slots", flags.slots, "slots of a step")->capture_default_str()->check(CLI::Range(2, 128));
  app.add_option("--steps", flags.steps, "steps of a round")->capture_default_str()->check(CLI::Range(1, 100000));
  app.footer("Example:\n  bazel run -c opt //bench:slots -- --json $PWD/slots.json      seconds");
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) flags.steps = 50;
  return shardmesh::bench::ExitStatus("slots", shardmesh::bench::SlotsBench(flags).Run());
}
