#include "worker/versions/publications.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <set>

#include "core/base/matchers.h"
#include "worker/versions/version_leases.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Code = absl::StatusCode;

constexpr int64_t kSecond = 1'000'000'000;

// A host with two workers' views of one control block, and a clock that is set.
struct Host {
  explicit Host(int count = 3, int publish_every = 1) {
    job.name = "small";
    job.publications = count;
    job.publish_every = publish_every;
    for (Publications* each : {&lead, &other}) {
      each->ShowOn(&board, [this](int buffer) {
        if (in_look) in_look(buffer);
        return mapped.count(buffer) > 0;
      });
    }
  }

  // Writes and shows the next version, if it can.
  bool Commit(int64_t step) {
    const int buffer = lead.Reserve(step);
    if (buffer >= 0) lead.Show(buffer, step);
    return buffer >= 0;
  }

  JobSpec job;
  std::unique_ptr<ControlBlock> control = std::make_unique<ControlBlock>();
  VersionBoard board{};
  int64_t now = 1000 * kSecond;
  std::set<int> mapped;                 // publications that a reader maps
  std::set<std::pair<int, int>> places;  // (publication, place)
  std::function<void(int)> in_look;     // called while the lead looks who maps one
  Publications lead{control.get(), &job, Rank(0), [this] { return now; }};
  Publications other{control.get(), &job, Rank(1), [this] { return now; }};
  VersionLeases leases{
      control.get(),         &other, &job, Rank(1), [this](int b, int place) {
                         return places.count({b, place}) > 0; },
      [this] { return now; }};
};

std::unique_ptr<Host> NewHost(int count = 3, int publish_every = 1) {
  return std::make_unique<Host>(count, publish_every);
}

TEST(Publications, TwoTakeTurnsAndTheThirdIsForReaders) {
  const auto host = NewHost();
  for (int64_t step = 0; step < 6; ++step) ASSERT_TRUE(host->Commit(step));
  EXPECT_THAT(host->other.Published(), ElementsAre(Step(4), Step(5)));
  EXPECT_EQ(host->control->publications[2].written.load(), 0);  // takes no memory
  const std::optional<int> pinned = host->other.Pin(Step(5));
  ASSERT_TRUE(pinned.has_value());
  for (int64_t step = 6; step < 12; ++step) ASSERT_TRUE(host->Commit(step));
  EXPECT_THAT(host->lead.Published(), ElementsAre(Step(5), Step(10), Step(11)));
  host->other.Unpin(*pinned);
  for (int64_t step = 12; step < 15; ++step) ASSERT_TRUE(host->Commit(step));
  EXPECT_THAT(host->lead.Published(), ElementsAre(Step(12), Step(13), Step(14)));
}

TEST(Publications, TheNewestStaysWhileTheNextIsWritten) {
  const auto host = NewHost(2);
  for (int64_t step = 0; step < 5; ++step) ASSERT_TRUE(host->Commit(step));
  const int buffer = host->lead.Reserve(5);
  EXPECT_THAT(host->other.Published(), ElementsAre(Step(4)));
  EXPECT_FALSE(host->other.Pin(Step(3)).has_value());
  EXPECT_EQ(host->board.version_plus_one[buffer].load(), 0);
  host->lead.Keep(buffer);
  EXPECT_THAT(host->other.Published(), ElementsAre(Step(3), Step(4)));
  EXPECT_EQ(host->board.version_plus_one[buffer].load(), 4);
  const auto alone = NewHost(1);
  for (int64_t step = 0; step < 3; ++step) ASSERT_TRUE(alone->Commit(step));
  EXPECT_THAT(alone->other.Published(), ElementsAre(Step(2)));
}

TEST(Publications, EveryOneHeldNothingIsPublishedAndItIsCounted) {
  const auto host = NewHost(2);
  for (int64_t step = 0; step < 2; ++step) ASSERT_TRUE(host->Commit(step));
  host->mapped = {0};
  EXPECT_FALSE(host->Commit(2));  // the newest is not given up for it
  EXPECT_EQ(host->lead.refused(), 1);
  EXPECT_THAT(host->lead.Published(), ElementsAre(Step(0), Step(1)));
  EXPECT_EQ(host->lead.Holders(), "version 0 (mapped by readers)");
  EXPECT_EQ(host->lead.num_held(), 1);
  host->mapped = {};
  EXPECT_TRUE(host->Commit(3));
  EXPECT_EQ(host->lead.refused(), 1);
  EXPECT_EQ(host->lead.Holders(), "nobody");
}

