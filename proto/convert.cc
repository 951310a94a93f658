#include "proto/convert.h"

#include <optional>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

absl::Status UnknownValue(absl::string_view field, int value, absl::string_view known) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, ", which is no value of it; known: ", known));
}

absl::StatusOr<DimRole> DimRoleFromProto(const v1::MeshDimension& dim) {
  switch (dim.role()) {
    case v1::DIMENSION_ROLE_UNSPECIFIED:
      return DefaultDimRole(dim.name());
    case v1::DIMENSION_ROLE_REPLICATE:
      return DimRole::kReplicate;
    case v1::DIMENSION_ROLE_SHARD:
      return DimRole::kShard;
    default:
      return UnknownValue(absl::StrCat("mesh dimension \"", absl::CHexEscape(dim.name().substr(0, 100)), "\": role"),
                          dim.role(), "1 (replicate), 2 (shard)");
  }
}

absl::StatusOr<Residency> ResidencyFromProto(v1::Residency proto) {
  switch (proto) {
    case v1::RESIDENCY_UNSPECIFIED:
    case v1::RESIDENCY_FULL:
      return Residency::kFull;
    case v1::RESIDENCY_BUCKET:
      return Residency::kBucket;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("residency is ", static_cast<int>(proto), "; it is 1 (full) or 2 (bucket)"));
  }
}

absl::StatusOr<OnLoss> OnLossFromProto(v1::OnLoss proto) {
  switch (proto) {
    case v1::ON_LOSS_UNSPECIFIED:
    case v1::ON_LOSS_FAIL:
      return OnLoss::kFail;
    case v1::ON_LOSS_CHECKPOINT:
      return OnLoss::kCheckpoint;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("on_loss is ", static_cast<int>(proto), "; it is 1 (fail) or 2 (checkpoint)"));
  }
}

absl::StatusOr<SlotMode> SlotModeFromProto(v1::SlotMode proto) {
  switch (proto) {
    case v1::SLOT_MODE_UNSPECIFIED:
    case v1::SLOT_MODE_ASSIGNED:
      return SlotMode::kAssigned;
    case v1::SLOT_MODE_PULLED:
      return SlotMode::kPulled;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("slot_mode is ", static_cast<int>(proto), "; it is 1 (assigned) or 2 (pulled)"));
  }
}

absl::StatusOr<NonFinitePolicy> NonFiniteFromProto(v1::NonFinitePolicy proto) {
  switch (proto) {
    case v1::NON_FINITE_POLICY_UNSPECIFIED:
    case v1::NON_FINITE_POLICY_SKIP:
      return NonFinitePolicy::kSkip;
    case v1::NON_FINITE_POLICY_FAIL:
      return NonFinitePolicy::kFail;
    default:
      return UnknownValue("non_finite", proto, "1 (skip), 2 (fail)");
  }
}

constexpr absl::string_view kKnownFormats =
    "1 (fp32), 2 (bf16), 3 (bf16_sr), 4 (bf16+16), 5 (bf16+8sr), 6 (int8_row), "
    "7 (nf4)";

std::optional<WeightFormat> WeightFormatFromProto(v1::Format proto) {
  switch (proto) {
    case v1::FORMAT_UNSPECIFIED:
    case v1::FORMAT_FP32:
      return WeightFormat::kFp32;
    case v1::FORMAT_BF16:
      return WeightFormat::kBf16;
    case v1::FORMAT_BF16_SR:
      return WeightFormat::kBf16Sr;
    case v1::FORMAT_BF16_PLUS_16:
      return WeightFormat::kBf16Plus16;
    case v1::FORMAT_BF16_PLUS_8SR:
      return WeightFormat::kBf16Plus8Sr;
    case v1::FORMAT_INT8_ROW:
      return WeightFormat::kInt8Row;
    case v1::FORMAT_NF4:
      return WeightFormat::kNf4;
    default:
      return std::nullopt;
  }
}

// The two enums have the same values in the same order, one apart.
std::optional<StateFormat> StateFormatFromProto(v1::StateFormat proto) {
  static_assert(v1::STATE_FORMAT_FP8X32 - 1 == static_cast<int>(StateFormat::kFp8x32));
  if (proto == v1::STATE_FORMAT_UNSPECIFIED) return StateFormat::kFp32;
  if (proto < v1::STATE_FORMAT_FP32 || proto > v1::STATE_FORMAT_FP8X32) return std::nullopt;
  return static_cast<StateFormat>(proto - 1);
}

