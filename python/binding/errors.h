// How a Status becomes an exception of Python. Shared by the package's extension modules; everything here runs with the
// interpreter's lock held.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardmesh::python {

namespace py = pybind11;

// Becomes the exception of shardmesh.errors that is named after the code.
class StatusError : public std::exception {
 public:
  explicit StatusError(absl::Status status) : status_(std::move(status)), message_(status_.message()) {}  // not OK
  const absl::Status& status() const { return status_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  absl::Status status_;
  std::string message_;
};

template <typename T>
T OrThrow(absl::StatusOr<T> result) {
  if (!result.ok()) throw StatusError(result.status());
  return *std::move(result);
}

// A function of the module that throws StatusError raises the exception. Once for each module.
void BindErrors(py::module_& module);

}  // namespace shardmesh::python
