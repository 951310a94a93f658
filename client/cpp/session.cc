#include "client/cpp/session.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/cpp/copied_windows.h"
#include "client/cpp/gradient_check.h"
#include "core/base/status.h"

namespace shardmesh {

absl::Status CheckSlots(const Job& job, const std::vector<Slot>& slots) {
  if (slots.empty()) return absl::InvalidArgumentError("a session needs at least one slot");
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].value() < 0 || slots[i].value() >= job.spec().num_slots) {
      return absl::InvalidArgumentError(absl::StrCat("slot ", slots[i].value(), " is none of job ", job.spec().name,
                                                     "'s: 0 to ", job.spec().num_slots - 1));
    }
    if (std::find(slots.begin(), slots.begin() + i, slots[i]) != slots.begin() + i) {
      return absl::InvalidArgumentError(absl::StrCat("slot ", slots[i].value(), " is given twice"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> Session::IndexOf(Slot slot) const {
  const auto it = std::find(slots_.begin(), slots_.end(), slot);
  if (it != slots_.end()) return it - slots_.begin();
  return absl::InvalidArgumentError(absl::StrCat("slot ", slot.value(), " is not of this session"));
}

absl::StatusOr<TensorView> Session::gradient(Slot slot, absl::string_view name) const {
  ASSIGN_OR_RETURN(const size_t index, IndexOf(slot));
  ASSIGN_OR_RETURN(TensorView view, GradientView(*job_, name, gradient_window(index)));
  if (device_ != nullptr) view.device = device_->device();
  return view;
}

absl::Status Session::WriteGradient(Slot slot, absl::string_view name, absl::string_view bytes) const {
  if (device_ != nullptr) return absl::UnimplementedError("windows of gradients are a device's: copy to gradient()");
  ASSIGN_OR_RETURN(const size_t index, IndexOf(slot));
  ASSIGN_OR_RETURN(const TensorView view, GradientView(*job_, name, gradient_window(index)));
  const int64_t expected = view.num_elements * BytesPerElement(view.format);
  if (static_cast<int64_t>(bytes.size()) != expected) {
    return absl::InvalidArgumentError(
        absl::StrCat("the gradient of \"", name, "\" has ", expected, " bytes, not ", bytes.size()));
  }
  char* const target = static_cast<char*>(view.data);
  if (bucketed()) {
    gradients_[index].Write(target - gradients_[index].data(), bytes.data(), expected);
  } else {
    std::memcpy(target, bytes.data(), expected);
  }
  return absl::OkStatus();
}

absl::StatusOr<ConstTensorView> Session::parameter(absl::string_view name) const {
  ASSIGN_OR_RETURN(const int tensor, job_->Resolve(name));
  const Placement& at = job_->plan().placements()[tensor];
  ConstTensorView view = WeightsIn(job_->plan(), tensor, window() + job_->plan().buckets()[at.bucket].weight_offset);
  if (device_ != nullptr) view.device = device_->device();
  return view;
}

absl::Status Session::ForgetWrites() const {
  if (!job_->options().writable_weights) {
    return absl::FailedPreconditionError("weights of this session cannot be written to: writable_weights is not set");
  }
  return weights().ForgetWrites();
}

absl::Status Session::ShowPrivately() {
  ASSIGN_OR_RETURN(shown_, MapToDropWrites(parameters_));
  return absl::OkStatus();
}

absl::Status Session::CheckHasWeights() const {
  if (committed_.value() >= 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("no initial weights of job ", job_->spec().name,
                                                    " were seen yet; call AwaitWeights before the first step"));
}

v1::StepRequest Session::NewStepRequest(const StepOptions& options) const {
  v1::StepRequest request;
  request.set_job(job_->spec().name);
  request.set_epoch(job_->epoch().value());
  request.set_step(committed_.value() + 1);
  for (Slot slot : slots_) request.add_slots(slot.value());
  request.mutable_learning_rates()->Add(options.learning_rates.begin(), options.learning_rates.end());
  request.mutable_tokens()->Add(options.tokens.begin(), options.tokens.end());
  if (options.loss_scale != 1) request.set_loss_scale(options.loss_scale);
  return request;
}

}  // namespace shardmesh
