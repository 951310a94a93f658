// DefinePickle: pickles and copies of an immutable class, for all protocols, from its state as a tuple.
//
// pybind11's own (py::pickle) is for protocols 2 and above: with the older ones, copyreg makes an instance of
// pybind11's base class. A bound function cannot be pickled, so shardmesh._restore has one of Python's for each class.
#pragma once

#include "python/binding/binding.h"

namespace shardmesh::python {

// `kind`: the function of shardmesh._restore; it calls _core.restore_<kind>, which is defined here.
template <typename T, typename State>
void DefinePickle(py::module_& module, py::class_<T>& type, const char* kind, State (*to_state)(const T&),
                  T (*from_state)(const State&)) {
  type.def("__reduce__", [kind, to_state](const T& value) {
    return py::make_tuple(py::module_::import("shardmesh._restore").attr(kind), py::make_tuple(to_state(value)));
  });
  const auto same = [](const py::object& self, const py::args&) { return self; };
  type.def("__copy__", same);
  type.def("__deepcopy__", same);
  module.def(absl::StrCat("restore_", kind).c_str(), from_state, py::arg("state"));
}

}  // namespace shardmesh::python
