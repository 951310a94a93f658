// What a trainer does with a job but for its steps: it creates it, gives it its weights, opens it again.
#include <google/protobuf/util/json_util.h>

#include <map>
#include <utility>

#include "core/base/status.h"
#include "core/job/job.h"
#include "proto/convert.h"
#include "python/client_binding/await.h"
#include "python/client_binding/binding.h"
#include "python/client_binding/one_call.h"

namespace shardmesh::python {
namespace {

// A job's specification as JSON of the message JobSpec. InvalidArgument: it is none; says where.
JobSpec SpecOf(const std::string& json) {
  v1::JobSpec message;
  const auto status = google::protobuf::util::JsonStringToMessage(json, &message);
  if (!status.ok()) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("a job's specification: ", std::string(status.message().data(), status.message().size()))));
  }
  return OrThrow(JobSpecFromProto(message));
}

// A trainer may load its model's weights in place: what it writes is its own.
Client TrainingClient(const Service& service, absl::Duration ready_timeout) {
  ClientOptions options = service.options;
  options.ready_timeout = ready_timeout;
  options.writable_weights = true;
  return Client(service.coordinator, std::move(options));
}

BoundJob CreateJob(const BoundClient& client, const Text& json, double timeout, const NameRules& names,
                   int64_t replaces_uid) {
  const auto create = [service = *client.service, spec = SpecOf(json.value), names, ready = absl::Seconds(timeout),
                       replaces_uid]() {
    return TrainingClient(service, ready).CreateJob(spec, names, replaces_uid);
  };
  return {client.service, OfThisProcess(OrThrow(Await<std::shared_ptr<Job>>(create))), names};
}

BoundJob OpenToTrain(const BoundClient& client, const Text& name, double timeout, const NameRules& names) {
  const auto open = [service = *client.service, name = name.value, names, ready = absl::Seconds(timeout)]() {
    return TrainingClient(service, ready).AwaitJob(name, ready, names, JobUse::kTrain);
  };
  return {client.service, OfThisProcess(OrThrow(Await<std::shared_ptr<Job>>(open))), names};
}

// The job of that uid, and no other one of its name.
void Delete(const BoundClient& client, const Text& name, int64_t uid) {
  const auto erase = [service = *client.service, name = name.value, uid]() -> absl::StatusOr<Done> {
    RETURN_IF_ERROR(Client(service.coordinator, service.options).DeleteJob(name, uid));
    return Done{};
  };
  OrThrow(Await<Done>(erase));
}

// As it is after it lost a member, or began a later epoch.
BoundJob Reopen(const BoundJob& job, double timeout) {
  const auto open = [service = *job.service, before = job.job, ready = absl::Seconds(timeout)]() {
    return TrainingClient(service, ready).Reopen(*before);
  };
  return {job.service, OfThisProcess(OrThrow(Await<std::shared_ptr<Job>>(open))), job.names};
}

void AwaitClosed(const BoundJob& job, double timeout) {
  OrThrow(Await<Done>([before = job.job, duration = absl::Seconds(timeout)]() -> absl::StatusOr<Done> {
    before->AwaitClosed(duration);
    return Done{};
  }));
}

// {name: fp32 values, contiguous}.
void Initialize(const BoundJob& job, const py::dict& values, double timeout) {
  std::map<std::string, std::vector<float>> weights;
  for (const auto& [name, value] : values) {
    const py::buffer_info info = py::reinterpret_borrow<py::buffer>(value).request();
    if (info.format != py::format_descriptor<float>::format()) {
      throw StatusError(absl::InvalidArgumentError(
          absl::StrCat("weights of ", name.cast<std::string>(), " are of type \"", info.format, "\"; give float32")));
    }
    const auto* const begin = static_cast<const float*>(info.ptr);
    weights.emplace(name.cast<std::string>(), std::vector<float>(begin, begin + info.size));
  }
  const auto initialize = [held = job.job, weights = std::move(weights),
                           duration = absl::Seconds(timeout)]() -> absl::StatusOr<Done> {
    RETURN_IF_ERROR(held->Initialize(weights, duration));
    return Done{};
  };
  OrThrow(Await<Done>(initialize));
}

}  // namespace

void BindTraining(py::module_& module, py::class_<BoundClient>& client, py::class_<BoundJob>& job) {
  const auto named = [](std::vector<Text>& root_wrappers, std::vector<Text>& literal, std::vector<Text>& wrapped_at) {
    return RulesOf(std::move(root_wrappers), std::move(literal), std::move(wrapped_at));
  };
  client
      .def(
          "create_job",
          [named](const BoundClient& self, const Text& specification, double timeout, std::vector<Text> root_wrappers,
                  std::vector<Text> literal, std::vector<Text> wrapped_at, int64_t replaces_uid) {
            return CreateJob(self, specification, timeout, named(root_wrappers, literal, wrapped_at), replaces_uid);
          },
          py::arg("specification"), py::arg("timeout"), py::arg("root_wrappers"), py::arg("literal"),
          py::arg("wrapped_at"), py::arg("replaces_uid") = 0)
      .def(
          "open_to_train",
          [named](const BoundClient& self, const Text& name, double timeout, std::vector<Text> root_wrappers,
                  std::vector<Text> literal, std::vector<Text> wrapped_at) {
            return OpenToTrain(self, name, timeout, named(root_wrappers, literal, wrapped_at));
          },
          py::arg("name"), py::arg("timeout"), py::arg("root_wrappers"), py::arg("literal"), py::arg("wrapped_at"))
      .def("delete_job", &Delete, py::arg("name"), py::arg("uid"));
  job.def("reopen", &Reopen, py::arg("timeout"))
      .def("await_closed", &AwaitClosed, py::arg("timeout"))
      .def("initialize", &Initialize, py::arg("weights"), py::arg("timeout"));
  // Of two specifications, the older one first; "": none.
  module.def(
      "difference",
      [](const Text& there, const Text& here) { return Difference(SpecOf(there.value), SpecOf(here.value)); },
      py::arg("there"), py::arg("here"));
}

}  // namespace shardmesh::python
