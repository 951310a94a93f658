// SteadyTraining: two trainers of one job, one attached and one connected, that step without a rest until they are told
// to end; and the pauses that they see. For one thread.
//
//   ASSERT_OK_AND_ASSIGN(const auto training, SteadyTraining::Start(client, spec));
//   ... kill somebody ...
//   ASSERT_OK(training->AwaitBeyond(training->committed() + 1));
//   ASSERT_OK_AND_ASSIGN(const int64_t last, training->End());
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/session.h"
#include "core/job.h"
#include "core/sync.h"

namespace shardmesh::testing {

class SteadyTraining {
 public:
  // From one commit to the next.
  struct Gap {
    absl::Time begin;
    absl::Duration length;
  };

  // Creates the job, with its initial weights. REQUIRES: it has two slots.
  static absl::StatusOr<std::unique_ptr<SteadyTraining>> Start(Client& client, const JobSpec& spec);
  ~SteadyTraining() { End().status().IgnoreError(); }

  Job& job() { return *job_; }
  int64_t committed() const { return committed_.load(); }
  // Waits until a step after `step` is committed: for committed() + 1, one that began after the call, since one may
  // be under way. Aborted: a trainer ended, which End tells more of. DeadlineExceeded: none was in a minute.
  absl::Status AwaitBeyond(int64_t step) const;
  // Forgets the gaps before.
  void WatchGaps();
  // The longest that ended since WatchGaps.
  Gap LongestGap() const;
  // Some steps more, and the last one. Else the first error of a trainer; Internal: one saw a step passed over.
  absl::StatusOr<int64_t> End();

 private:
  SteadyTraining() = default;
  absl::Status Train(Session& session);
  void Committed(int64_t step);

  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> sessions_[2];
  std::thread threads_[2];
  absl::Status statuses_[2];
  std::atomic<int64_t> committed_{0}, last_{std::numeric_limits<int64_t>::max() / 2};
  std::atomic<bool> failed_{false};
  mutable Mutex mu_;
  absl::Time newest_ ABSL_GUARDED_BY(mu_);
  Gap longest_ ABSL_GUARDED_BY(mu_);
};

}  // namespace shardmesh::testing
