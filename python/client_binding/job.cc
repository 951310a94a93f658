#include <algorithm>
#include <random>
#include <utility>

#include "client/cpp/next_incarnation.h"
#include "core/base/status.h"
#include "python/client_binding/await.h"
#include "python/client_binding/binding.h"

namespace shardmesh::python {
namespace {

// A lease, and the worker that granted it, which has it until it ends, at a later epoch of the job, too.
class BoundLease {
 public:
  std::shared_ptr<Job> job;  // OfThisProcess
  Rank rank;
  v1::Lease lease;
  uint64_t nonce = 0;  // that it was acquired with
};

uint64_t RandomNonce() {
  std::random_device random;
  return (static_cast<uint64_t>(random()) << 32 | random()) | 1;
}

// (committed step or -1, published steps, epoch), the first two as of the last heartbeats.
py::tuple Versions(const BoundJob& job) {
  const auto list = [service = *job.service, name = job.job->spec().name]() {
    v1::ListVersionsRequest request;
    request.set_job(name);
    return service.coordinator->ListVersions(request, service.options.call_timeout);
  };
  const auto reply = OrThrow(Await<v1::ListVersionsReply>(list));
  return py::make_tuple(reply.committed_step(),
                        std::vector<int64_t>(reply.published_steps().begin(), reply.published_steps().end()),
                        reply.epoch());
}

int Trainers(const BoundJob& job, double timeout) {
  return OrThrow(Await<int>([held = job.job, limit = absl::Seconds(timeout)] { return held->CountTrainers(limit); }));
}

// (step, digest).
std::pair<int64_t, uint64_t> Digest(const BoundJob& job, double timeout) {
  const auto ask = [service = *job.service, name = job.job->spec().name,
                    duration = absl::Seconds(timeout)]() -> absl::StatusOr<v1::DigestReply> {
    ASSIGN_OR_RETURN(const std::shared_ptr<Job> opened, service.client(duration).OpenJob(name));
    return opened->Digest(duration);
  };
  const auto reply = OrThrow(Await<v1::DigestReply>(ask));
  return {reply.step(), reply.digest()};
}

v1::AcquireLeaseRequest LeaseRequest(const VersionChoice& choice, absl::Duration ttl) {
  v1::AcquireLeaseRequest request;
  if (choice.kind == VersionChoice::kExact) request.set_exact(choice.step.value());
  if (choice.kind == VersionChoice::kAtLeast) request.set_at_least(choice.step.value());
  if (choice.kind == VersionChoice::kLatest) request.set_latest(true);
  request.set_ttl_ms(absl::ToInt64Milliseconds(ttl));
  request.set_nonce(RandomNonce());
  return request;
}

// A call to a worker that is repeated while its next incarnation is on its way (client/cpp/next_incarnation.h): each
// may be made twice.
template <typename Call>
auto AskWorker(const Job& job, Rank rank, absl::Duration timeout, Call call) {
  return CallAgain(job, rank, std::min(job.peer_timeout(), timeout), std::move(call));
}

// Publishes the committed step; (epoch, step).
std::pair<int64_t, int64_t> Publish(const BoundJob& job, double timeout) {
  const auto publish = [service = *job.service, name = job.job->spec().name,
                        duration = absl::Seconds(timeout)]() -> absl::StatusOr<v1::PublishReply> {
    ASSIGN_OR_RETURN(const std::shared_ptr<Job> opened, service.client(duration).OpenJob(name));
    return AskWorker(*opened, Rank(0), duration, [&] { return opened->worker(Rank(0)).Publish(name, duration); });
  };
  const auto reply = OrThrow(Await<v1::PublishReply>(publish));
  return {reply.epoch(), reply.step()};
}

BoundLease Acquire(const BoundJob& job, const std::string& kind, Integer step, double ttl, double timeout) {
  v1::AcquireLeaseRequest request = LeaseRequest(ChoiceOf(kind, step.value), absl::Seconds(ttl));
  request.set_job(job.job->spec().name);
  const auto acquire = [service = *job.service, request, names = job.names,
                        duration = absl::Seconds(timeout)]() -> absl::StatusOr<BoundLease> {
    ASSIGN_OR_RETURN(std::shared_ptr<Job> opened,
                     service.client(duration).OpenJob(request.job(), names, JobUse::kRead));
    const Rank rank = opened->reading_rank();
    ASSIGN_OR_RETURN(v1::Lease lease, AskWorker(*opened, rank, duration, [&] {
                       return opened->worker(rank).AcquireLease(request, duration);
                     }));
    return BoundLease{OfThisProcess(std::move(opened)), rank, std::move(lease), request.nonce()};
  };
  return OrThrow(Await<BoundLease>(acquire));
}

void Renew(BoundLease& lease, double ttl) {
  v1::RenewLeaseRequest request;
  request.set_job(lease.job->spec().name);
  request.set_epoch(lease.lease.epoch());
  request.set_id(lease.lease.id());
  request.set_nonce(lease.nonce);
  request.set_ttl_ms(absl::ToInt64Milliseconds(absl::Seconds(ttl)));
  const auto renew = [job = lease.job, rank = lease.rank, request]() {
    const absl::Duration timeout = job->options().call_timeout;
    return AskWorker(*job, rank, timeout, [&] { return job->worker(rank).RenewLease(request, timeout); });
  };
  lease.lease = OrThrow(Await<v1::Lease>(renew));
}

void Release(BoundLease& lease) {
  v1::ReleaseLeaseRequest request;
  request.set_job(lease.job->spec().name);
  request.set_epoch(lease.lease.epoch());
  request.set_id(lease.lease.id());
  request.set_nonce(lease.nonce);
  const auto release = [job = lease.job, rank = lease.rank, request]() {
    return job->worker(rank).ReleaseLease(request, job->options().call_timeout);
  };
  OrThrow(Await<v1::ReleaseLeaseReply>(release));
}

// (epoch, step, lost_step, checkpoint, cause), or None.
py::object GoneBackOf(const BoundJob& self) {
  const std::optional<v1::GoneBack> back = self.job->WentBackSince(Epoch(0));
  if (!back.has_value()) return py::none();
  return py::make_tuple(back->epoch(), back->checkpoint().step(), back->lost_step(), back->checkpoint().folder(),
                        back->cause());
}

}  // namespace

void BindJob(py::module_& module, py::class_<BoundJob>& job) {
  job.def_property_readonly("name", [](const BoundJob& self) { return self.job->spec().name; })
      .def_property_readonly("mesh", [](const BoundJob& self) { return self.job->spec().mesh.ToString(); })
      .def_property_readonly("uid", [](const BoundJob& self) { return self.job->uid(); })
      .def_property_readonly("epoch", [](const BoundJob& self) { return self.job->epoch().value(); })
      .def_property_readonly("gone_back", &GoneBackOf)
      .def_property_readonly("on_this_host", [](const BoundJob& self) { return self.job->IsOnThisHost(); })
      .def_property_readonly(
          "residency", [](const BoundJob& self) { return std::string(ResidencyName(self.job->spec().residency)); })
      .def_property_readonly("publications", [](const BoundJob& self) { return self.job->spec().publications; })
      .def("versions", &Versions)
      .def_property_readonly("publish_every", [](const BoundJob& self) { return self.job->spec().publish_every; })
      .def("publish", &Publish, py::arg("timeout"))
      .def("digest", &Digest, py::arg("timeout"))
      .def("trainers", &Trainers, py::arg("timeout"))
      .def("lease", &Acquire, py::arg("kind"), py::arg("step"), py::arg("ttl"), py::arg("timeout"));
  py::class_<BoundLease>(module, "Lease")
      .def_property_readonly("id", [](const BoundLease& self) { return self.lease.id(); })
      .def_property_readonly("nonce", [](const BoundLease& self) { return self.nonce; })
      .def_property_readonly("step", [](const BoundLease& self) { return self.lease.step(); })
      .def_property_readonly("epoch", [](const BoundLease& self) { return self.lease.epoch(); })
      .def_property_readonly("ttl", [](const BoundLease& self) { return self.lease.ttl_ms() / 1000.0; })
      .def("renew", &Renew, py::arg("ttl"))
      .def("release", &Release);
}

}  // namespace shardmesh::python
