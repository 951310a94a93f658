#include "core/job/job.h"

#include <cfloat>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"
#include "core/job/muon.h"
#include "core/job/support_table.h"
#include "core/names/names.h"

namespace shardmesh {
namespace {

std::string Quoted(absl::string_view text) { return absl::StrCat("\"", absl::CHexEscape(text.substr(0, 200)), "\""); }

std::string ShapeString(const std::vector<int64_t>& shape) { return absl::StrCat("[", absl::StrJoin(shape, ","), "]"); }

// The product of the sizes; -1 when it is over kMaxTensorElements or a size is negative.
int64_t BoundedElements(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (int64_t size : shape) {
    if (size < 0) return -1;
    if (size == 0) return 0;
    if (elements > kMaxTensorElements / size) return -1;
    elements *= size;
  }
  return elements;
}

// No step writes nf4, and of its codes no others are made.
absl::Status ValidateNf4(const std::string& who, const ParameterSpec& p) {
  if (p.format != WeightFormat::kNf4) return absl::OkStatus();
  if (!p.frozen) {
    return absl::InvalidArgumentError(absl::StrCat(
        who, " has nf4 weights and is trained, but no step writes nf4; freeze it, or store it as int8_row or bf16_sr"));
  }
  if (GatherOf(p.format, p.gather) == GatherFormat::kNf4) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(who, " has nf4 weights, which are gathered as nf4, not as ",
                                                 GatherFormatName(p.gather),
                                                 "; gather it as stored, or store it as bf16"));
}

absl::Status ValidateParameter(int index, const ParameterSpec& p, int num_groups) {
  const std::string who = absl::StrCat("parameter ", index, " ", Quoted(p.name));
  if (p.name.empty()) return absl::InvalidArgumentError(absl::StrCat("parameter ", index, " has no name"));
  if (p.shape.size() > 16) {
    return absl::InvalidArgumentError(absl::StrCat(who, " has ", p.shape.size(), " dimensions; at most 16"));
  }
  for (int64_t size : p.shape) {
    if (size < 0)
      return absl::InvalidArgumentError(absl::StrCat(who, ": size ", size, " in its shape; sizes are >= 0"));
  }
  if (BoundedElements(p.shape) < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat(who, ": shape ", ShapeString(p.shape), " has more than 2^40 elements"));
  }
  if (p.group < 0 || p.group >= num_groups) {
    return absl::InvalidArgumentError(
        absl::StrCat(who, ": group ", p.group, " is none of the job's: 0 to ", num_groups - 1));
  }
  RETURN_IF_ERROR(ValidateNf4(who, p));
  return Annotate(ScaleBlocksOf(p.gather, p.shape).status(), who);
}

// Muon steps matrices, each as a whole; in torch.optim.Muon too everything else is an error.
absl::Status ValidateMuon(const JobSpec& job, const ParameterSpec& p) {
  if (!p.tied_to.empty() || !job.IsMuon(p)) return absl::OkStatus();
  const std::string who = absl::StrCat("parameter ", Quoted(p.name), " is stepped by muon (group ", p.group, "), but ");
  if (p.shape.size() != 2) {
    return absl::InvalidArgumentError(absl::StrCat(who, "has the shape ", ShapeString(p.shape),
                                                   "; muon steps matrices: reshape it to two dimensions, or give it a "
                                                   "group of another optimizer, such as adamw"));
  }
  if (p.format == WeightFormat::kInt8Row) {
    const std::string grouped = absl::StrCat("parameter ", Quoted(p.name), " (group ", p.group, ")");
    RETURN_IF_ERROR(CheckTogether(grouped, Feature::kMuon, Feature::kInt8RowWeights));
  }
  if (BoundedElements(p.shape) <= kMaxMuonElements) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(who, "has the shape ", ShapeString(p.shape), "; matrices of muon have at most 2^31 elements"));
}

