// What sessions of both kinds hand to Python.
#pragma once

#include <memory>
#include <vector>

#include "client/cpp/client.h"
#include "proto/shardmesh/v1/local.pb.h"
#include "python/client_binding/binding.h"

namespace shardmesh::python {

// (step, already applied, skipped, why, gradient norm).
py::tuple TupleOf(const v1::StepReply& reply);

// (slot, "attached", "stopped", "left" or "absent", pid) of each.
py::list ListOf(const std::vector<v1::AwaitedTrainer>& awaited);

// (canonical name of the storage, shape, format, parts that may be written to).
py::tuple DescriptionOf(const Job& job, int tensor, const std::shared_ptr<const void>& owner,
                        const ConstTensorView& view);

}  // namespace shardmesh::python
