#include "client/cpp/checkpoint/checkpoint_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Code = absl::StatusCode;

// Says one step of a list at each look, and saves that, or fails.
class Scripted : public ScheduledJob {
 public:
  absl::StatusOr<int64_t> Look() override {
    EXPECT_FALSE(looks.empty());
    const absl::StatusOr<int64_t> look = looks.front();
    looks.pop_front();
    if (look.ok()) step_ = *look;
    return look;
  }
  absl::StatusOr<ScheduledSave> Save() override {
    if (!errors.empty()) {
      const absl::Status error = errors.front();
      errors.pop_front();
      if (!error.ok()) return error;
    }
    return ScheduledSave{{"", step_ + ahead, 0, 0}, {}};
  }
  bool Stops(absl::Duration after) override {
    waited += after;
    return looks.empty();
  }

  // Steps that were saved.
  std::vector<int64_t> Run(int64_t every, absl::Status* end = nullptr, int64_t count = 0) {
    ScheduleOptions options;
    options.every = every;
    options.count = count;
    std::vector<int64_t> steps;
    options.saved = [&](const ScheduledSave& save) { steps.push_back(save.saved.step); };
    options.troubled = [&](const absl::Status& status) { troubles.emplace_back(status.message()); };
    const absl::Status status = RunSchedule(*this, options);
    if (end != nullptr) {
      *end = status;
    } else {
      EXPECT_OK(status);
    }
    return steps;
  }

  std::deque<absl::StatusOr<int64_t>> looks;
  std::deque<absl::Status> errors;  // of saves; OK: none
  int64_t ahead = 0;                // the step that is saved is so far on
  absl::Duration waited;
  std::vector<std::string> troubles;

 private:
  int64_t step_ = -1;
};

TEST(Schedule, PassedMultiples_AreSavedOnceEach) {
  Scripted job;
  job.looks = {3, 9, 10, 10, 11, 19, 27, 28, 30, 30};
  EXPECT_THAT(job.Run(10), ElementsAre(10, 27, 30));
  EXPECT_EQ(job.waited, 10 * absl::Milliseconds(200));
}

TEST(Schedule, AMultipleThatIsThereAtTheStart_IsNotWaitedFor) {
  Scripted job;
  job.looks = {20, 21, 29, 30};
  EXPECT_THAT(job.Run(10), ElementsAre(30));
}

TEST(Schedule, BeforeTheFirstWeights_NothingIsSaved) {
  Scripted job;
  job.looks = {-1, -1, 0, 0, 4, 5};
  EXPECT_THAT(job.Run(5), ElementsAre(0, 5));
}

TEST(Schedule, TheStepThatWasSaved_SaysWhatIsNext) {
  Scripted job;
  job.ahead = 15;  // the job trained on until its workers copied
  job.looks = {0, 10, 20, 29, 30};
  EXPECT_THAT(job.Run(10), ElementsAre(25, 45));
}

TEST(Schedule, SoMany_AndNoMore) {
  Scripted job;
  job.looks = {0, 1, 2, 3, 4};
  EXPECT_THAT(job.Run(1, nullptr, 2), ElementsAre(1, 2));
  EXPECT_EQ(job.looks.size(), 2u);
}

TEST(Schedule, WhatComesBack_IsWaitedFor_AndToldOnce) {
  Scripted job;
  const absl::Status away = absl::UnavailableError("the coordinator is away");
  job.looks = {0, away, away, 10, 11, absl::DeadlineExceededError("slow"), 12, 13, 20};
  job.errors = {absl::UnavailableError("a worker is gone"), absl::AbortedError("epoch 1 is over")};
  EXPECT_THAT(job.Run(10), ElementsAre(12, 20));
  EXPECT_THAT(job.troubles, ElementsAre("the coordinator is away", "a worker is gone", "epoch 1 is over", "slow"));
}

TEST(Schedule, AStepOfAnotherRun_IsToldAndPassedOver) {
  Scripted job;
  job.looks = {0, 10, 11, 20};
  job.errors = {absl::AlreadyExistsError("step 10 is saved already, with other weights")};
  EXPECT_THAT(job.Run(10), ElementsAre(20));
  EXPECT_THAT(job.troubles, ElementsAre("step 10 is saved already, with other weights"));
}

TEST(Schedule, AJobThatBeganAgain_IsSavedAtItsOwnMultiples) {
  Scripted job;
  job.looks = {25, 30, 4, 9, 10};
  EXPECT_THAT(job.Run(10), ElementsAre(30, 10));
}

TEST(Schedule, WhatDoesNotMend_EndsIt) {
  const std::vector<absl::Status> of_looks = {absl::NotFoundError("no job j"),
                                              absl::FailedPreconditionError("job j failed")};
  for (const absl::Status& error : of_looks) {
    Scripted job;
    job.looks = {0, 1, error, 2};
    absl::Status end;
    EXPECT_THAT(job.Run(1, &end), ElementsAre(1));
    EXPECT_EQ(end, error);
  }
  for (const absl::Status& error : {absl::ResourceExhaustedError("the disk is full"), absl::DataLossError("differ")}) {
    Scripted job;
    job.looks = {0, 1, 2};
    job.errors = {error};
    absl::Status end;
    EXPECT_THAT(job.Run(1, &end), IsEmpty());
    EXPECT_EQ(end, error);
  }
  Scripted job;
  absl::Status end;
  job.Run(0, &end);
  EXPECT_THAT(end, StatusIs(Code::kInvalidArgument, HasSubstr("every is 0")));
}

}  // namespace
}  // namespace shardmesh
