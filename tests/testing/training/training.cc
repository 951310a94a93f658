#include "tests/testing/training/training.h"

#include <cstdlib>
#include <cstring>
#include <ostream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"
#include "local/device/device_runtime.h"
#include "tests/testing/system/process.h"

namespace shardmesh::testing {
namespace {

// splitmix64 (Steele, Lea, Flood 2014).
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// In [-1, 1), in steps of 2^-23.
float Value(uint64_t a, uint64_t b, uint64_t c, uint64_t element) {
  const uint64_t bits = Mix(Mix(Mix(Mix(a) + b) + c) + element);
  return static_cast<float>(static_cast<int64_t>(bits >> 40) - (int64_t{1} << 23)) / static_cast<float>(1 << 23);
}

void Store(char* to, Format format, int64_t element, float value) {
  if (format == Format::kFp32) {
    std::memcpy(to + element * 4, &value, 4);
  } else {
    const uint16_t bits = FloatToBf16Rne(value);
    std::memcpy(to + element * 2, &bits, 2);
  }
}

}  // namespace

float InitialValue(int tensor, int64_t element) { return Value(7, 0, tensor, element); }

float GradientValue(Format format, int slot, int64_t step, int tensor, int64_t element) {
  // Slots of different magnitude: what three in fp32 add up to depends on their order.
  const float value = Value(1000 + slot, step, tensor, element) / static_cast<float>(1 << 5 * slot % 12);
  return format == Format::kFp32 ? value : Bf16ToFloat(FloatToBf16Rne(value));
}

JobSpec OddJob(const std::string& name, const std::string& mesh, int slots) {
  JobSpec spec;
  spec.name = name;
  spec.mesh = ParseMeshSpec(mesh).value();
  spec.num_slots = slots;
  spec.parameters = {{"embed.weight", {37, 53}, WeightFormat::kBf16Sr, ""},
                     {"layers.0.weight", {129, 65}, WeightFormat::kFp32, ""},
                     {"layers.0.bias", {7}, WeightFormat::kFp32, ""},
                     {"layers.1.weight", {3, 1001}, WeightFormat::kBf16, ""},
                     {"layers.1.scale", {}, WeightFormat::kBf16Sr, ""},
                     {"layers.1.empty", {0, 5}, WeightFormat::kBf16, ""},
                     {"head.weight", {37, 53}, WeightFormat::kBf16Sr, "embed.weight"},
                     {"layers.2.weight", {4099}, WeightFormat::kBf16Sr, ""}};
  spec.optimizer.lr = 1e-2;
  spec.seed = 42;
  spec.bucket_elements = 4096;
  return spec;
}

JobSpec TinyJob(const std::string& name, const std::string& mesh, int slots, int64_t elements) {
  JobSpec spec;
  spec.name = name;
  spec.mesh = ParseMeshSpec(mesh).value();
  spec.num_slots = slots;
  spec.parameters = {{"w", {elements}, WeightFormat::kFp32, ""}};
  spec.optimizer.lr = 1e-2;
  return spec;
}

std::map<std::string, std::vector<float>> InitialWeights(const JobSpec& spec) {
  std::map<std::string, std::vector<float>> values;
  for (size_t t = 0; t < spec.parameters.size(); ++t) {
    if (!spec.parameters[t].tied_to.empty()) continue;
    std::vector<float>& tensor = values[spec.parameters[t].name];
    for (int64_t i = 0; i < spec.parameters[t].NumElements(); ++i)
      tensor.push_back(InitialValue(static_cast<int>(t), i));
  }
  return values;
}

absl::Status Initialize(Job& job) {
  RETURN_IF_ERROR(job.Initialize(InitialWeights(job.spec()), absl::Seconds(30)));
  return job.Pull({VersionChoice::kAtLeast, Step(0)}, absl::Seconds(30)).status();
}

int64_t TokensOf(int slot, int64_t step) { return (slot * 7 + step * 3) % 5 * 11; }

namespace {
void WriteGradient(const JobSpec& spec, const TensorView& view, Slot slot, Step step, int tensor) {
  const bool empty = spec.token_weights && TokensOf(slot.value(), step.value()) == 0;
  for (int64_t i = 0; i < view.num_elements; ++i) {
    Store(static_cast<char*>(view.data), view.format, i,
          empty ? 0 : GradientValue(view.format, slot.value(), step.value(), tensor, i));
  }
}
}  // namespace

absl::StatusOr<FinishOptions> WriteTaken(PullingSession& session, const PullingSession::Work& work) {
  const JobSpec& spec = session.job().spec();
  for (size_t t = 0; t < spec.parameters.size(); ++t) {
    if (!spec.parameters[t].tied_to.empty() || spec.parameters[t].frozen) continue;
    ASSIGN_OR_RETURN(const TensorView view, session.gradient(spec.parameters[t].name));
    WriteGradient(spec, view, *work.slot, work.step, static_cast<int>(t));
  }
  FinishOptions options;
  options.learning_rates = LearningRates(spec, work.step.value());
  if (spec.token_weights) options.tokens = TokensOf(work.slot->value(), work.step.value());
  return options;
}

absl::Status PullTo(PullingSession& session, int64_t last, absl::Duration timeout) {
  if (session.committed_step().value() >= last) return absl::OkStatus();
  ASSIGN_OR_RETURN(PullingSession::Work work, session.Take(timeout));
  while (session.committed_step().value() < last) {
    if (!work.slot.has_value()) {
      ASSIGN_OR_RETURN(work, session.Take(timeout));
      continue;
    }
    ASSIGN_OR_RETURN(FinishOptions options, WriteTaken(session, work));
    options.timeout = timeout;
    ASSIGN_OR_RETURN(PullingSession::Next next, session.FinishAndTake(options));
    if (next.result != SlotResult::kAccepted) return absl::InternalError("another trainer has finished the slot");
    work = std::move(next.work);
  }
  return absl::OkStatus();
}

absl::Status WriteGradients(Session& session, Step step) {
  for (int b = 0; b < static_cast<int>(session.job().plan().buckets().size()); ++b) {
    RETURN_IF_ERROR(WriteBucketGradients(session, step, b));
  }
  return absl::OkStatus();
}

namespace {
// As a trainer's kernels would: in the window when the step is declared.
absl::Status CopyToDevice(const Session& session, int device, const std::string& bytes, void* to) {
  ASSIGN_OR_RETURN(const auto runtime, DeviceRuntime::Open(device, session.job().options().cuda_library));
  const DeviceRuntime::Scope scope(*runtime);
  RETURN_IF_ERROR(runtime->Copy(to, bytes.data(), static_cast<int64_t>(bytes.size())));
  return runtime->AwaitIdle(absl::Seconds(20));
}
}  // namespace

// One tensor in its window, the next one by a call; on a device all by copies.
absl::Status WriteBucketGradients(Session& session, Step step, int bucket) {
  const JobSpec& spec = session.job().spec();
  for (Slot slot : session.slots()) {
    for (size_t t = 0; t < spec.parameters.size(); ++t) {
      if (!spec.parameters[t].tied_to.empty() || spec.parameters[t].frozen) continue;
      if (session.job().plan().placements()[t].bucket != bucket) continue;
      ASSIGN_OR_RETURN(TensorView view, session.gradient(slot, spec.parameters[t].name));
      if (t % 2 == 0 && view.device < 0) {
        WriteGradient(spec, view, slot, step, static_cast<int>(t));
        continue;
      }
      std::string bytes(view.num_elements * BytesPerElement(view.format), '\0');
      void* const there = std::exchange(view.data, bytes.data());
      WriteGradient(spec, view, slot, step, static_cast<int>(t));
      RETURN_IF_ERROR(view.device < 0 ? session.WriteGradient(slot, spec.parameters[t].name, bytes)
                                      : CopyToDevice(session, view.device, bytes, there));
    }
  }
  return absl::OkStatus();
}

std::string GradientShard(const Job& job, Slot slot, Step step, int shard) {
  const Plan& plan = job.plan();
  const Format format = plan.gradient_format();
  std::string bytes;
  for (size_t b = 0; b < plan.buckets().size(); ++b) {
    const Bucket& bucket = plan.buckets()[b];
    if (bucket.frozen) continue;
    std::string flat(bucket.num_elements * BytesPerElement(format), '\0');
    for (size_t t = 0; t < job.spec().parameters.size(); ++t) {
      const Placement& at = plan.placements()[t];
      if (!job.spec().parameters[t].tied_to.empty() || at.bucket != static_cast<int>(b)) continue;
      for (int64_t i = 0; i < at.num_elements; ++i) {
        Store(flat.data(), format, at.offset + i,
              GradientValue(format, slot.value(), step.value(), static_cast<int>(t), i));
      }
    }
    const int64_t width = BytesPerElement(format);
    bytes += flat.substr(bucket.begin(shard) * width, bucket.size(shard) * width);
  }
  return bytes;
}

double LearningRate(int64_t step, int group) { return 1e-2 / static_cast<double>((1 + step % 5) * (1 + 2 * group)); }

std::vector<double> LearningRates(const JobSpec& spec, int64_t step) {
  std::vector<double> rates;
  for (int group = 0; group < spec.num_groups(); ++group) rates.push_back(LearningRate(step, group));
  return rates;
}

absl::Status TrainTo(Session& session, int64_t last, absl::Duration step_timeout) {
  while (session.committed_step().value() < last) {
    const Step step = session.committed_step().next();
    RETURN_IF_ERROR(WriteGradients(session, step));
    StepOptions options;
    options.learning_rates = LearningRates(session.job().spec(), step.value());
    options.timeout = step_timeout;
    for (const Slot slot : session.slots()) {
      if (session.job().spec().token_weights) options.tokens.push_back(TokensOf(slot.value(), step.value()));
    }
    RETURN_IF_ERROR(session.Step(options).status());
  }
  return absl::OkStatus();
}

constexpr absl::Duration kPatience = absl::Seconds(60);

absl::Status TrainOver(Client& client, std::shared_ptr<Job> job, const std::function<absl::Status(Job&)>& train) {
  absl::Time deadline = MonotonicNow() + kPatience;  // at one epoch
  while (true) {
    const absl::Status status = train(*job);
    // A worker that went on without the job, or a member that holds it at its next epoch already.
    const bool lost = absl::IsUnavailable(status) || absl::IsNotFound(status) || absl::IsAborted(status);
    if (!lost) return status;
    // A worker that is on its way back at the same epoch, or a coordinator that is, takes a moment.
    absl::StatusOr<std::shared_ptr<Job>> next = client.OpenJob(job->spec().name);
    const bool away = absl::IsUnavailable(next.status()) && !absl::StrContains(next.status().message(), " failed: ");
    if (!next.ok() && !away) return Annotate(next.status(), status.message());
    if (next.ok() && (*next)->epoch() != job->epoch()) deadline = MonotonicNow() + kPatience;
    if (MonotonicNow() >= deadline) return status;
    if (next.ok()) job = *std::move(next);
    Pause(absl::Milliseconds(10));
  }
}

bool operator==(const Learnt& a, const Learnt& b) {
  return a.step == b.step && a.digest == b.digest && a.weights == b.weights;
}

std::ostream& operator<<(std::ostream& out, const Learnt& learnt) {
  out << "step " << learnt.step << " digest " << std::hex << learnt.digest << std::dec;
  for (const auto& [name, bytes] : learnt.weights) {
    out << " " << name << ":" << bytes.size() << "B/" << std::hex << std::hash<std::string>()(bytes) << std::dec;
  }
  return out;
}

absl::StatusOr<Learnt> Learn(Job& job, int64_t step) {
  ASSIGN_OR_RETURN(const Version version, job.Pull({VersionChoice::kAtLeast, Step(step)}, absl::Seconds(20)));
  Learnt learnt;
  learnt.step = version.step().value();
  for (const ParameterSpec& parameter : job.spec().parameters) {
    ASSIGN_OR_RETURN(const ConstTensorView view, version.parameter(parameter.name));
    learnt.weights[parameter.name] =
        absl::StrCat(absl::string_view(static_cast<const char*>(view.data), view.data_bytes()),
                     absl::string_view(static_cast<const char*>(view.scales), view.scale_bytes()));
  }
  ASSIGN_OR_RETURN(const v1::DigestReply digest, job.Digest(absl::Seconds(20)));
  if (digest.step() != learnt.step) {
    return absl::InternalError(absl::StrCat("digest of step ", digest.step(), ", weights of step ", learnt.step));
  }
  learnt.digest = digest.digest();
  return learnt;
}

ClientOptions TlsOfEnvironment() {
  ClientOptions options;
  if (const char* prefix = std::getenv("SHARDMESH_TEST_TLS")) {
    options.tls.cert_file = absl::StrCat(prefix, ".pem");
    options.tls.key_file = absl::StrCat(prefix, ".key");
    options.tls.ca_file = absl::StrCat(prefix, ".ca");
  }
  return options;
}

int64_t NumberOfEnvironment(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

absl::Status Delete(Client& client, const std::string& job) {
  v1::DeleteJobRequest request;
  request.set_job(job);
  return client.coordinator().DeleteJob(request, absl::Seconds(10)).status();
}

absl::StatusOr<Learnt> Undisturbed(Client& client, JobSpec spec, int64_t steps) {
  spec.name += "-undisturbed";
  spec.slot_mode = SlotMode::kAssigned;
  spec.num_trainers = 0;
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  RETURN_IF_ERROR(Initialize(*job));
  std::vector<Slot> slots;
  for (int s = 0; s < spec.num_slots; ++s) slots.push_back(Slot(s));
  ASSIGN_OR_RETURN(const auto session, job->Attach(slots));
  RETURN_IF_ERROR(session->AwaitWeights(absl::Seconds(20)));
  RETURN_IF_ERROR(TrainTo(*session, steps));
  absl::StatusOr<Learnt> learnt = Learn(*job, steps);
  RETURN_IF_ERROR(Delete(client, spec.name));
  return learnt;
}

}  // namespace shardmesh::testing