TEST(Publications, AHoldThatComesBetweenTheTwoLooksKeepsTheVersion) {
  const auto host = NewHost(2);
  for (int64_t step = 0; step < 2; ++step) ASSERT_TRUE(host->Commit(step));
  int looks = 0;
  host->in_look = [&](int buffer) {
    if (++looks == 1) return;  // not held yet
    EXPECT_EQ(host->control->publications[buffer].version_plus_one.load() & kTaken, kTaken);
    EXPECT_EQ(host->board.version_plus_one[buffer].load(), 0);
    host->mapped.insert(buffer);
  };
  EXPECT_FALSE(host->Commit(2));
  EXPECT_EQ(looks, 2);
  EXPECT_THAT(host->other.Published(), ElementsAre(Step(0), Step(1)));
  EXPECT_EQ(host->board.version_plus_one[0].load(), 1);
}

TEST(Publications, ByTheJobsRuleOrOnDemand) {
  const auto third = NewHost(3, 3);
  EXPECT_EQ(third->lead.Reserve(2), -1);
  EXPECT_GE(third->lead.Reserve(3), 0);
  const auto asked = NewHost(3, kPublishOnDemand);
  EXPECT_EQ(asked->lead.Reserve(0), -1);
  EXPECT_EQ(asked->lead.refused(), 0);
  EXPECT_GE(asked->lead.ReserveAny(), 0);
}

TEST(Publications, TheNextIncarnationOfTheLeadKeepsWhatWasTakenInVain) {
  const auto host = NewHost(3);
  for (int64_t step = 0; step < 4; ++step) ASSERT_TRUE(host->Commit(step));
  ASSERT_TRUE(host->lead.Pin(Step(3)).has_value());
  ASSERT_TRUE(host->other.Pin(Step(3)).has_value());
  const int buffer = host->lead.Reserve(4);
  host->lead.TakeOver();
  host->lead.KeepUnused(-1);
  EXPECT_THAT(host->lead.Published(), ElementsAre(Step(2), Step(3)));
  EXPECT_EQ(host->board.version_plus_one[buffer].load(), 3);
  EXPECT_EQ(host->lead.num_held(), 1);  // the other worker's pin
  const int written = host->lead.Reserve(4);
  host->lead.KeepUnused(written);  // of a command that is open
  EXPECT_THAT(host->lead.Published(), ElementsAre(Step(3)));
  EXPECT_EQ(host->board.version_plus_one[written].load(), 0);
}

TEST(Publications, AVersionThatNobodyHasIsNotFound) {
  const auto host = NewHost();
  for (const int64_t step : {int64_t{-1}, int64_t{0}, kMaxStep, INT64_MAX}) {
    EXPECT_FALSE(host->lead.Pin(Step(step)).has_value()) << step;
  }
  EXPECT_THAT(host->lead.Published(), IsEmpty());
}

TEST(VersionLeases, KeepsAVersionUntilItEnds) {
  const auto host = NewHost();
  for (int64_t step = 0; step < 3; ++step) ASSERT_TRUE(host->Commit(step));
  ASSERT_OK_AND_ASSIGN(const auto lease, host->leases.Acquire(Step(2), absl::Seconds(10), 7));
  ASSERT_TRUE(lease.has_value());
  for (int64_t step = 3; step < 9; ++step) ASSERT_TRUE(host->Commit(step));
  EXPECT_THAT(host->lead.Published(), ElementsAre(Step(2), Step(7), Step(8)));
  host->now += 9 * kSecond;
  ASSERT_OK(host->leases.Renew(lease->id, 7, absl::Seconds(10)));
  host->now += 9 * kSecond;
  ASSERT_OK_AND_ASSIGN(const auto pinned, host->leases.PinLeased(lease->id));
  EXPECT_EQ(pinned.step, Step(2));
  host->now += 2 * kSecond;  // it ends, and a read is under way
  EXPECT_THAT(host->leases.Renew(lease->id, 7, absl::Seconds(10)),
              StatusIs(Code::kNotFound, HasSubstr("it has ended")));
  EXPECT_THAT(host->leases.PinLeased(lease->id), StatusIs(Code::kNotFound, HasSubstr("")));
  for (int64_t step = 9; step < 12; ++step) ASSERT_TRUE(host->Commit(step));
  EXPECT_THAT(host->lead.Published(), ElementsAre(Step(2), Step(10), Step(11)));
  host->other.Unpin(pinned.buffer);
  for (int64_t step = 12; step < 15; ++step) ASSERT_TRUE(host->Commit(step));
  EXPECT_THAT(host->lead.Published(), ElementsAre(Step(12), Step(13), Step(14)));
}

