// SteadyTraining: two trainers of one job that step without a rest until they are told to end, and the pauses that they
// see. Of assigned slots one is attached and one connected; pulled ones both take. With bucket residency they read
// every weight bucket by bucket before a step, and both must have read the same bytes. For one thread.
//
//   ASSERT_OK_AND_ASSIGN(const auto training, SteadyTraining::Start(client, spec));
//   ... kill somebody ...
//   ASSERT_OK(training->AwaitBeyond(training->committed() + 1));
//   ASSERT_OK_AND_ASSIGN(const int64_t last, training->End());
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/pulling_session.h"
#include "client/cpp/session.h"
#include "core/base/sync.h"
#include "core/job/job.h"
#include "tests/testing/system/pauses.h"

namespace shardmesh::testing {

class SteadyTraining {
 public:
  // Creates the job, with its initial weights. REQUIRES: it has two slots, or two trainers that pull them.
  static absl::StatusOr<std::unique_ptr<SteadyTraining>> Start(Client& client, const JobSpec& spec);
  ~SteadyTraining() { End().status().IgnoreError(); }

  Job& job() { return *job_; }
  Commits& commits() { return commits_; }
  int64_t committed() const { return commits_.newest(); }
  // Waits until a step after `step` is committed: for committed() + 1, one that began after the call, since one may
  // be under way. Aborted: a trainer ended, which End tells more of. DeadlineExceeded: none was in a minute.
  absl::Status AwaitBeyond(int64_t step) const;
  // Some steps more, and the last one. Else the first error of a trainer; Internal: one with slots of its own saw a
  // step passed over.
  absl::StatusOr<int64_t> End();

 private:
  SteadyTraining() = default;
  absl::Status Open();
  int64_t KnownTo(int trainer) const;
  absl::Status Step(int trainer);
  absl::Status StepByBucket(Session& session);
  // DataLoss: the other trainer has read other bytes of that version.
  absl::Status CompareRead(int64_t version, std::string read);
  absl::Status Train(int trainer);

  std::shared_ptr<Job> job_;
  std::unique_ptr<Session> sessions_[2];        // of assigned slots
  std::unique_ptr<PullingSession> pullers_[2];  // of pulled ones
  std::thread threads_[2];
  absl::Status statuses_[2];
  Commits commits_;
  Mutex mu_;
  std::map<int64_t, std::string> read_ ABSL_GUARDED_BY(mu_);  // by one trainer: the other has not come so far
  std::atomic<int64_t> last_{std::numeric_limits<int64_t>::max() / 2};
  std::atomic<bool> failed_{false};
};

}  // namespace shardmesh::testing
