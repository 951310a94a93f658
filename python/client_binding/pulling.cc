#include <utility>

#include "client/cpp/pulling_session.h"
#include "core/base/status.h"
#include "python/client_binding/binding.h"
#include "python/client_binding/memory.h"
#include "python/client_binding/one_call.h"
#include "python/client_binding/step_reply.h"

namespace shardmesh::python {
namespace {

class BoundPulling {
 public:
  BoundPulling(const BoundJob& job, const Text& way, double timeout) {
    const bool connected = way.value == "connected";
    if (!connected && way.value != "attached") {
      throw StatusError(
          absl::InvalidArgumentError("way is \"" + std::string(way.value) + "\"; give attached or connected"));
    }
    const auto open = [held = job.job, connected](absl::Duration) -> absl::StatusOr<std::shared_ptr<PullingSession>> {
      ASSIGN_OR_RETURN(std::unique_ptr<PullingSession> session,
                       connected ? held->ConnectPulling() : held->AttachPulling());
      return OfThisProcess(std::shared_ptr<PullingSession>(std::move(session)));
    };
    session_ = OrThrow(calls_.Run<std::shared_ptr<PullingSession>>(open, absl::Seconds(timeout)));
  }

  // A call that returns nothing; gets how long it may take.
  template <typename Call>
  void Do(double timeout, Call call) {
    const auto run = [session = Live(), call](absl::Duration left) -> absl::StatusOr<Done> {
      RETURN_IF_ERROR(call(*session, left));
      return Done{};
    };
    OrThrow(calls_.Run<Done>(run, absl::Seconds(timeout)));
  }

  // (slot, step, None), or (None, step, how it went).
  py::tuple Take(double timeout) {
    const auto take = [session = Live()](absl::Duration left) { return session->Take(left); };
    const auto work = OrThrow(calls_.Run<PullingSession::Work>(take, absl::Seconds(timeout)));
    if (work.slot.has_value()) return py::make_tuple(work.slot->value(), work.step.value(), py::none());
    return py::make_tuple(py::none(), work.step.value(), TupleOf(work.committed));
  }

  // "accepted", "same" or "differs".
  const char* Finish(std::vector<double> learning_rates, double loss_scale, Integer tokens, double timeout) {
    FinishOptions options;
    options.learning_rates = std::move(learning_rates);
    options.loss_scale = loss_scale;
    options.tokens = tokens.value;
    const auto finish = [session = Live(), options](absl::Duration left) {
      FinishOptions with = options;
      with.timeout = left;
      return session->Finish(with);
    };
    const auto result = OrThrow(calls_.Run<SlotResult>(finish, absl::Seconds(timeout)));
    return result == SlotResult::kAccepted ? "accepted" : result == SlotResult::kSame ? "same" : "differs";
  }

  // Nothing, while a call that was given up has not ended.
  py::list Awaited() {
    const auto awaited = [session = Live()](absl::Duration) -> absl::StatusOr<std::vector<v1::AwaitedTrainer>> {
      return session->awaited();
    };
    const auto found = calls_.Run<std::vector<v1::AwaitedTrainer>>(awaited, absl::ZeroDuration());
    return ListOf(found.ok() ? *found : std::vector<v1::AwaitedTrainer>());
  }

  const std::shared_ptr<PullingSession>& Live() const {
    if (session_ != nullptr) return session_;
    throw StatusError(absl::FailedPreconditionError("this session was closed"));
  }
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
  std::shared_ptr<PullingSession> session_;
};

// (format, bytes), of the slot that is taken.
py::tuple GradientOf(const BoundPulling& self, const Text& name) {
  const TensorView view = OrThrow(self.Live()->gradient(name.value));
  const int64_t bytes = view.num_elements * (view.format == Format::kFp32 ? 4 : 2);
  return py::make_tuple(std::string(FormatName(view.format)), Bytes{self.Live(), view.data, bytes, /*writable=*/true});
}

py::tuple ParameterOf(const BoundPulling& self, const Text& name) {
  const std::shared_ptr<PullingSession>& session = self.Live();
  const ConstTensorView view = OrThrow(session->parameter(name.value));
  return DescriptionOf(session->job(), OrThrow(session->job().Resolve(name.value)), session, view);
}

// As Session's.
void BindBuckets(py::class_<BoundPulling>& session) {
  session
      .def(
          "bucket", [](const BoundPulling& self, const Text& name) { return OrThrow(self.Live()->bucket(name.value)); },
          py::arg("name"))
      .def(
          "acquire",
          [](BoundPulling& self, int bucket, double timeout) {
            self.Do(timeout,
                    [bucket](PullingSession& session, absl::Duration left) { return session.Acquire(bucket, left); });
          },
          py::arg("bucket"), py::arg("timeout"))
      .def(
          "prefetch",
          [](BoundPulling& self, int bucket) {
            self.Do(0.0, [bucket](PullingSession& session, absl::Duration) { return session.Prefetch(bucket); });
          },
          py::arg("bucket"))
      .def(
          "release",
          [](BoundPulling& self, int bucket) {
            self.Do(0.0, [bucket](PullingSession& session, absl::Duration) { return session.Release(bucket); });
          },
          py::arg("bucket"));
}

}  // namespace

void BindPullingSession(py::module_& module) {
  py::class_<BoundPulling> session(module, "PullingSession");
  session
      .def(py::init<const BoundJob&, const Text&, double>(), py::arg("job"), py::arg("way"), py::arg("timeout"))
      .def_property_readonly("committed",
                             [](const BoundPulling& self) { return self.Live()->committed_step().value(); })
      .def_property_readonly("awaited", &BoundPulling::Awaited)
      .def(
          "await_weights",
          [](BoundPulling& self, double timeout) {
            self.Do(timeout, [](PullingSession& session, absl::Duration left) { return session.AwaitWeights(left); });
          },
          py::arg("timeout"))
      .def("take", &BoundPulling::Take, py::arg("timeout"))
      .def("finish", &BoundPulling::Finish, py::arg("learning_rates"), py::arg("loss_scale"), py::arg("tokens"),
           py::arg("timeout"))
      .def("gradient", &GradientOf, py::arg("name"))
      .def("parameter", &ParameterOf, py::arg("name"))
      .def("forget_writes",
           [](const BoundPulling& self) {
             if (absl::Status status = self.Live()->ForgetWrites(); !status.ok()) throw StatusError(status);
           })
      .def("close", &BoundPulling::Close);
  BindBuckets(session);
}

}  // namespace shardmesh::python