// "[3,5] bf16_sr", its states where they are not fp32, and what it is gathered as where that is not as stored.
std::string Stored(const ParameterSpec& p) {
  return absl::StrCat(
      ShapeString(p.shape), " ", WeightFormatName(p.format),
      p.states == StateFormat::kFp32 ? "" : absl::StrCat(" with ", StateFormatName(p.states), " states"),
      p.gather == GatherFormat::kStored ? "" : absl::StrCat(" gathered as ", GatherFormatName(p.gather)));
}

// That an export under original names has each once.
absl::Status ValidateOriginalNames(const JobSpec& job) {
  absl::flat_hash_map<absl::string_view, int> index_of;
  for (int i = 0; i < static_cast<int>(job.parameters.size()); ++i) {
    const ParameterSpec& p = job.parameters[i];
    if (!p.given.empty()) {
      RETURN_IF_ERROR(Annotate(ValidateName(p.given), absl::StrCat("parameter ", i, " ", Quoted(p.name), ": given")));
    }
    if (auto [it, inserted] = index_of.emplace(p.original_name(), i); !inserted) {
      return absl::AlreadyExistsError(
          absl::StrCat("parameters ", it->second, " and ", i, " have one original name ", Quoted(p.original_name())));
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateParameters(const JobSpec& job) {
  if (job.parameters.empty()) return absl::InvalidArgumentError("the job has no parameters; give at least one");
  if (job.parameters.size() > kMaxParameters) {
    return absl::ResourceExhaustedError(
        absl::StrCat(job.parameters.size(), " parameters; at most ", kMaxParameters, " in a job"));
  }
  absl::flat_hash_map<absl::string_view, int> index_of;
  int64_t total = 0;
  for (int i = 0; i < static_cast<int>(job.parameters.size()); ++i) {
    const ParameterSpec& p = job.parameters[i];
    RETURN_IF_ERROR(ValidateParameter(i, p, job.num_groups()));
    if (auto [it, inserted] = index_of.emplace(p.name, i); !inserted) {
      return absl::AlreadyExistsError(
          absl::StrCat("parameters ", it->second, " and ", i, " have one canonical name ", Quoted(p.name)));
    }
    RETURN_IF_ERROR(ValidateMuon(job, p));
    total += BoundedElements(p.shape);
    if (total > kMaxJobElements) return absl::ResourceExhaustedError("the job has more than 2^42 elements");
  }
  for (const ParameterSpec& p : job.parameters) {
    if (p.tied_to.empty()) continue;
    auto owner = index_of.find(p.tied_to);
    if (owner == index_of.end() || !job.parameters[owner->second].tied_to.empty() || p.tied_to == p.name) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", Quoted(p.name), " is tied to ", Quoted(p.tied_to),
                                                     ", which is no parameter with its own storage"));
    }
    RETURN_IF_ERROR(CheckTie(p, job.parameters[owner->second]));
  }
  return ValidateOriginalNames(job);
}

// The optimizers of all groups.
absl::Status ValidateGroups(const JobSpec& job) {
  if (job.num_groups() > kMaxGroups) {
    return absl::ResourceExhaustedError(absl::StrCat(job.num_groups(), " parameter groups; at most ", kMaxGroups));
  }
  for (int g = 0; g < job.num_groups(); ++g) RETURN_IF_ERROR(job.ValidateGroup(g, job.group(g)));
  return absl::OkStatus();
}

absl::string_view SlotModeName(SlotMode mode) { return mode == SlotMode::kAssigned ? "assigned" : "pulled"; }

