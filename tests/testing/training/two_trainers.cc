#include "tests/testing/training/two_trainers.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/pulling_session.h"
#include "client/cpp/session.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "tests/testing/training/training.h"

namespace shardmesh::testing {
namespace {

constexpr absl::Duration kLong = absl::Seconds(30);

absl::Status Pull(Job& job, int64_t last) {
  ASSIGN_OR_RETURN(const auto session, job.AttachPulling());
  RETURN_IF_ERROR(session->AwaitWeights(kLong));
  return PullTo(*session, last, kLong);
}

}  // namespace

JobSpec EverythingJob(const std::string& name, const std::string& mesh) {
  JobSpec spec = OddJob(name, mesh, 3);
  spec.clip_norm = 0.5;
  spec.more_groups = {OptimizerHyper::Defaults(OptimizerKind::kMuon)};
  const GatherFormat gathers[] = {GatherFormat::kStored, GatherFormat::kFp8Tensor, GatherFormat::kNf4,
                                  GatherFormat::kMx8, GatherFormat::kFp8Row};
  for (int i = 0; i < 18; ++i) {
    ParameterSpec p{absl::StrCat("more.", i), {60, 96}, static_cast<WeightFormat>(i % 6)};
    p.states = static_cast<StateFormat>(i / 3);
    p.gather = gathers[i % 5];
    if (i % 7 == 1) p.group = 1;
    if (i % 7 == 5) p.frozen = true;
    spec.parameters.push_back(p);
  }
  spec.parameters.push_back({"base", {60, 97}, WeightFormat::kNf4});
  spec.parameters.back().frozen = true;
  return spec;
}

absl::Status TrainHalf(Job& job, bool attached, int64_t last) {
  std::vector<Slot> slots;
  for (int s = attached ? 0 : 1; s < job.spec().num_slots; s += 2) slots.push_back(Slot(s));
  ASSIGN_OR_RETURN(const auto session, attached ? job.Attach(slots) : job.Connect(slots));
  RETURN_IF_ERROR(session->AwaitWeights(kLong));
  return TrainTo(*session, last, kLong);
}

void TrainByTwo(Client& client, const std::shared_ptr<Job>& job, int64_t last) {
  absl::Status of[2];
  std::vector<std::thread> trainers;
  for (int i = 0; i < 2; ++i) {
    trainers.emplace_back([&client, &job, i, last, &of] {
      of[i] = TrainOver(client, job,
                        [&](Job& now) { return now.spec().pulled() ? Pull(now, last) : TrainHalf(now, i == 0, last); });
    });
  }
  for (std::thread& trainer : trainers) trainer.join();
  EXPECT_OK(of[0]);
  EXPECT_OK(of[1]);
}

}  // namespace shardmesh::testing
