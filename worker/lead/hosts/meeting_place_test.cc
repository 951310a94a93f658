#include "worker/lead/hosts/meeting_place.h"

#include "core/base/matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

TEST(MeetingPlace, HasAKey_WhenAllHaveCome) {
  MeetingPlace place;
  ASSERT_OK_AND_ASSIGN(MeetingPlace::Meeting meeting, place.Come(0, 3, "a"));
  EXPECT_EQ(meeting.key, "");
  EXPECT_EQ(meeting.missing, 1);
  ASSERT_OK_AND_ASSIGN(meeting, place.Come(1, 3, "b"));
  EXPECT_EQ(meeting.missing, 2);
  ASSERT_OK_AND_ASSIGN(meeting, place.Come(2, 3, "c"));
  EXPECT_NE(meeting.key, "");
  for (const auto& [host, number] : {std::pair(0, "a"), {1, "b"}, {2, "c"}}) {  // who asks again is told the same
    ASSERT_OK_AND_ASSIGN(const MeetingPlace::Meeting same, place.Come(host, 3, number));
    EXPECT_EQ(same.key, meeting.key);
  }
}

TEST(MeetingPlace, OneThatComesAnew_EndsTheMeeting) {
  MeetingPlace place;
  ASSERT_OK(place.Come(0, 2, "a").status());
  ASSERT_OK_AND_ASSIGN(const MeetingPlace::Meeting first, place.Come(1, 2, "b"));
  ASSERT_OK(place.Set(first.key, "address", "x"));
  ASSERT_OK_AND_ASSIGN(MeetingPlace::Meeting next, place.Come(1, 2, "killed and back"));
  EXPECT_EQ(next.key, "");
  EXPECT_EQ(next.missing, 0);
  for (const char* number : {"a", "b"}) {
    EXPECT_THAT(place.Come(0, 2, number), StatusIs(Code::kAborted, HasSubstr("come again")));
  }
  EXPECT_THAT(place.Get(first.key, "address", absl::ZeroDuration()), StatusIs(Code::kAborted, HasSubstr("over")));
  EXPECT_THAT(place.Set(first.key, "address", "y"), StatusIs(Code::kAborted, HasSubstr("over")));
  ASSERT_OK_AND_ASSIGN(next, place.Come(0, 2, "anew"));
  EXPECT_NE(next.key, "");
  EXPECT_NE(next.key, first.key);
  EXPECT_THAT(place.Get(next.key, "address", absl::ZeroDuration()), StatusIs(Code::kDeadlineExceeded, HasSubstr("")));
}

// One that is killed while the others are on their way.
TEST(MeetingPlace, OneThatComesTwice_BeforeAllHave_CountsOnce) {
  MeetingPlace place;
  ASSERT_OK(place.Come(1, 2, "killed").status());
  ASSERT_OK(place.Come(1, 2, "back").status());
  ASSERT_OK_AND_ASSIGN(const MeetingPlace::Meeting meeting, place.Come(0, 2, "a"));
  EXPECT_NE(meeting.key, "");
  ASSERT_OK_AND_ASSIGN(const MeetingPlace::Meeting same, place.Come(1, 2, "back"));
  EXPECT_EQ(same.key, meeting.key);
}

TEST(MeetingPlace, TheFirstMeeting_IsThereFromTheBeginning) {
  MeetingPlace place;
  ASSERT_OK(place.Set(MeetingPlace::kFirst, "address", "x"));
  ASSERT_OK(place.Come(0, 1, "a").status());
  ASSERT_OK_AND_ASSIGN(const std::string value, place.Get(MeetingPlace::kFirst, "address", absl::ZeroDuration()));
  EXPECT_EQ(value, "x");
}

TEST(MeetingPlace, WhatIsNoLead_IsRefused) {
  MeetingPlace place;
  for (const auto& [host, number] : {std::pair(-1, std::string("a")), {2, "a"}, {0, ""}, {0, std::string(65, 'n')}}) {
    EXPECT_THAT(place.Come(host, 2, number), StatusIs(Code::kInvalidArgument, HasSubstr("comes with")));
  }
}

TEST(MeetingPlace, WhyLeadsCannotMeet_StaysTheFirstCause) {
  MeetingPlace place;
  EXPECT_OK(place.Check());
  place.TellNotMet("no such address");
  place.TellNotMet("late");
  EXPECT_THAT(place.Check(), StatusIs(Code::kFailedPrecondition, "no such address"));
}

}  // namespace
}  // namespace shardmesh