TEST(VersionLeases, TheSameNonceIsTheSameLeaseWhileItLives) {
  const auto host = NewHost();
  ASSERT_TRUE(host->Commit(0));
  const auto first = **host->leases.Acquire(Step(0), absl::Seconds(10), 7);
  EXPECT_EQ((**host->leases.Acquire(Step(0), absl::Seconds(10), 7)).id, first.id);
  EXPECT_NE((**host->leases.Acquire(Step(0), absl::Seconds(10), 8)).id, first.id);
  ASSERT_OK(host->leases.Release(first.id, 7));
  EXPECT_THAT(host->leases.Release(first.id, 7), StatusIs(Code::kNotFound, HasSubstr("")));
  EXPECT_NE((**host->leases.Acquire(Step(0), absl::Seconds(10), 7)).id, first.id);
}

TEST(VersionLeases, UnknownAndForgedOnesAreNotFound) {
  const auto host = NewHost();
  ASSERT_TRUE(host->Commit(0));
  EXPECT_EQ(*host->leases.Acquire(Step(1), absl::Seconds(10), 1), std::nullopt);
  const auto lease = **host->leases.Acquire(Step(0), absl::Seconds(10), 2);
  for (const uint64_t id : {uint64_t{0}, uint64_t{1}, lease.id ^ 1, ~lease.id}) {
    EXPECT_THAT(host->leases.Renew(id, 2, absl::Seconds(1)), StatusIs(Code::kNotFound, HasSubstr(""))) << id;
    EXPECT_THAT(host->leases.Release(id, 2), StatusIs(Code::kNotFound, HasSubstr(""))) << id;
    EXPECT_THAT(host->leases.PinLeased(id), StatusIs(Code::kNotFound, HasSubstr(""))) << id;
  }
  EXPECT_EQ(host->leases.List().size(), 1u);
}

TEST(VersionLeases, AnotherNonce_IsRefused_AndChangesNothing) {
  const auto host = NewHost();
  ASSERT_TRUE(host->Commit(0));
  const auto lease = **host->leases.Acquire(Step(0), absl::Seconds(10), 7);
  for (const uint64_t nonce : {uint64_t{0}, uint64_t{6}, lease.id}) {
    EXPECT_THAT(host->leases.Release(lease.id, nonce), StatusIs(Code::kPermissionDenied, HasSubstr("another nonce")));
    EXPECT_THAT(host->leases.Renew(lease.id, nonce, absl::Hours(1)),
                StatusIs(Code::kPermissionDenied, HasSubstr("another nonce")));
  }
  ASSERT_EQ(host->leases.List().size(), 1u);
  EXPECT_EQ(host->leases.List()[0].left_nanos, 10 * kSecond);
  ASSERT_OK(host->leases.Renew(lease.id, 7, absl::Seconds(20)));
  EXPECT_EQ(host->leases.List()[0].left_nanos, 20 * kSecond);
  ASSERT_OK(host->leases.Release(lease.id, 7));
  EXPECT_EQ(host->leases.List().size(), 0u);
}

TEST(VersionLeases, SoManyAndNoMore) {
  const auto host = NewHost();
  ASSERT_TRUE(host->Commit(0));
  for (int i = 0; i < kMaxLeases; ++i) ASSERT_OK(host->leases.Acquire(Step(0), absl::Seconds(10), i + 1));
  EXPECT_THAT(host->leases.Acquire(Step(0), absl::Seconds(10), 999),
              StatusIs(Code::kResourceExhausted, HasSubstr("256 leases")));
  host->now += 11 * kSecond;
  ASSERT_OK_AND_ASSIGN(const auto lease, host->leases.Acquire(Step(0), absl::Seconds(10), 999));
  EXPECT_TRUE(lease.has_value());
}

