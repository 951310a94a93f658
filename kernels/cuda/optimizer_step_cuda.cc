#include "kernels/cuda/optimizer_step_cuda.h"

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

#ifdef SHARDMESH_CUDA
#include "kernels/cuda/device_table_cuda.h"
#include "kernels/cuda/optimizer_step_kernel_cuda.h"
#include "kernels/cuda/warp_step_body.h"
#include "kernels/tile/walk.h"
#endif

namespace shardmesh {

#ifdef SHARDMESH_CUDA

namespace {

absl::Status StatusOf(const char* error, const char* refused) {
  if (error == nullptr) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the CUDA runtime refused to ", refused, ": ", error));
}

}  // namespace

absl::Status OptimizerStepCuda(const OptimizerContext& context, const OptimizerRun& run, void* stream) {
  StepSource source;
  source.context = context;
  source.entry = {run, PlanStep(context, run), 0};
  source.num_units = NumUnits(context, run);
  return StatusOf(LaunchOptimizerStep(source, HasWarpBody(context, run) ? &context : nullptr, stream),
                  "launch the optimizer step");
}

absl::Status OptimizerStepListCuda(absl::Span<const OptimizerContext> contexts, absl::Span<const OptimizerItem> items,
                                   DeviceTable& table, void* stream) {
  for (const OptimizerItem& item : items) {
    if (item.context < 0 || item.context >= static_cast<int>(contexts.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("an item names context ", item.context, "; there are ", contexts.size(), ", from 0 on"));
    }
  }
  const StepTables tables(contexts, items);
  StepSource source;
  source.num_units = tables.num_units();
  if (source.num_units == 0) return absl::OkStatus();
  const uint8_t* at = nullptr;
  RETURN_IF_ERROR(
      StatusOf(table.Upload(tables.bytes().data(), static_cast<int64_t>(tables.bytes().size()), stream, &at),
               "copy the tables of an optimizer step"));
  source.list = tables.At(at);
  const char* error = LaunchOptimizerStep(source, SharedWarpContext(contexts, items), stream);
  const char* noted = table.NoteUse(stream);
  return StatusOf(error != nullptr ? error : noted, "launch the optimizer step of a list");
}

#else

namespace {
absl::Status BuiltWithout() {
  return absl::UnimplementedError("this build has no CUDA; build with --config=cuda for the optimizer step on a GPU");
}
}  // namespace

absl::Status OptimizerStepCuda(const OptimizerContext&, const OptimizerRun&, void*) { return BuiltWithout(); }
absl::Status OptimizerStepListCuda(absl::Span<const OptimizerContext>, absl::Span<const OptimizerItem>, DeviceTable&,
                                   void*) {
  return BuiltWithout();
}

#endif

}  // namespace shardmesh
