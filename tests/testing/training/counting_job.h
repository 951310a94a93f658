// A job whose weights are all equal to its committed step, on two workers: every version says in every element, over
// both shards, which one it is. For tests of versions.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/session.h"
#include "client/cpp/version_reader.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/mesh/mesh_spec.h"
#include "tests/testing/cluster.h"
#include "tests/testing/training/training.h"

namespace shardmesh::testing {

inline constexpr absl::Duration kLong = absl::Seconds(60);
inline constexpr int64_t kElements = 200'000;
inline constexpr char kJob[] = "counting";

inline JobSpec CountingJob(int publications = kDefaultPublications, int publish_every = 1) {
  JobSpec spec;
  spec.name = kJob;
  spec.mesh = ParseMeshSpec("fsdp=2").value();
  spec.parameters = {{"w", {kElements}}};
  spec.gradient_format = Format::kFp32;
  spec.optimizer = OptimizerHyper::Defaults(OptimizerKind::kSgd);
  spec.optimizer.lr = 1;
  spec.optimizer.momentum = 0;
  spec.publications = publications;
  spec.publish_every = publish_every;
  return spec;
}

inline absl::Status CheckWhole(const ConstTensorView& view, int64_t step) {
  const auto* const values = static_cast<const float*>(view.data);
  for (int64_t i = 0; i < view.num_elements; ++i) {
    if (values[i] == static_cast<float>(step)) continue;
    return absl::DataLossError(absl::StrCat("element ", i, " of version ", step, " is of ", values[i]));
  }
  return absl::OkStatus();
}

template <typename SomeVersion>
absl::Status CheckVersion(const SomeVersion& version) {
  ASSIGN_OR_RETURN(const ConstTensorView view, version.parameter("w"));
  return CheckWhole(view, version.step().value());
}

// Trains one step after the other.
class Trainer {
 public:
  static absl::StatusOr<std::unique_ptr<Trainer>> Start(Job& job) {
    ASSIGN_OR_RETURN(std::unique_ptr<Session> session, job.Attach({Slot(0)}));
    RETURN_IF_ERROR(session->AwaitWeights(kLong));
    ASSIGN_OR_RETURN(const TensorView gradient, session->gradient(Slot(0), "w"));
    std::fill_n(static_cast<float*>(gradient.data), kElements, -1.0f);
    return std::unique_ptr<Trainer>(new Trainer(std::move(session)));
  }
  absl::Status Step() { return session_->Step({}).status(); }
  absl::Status To(int64_t step) {
    while (session_->committed_step().value() < step) RETURN_IF_ERROR(Step());
    return absl::OkStatus();
  }
  int64_t committed() const { return session_->committed_step().value(); }

 private:
  explicit Trainer(std::unique_ptr<Session> session) : session_(std::move(session)) {}
  std::unique_ptr<Session> session_;
};

class CountingCluster : public ::testing::Test {
 protected:
  void Begin(const JobSpec& spec, bool retained = false) {
    ClusterOptions options;
    options.workers = 2;
    options.retained = retained;
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
    ASSERT_OK_AND_ASSIGN(job_, client_->CreateJob(spec));
    ASSERT_OK(job_->Initialize({{"w", std::vector<float>(kElements, 0)}}, kLong));
    ASSERT_OK_AND_ASSIGN(trainer_, Trainer::Start(*job_));
  }
  absl::StatusOr<std::unique_ptr<VersionReader>> Open(ReaderOptions::Way way, absl::Duration ttl = absl::Seconds(30)) {
    return VersionReader::Open(*client_, kJob, {way, ttl});
  }
  absl::StatusOr<v1::Lease> Lease(int64_t exact, absl::Duration ttl, uint64_t nonce = 1) {
    v1::AcquireLeaseRequest request;
    request.set_job(kJob);
    request.set_exact(exact);
    request.set_ttl_ms(absl::ToInt64Milliseconds(ttl));
    request.set_nonce(nonce);
    return job_->worker(Rank(1)).AcquireLease(request, kLong);
  }
  // The step that a lease's bytes are of, from either worker; DataLoss: of several.
  absl::StatusOr<int64_t> PullLeased(uint64_t id, Rank from) {
    v1::PullRequest request;
    request.set_job(kJob);
    request.set_lease(id);
    int64_t step = -1;
    std::string bytes;
    RETURN_IF_ERROR(job_->worker(from)
                        .Pull(
                            request,
                            [&](const v1::PullHeader& header) {
                              step = header.step();
                              bytes.clear();
                              return absl::OkStatus();
                            },
                            [&](absl::string_view data) {
                              bytes.append(data.data(), data.size());
                              return absl::OkStatus();
                            },
                            kLong)
                        .status());
    ConstTensorView view = WeightsIn(job_->plan(), 0, bytes.data());
    RETURN_IF_ERROR(CheckWhole(view, step));
    return step;
  }
  v1::ListLeasesReply Listed() { return job_->worker(Rank(0)).ListLeases(kJob, kLong).value_or(v1::ListLeasesReply()); }

  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
  std::shared_ptr<Job> job_;
  std::unique_ptr<Trainer> trainer_;
};
}  // namespace shardmesh::testing
