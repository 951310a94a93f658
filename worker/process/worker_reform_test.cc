// Worker: a job that lost a member, or is brought to another mesh, goes on at a later epoch: in one process, so that
// the thread sanitizer sees it.
#include <cstring>

#include "core/base/matchers.h"
#include "worker/process/worker.h"
#include "worker/testing/local_host.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int64_t kFrom = 3;  // the epoch of LocalHost::Start
constexpr char kMesh[] = "ddp=2,fsdp=2";

struct WorkerReformTest : ::testing::Test {
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(host.Start(SmallJob(kMesh, 1)));
    ASSERT_NO_FATAL_FAILURE(host.PlaceWeights());
    ASSERT_NO_FATAL_FAILURE(TrainTo(0, kFrom, 1, 3));
    before = DigestOf(0);
  }

  // A trainer attached to worker `i` steps.
  void TrainTo(int i, int64_t epoch, int64_t first, int64_t last) {
    ASSERT_OK_AND_ASSIGN(Trainer trainer, Trainer::Attach(host, i, {0}));
    for (int64_t step = first; step <= last; ++step) {
      auto* const gradients = reinterpret_cast<float*>(trainer.segments[1].data());
      for (int e = 0; e < 150; ++e) gradients[e] = RandomValue(1, step, e);
      v1::StepRequest request = Request({0}, step);
      request.set_epoch(epoch);
      ASSERT_OK(trainer.Step(request));
    }
  }
  uint64_t DigestOf(int i) {
    StepProtocol& protocol = (*host.workers[i]->Find("small"))->protocol();
    const uint64_t ticket = protocol.tickets().AskForDigest();
    EXPECT_TRUE(Await(
        [&] { return protocol.tickets().DigestOf(ticket).ok() && protocol.tickets().DigestOf(ticket)->has_value(); }));
    return protocol.tickets().DigestOf(ticket).value()->second;
  }
  // To worker workers[rank], whose rank was was[rank].
  v1::Assignment Anew(int64_t epoch, const std::string& mesh, int rank, const std::vector<int>& workers,
                      const std::vector<int>& was) const {
    v1::Assignment assignment = host.AssignmentOf(SmallJob(mesh, 1), rank, epoch);
    const auto peers = assignment.peers();
    assignment.clear_peers();
    for (size_t r = 0; r < workers.size(); ++r) {
      *assignment.add_peers() = peers[workers[r]];
      assignment.mutable_peers(static_cast<int>(r))->set_rank(static_cast<int>(r));
      assignment.mutable_from()->add_was(was[r]);
    }
    assignment.mutable_from()->set_epoch(kFrom);
    assignment.mutable_from()->set_mesh(kMesh);
    return assignment;
  }
  v1::Assignment Keep(int rank) const {
    v1::Assignment assignment = host.AssignmentOf(SmallJob(kMesh, 1), rank, kFrom);
    assignment.mutable_from()->set_epoch(kFrom);
    return assignment;
  }
  bool IsReady(int i, int64_t epoch) const {
    const v1::MemberStatus status = host.StatusOf(i);
    return status.state() == v1::MEMBER_STATE_READY && status.epoch() == epoch;
  }

  LocalHost host{4};
  uint64_t before = 0;
};

TEST_F(WorkerReformTest, TwoOfThree_GoOn_TheThirdKeepsWhatItHeld_UntilTheyAreReady) {
  host.workers[1]->Leave();
  const std::vector<int> workers = {0, 3};
  host.workers[2]->Reconcile({Keep(2)});
  for (int rank : {0, 1}) {
    host.workers[workers[rank]]->Reconcile({Anew(4, "ddp=2,fsdp=1", rank, workers, workers)});
  }
  for (int i : workers) ASSERT_TRUE(Await([&] { return IsReady(i, 4); })) << host.StatusOf(i).DebugString();
  EXPECT_EQ(DigestOf(0), before);
  for (int i : {0, 2, 3}) EXPECT_OK(host.workers[i]->FindHeld("small", kFrom, kJobSecret).status());
  EXPECT_EQ((*host.workers[0]->Find("small"))->protocol().publications().Published(), std::vector<Step>{Step(3)});
  ASSERT_NO_FATAL_FAILURE(TrainTo(3, 4, 4, 6));

  for (int rank : {0, 1}) {
    v1::Assignment ready = host.AssignmentOf(SmallJob("ddp=2,fsdp=1", 1), rank, 4);
    host.workers[workers[rank]]->Reconcile({ready});
  }
  host.workers[2]->Reconcile({});
  for (int i : {0, 2, 3}) {
    EXPECT_THAT(host.workers[i]->FindHeld("small", kFrom, kJobSecret), StatusIs(Code::kNotFound, HasSubstr("epoch 3")));
  }
  ASSERT_NO_FATAL_FAILURE(TrainTo(0, 4, 7, 8));
}

