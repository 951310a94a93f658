// A shard of a job that goes back to copies: whom it asks for them, how often, and when it gives up.
#include "worker/move/kept_copies.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "worker/testing/local_host.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int64_t kStep = 5;
constexpr int64_t kCopiedAt = 1;

// A job of one rank now, READY and without weights, that goes back to copies of the mesh it had before.
class KeptCopiesTest : public ::testing::Test {
 protected:
  // One rank on each host.
  void Begin(const std::string& before, const std::vector<int>& holders) {
    ASSERT_NO_FATAL_FAILURE(host_.Start(SmallJob("fsdp=1", 1)));
    ASSERT_OK_AND_ASSIGN(shard_, host_.workers[0]->Find("small"));
    const JobSpec spec = SmallJob(before, 1);
    const Plan plan = *Plan::Create(spec);
    for (int rank = 0; rank < plan.num_ranks(); ++rank) {
      auto copies = std::make_shared<PeerCopies>(spec, plan, Epoch(kCopiedAt), Rank(rank),
                                                 HostRanks{rank, plan.num_ranks(), 1}, kJobSecret);
      for (const Rank each : {copies->own(), copies->other()}) {
        ASSERT_OK_AND_ASSIGN(std::shared_ptr<Snapshot> room, copies->Room(each));
        copies->Put(each, {kStep, 0, std::move(room)});
      }
      copies_.push_back(std::move(copies));
    }
    assignment_ = host_.AssignmentOf(SmallJob("fsdp=1", 1), 0);
    v1::Back& back = *assignment_.mutable_back();
    back.mutable_checkpoint()->set_step(kStep);
    back.mutable_checkpoint()->set_copied_at(kCopiedAt);
    back.set_mesh(before);
    back.set_hosts(plan.num_ranks());
    for (const int rank : holders) {
      v1::Peer& holder = *back.add_holders();
      holder.set_rank(rank);
      holder.set_worker(absl::StrCat("was-", rank));
    }
  }
  absl::Status Load(absl::Duration patience) {
    return LoadKept({*shard_, assignment_, nullptr, transfer_, cancelled_, patience}, 7).status();
  }

  LocalHost host_{1};
  std::shared_ptr<JobShard> shard_;
  std::vector<std::shared_ptr<PeerCopies>> copies_;  // by rank
  v1::Assignment assignment_;
  std::atomic<bool> cancelled_{false};
  std::vector<int> asked_;             // ranks
  std::map<int, absl::Status> fails_;  // by rank
  int works_after_ = -1;               // calls, then nothing fails any more; -1: never
  int cancel_after_ = -1;              // calls; -1: never
  const FetchCall transfer_ = [this](const v1::Peer& from, const v1::TransferRequest& request, const TransferSink& sink,
                                     absl::Duration) -> absl::StatusOr<v1::TransferHeader> {
    asked_.push_back(from.rank());
    const auto calls = static_cast<int>(asked_.size());
    if (calls == cancel_after_) cancelled_.store(true);
    const bool works = works_after_ >= 0 && calls > works_after_;
    if (const auto fails = fails_.find(from.rank()); fails != fails_.end() && !works) return fails->second;
    ASSIGN_OR_RETURN(const auto source, TransferSource::Open(copies_[from.rank()], request));
    RETURN_IF_ERROR(sink.begin(source->Begin()));
    while (source->left() > 0) {
      std::string bytes(static_cast<size_t>(std::min<int64_t>(source->left(), 1000)), '\0');
      source->Read(bytes.data(), static_cast<int64_t>(bytes.size()));
      RETURN_IF_ERROR(sink.data(bytes));
    }
    return source->End();
  };
};

absl::Status NoLink() { return absl::UnavailableError("no link to it"); }

TEST_F(KeptCopiesTest, AHolderThatIsNotReachedAtFirst_IsAskedAgain) {
  ASSERT_NO_FATAL_FAILURE(Begin("fsdp=2", {0}));
  fails_[0] = NoLink();
  works_after_ = 3;
  EXPECT_OK(Load(kLong));
  EXPECT_THAT(asked_, ElementsAre(0, 0, 0, 0, 0)) << "three in vain, and once for each shard";
}

TEST_F(KeptCopiesTest, ItGivesUp_WhenItsPatienceEnds) {
  ASSERT_NO_FATAL_FAILURE(Begin("fsdp=2", {0, 1}));
  fails_[0] = NoLink();
  fails_[1] = absl::NotFoundError("it keeps no copies");
  EXPECT_THAT(Load(absl::ZeroDuration()),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("shard 0 of 2 as it was after step 5: worker was-0"),
                                                 HasSubstr("no link to it"))));
  EXPECT_THAT(asked_, ElementsAre(0, 1));
}

TEST_F(KeptCopiesTest, WhoHasNothing_IsNotAskedAgain) {
  ASSERT_NO_FATAL_FAILURE(Begin("fsdp=2", {0, 1}));
  for (const int rank : {0, 1}) fails_[rank] = absl::AbortedError("none will come");
  EXPECT_THAT(Load(kLong), StatusIs(Code::kUnavailable, HasSubstr("worker was-1 (was rank 1): none will come")));
  EXPECT_THAT(asked_, ElementsAre(0, 1));
}

TEST_F(KeptCopiesTest, AnAssignmentThatIsOver_EndsIt) {
  ASSERT_NO_FATAL_FAILURE(Begin("fsdp=2", {0}));
  fails_[0] = NoLink();
  cancel_after_ = 2;
  EXPECT_THAT(Load(absl::InfiniteDuration()), StatusIs(Code::kCancelled, HasSubstr("assigned anew")));
  EXPECT_THAT(asked_, ElementsAre(0, 0));
}

// A later one has the same shard as another replica.
TEST_F(KeptCopiesTest, HoldersAreAskedInTheirOrder_WhicheverReplicaTheyHave) {
  ASSERT_NO_FATAL_FAILURE(Begin("ddp=4", {3, 0}));
  EXPECT_OK(Load(kLong));
  EXPECT_THAT(asked_, ElementsAre(3));
  fails_[3] = NoLink();
  asked_.clear();
  EXPECT_OK(Load(kLong));
  EXPECT_THAT(asked_, ElementsAre(3, 0));
}

}  // namespace
}  // namespace shardmesh
