// What the parts of the extension module share. One Bind function for each kind of object; python/shardmesh/_client.pyi
// repeats their signatures. Everything here runs with the interpreter's lock held; what waits lets go of it (await.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/version_reader.h"
#include "core/names/names.h"
#include "python/binding/arguments.h"
#include "python/binding/constructed.h"
#include "python/binding/errors.h"

namespace shardmesh::python {

// A coordinator, and how it is talked with. Thread-safe; copies are of one connection.
struct Service {
  std::shared_ptr<CoordinatorTransport> coordinator;
  ClientOptions options;

  Client client() const { return Client(coordinator, options); }
  Client client(absl::Duration ready_timeout) const;
};

class BoundClient {
 public:
  std::shared_ptr<const Service> service;  // OfThisProcess
};

// A job by its name. Each call opens it anew, so that it is of the members that the job has by then.
class BoundJob {
 public:
  std::shared_ptr<const Service> service;
  std::shared_ptr<Job> job;  // as it was opened; OfThisProcess
  NameRules names;
};

// A version that is held, until it is closed and nobody has bytes of it any more.
class BoundVersion {
 public:
  std::shared_ptr<const HeldVersion> held;  // OfThisProcess; null: closed
  Step step;
  Epoch epoch;
  bool attached = false;
};

// "exact", "at_least", "newer" or "latest", the step of the first three, and the epoch that "newer" compares with.
VersionChoice ChoiceOf(const std::string& kind, int64_t step, int64_t epoch = 0);

// The rules of names, from three lists.
NameRules RulesOf(std::vector<Text> root_wrappers, std::vector<Text> literal, std::vector<Text> wrapped_at);

void BindClient(py::module_& module);
void BindJob(py::module_& module, py::class_<BoundJob>& job);
void BindCheckpoint(py::module_& module, py::class_<BoundClient>& client, py::class_<BoundJob>& job);
void BindVersion(py::module_& module);
void BindReader(py::module_& module);
void BindTraining(py::module_& module, py::class_<BoundClient>& client, py::class_<BoundJob>& job);
void BindSession(py::module_& module);
void BindPullingSession(py::module_& module);

}  // namespace shardmesh::python

namespace pybind11::detail {

template <>
struct type_caster<shardmesh::python::BoundClient> : ConstructedCaster<shardmesh::python::BoundClient> {};
template <>
struct type_caster<shardmesh::python::BoundJob> : ConstructedCaster<shardmesh::python::BoundJob> {};
template <>
struct type_caster<shardmesh::python::BoundVersion> : ConstructedCaster<shardmesh::python::BoundVersion> {};

}  // namespace pybind11::detail