absl::Status ValidateSlotMode(const JobSpec& job) {
  if (job.slot_timeout_ms < 1 || job.slot_timeout_ms > kMaxSlotTimeoutMs) {
    return absl::InvalidArgumentError(
        absl::StrCat("slot_timeout_ms is ", job.slot_timeout_ms, "; it is 1 to ", kMaxSlotTimeoutMs, " (a day)"));
  }
  if (!job.pulled()) {
    if (job.num_trainers == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("trainers is ", job.num_trainers,
                                                   ", and slots are assigned: leave it out, or take slot mode pulled"));
  }
  if (job.num_trainers < 1 || job.num_trainers > kMaxTrainers) {
    return absl::InvalidArgumentError(absl::StrCat("trainers is ", job.num_trainers, "; with pulled slots it is 1 to ",
                                                   kMaxTrainers, ", those that may take part at a time"));
  }
  return absl::OkStatus();
}

absl::string_view PolicyName(NonFinitePolicy policy) { return policy == NonFinitePolicy::kSkip ? "skip" : "fail"; }

template <typename T>
bool Differs(absl::string_view what, const T& there, const T& here, std::string& out) {
  if (there == here) return false;
  out = absl::StrCat(what, ": ", there, " there, ", here, " here");
  return true;
}

// Numbers that print alike in short are printed in full.
bool Differs(absl::string_view what, double there, double here, std::string& out) {
  if (there == here) return false;
  if (Differs(what, absl::StrCat(there), absl::StrCat(here), out)) return true;
  return Differs(what, absl::StrFormat("%.17g", there), absl::StrFormat("%.17g", here), out);
}

// `who`: "optimizer", or "optimizer of group 2".
bool OptimizerDiffers(const std::string& who, const OptimizerHyper& there, const OptimizerHyper& here,
                      std::string& out) {
  return Differs(who, OptimizerName(there.kind), OptimizerName(here.kind), out) ||
         Differs(who + " maximize", there.maximize, here.maximize, out) ||
         Differs(who + " amsgrad", there.amsgrad, here.amsgrad, out) ||
         Differs(who + " nesterov", there.nesterov, here.nesterov, out) ||
         Differs(who + " momentum", there.momentum, here.momentum, out) ||
         Differs(who + " dampening", there.dampening, here.dampening, out) ||
         Differs(who + " lr", there.lr, here.lr, out) || Differs(who + " beta1", there.beta1, here.beta1, out) ||
         Differs(who + " beta2", there.beta2, here.beta2, out) || Differs(who + " eps", there.eps, here.eps, out) ||
         Differs(who + " weight_decay", there.weight_decay, here.weight_decay, out);
}

bool GroupsDiffer(const JobSpec& there, const JobSpec& here, std::string& out) {
  if (OptimizerDiffers("optimizer", there.optimizer, here.optimizer, out)) return true;
  if (Differs("number of parameter groups", there.num_groups(), here.num_groups(), out)) return true;
  for (int g = 1; g < there.num_groups(); ++g) {
    if (OptimizerDiffers(absl::StrCat("optimizer of group ", g), there.group(g), here.group(g), out)) return true;
  }
  return false;
}

bool ParametersDiffer(const JobSpec& there, const JobSpec& here, std::string& out) {
  if (Differs("number of parameters", there.parameters.size(), here.parameters.size(), out)) return true;
  for (size_t i = 0; i < there.parameters.size(); ++i) {
    const ParameterSpec& a = there.parameters[i];
    const ParameterSpec& b = here.parameters[i];
    if (Differs(absl::StrCat("name of parameter ", i), Quoted(a.name), Quoted(b.name), out)) return true;
    const std::string who = absl::StrCat("parameter ", i, " ", Quoted(a.name));
    if (Differs(absl::StrCat(who, ": shape"), ShapeString(a.shape), ShapeString(b.shape), out) ||
        Differs(absl::StrCat(who, ": format"), WeightFormatName(a.format), WeightFormatName(b.format), out) ||
        Differs(absl::StrCat(who, ": states"), StateFormatName(a.states), StateFormatName(b.states), out) ||
        (a.tied_to.empty() && Differs(absl::StrCat(who, ": group"), a.group, b.group, out)) ||
        Differs(absl::StrCat(who, ": frozen"), a.frozen, b.frozen, out) ||
        Differs(absl::StrCat(who, ": gather"), GatherFormatName(a.gather), GatherFormatName(b.gather), out) ||
        Differs(absl::StrCat(who, ": tied to"), Quoted(a.tied_to), Quoted(b.tied_to), out)) {
      return true;
    }
  }
  return false;
}

}  // namespace