// The first attempt waits for a member that is lost, too.
TEST_F(WorkerReformTest, AnAttemptThatIsGivenUp_TheNextGoesOnFromTheSameEpoch) {
  host.workers[1]->Leave();
  host.workers[0]->Reconcile({Anew(4, "ddp=2,fsdp=1", 0, {0, 3}, {0, 3})});
  ASSERT_TRUE(Await([&] { return host.StatusOf(0).epoch() == 4; }));
  const std::vector<int> workers = {2, 3};
  host.workers[0]->Reconcile({Keep(0)});
  for (int rank : {1, 0}) {
    host.workers[workers[rank]]->Reconcile({Anew(5, "ddp=2,fsdp=1", rank, workers, workers)});
  }
  for (int i : workers) ASSERT_TRUE(Await([&] { return IsReady(i, 5); })) << host.StatusOf(i).DebugString();
  EXPECT_EQ(DigestOf(2), before);
  EXPECT_OK(host.workers[0]->FindHeld("small", kFrom, kJobSecret).status());

  // And once more, of all that are left, while nobody was told that the job is READY.
  const std::vector<int> three = {0, 3, 2};
  for (int rank : {0, 1, 2}) {
    host.workers[three[rank]]->Reconcile({Anew(6, "fsdp=3", rank, three, three)});
  }
  for (int i : three) ASSERT_TRUE(Await([&] { return IsReady(i, 6); })) << host.StatusOf(i).DebugString();
  EXPECT_EQ(DigestOf(0), before);
  ASSERT_NO_FATAL_FAILURE(TrainTo(2, 6, 4, 5));
}

TEST_F(WorkerReformTest, NonsenseInAnAssignment_FailsTheJobWithAReason) {
  const auto error_of = [&](const v1::Assignment& assignment) {
    host.workers[0]->Reconcile({assignment});
    EXPECT_TRUE(Await([&] { return host.StatusOf(0).state() == v1::MEMBER_STATE_FAILED; }));
    return host.StatusOf(0).error();
  };
  v1::Assignment other_epoch = Anew(4, "fsdp=1", 0, {0}, {0});
  other_epoch.mutable_from()->set_epoch(2);
  EXPECT_THAT(error_of(other_epoch), HasSubstr("does not hold what it held of epoch 2"));
  EXPECT_THAT(error_of(Anew(5, "fsdp=1", 0, {0}, {-1})), HasSubstr("does not hold what it held of epoch 3"));
}

TEST_F(WorkerReformTest, Transfers_OfWhatIsNotThere_AreRefused) {
  const TransferSink sink = {[](const v1::TransferHeader&) { return absl::OkStatus(); },
                             [](absl::string_view) { return absl::OkStatus(); }};
  v1::TransferRequest request;
  request.set_job("small");
  request.set_epoch(kFrom);
  request.set_mesh("fsdp=2");
  request.set_secret(kJobSecret);
  v1::Peer peer;
  peer.set_worker("w0");
  EXPECT_THAT(host.Transfer(peer, request, sink), StatusIs(Code::kUnavailable, HasSubstr("has not ended")));
  host.workers[1]->Leave();
  for (int i : {0, 3}) host.workers[i]->Reconcile({Anew(4, "ddp=2,fsdp=1", i / 3, {0, 3}, {0, 3})});
  ASSERT_TRUE(Await([&] { return IsReady(0, 4) && IsReady(3, 4); }));
  ASSERT_OK(host.Transfer(peer, request, sink));
  for (const char* const secret : {"", "guessed", "of the members alon", "of the members alone."}) {
    request.set_secret(secret);
    EXPECT_THAT(host.Transfer(peer, request, sink), StatusIs(Code::kPermissionDenied, HasSubstr("secret of job small")));
  }
  request.set_secret(kJobSecret);
  request.set_rank(2);
  EXPECT_THAT(host.Transfer(peer, request, sink), StatusIs(Code::kInvalidArgument, HasSubstr("rank 2")));
  request.set_rank(0);
  request.set_mesh("fsdp=65");
  EXPECT_THAT(host.Transfer(peer, request, sink), StatusIs(Code::kInvalidArgument, HasSubstr("65 ranks")));
  request.set_mesh("fsdp");
  EXPECT_THAT(host.Transfer(peer, request, sink), StatusIs(Code::kInvalidArgument, HasSubstr("fsdp")));
  request.set_epoch(2);
  EXPECT_THAT(host.Transfer(peer, request, sink), StatusIs(Code::kNotFound, HasSubstr("epoch 2")));
}

