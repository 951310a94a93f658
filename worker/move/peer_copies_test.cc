#include "worker/move/peer_copies.h"

#include <gmock/gmock.h>

#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"
#include "worker/move/reform.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

JobSpec SpecOf(const std::string& mesh) {
  JobSpec spec;
  spec.name = "j";
  spec.mesh = ParseMeshSpec(mesh).value();
  spec.copies = 2;
  spec.parameters = {{"w", {1000}, WeightFormat::kFp32, ""}};
  return spec;
}

class PeerCopiesTest : public ::testing::Test {
 protected:
  // Rank 3 of six, two on each of three hosts: it keeps a copy for rank 1.
  PeerCopies copies_{SpecOf("fsdp=6"), Plan::Create(SpecOf("fsdp=6")).value(), Epoch(4), Rank(3), {1, 3, 2}, "secret"};

  const ShardStorage* Fill(Rank rank, int64_t step) {
    auto room = copies_.Room(rank);
    EXPECT_OK(room);
    const ShardStorage* const storage = &(*room)->storage();
    copies_.Put(rank, {step, 1, *std::move(room)});
    return storage;
  }
  void FillBoth(int64_t step) {
    Fill(Rank(3), step);
    Fill(Rank(1), step);
  }
  static v1::WholeCopies Whole(int64_t step) {
    v1::WholeCopies whole;
    whole.set_step(step);
    whole.set_digest(77);
    return whole;
  }
};

TEST_F(PeerCopiesTest, KeepsItsOwnAndThatOfTheHostBefore) {
  EXPECT_EQ(copies_.own(), Rank(3));
  EXPECT_EQ(copies_.other(), Rank(1));
  FillBoth(5);
  EXPECT_TRUE(copies_.Find(Rank(3), 5).has_value());
  EXPECT_TRUE(copies_.Find(Rank(1), 5).has_value());
  EXPECT_FALSE(copies_.Find(Rank(1), 4).has_value());
  EXPECT_FALSE(copies_.Find(Rank(2), 5).has_value());
}

TEST_F(PeerCopiesTest, OnlyAWholeStepIsTold_AndItStaysUntilTheNextIs) {
  FillBoth(5);
  EXPECT_FALSE(copies_.Told().has_value());
  copies_.SetWhole(Whole(5));
  ASSERT_TRUE(copies_.Told().has_value());
  EXPECT_EQ(copies_.Told()->step(), 5);
  EXPECT_EQ(copies_.Told()->digest(), 77u);
  EXPECT_EQ(copies_.Told()->rank(), 3);
  EXPECT_EQ(copies_.Told()->hosts(), 3);
  EXPECT_EQ(copies_.Told()->mesh(), "fsdp=6");
  EXPECT_EQ(copies_.Told()->epoch(), 4);
  FillBoth(6);
  FillBoth(7);  // the round of 6 failed
  EXPECT_TRUE(copies_.Find(Rank(1), 5).has_value());
  EXPECT_FALSE(copies_.Find(Rank(1), 6).has_value());
  EXPECT_EQ(copies_.Told()->step(), 5);
  EXPECT_TRUE(copies_.SetWhole(Whole(7)));
  EXPECT_TRUE(copies_.SetWhole(Whole(7))) << "it is told again";
  EXPECT_EQ(copies_.Told()->step(), 7);
  EXPECT_FALSE(copies_.Find(Rank(1), 5).has_value());
}

// It started anew in the middle of a round, or says a step of another one.
TEST_F(PeerCopiesTest, AStepThatItDoesNotHave_IsNotWhole) {
  Fill(Rank(3), 5);
  EXPECT_FALSE(copies_.SetWhole(Whole(5)));
  EXPECT_FALSE(copies_.Told().has_value());
  FillBoth(6);
  EXPECT_FALSE(copies_.SetWhole(Whole(5)));
  EXPECT_FALSE(copies_.Told().has_value());
  EXPECT_TRUE(copies_.Find(Rank(3), 6).has_value());
}

// Of what it has given up, nothing comes any more; of what it has not reached, something will.
TEST_F(PeerCopiesTest, WhoAsksForAnOlderStep_IsToldThatNoneComes) {
  v1::TransferRequest request;
  request.set_epoch(4);
  request.set_mesh("fsdp=6");
  request.set_rank(3);
  request.mutable_kept()->set_rank(3);
  const auto ask = [&](int64_t step) {
    request.mutable_kept()->set_step(step);
    // The test's object lasts longer than what is opened.
    return TransferSource::Open(std::shared_ptr<const PeerCopies>(std::shared_ptr<void>(), &copies_), request).status();
  };
  EXPECT_FALSE(copies_.NewestStep(Rank(3)).has_value());
  EXPECT_THAT(ask(5), StatusIs(Code::kUnavailable, HasSubstr("no copy of rank 3 of step 5 of epoch 4 is here yet")));
  FillBoth(5);
  copies_.SetWhole(Whole(5));
  EXPECT_EQ(copies_.NewestStep(Rank(3)), 5);
  EXPECT_OK(ask(5));
  EXPECT_THAT(ask(6), StatusIs(Code::kUnavailable, HasSubstr("yet")));
  FillBoth(7);
  EXPECT_EQ(copies_.NewestStep(Rank(3)), 7);
  EXPECT_EQ(copies_.NewestStep(Rank(1)), 7);
  EXPECT_FALSE(copies_.NewestStep(Rank(2)).has_value());
  EXPECT_OK(ask(5)) << "it is whole";
  EXPECT_OK(ask(7));
  EXPECT_THAT(ask(6), StatusIs(Code::kAborted, HasSubstr("none will come: the newest is of step 7")));
  EXPECT_THAT(ask(8), StatusIs(Code::kUnavailable, HasSubstr("yet")));
}

TEST_F(PeerCopiesTest, MemoryIsUsedAgain_UnlessSomebodyReadsIt) {
  const ShardStorage* const first = Fill(Rank(3), 5);
  Fill(Rank(1), 5);
  copies_.SetWhole(Whole(5));
  const ShardStorage* const second = Fill(Rank(3), 6);
  Fill(Rank(1), 6);
  EXPECT_NE(first, second);
  copies_.SetWhole(Whole(6));
  EXPECT_EQ(Fill(Rank(3), 7), first);
  Fill(Rank(1), 7);
  const std::optional<PeerCopies::Copy> reader = copies_.Find(Rank(3), 6);
  copies_.SetWhole(Whole(7));
  EXPECT_NE(Fill(Rank(3), 8), second);
}

TEST_F(PeerCopiesTest, TheFirstHostKeepsThatOfTheLast) {
  const PeerCopies first(SpecOf("fsdp=6"), Plan::Create(SpecOf("fsdp=6")).value(), Epoch(4), Rank(1), {0, 3, 2}, "");
  EXPECT_EQ(first.other(), Rank(5));
}

}  // namespace
}  // namespace shardmesh
