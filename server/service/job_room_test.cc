#include "server/service/job_room.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "server/coordinator/testing/small_jobs.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

JobView Viewed(const std::string& name, int64_t uid) {
  JobView view;
  view.definition = SmallJob(name, 1);
  view.uid = uid;
  return view;
}

TEST(JobRoomTest, OneCallersJobs_LeaveTheLastQuarterToOthers) {
  JobRoom room(8, int64_t{1} << 30);
  std::vector<JobView> jobs;
  for (int i = 0; i < 7; ++i) {
    const std::string name = absl::StrCat("j", i);
    ASSERT_OK(room.Check("a", name, 10));
    room.Take("a", name, i + 1, 10);
    jobs.push_back(Viewed(name, i + 1));
  }
  room.Learn(jobs);
  EXPECT_THAT(room.Check("a", "more", 10),
              StatusIs(Code::kResourceExhausted,
                       AllOf(HasSubstr("caller \"a\" has 7 of 8 jobs"), HasSubstr("delete some of its jobs first"))));
  EXPECT_OK(room.Check("a", "j3", 10));  // in place of one
  EXPECT_OK(room.Check("b", "more", 10));
  EXPECT_OK(room.Check("", "more", 10));
  jobs.pop_back();  // deleted
  room.Learn(jobs);
  EXPECT_OK(room.Check("a", "more", 10));
}

TEST(JobRoomTest, Bytes_AreBounded_InAllAndForOneCaller) {
  JobRoom room(1000, 1000);
  room.Take("a", "x", 1, 500);
  EXPECT_THAT(room.Check("b", "y", 501),
              StatusIs(Code::kResourceExhausted, HasSubstr("a specification of 501 bytes, and those of the other jobs "
                                                           "have 500 of at most 1000; delete jobs first")));
  EXPECT_THAT(room.Check("", "y", 501), StatusIs(Code::kResourceExhausted, HasSubstr("501 bytes")));
  EXPECT_THAT(room.Check("a", "y", INT64_MAX), StatusIs(Code::kResourceExhausted, HasSubstr("of at most 1000")));
  EXPECT_OK(room.Check("a", "x", 1000));  // in place of it
  EXPECT_OK(room.Check("a", "y", 300));
  room.Take("a", "y", 2, 300);
  EXPECT_THAT(room.Check("a", "z", 1),
              StatusIs(Code::kResourceExhausted, HasSubstr("\"a\" has 800 of 1000 bytes of specifications")));
  EXPECT_OK(room.Check("b", "z", 200));
}

TEST(JobRoomTest, JobsOfBefore_AreNobodys_AndOneMadeAgainIsItsMakers) {
  JobRoom room(4, int64_t{1} << 30);
  std::vector<JobView> jobs = {Viewed("j0", 1), Viewed("j1", 2), Viewed("j2", 3), Viewed("j3", 4)};
  room.Learn(jobs);
  EXPECT_OK(room.Check("a", "j4", 10));
  const int64_t bytes = JobRoom::BytesOf(*jobs[0].definition);
  EXPECT_GT(bytes, 20);
  JobRoom small(4, 4 * bytes);
  small.Learn(jobs);
  EXPECT_THAT(small.Check("a", "j4", 1), StatusIs(Code::kResourceExhausted, HasSubstr(absl::StrCat(4 * bytes))));
  room.Take("a", "j0", 5, 10);
  room.Learn(jobs);  // of that name there is another one: uid 1
  EXPECT_OK(room.Check("a", "j4", 10));
  room.Take("a", "j0", 1, 10);
  room.Learn(jobs);
  EXPECT_THAT(room.Check("a", "j4", 10), StatusIs(Code::kResourceExhausted, HasSubstr("\"a\" has 1 of 4 jobs")));
}

}  // namespace
}  // namespace shardmesh
