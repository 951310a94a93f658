#include "client/cpp/session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "python/client_binding/binding.h"
#include "python/client_binding/memory.h"
#include "python/client_binding/one_call.h"
#include "python/client_binding/step_reply.h"

namespace shardmesh::python {
namespace {

// A session, whose memory what was taken of it keeps. One thread at a time; another one gets FailedPrecondition.
class BoundSession {
 public:
  BoundSession(const BoundJob& job, const std::vector<Integer>& slots, const std::string& way, double timeout,
               bool needs_all) {
    std::vector<Slot> numbers;
    for (const int64_t slot : ToVector(slots)) numbers.push_back(Slot(static_cast<int>(slot)));
    attached_ = way == "attached";
    const auto open = [held = job.job, numbers,
                       attached = attached_,
                       needs_all](absl::Duration) -> absl::StatusOr<std::shared_ptr<Session>> {
      ASSIGN_OR_RETURN(std::unique_ptr<Session> session,
                       attached ? held->Attach(numbers, AttachOptions{needs_all}) : held->Connect(numbers));
      return OfThisProcess(std::shared_ptr<Session>(std::move(session)));
    };
    session_ = OrThrow(calls_.Run<std::shared_ptr<Session>>(open, absl::Seconds(timeout)));
  }

  // A call that returns nothing; gets how long it may take.
  template <typename Call>
  void Do(double timeout, Call call) {
    const auto run = [session = Live(), call](absl::Duration left) -> absl::StatusOr<Done> {
      RETURN_IF_ERROR(call(*session, left));
      return Done{};
    };
    OrThrow(calls_.Run<Done>(run, absl::Seconds(timeout), attached_ || timeout <= 0));
  }

  py::tuple Step(std::vector<double> learning_rates, double loss_scale, const std::vector<Integer>& tokens,
                 double timeout) {
    StepOptions options;
    options.learning_rates = std::move(learning_rates);
    options.loss_scale = loss_scale;
    options.tokens = ToVector(tokens);
    const auto step = [session = Live(), options](absl::Duration left) {
      StepOptions with = options;
      with.timeout = left;
      return session->Step(with);
    };
    return TupleOf(OrThrow(calls_.Run<v1::StepReply>(step, absl::Seconds(timeout), attached_)));
  }

  // Nothing, while a call that was given up has not ended.
  py::list Awaited() {
    const auto awaited = [session = Live()](absl::Duration) -> absl::StatusOr<std::vector<v1::AwaitedTrainer>> {
      return session->awaited();
    };
    const auto found = calls_.Run<std::vector<v1::AwaitedTrainer>>(awaited, absl::ZeroDuration());
    return ListOf(found.ok() ? *found : std::vector<v1::AwaitedTrainer>());
  }

  const std::shared_ptr<Session>& Live() const {
    if (session_ != nullptr) return session_;
    throw StatusError(absl::FailedPreconditionError("this session was closed"));
  }
  bool attached() const { return attached_; }
  // Memory stays for those who have views of it.
  void Close() {
    if (session_ == nullptr) return;
    const auto session = std::exchange(session_, nullptr);
    if (!EnterProcess().ok()) return;  // in a child the connection is its parent's
    const py::gil_scoped_release released;
    session->Leave();
  }

 private:
  OneCall calls_;
  std::shared_ptr<Session> session_;
  bool attached_ = false;  // else calls send and fetch what would be sent and fetched again
};

// (format, bytes).
py::tuple GradientOf(const BoundSession& self, int slot, const Text& name) {
  const TensorView view = OrThrow(self.Live()->gradient(Slot(slot), name.value));
  const int64_t bytes = view.num_elements * (view.format == Format::kFp32 ? 4 : 2);
  return py::make_tuple(std::string(FormatName(view.format)), Bytes{self.Live(), view.data, bytes, /*writable=*/true});
}

void WriteGradient(const BoundSession& self, int slot, const Text& name, const py::buffer& from) {
  const py::buffer_info info = from.request();
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) {
    throw StatusError(
        absl::InvalidArgumentError(absl::StrCat("the gradient of \"", name.value, "\" is not contiguous")));
  }
  const absl::string_view bytes(static_cast<const char*>(info.ptr), info.size * info.itemsize);
  const std::shared_ptr<Session> session = self.Live();
  const absl::Status written = [&] {
    const py::gil_scoped_release released;
    return session->WriteGradient(Slot(slot), name.value, bytes);
  }();
  if (!written.ok()) throw StatusError(written);
}

// (canonical name of the storage, shape, format, parts).
py::tuple ParameterOf(const BoundSession& self, const Text& name) {
  const std::shared_ptr<Session>& session = self.Live();
  const ConstTensorView view = OrThrow(session->parameter(name.value));
  return DescriptionOf(session->job(), OrThrow(session->job().Resolve(name.value)), session, view);
}

void BindBuckets(py::class_<BoundSession>& session) {
  session
      .def(
          "bucket", [](const BoundSession& self, const Text& name) { return OrThrow(self.Live()->bucket(name.value)); },
          py::arg("name"))
      .def(
          "acquire",
          [](BoundSession& self, int bucket, double timeout) {
            self.Do(timeout, [bucket](Session& session, absl::Duration left) { return session.Acquire(bucket, left); });
          },
          py::arg("bucket"), py::arg("timeout"))
      .def(
          "prefetch",
          [](BoundSession& self, int bucket) {
            self.Do(0.0, [bucket](Session& session, absl::Duration) { return session.Prefetch(bucket); });
          },
          py::arg("bucket"))
      .def(
          "release",
          [](BoundSession& self, int bucket) {
            self.Do(0.0, [bucket](Session& session, absl::Duration) { return session.Release(bucket); });
          },
          py::arg("bucket"))
      .def(
          "declare",
          [](BoundSession& self, int bucket, double timeout) {
            self.Do(timeout,
                    [bucket](Session& session, absl::Duration left) { return session.DeclareBucket(bucket, left); });
          },
          py::arg("bucket"), py::arg("timeout"));
}

}  // namespace

void BindSession(py::module_& module) {
  py::class_<BoundSession> session(module, "Session");
  session
      .def(py::init<const BoundJob&, const std::vector<Integer>&, const std::string&, double, bool>(), py::arg("job"),
           py::arg("slots"), py::arg("way"), py::arg("timeout"), py::arg("needs_all") = false)
      .def_property_readonly("attached", &BoundSession::attached)
      .def_property_readonly("committed",
                             [](const BoundSession& self) { return self.Live()->committed_step().value(); })
      .def_property_readonly("awaited", &BoundSession::Awaited)
      .def(
          "await_weights",
          [](BoundSession& self, double timeout) {
            self.Do(timeout, [](Session& session, absl::Duration left) { return session.AwaitWeights(left); });
          },
          py::arg("timeout"))
      .def("write_gradient", &WriteGradient, py::arg("slot"), py::arg("name"), py::arg("bytes"))
      .def("gradient", &GradientOf, py::arg("slot"), py::arg("name"))
      .def("parameter", &ParameterOf, py::arg("name"))
      .def("step", &BoundSession::Step, py::arg("learning_rates"), py::arg("loss_scale"), py::arg("tokens"),
           py::arg("timeout"))
      .def("forget_writes",
           [](BoundSession& self) {
             self.Do(0.0, [](Session& session, absl::Duration) { return session.ForgetWrites(); });
           })
      .def("close", &BoundSession::Close);
  BindBuckets(session);
}

}  // namespace shardmesh::python