// As above.
absl::StatusOr<GatherFormat> GatherFromProto(absl::string_view who, v1::GatherFormat proto) {
  static_assert(v1::GATHER_FORMAT_NF4 - 1 == static_cast<int>(GatherFormat::kNf4));
  if (proto == v1::GATHER_FORMAT_UNSPECIFIED) return GatherFormat::kStored;
  if (proto >= v1::GATHER_FORMAT_STORED && proto <= v1::GATHER_FORMAT_NF4) return static_cast<GatherFormat>(proto - 1);
  return UnknownValue(absl::StrCat(who, "gather"), proto,
                      "1 (stored), 2 (fp8_tensor), 3 (fp8_row), 4 (fp8_block), 5 (mx8), 6 (int8_row), 7 (nf4)");
}

absl::StatusOr<ParameterSpec> ParameterFromProto(int index, const v1::Parameter& proto) {
  ParameterSpec p;
  p.name = proto.name();
  p.shape.assign(proto.shape().begin(), proto.shape().end());
  p.tied_to = proto.tied_to();
  p.group = proto.group();
  p.frozen = proto.frozen();
  p.given = proto.given();
  const auto format = WeightFormatFromProto(proto.format());
  const auto states = StateFormatFromProto(proto.states());
  const std::string who =
      absl::StrCat("parameter ", index, " \"", absl::CHexEscape(proto.name().substr(0, 200)), "\": ");
  if (format.has_value() && states.has_value()) {
    p.format = *format;
    p.states = *states;
    ASSIGN_OR_RETURN(p.gather, GatherFromProto(who, proto.gather()));
    return p;
  }
  if (!format.has_value()) return UnknownValue(who + "format", proto.format(), kKnownFormats);
  return UnknownValue(who + "states", proto.states(), "1 (fp32), 2 (bf16_sr), 3 (dyn8), 4 (dyn4), 5 (fp8), 6 (fp8x32)");
}

absl::StatusOr<OptimizerKind> KindFromProto(v1::OptimizerKind proto) {
  switch (proto) {
    case v1::OPTIMIZER_KIND_SGD:
      return OptimizerKind::kSgd;
    case v1::OPTIMIZER_KIND_ADAM:
      return OptimizerKind::kAdam;
    case v1::OPTIMIZER_KIND_UNSPECIFIED:
    case v1::OPTIMIZER_KIND_ADAMW:
      return OptimizerKind::kAdamW;
    case v1::OPTIMIZER_KIND_LION:
      return OptimizerKind::kLion;
    case v1::OPTIMIZER_KIND_MUON:
      return OptimizerKind::kMuon;
    default:
      return UnknownValue("optimizer kind", proto, "1 (sgd), 2 (adam), 3 (adamw), 4 (lion), 5 (muon)");
  }
}

v1::OptimizerKind ToProto(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kSgd:
      return v1::OPTIMIZER_KIND_SGD;
    case OptimizerKind::kAdam:
      return v1::OPTIMIZER_KIND_ADAM;
    case OptimizerKind::kLion:
      return v1::OPTIMIZER_KIND_LION;
    case OptimizerKind::kMuon:
      return v1::OPTIMIZER_KIND_MUON;
    case OptimizerKind::kAdamW:
      break;
  }
  return v1::OPTIMIZER_KIND_ADAMW;
}

absl::StatusOr<OptimizerHyper> FromProto(const v1::Optimizer& proto) {
  OptimizerHyper hyper;
  ASSIGN_OR_RETURN(hyper.kind, KindFromProto(proto.kind()));
  hyper.maximize = proto.maximize();
  hyper.amsgrad = proto.amsgrad();
  hyper.momentum = proto.momentum();
  hyper.dampening = proto.dampening();
  hyper.nesterov = proto.nesterov();
  hyper.lr = proto.learning_rate();
  hyper.beta1 = proto.beta1();
  hyper.beta2 = proto.beta2();
  hyper.eps = proto.epsilon();
  hyper.weight_decay = proto.weight_decay();
  return hyper;
}

v1::Optimizer ToProto(const OptimizerHyper& hyper) {
  v1::Optimizer proto;
  proto.set_kind(ToProto(hyper.kind));
  proto.set_maximize(hyper.maximize);
  proto.set_amsgrad(hyper.amsgrad);
  proto.set_momentum(hyper.momentum);
  proto.set_dampening(hyper.dampening);
  proto.set_nesterov(hyper.nesterov);
  proto.set_learning_rate(hyper.lr);
  proto.set_beta1(hyper.beta1);
  proto.set_beta2(hyper.beta2);
  proto.set_epsilon(hyper.eps);
  proto.set_weight_decay(hyper.weight_decay);
  return proto;
}

}  // namespace

