#include <set>
#include <string>
#include <utility>

#include "absl/strings/strip.h"
#include "core/base/status.h"
#include "python/client_binding/await.h"
#include "python/client_binding/binding.h"

namespace shardmesh::python {
namespace {

// environment: what is empty comes from the variables SHARDMESH_TLS_*.
BoundClient Connect(const Text& coordinator, const Text& cert, const Text& key, const Text& ca, const Text& target,
                    bool environment, double call_timeout) {
  if (absl::Status status = EnterProcess(); !status.ok()) throw StatusError(status);
  Service service;
  service.options.tls = {cert.value, key.value, ca.value, target.value, TlsWords::kPython};
  if (environment) service.options.tls = WithTlsEnvironment(std::move(service.options.tls));
  service.options.call_timeout = absl::Seconds(call_timeout);
  service.coordinator = OrThrow(NewGrpcCoordinatorTransport(coordinator.value, service.options.tls));
  return {OfThisProcess(std::make_shared<const Service>(std::move(service)))};
}

// (name, state, committed step, published steps, error, what it waits for).
py::list Jobs(const BoundClient& client) {
  const auto list = [service = *client.service]() {
    return service.coordinator->ListJobs({}, service.options.call_timeout);
  };
  const v1::ListJobsReply reply = OrThrow(Await<v1::ListJobsReply>(list));
  py::list jobs;
  for (const v1::JobDescription& job : reply.jobs()) {
    const std::string state = v1::JobState_Name(job.state());
    const bool waits = job.state() == v1::JOB_STATE_WAITING || job.state() == v1::JOB_STATE_PREPARING;
    jobs.append(py::make_tuple(job.spec().name(), std::string(absl::StripPrefix(state, "JOB_STATE_")),
                               job.committed_step(),
                               std::vector<int64_t>(job.published_steps().begin(), job.published_steps().end()),
                               job.error(), waits ? WaitsFor(job) : std::string()));
  }
  return jobs;
}

BoundJob OpenJob(const BoundClient& client, const Text& name, double timeout, bool await_creation,
                 const NameRules& names) {
  const auto open = [service = *client.service, name = name.value, names, await_creation,
                     ready = absl::Seconds(timeout)]() {
    Client opener = service.client(ready);
    return await_creation ? opener.AwaitJob(name, ready, names, JobUse::kRead)
                          : opener.OpenJob(name, names, JobUse::kRead);
  };
  return {client.service, OfThisProcess(OrThrow(Await<std::shared_ptr<Job>>(open))), names};
}

}  // namespace

Client Service::client(absl::Duration ready_timeout) const {
  ClientOptions with = options;
  with.ready_timeout = ready_timeout;
  return Client(coordinator, std::move(with));
}

NameRules RulesOf(std::vector<Text> root_wrappers, std::vector<Text> literal, std::vector<Text> wrapped_at) {
  const auto set = [](std::vector<Text> texts) {
    const std::vector<std::string> values = ToVector(std::move(texts));
    return std::set<std::string, std::less<>>(values.begin(), values.end());
  };
  NameRules rules{ToVector(std::move(root_wrappers)), set(std::move(wrapped_at)), set(std::move(literal))};
  if (absl::Status status = ValidateNameRules(rules); !status.ok()) throw StatusError(status);
  return rules;
}

void BindClient(py::module_& module) {
  py::class_<BoundClient> client(module, "Client");
  client
      .def(py::init(&Connect), py::arg("coordinator"), py::arg("tls_cert"), py::arg("tls_key"), py::arg("tls_ca"),
           py::arg("tls_name"), py::arg("environment"), py::arg("call_timeout"))
      .def("jobs", &Jobs)
      .def(
          "job",
          [](const BoundClient& self, const Text& name, double timeout, bool await_creation,
             std::vector<Text> root_wrappers, std::vector<Text> literal, std::vector<Text> wrapped_at) {
            const NameRules names = RulesOf(std::move(root_wrappers), std::move(literal), std::move(wrapped_at));
            return OpenJob(self, name, timeout, await_creation, names);
          },
          py::arg("name"), py::arg("timeout"), py::arg("await_creation"), py::arg("root_wrappers"), py::arg("literal"),
          py::arg("wrapped_at"));
  py::class_<BoundJob> job(module, "Job");
  BindJob(module, job);
  BindCheckpoint(module, client, job);
  BindTraining(module, client, job);
}

}  // namespace shardmesh::python