int64_t ParameterSpec::NumElements() const { return BoundedElements(shape); }

absl::Status ValidateId(absl::string_view what, absl::string_view id) {
  bool good = !id.empty() && id.size() <= kMaxIdBytes;
  for (char c : id) good = good && (absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-');
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " ", Quoted(id), " is not 1 to ", kMaxIdBytes, " characters of A-Z a-z 0-9 . _ -"));
}

absl::Status CheckTie(const ParameterSpec& tied, const ParameterSpec& owner) {
  if (owner.frozen != tied.frozen) {
    return absl::InvalidArgumentError(absl::StrCat("parameter ", Quoted(tied.name), tied.frozen ? " is" : " is not",
                                                   " frozen, but is tied to ", Quoted(owner.name), ", which is",
                                                   owner.frozen ? "" : " not", "; freeze both or neither"));
  }
  if (owner.shape == tied.shape && owner.format == tied.format && owner.states == tied.states &&
      owner.gather == tied.gather) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("parameter ", Quoted(tied.name), " is tied to ", Quoted(owner.name),
                                                 " but has another shape or format: ", Stored(tied), ", not ",
                                                 Stored(owner)));
}

absl::string_view ResidencyName(Residency residency) { return residency == Residency::kFull ? "full" : "bucket"; }

absl::StatusOr<Residency> ParseResidency(absl::string_view name) {
  for (const Residency residency : {Residency::kFull, Residency::kBucket}) {
    if (name == ResidencyName(residency)) return residency;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", absl::CHexEscape(name.substr(0, 40)), "\" is no residency; there are full, bucket"));
}

absl::string_view OnLossName(OnLoss on_loss) { return on_loss == OnLoss::kFail ? "fail" : "checkpoint"; }

absl::StatusOr<OnLoss> ParseOnLoss(absl::string_view name) {
  for (const OnLoss on_loss : {OnLoss::kFail, OnLoss::kCheckpoint}) {
    if (name == OnLossName(on_loss)) return on_loss;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("on_loss is \"", absl::CHexEscape(name.substr(0, 40)), "\"; it is fail or checkpoint"));
}

absl::Status JobSpec::Validate() const {
  RETURN_IF_ERROR(ValidateId("job name", name));
  RETURN_IF_ERROR(mesh.Validate());
  if (num_slots < 1 || num_slots > kMaxSlots) {
    return absl::InvalidArgumentError(absl::StrCat("slots is ", num_slots, "; it is 1 to ", kMaxSlots));
  }
  RETURN_IF_ERROR(ValidateParameters(*this));
  if (gradient_format != Format::kFp32 && gradient_format != Format::kBf16) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradient format is ", FormatName(gradient_format), "; it is fp32 or bf16"));
  }
  RETURN_IF_ERROR(ValidateGroups(*this));
  if (!(clip_norm >= 0) || clip_norm > FLT_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat("clip_norm is ", clip_norm, "; it is 0 (no clipping) or a positive number of fp32"));
  }
  if (bucket_elements < kMinBucketElements || bucket_elements > kMaxBucketElements) {
    return absl::InvalidArgumentError(absl::StrCat("bucket_elements is ", bucket_elements, "; it is ",
                                                   kMinBucketElements, " to ", kMaxBucketElements));
  }
  if (publish_every != kPublishOnDemand && (publish_every < 1 || publish_every > kMaxPublishEvery)) {
    return absl::InvalidArgumentError(absl::StrCat("publish_every is ", publish_every, "; it is 1 to ",
                                                   kMaxPublishEvery, ", or ", kPublishOnDemand, " (on demand)"));
  }
  if (publications < 1 || publications > kMaxPublications) {
    return absl::InvalidArgumentError(
        absl::StrCat("publications is ", publications, "; it is 1 to ", kMaxPublications));
  }
  if (check_every < 0 || check_every > kMaxCheckEvery) {
    return absl::InvalidArgumentError(
        absl::StrCat("check_every is ", check_every, "; it is 0 (nothing is checked) to ", kMaxCheckEvery));
  }
  if (prefetch_buckets < 1 || prefetch_buckets > kMaxPrefetchBuckets) {
    return absl::InvalidArgumentError(
        absl::StrCat("prefetch_buckets is ", prefetch_buckets, "; it is 1 to ", kMaxPrefetchBuckets));
  }
  if (copies < 1 || copies > 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("copies is ", copies, "; it is 1, or 2: another host keeps each shard, too"));
  }
  return ValidateSlotMode(*this);
}