// An assignment that the worker reported comes again without what it knows.
TEST_F(WorkerReformTest, ShortAssignments_TheSecretIsKept) {
  v1::Assignment again;
  again.mutable_spec()->set_name("small");
  again.set_epoch(kFrom);
  host.workers[0]->Reconcile({again});
  EXPECT_OK(host.workers[0]->FindHeld("small", kFrom, kJobSecret));
  EXPECT_THAT(host.workers[0]->FindHeld("small", kFrom, ""), StatusIs(Code::kPermissionDenied, HasSubstr("secret")));
}

// From four workers to the first three of them; the fourth leaves.
struct WorkerReshardTest : WorkerReformTest {
  v1::Assignment Now(int i) const { return host.AssignmentOf(SmallJob(kMesh, 1), i, kFrom); }
  v1::Assignment Next(int i, int64_t epoch, bool staged) const {
    v1::Assignment next = Anew(epoch, "fsdp=3", i, {0, 1, 2}, {0, 1, 2});
    *next.mutable_from()->add_departing() = Now(0).peers(3);
    next.set_staged(staged);
    next.set_leaves(i == 3);
    return next;
  }
  void Stage(int64_t epoch) {
    for (int i = 0; i < 4; ++i) host.workers[i]->Reconcile({Now(i), Next(i, epoch, true)});
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(Await([&] {
        const std::vector<v1::MemberStatus> statuses = host.workers[i]->Statuses();
        return statuses.size() == 2 && statuses[0].state() == v1::MEMBER_STATE_READY &&
               statuses[1].state() == v1::MEMBER_STATE_PREPARED && statuses[1].epoch() == epoch;
      })) << i;
    }
  }
  void Finish(int64_t epoch) {
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(Await([&] { return IsReady(i, epoch); })) << host.StatusOf(i).DebugString();
    for (int i = 0; i < 3; ++i) host.workers[i]->Reconcile({host.AssignmentOf(SmallJob("fsdp=3", 1), i, epoch)});
    host.workers[3]->Reconcile({});
  }
};

TEST_F(WorkerReshardTest, TrainsOnUntilOneIsTold_TheOthersSeeIt_AndLeasedVersionsStay) {
  ASSERT_NO_FATAL_FAILURE(Stage(4));
  ASSERT_NO_FATAL_FAILURE(TrainTo(0, kFrom, 4, 5));
  const uint64_t digest = DigestOf(0);
  std::vector<uint64_t> leases;
  for (int i : {1, 3}) {  // stays, leaves
    ASSERT_OK_AND_ASSIGN(const auto shard, host.workers[i]->Find("small"));
    ASSERT_OK_AND_ASSIGN(const auto lease, shard->leases().Acquire(Step(5), absl::Seconds(600), i));
    ASSERT_TRUE(lease.has_value());
    leases.push_back(lease->id);
  }
  host.workers[1]->Reconcile({Next(1, 4, false)});
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Await([&] { return IsReady(i, 4); })) << host.StatusOf(i).DebugString();
  EXPECT_EQ(DigestOf(2), digest);
  host.workers[0]->Reconcile({Now(0), Next(0, 4, true)});  // an answer that comes late
  EXPECT_TRUE(IsReady(0, 4));
  host.workers[3]->Reconcile({Keep(3)});
  ASSERT_NO_FATAL_FAILURE(Finish(4));
  ASSERT_NO_FATAL_FAILURE(TrainTo(2, 4, 6, 7));
  for (int i : {1, 3}) {
    EXPECT_THAT(host.workers[i]->FindHeld("small", kFrom, kJobSecret), StatusIs(Code::kNotFound, HasSubstr("epoch 3")));
    ASSERT_OK_AND_ASSIGN(const auto past, host.workers[i]->FindLeased("small", leases[i / 2]));
    EXPECT_EQ(past->epoch(), Epoch(kFrom));
    EXPECT_OK(past->leases().Release(leases[i / 2], i));
  }
  EXPECT_TRUE(Await([&] { return !host.workers[3]->FindLeased("small", leases[1]).ok(); }));
  EXPECT_TRUE(Await([&] { return (*host.workers[1]->FindLeased("small", leases[0]))->epoch() == Epoch(4); }));
}

TEST_F(WorkerReshardTest, GivenUp_ItTrainsOn_AndMayMoveLater) {
  ASSERT_NO_FATAL_FAILURE(Stage(4));
  for (int i = 0; i < 4; ++i) host.workers[i]->Reconcile({Now(i)});
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(IsReady(i, kFrom));
  ASSERT_NO_FATAL_FAILURE(TrainTo(1, kFrom, 4, 5));
  const uint64_t digest = DigestOf(0);
  ASSERT_NO_FATAL_FAILURE(Stage(5));
  host.workers[3]->Reconcile({Keep(3)});
  ASSERT_NO_FATAL_FAILURE(Finish(5));
  EXPECT_EQ(DigestOf(1), digest);
  ASSERT_NO_FATAL_FAILURE(TrainTo(0, 5, 6, 7));
}

}  // namespace
}  // namespace shardmesh
