#include "client/cpp/checkpoint/checkpoint.h"

#include <atomic>
#include <tuple>
#include <utility>

#include "checkpoint/buffers.h"
#include "core/base/status.h"
#include "python/client_binding/await.h"
#include "python/client_binding/binding.h"

namespace shardmesh::python {
namespace {

// What the client's threads tell, and Python is told while it waits.
class Told {
 public:
  explicit Told(py::object progress) : progress_(std::move(progress)) {}

  OnFileProgress Listener() const {
    return [numbers = numbers_](int64_t done, int64_t total) {
      numbers->total.store(total);
      numbers->done.store(done);
    };
  }
  // True. Throws what Python's function throws.
  bool Tell() {
    const int64_t done = numbers_->done.load(), total = numbers_->total.load();
    if (progress_.is_none() || done < 0 || done == last_) return true;
    last_ = done;
    progress_(done, total);
    return true;
  }

 private:
  struct Numbers {
    std::atomic<int64_t> done{-1}, total{0};
  };
  const py::object progress_;
  const std::shared_ptr<Numbers> numbers_ = std::make_shared<Numbers>();
  int64_t last_ = -1;
};

struct Saved {
  SavedCheckpoint checkpoint;
  std::vector<int64_t> removed;
};

// (name, dtype, shape, bytes).
using BoundBuffer = std::tuple<Text, Text, std::vector<int64_t>, py::bytes>;

std::vector<BufferValue> ValuesOf(std::vector<BoundBuffer> buffers) {
  std::vector<BufferValue> values;
  for (auto& [name, dtype, shape, bytes] : buffers) {
    values.push_back({OrThrow(MakeSafetensorsEntry(name.value, dtype.value, std::move(shape))), std::string(bytes)});
  }
  return values;
}

// Of the checkpoint at `path`, as ReadBuffers has them.
py::list Buffers(const Text& path) {
  const auto read = [path = path.value]() -> absl::StatusOr<std::vector<BufferValue>> {
    ASSIGN_OR_RETURN(const OpenedCheckpoint opened, OpenCheckpoint(path));
    return ReadBuffers(opened);
  };
  py::list buffers;
  for (const BufferValue& value : OrThrow(Await<std::vector<BufferValue>>(read))) {
    buffers.append(py::make_tuple(value.entry.name, value.entry.dtype, value.entry.shape, py::bytes(value.bytes)));
  }
  return buffers;
}

// (path, step, digest, bytes, steps that were removed, whether it was there already, why the coordinator does not know of
// it: "" if it does).
py::tuple Save(const BoundJob& job, const Text& root, int keep_last, Integer keep_every, double timeout,
               py::object progress, std::vector<BoundBuffer> buffers, bool record) {
  Told told(std::move(progress));
  SaveOptions options;
  options.timeout = absl::Seconds(timeout);
  options.progress = told.Listener();
  options.buffers = ValuesOf(std::move(buffers));
  options.record = record;
  const KeepRule keep{keep_last, keep_every.value};
  const auto save = [service = *job.service, name = job.job->spec().name, root = root.value, options,
                     keep]() -> absl::StatusOr<Saved> {
    ASSIGN_OR_RETURN(const std::shared_ptr<Job> opened, service.client(options.timeout).OpenJob(name));
    Saved saved;
    ASSIGN_OR_RETURN(saved.checkpoint, SaveCheckpoint(*opened, root, options));
    if (keep.last > 0 && saved.checkpoint.recorded.ok()) {
      ASSIGN_OR_RETURN(saved.removed, Prune(root, keep));
    }
    return saved;
  };
  const Saved saved = OrThrow(Await<Saved>(save, [&] { return told.Tell(); }));
  told.Tell();
  const SavedCheckpoint& made = saved.checkpoint;
  return py::make_tuple(made.path, made.step, made.digest, made.bytes, saved.removed, made.already_there,
                        std::string(made.recorded.message()));
}

BoundJob Restore(const BoundClient& client, const Text& path, const Text& name, const Text& mesh, const Text& gather,
                 bool fit_mesh, double timeout, py::object progress, int64_t replaces_uid, const Text& residency,
                 Integer bucket_elements, Integer prefetch_buckets, const Text& on_loss, Integer copies, bool record) {
  Told told(std::move(progress));
  RestoreOptions options{
      name.value,   mesh.value,      absl::Seconds(timeout), told.Listener(),        gather.value,  fit_mesh,
      replaces_uid, residency.value, bucket_elements.value,  prefetch_buckets.value, on_loss.value, copies.value,
      record};
  const auto restore = [service = *client.service, path = path.value, options]() {
    Client opener = service.client(options.timeout);
    return RestoreCheckpoint(opener, path, options);
  };
  const auto job = OrThrow(Await<std::shared_ptr<Job>>(restore, [&] { return told.Tell(); }));
  told.Tell();
  return {client.service, OfThisProcess(job), {}};
}

}  // namespace

void BindCheckpoint(py::module_& module, py::class_<BoundClient>& client, py::class_<BoundJob>& job) {
  module.def("checkpoint_buffers", &Buffers, py::arg("path"));
  job.def("checkpoint", &Save, py::arg("folder"), py::arg("keep_last"), py::arg("keep_every"), py::arg("timeout"),
          py::arg("progress"), py::arg("buffers"), py::arg("record"));
  client.def("restore", &Restore, py::arg("path"), py::arg("name"), py::arg("mesh"), py::arg("gather"),
             py::arg("fit_mesh"), py::arg("timeout"), py::arg("progress"), py::arg("replaces_uid"),
             py::arg("residency"), py::arg("bucket_elements"), py::arg("prefetch_buckets"), py::arg("on_loss"),
             py::arg("copies"), py::arg("record"));
}

}  // namespace shardmesh::python