absl::Status JobSpec::ValidateGroup(int index, const OptimizerHyper& hyper) const {
  absl::Status status = shardmesh::Validate(hyper);
  if (status.ok() && hyper.kind == OptimizerKind::kMuon) status = ComputeMuonScalars(hyper, {}, 1, 1).status();
  return more_groups.empty() ? status : Annotate(status, absl::StrCat("group ", index));
}

int JobSpec::NumStatesOf(const ParameterSpec& parameter) const {
  return parameter.frozen ? 0 : NumStates(group(parameter.group));
}

bool JobSpec::IsMuon(const ParameterSpec& parameter) const {
  return !parameter.frozen && group(parameter.group).kind == OptimizerKind::kMuon;
}

int JobSpec::StorageOf(int index) const {
  const std::string& owner = parameters[index].tied_to;
  if (owner.empty()) return index;
  for (int i = 0; i < static_cast<int>(parameters.size()); ++i) {
    if (parameters[i].name == owner) return i;
  }
  return index;
}

std::string Difference(const JobSpec& there, const JobSpec& here) {
  std::string out;
  if (Differs("job name", there.name, here.name, out) ||
      Differs("mesh", there.mesh.ToString(), here.mesh.ToString(), out) ||
      Differs("slots", there.num_slots, here.num_slots, out) ||
      Differs("gradient format", FormatName(there.gradient_format), FormatName(here.gradient_format), out) ||
      Differs("seed", there.seed, here.seed, out) || GroupsDiffer(there, here, out) ||
      Differs("non-finite policy", PolicyName(there.non_finite), PolicyName(here.non_finite), out) ||
      Differs("clip_norm", there.clip_norm, here.clip_norm, out) ||
      Differs("bucket_elements", there.bucket_elements, here.bucket_elements, out) ||
      Differs("publish_every", there.publish_every, here.publish_every, out) ||
      Differs("publications", there.publications, here.publications, out) ||
      Differs("check_every", there.check_every, here.check_every, out) ||
      Differs("residency", ResidencyName(there.residency), ResidencyName(here.residency), out) ||
      Differs("prefetch_buckets", there.prefetch_buckets, here.prefetch_buckets, out) ||
      Differs("slot_mode", SlotModeName(there.slot_mode), SlotModeName(here.slot_mode), out) ||
      Differs("trainers", there.num_trainers, here.num_trainers, out) ||
      Differs("slot_timeout_ms", there.slot_timeout_ms, here.slot_timeout_ms, out) ||
      Differs("token_weights", there.token_weights ? "on" : "off", here.token_weights ? "on" : "off", out) ||
      Differs("on_loss", OnLossName(there.on_loss), OnLossName(here.on_loss), out) ||
      Differs("copies", there.copies, here.copies, out) || ParametersDiffer(there, here, out)) {
    return out;
  }
  return out;
}

}  // namespace shardmesh
