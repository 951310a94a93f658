// ConstructedCaster: what every class that is bound has as its caster.
#pragma once

#include <pybind11/pybind11.h>

namespace pybind11::detail {

// For every class that is bound: refuses an object that __new__ alone made, where pybind11 would hand out memory that
// no constructor has seen.
template <typename T>
struct ConstructedCaster : type_caster_base<T> {
  bool load(handle source, bool convert) {
    if (isinstance<T>(source)) {
      auto* object = reinterpret_cast<instance*>(source.ptr());
      if (!object->get_value_and_holder(get_type_info(typeid(T))).holder_constructed()) return false;
    }
    return type_caster_base<T>::load(source, convert);
  }
};

}  // namespace pybind11::detail