TEST(VersionLeases, ACallerWithItsShare_LeavesTheLastQuarterToOthers) {
  const auto host = NewHost();
  ASSERT_TRUE(host->Commit(0));
  uint64_t nonce = 0;
  const auto acquire = [&](const char* caller) {
    return host->leases.Acquire(Step(0), absl::Seconds(10), ++nonce, caller);
  };
  uint64_t first = 0;
  for (int i = 0; i <= kMaxLeases * 3 / 4; ++i) {
    ASSERT_OK_AND_ASSIGN(const auto lease, acquire("a"));
    if (i == 0) first = lease->id;
  }
  EXPECT_THAT(acquire("a"),
              StatusIs(Code::kResourceExhausted, AllOf(HasSubstr("caller \"a\" has 193 of 256 leases of job small"),
                                                       HasSubstr("release some, or let them end"))));
  ASSERT_OK(acquire("b"));  // others have the rest
  ASSERT_OK(acquire(""));
  ASSERT_OK(host->leases.Release(first, 1));
  host->now += kSecond;
  ASSERT_OK(acquire("b"));
  EXPECT_THAT(acquire("a"), StatusIs(Code::kResourceExhausted, HasSubstr("\"a\" has 192")));
  host->now += 11 * kSecond;  // all have ended
  EXPECT_OK(acquire("a"));
}

// Renewed at the last moment it was never free: the lead counts it a little longer.
TEST(VersionLeases, TheGraceIsTheRenewals) {
  const auto host = NewHost(1);
  ASSERT_TRUE(host->Commit(0));
  const auto lease = **host->leases.Acquire(Step(0), absl::Seconds(1), 1);
  host->now += kSecond;
  EXPECT_THAT(host->leases.Renew(lease.id, 1, absl::Seconds(1)), StatusIs(Code::kNotFound, HasSubstr("")));
  EXPECT_FALSE(host->Commit(1));
  host->now += kSecond / 10;
  EXPECT_TRUE(host->Commit(2));
}

TEST(VersionLeases, AReaderThatMapsKeepsItsSeatUntilItLetsGo) {
  const auto host = NewHost();
  for (int64_t step = 0; step < 2; ++step) ASSERT_TRUE(host->Commit(step));
  ASSERT_OK_AND_ASSIGN(const int place, host->leases.TakePlace(4242, absl::Seconds(5)));
  host->places = {{1, place}};
  host->now += 3 * kSecond;
  ASSERT_EQ(host->leases.List().size(), 1u);
  EXPECT_EQ(host->leases.List()[0].step, Step(1));
  EXPECT_EQ(host->leases.List()[0].pid, 4242);
  EXPECT_EQ(host->leases.List()[0].left_nanos, 2 * kSecond);
  host->now += 4 * kSecond;
  EXPECT_EQ(host->leases.List()[0].left_nanos, -2 * kSecond);  // abandoned
  host->leases.Heard(place);
  EXPECT_EQ(host->leases.List()[0].left_nanos, 5 * kSecond);
  host->leases.LeavePlace(place);
  EXPECT_EQ(host->leases.List().size(), 1u);
  EXPECT_NE(*host->leases.TakePlace(1, absl::Seconds(5)), place);
  host->places = {};
  EXPECT_EQ(*host->leases.TakePlace(2, absl::Seconds(5)), place);
}

TEST(VersionLeases, TheNextIncarnationGivesSeatsBackWhenTheirReadersLetGo) {
  const auto host = NewHost();
  ASSERT_TRUE(host->Commit(0));
  const int holding = *host->leases.TakePlace(1, absl::Seconds(5)), idle = *host->leases.TakePlace(2, absl::Seconds(5));
  host->places = {{0, holding}};
  host->leases.TakeOver();
  EXPECT_EQ(*host->leases.TakePlace(3, absl::Seconds(5)), idle);
  host->places = {};
  host->leases.Sweep();
  EXPECT_EQ(*host->leases.TakePlace(4, absl::Seconds(5)), holding);
}

TEST(VersionLeases, SoManyReadersAndNoMore) {
  const auto host = NewHost();
  for (int i = 0; i < kMaxReaders; ++i) ASSERT_OK(host->leases.TakePlace(i + 1, absl::Seconds(5)));
  EXPECT_THAT(host->leases.TakePlace(1, absl::Seconds(5)),
              StatusIs(Code::kResourceExhausted, HasSubstr("256 attached readers")));
}

}  // namespace
}  // namespace shardmesh