absl::StatusOr<Format> FormatFromProto(absl::string_view field, v1::Format proto, Format unset) {
  switch (proto) {
    case v1::FORMAT_UNSPECIFIED:
      return unset;
    case v1::FORMAT_FP32:
      return Format::kFp32;
    case v1::FORMAT_BF16:
      return Format::kBf16;
    case v1::FORMAT_BF16_SR:
      return Format::kBf16Sr;
    default:
      return UnknownValue(field, proto, "1 (fp32), 2 (bf16), 3 (bf16_sr)");
  }
}

v1::Format ToProto(Format format) {
  switch (format) {
    case Format::kFp32:
      return v1::FORMAT_FP32;
    case Format::kBf16:
      return v1::FORMAT_BF16;
    case Format::kBf16Sr:
      return v1::FORMAT_BF16_SR;
  }
  return v1::FORMAT_UNSPECIFIED;
}

v1::Format ToProto(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp32:
      return v1::FORMAT_FP32;
    case WeightFormat::kBf16:
      return v1::FORMAT_BF16;
    case WeightFormat::kBf16Sr:
      return v1::FORMAT_BF16_SR;
    case WeightFormat::kBf16Plus16:
      return v1::FORMAT_BF16_PLUS_16;
    case WeightFormat::kBf16Plus8Sr:
      return v1::FORMAT_BF16_PLUS_8SR;
    case WeightFormat::kInt8Row:
      return v1::FORMAT_INT8_ROW;
    case WeightFormat::kNf4:
      return v1::FORMAT_NF4;
  }
  return v1::FORMAT_UNSPECIFIED;
}

v1::StateFormat ToProto(StateFormat format) { return static_cast<v1::StateFormat>(static_cast<int>(format) + 1); }
v1::GatherFormat ToProto(GatherFormat format) { return static_cast<v1::GatherFormat>(static_cast<int>(format) + 1); }

absl::StatusOr<MeshSpec> MeshSpecFromProto(const google::protobuf::RepeatedPtrField<v1::MeshDimension>& dims) {
  MeshSpec mesh;
  mesh.dims.reserve(dims.size());
  for (const v1::MeshDimension& dim : dims) {
    ASSIGN_OR_RETURN(const DimRole role, DimRoleFromProto(dim));
    mesh.dims.push_back({dim.name(), dim.size(), role});
  }
  return mesh;
}

google::protobuf::RepeatedPtrField<v1::MeshDimension> ToProto(const MeshSpec& mesh) {
  google::protobuf::RepeatedPtrField<v1::MeshDimension> dims;
  for (const MeshDim& dim : mesh.dims) {
    v1::MeshDimension* proto = dims.Add();
    proto->set_name(dim.name);
    proto->set_size(dim.size);
    proto->set_role(dim.role == DimRole::kReplicate ? v1::DIMENSION_ROLE_REPLICATE : v1::DIMENSION_ROLE_SHARD);
  }
  return dims;
}

NameRules NameRulesFromProto(const v1::NameRules& proto) {
  NameRules rules;
  rules.root_wrappers.assign(proto.root_wrappers().begin(), proto.root_wrappers().end());
  rules.wrapped_at.insert(proto.wrapped_at().begin(), proto.wrapped_at().end());
  rules.literal.insert(proto.literals().begin(), proto.literals().end());
  return rules;
}

v1::NameRules ToProto(const NameRules& rules) {
  v1::NameRules proto;
  for (const std::string& wrapper : rules.root_wrappers) proto.add_root_wrappers(wrapper);
  for (const std::string& prefix : rules.wrapped_at) proto.add_wrapped_at(prefix);
  for (const std::string& prefix : rules.literal) proto.add_literals(prefix);
  return proto;
}

