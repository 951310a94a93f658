#include "python/client_binding/memory.h"

#include "core/format/gather_format.h"

namespace shardmesh::python {
namespace {

using Shape = std::vector<int64_t>;

class Parts {
 public:
  Parts(const std::shared_ptr<const void>& owner, bool writable) : owner_(owner), writable_(writable) {}

  void Add(const char* name, const char* type, const Shape& shape, const void* data, int64_t size) {
    list_.append(py::make_tuple(name, type, py::tuple(py::cast(shape)), Bytes{owner_, data, size, writable_}));
  }
  py::list list() { return std::move(list_); }

 private:
  const std::shared_ptr<const void> owner_;
  const bool writable_;
  py::list list_;
};

py::buffer_info BufferOf(const Bytes& bytes) {
  return py::buffer_info(const_cast<void*>(bytes.data), 1, "B", 1, {bytes.size}, {1}, !bytes.writable);
}

}  // namespace

py::list PartsOf(const std::shared_ptr<const void>& owner, const ConstTensorView& view, const Shape& shape,
                 bool writable) {
  Parts parts(owner, writable);
  const bool stored = view.gather == GatherFormat::kStored, nf4 = view.gather == GatherFormat::kNf4;
  if (stored) {
    const char* const type = view.format == Format::kFp32 ? "float32" : "uint16";
    parts.Add("codes", type, shape, view.data, view.data_bytes());
    return parts.list();
  }
  parts.Add("codes", view.gather == GatherFormat::kInt8Row ? "int8" : "uint8", nf4 ? Shape{view.data_bytes()} : shape,
            view.data, view.data_bytes());
  const auto* const scales = static_cast<const char*>(view.scales);
  const int64_t count = view.num_scales;
  const char* const type = nf4 ? "int8" : view.gather == GatherFormat::kMx8 ? "uint8" : "float32";
  parts.Add("scales", type, ScaleShape(view.gather, shape), scales, count * GatheredScaleBytes(view.gather));
  if (!nf4) return parts.list();
  const int64_t factors = Nf4FactorsOffset(count), mean = Nf4MeanOffset(count);
  parts.Add("factors", "float32", {(mean - factors) / 4}, scales + factors, mean - factors);
  parts.Add("mean", "float32", {}, scales + mean, 4);
  return parts.list();
}

void BindMemory(py::module_& module) {
  py::class_<Bytes>(module, "Bytes", py::buffer_protocol()).def_buffer(&BufferOf);
}

}  // namespace shardmesh::python
