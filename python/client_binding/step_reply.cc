#include "python/client_binding/step_reply.h"

#include "python/client_binding/memory.h"

namespace shardmesh::python {

py::tuple TupleOf(const v1::StepReply& reply) {
  return py::make_tuple(reply.step(), reply.already_applied(), reply.skipped(), reply.skip_reason(),
                        reply.gradient_norm());
}

py::list ListOf(const std::vector<v1::AwaitedTrainer>& awaited) {
  py::list list;
  for (const v1::AwaitedTrainer& each : awaited) {
    const char* const state = each.state() == v1::AwaitedTrainer::ATTACHED  ? "attached"
                              : each.state() == v1::AwaitedTrainer::STOPPED ? "stopped"
                              : each.state() == v1::AwaitedTrainer::LEFT    ? "left"
                                                                            : "absent";
    list.append(py::make_tuple(each.slot(), state, each.pid()));
  }
  return list;
}

py::tuple DescriptionOf(const Job& job, int tensor, const std::shared_ptr<const void>& owner,
                        const ConstTensorView& view) {
  const JobSpec& spec = job.spec();
  const ParameterSpec& parameter = spec.parameters[spec.StorageOf(tensor)];
  const absl::string_view format =
      view.gather == GatherFormat::kStored ? FormatName(view.format) : GatherFormatName(view.gather);
  return py::make_tuple(parameter.name, py::tuple(py::cast(parameter.shape)), std::string(format),
                        PartsOf(owner, view, parameter.shape, /*writable=*/true));
}

}  // namespace shardmesh::python