absl::StatusOr<JobSpec> JobSpecFromProto(const v1::JobSpec& proto) {
  if (!proto.has_optimizer()) return absl::InvalidArgumentError("optimizer is unset; give its kind and values");
  JobSpec spec;
  spec.name = proto.name();
  ASSIGN_OR_RETURN(spec.mesh, MeshSpecFromProto(proto.mesh()));
  spec.num_slots = proto.slots();
  spec.parameters.reserve(proto.parameters_size());
  for (int i = 0; i < proto.parameters_size(); ++i) {
    ASSIGN_OR_RETURN(ParameterSpec parameter, ParameterFromProto(i, proto.parameters(i)));
    spec.parameters.push_back(std::move(parameter));
  }
  ASSIGN_OR_RETURN(spec.gradient_format, FormatFromProto("gradient_format", proto.gradient_format(), Format::kBf16));
  ASSIGN_OR_RETURN(spec.optimizer, FromProto(proto.optimizer()));
  for (const v1::Optimizer& group : proto.more_groups()) {
    ASSIGN_OR_RETURN(OptimizerHyper hyper, FromProto(group));
    spec.more_groups.push_back(hyper);
  }
  spec.seed = proto.seed();
  ASSIGN_OR_RETURN(spec.non_finite, NonFiniteFromProto(proto.non_finite()));
  spec.bucket_elements = proto.bucket_elements() == 0 ? kDefaultBucketElements : proto.bucket_elements();
  spec.clip_norm = proto.clip_norm();
  spec.publish_every = proto.publish_every() == 0 ? 1 : proto.publish_every();
  spec.publications = proto.publications() == 0 ? kDefaultPublications : proto.publications();
  spec.check_every = proto.check_every();
  ASSIGN_OR_RETURN(spec.residency, ResidencyFromProto(proto.residency()));
  spec.prefetch_buckets = proto.prefetch_buckets() == 0 ? 1 : proto.prefetch_buckets();
  ASSIGN_OR_RETURN(spec.slot_mode, SlotModeFromProto(proto.slot_mode()));
  spec.num_trainers = proto.trainers();
  spec.slot_timeout_ms = proto.slot_timeout_ms() == 0 ? kDefaultSlotTimeoutMs : proto.slot_timeout_ms();
  spec.token_weights = proto.token_weights();
  ASSIGN_OR_RETURN(spec.on_loss, OnLossFromProto(proto.on_loss()));
  if (proto.copies() != 0) spec.copies = proto.copies();
  return spec;
}

v1::JobSpec ToProto(const JobSpec& spec) {
  v1::JobSpec proto;
  proto.set_name(spec.name);
  *proto.mutable_mesh() = ToProto(spec.mesh);
  proto.set_slots(spec.num_slots);
  proto.mutable_parameters()->Reserve(static_cast<int>(spec.parameters.size()));
  for (const ParameterSpec& p : spec.parameters) {
    v1::Parameter* parameter = proto.add_parameters();
    parameter->set_name(p.name);
    for (int64_t size : p.shape) parameter->add_shape(size);
    parameter->set_format(ToProto(p.format));
    parameter->set_tied_to(p.tied_to);
    parameter->set_states(ToProto(p.states));
    parameter->set_group(p.group);
    parameter->set_frozen(p.frozen);
    parameter->set_given(p.given);
    parameter->set_gather(ToProto(p.gather));
  }
  proto.set_gradient_format(ToProto(spec.gradient_format));
  *proto.mutable_optimizer() = ToProto(spec.optimizer);
  for (const OptimizerHyper& group : spec.more_groups) *proto.add_more_groups() = ToProto(group);
  proto.set_seed(spec.seed);
  proto.set_non_finite(spec.non_finite == NonFinitePolicy::kFail ? v1::NON_FINITE_POLICY_FAIL
                                                                 : v1::NON_FINITE_POLICY_SKIP);
  proto.set_bucket_elements(spec.bucket_elements);
  proto.set_clip_norm(spec.clip_norm);
  proto.set_publish_every(spec.publish_every);
  proto.set_publications(spec.publications);
  proto.set_check_every(spec.check_every);
  proto.set_residency(spec.residency == Residency::kBucket ? v1::RESIDENCY_BUCKET : v1::RESIDENCY_FULL);
  proto.set_prefetch_buckets(spec.prefetch_buckets);
  proto.set_slot_mode(spec.pulled() ? v1::SLOT_MODE_PULLED : v1::SLOT_MODE_ASSIGNED);
  proto.set_trainers(spec.num_trainers);
  proto.set_slot_timeout_ms(spec.slot_timeout_ms);
  proto.set_token_weights(spec.token_weights);
  // The default is unset, so that manifests of jobs without it have the text that they always had.
  if (spec.on_loss == OnLoss::kCheckpoint) proto.set_on_loss(v1::ON_LOSS_CHECKPOINT);
  if (spec.copies != 1) proto.set_copies(spec.copies);
  return proto;
}

}  // namespace shardmesh
