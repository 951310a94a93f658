// NodeLink and RetainedMemory against a NodeServer, over a real socket. An incarnation that is killed is a process of
// its own.
#include "worker/node/node_link.h"

#include <atomic>
#include <csignal>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/incarnation.h"
#include "core/base/matchers.h"
#include "core/base/sync.h"
#include "local/process/child_process.h"
#include "local/testing/temp_folder.h"
#include "worker/node/node_server.h"
#include "worker/node/retained_memory.h"
#include "worker/node/testing/await.h"
#include "worker/node/testing/fake_worker.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBytes = 1 << 20;
constexpr int64_t kNewer = kMaxIncarnation;  // than any incarnation of a fake worker

struct NodeLinkTest : ::testing::Test {
  NodeLinkTest() { StartNode(); }

  void StartNode() {
    NodeEvents events;
    events.came = [](const std::string&, pid_t) {};
    events.ended = [this](const WorkerEnd& end) {
      MutexLock lock(mu);
      ends.push_back(end);
    };
    absl::StatusOr<std::unique_ptr<NodeServer>> started = NodeServer::Start(path, std::move(events));
    ASSERT_OK(started);
    node = *std::move(started);
  }
  // A new one that knows nothing, as after the death of a node.
  void ReplaceNode() {
    node.reset();
    StartNode();
  }
  std::unique_ptr<NodeLink> Link(const std::string& worker, int64_t incarnation) {
    auto link = NodeLink::Connect(path, worker, incarnation, [this] { changes.fetch_add(1); });
    EXPECT_OK(link);
    return link.ok() ? *std::move(link) : nullptr;
  }
  // An incarnation of the fake worker "w", up to where it serves (or closed its link, or left).
  std::unique_ptr<ChildProcess> Live(std::vector<std::string> args = {}) {
    const size_t before = FakeIncarnations(folder.path(), "w").size();
    args.insert(args.begin(), {"--name", "w", "--node", path, "--local-dir", folder.path()});
    auto incarnation = ChildProcess::Start({"w", kFakeWorker, args, ""});
    EXPECT_OK(incarnation);
    if (!incarnation.ok()) return nullptr;
    EXPECT_TRUE(Await([&] { return FakeIncarnations(folder.path(), "w").size() > before; }));
    return *std::move(incarnation);
  }
  void LiveAndDie() {
    const auto incarnation = Live();
    ASSERT_NE(incarnation, nullptr);
    kill(incarnation->pid(), SIGKILL);
    ASSERT_TRUE(Await([&] { return EndOf(incarnation->pid()).has_value(); }));
    EXPECT_EQ(EndOf(incarnation->pid())->worker, "w");
    EXPECT_EQ(EndOf(incarnation->pid())->wait_status, SIGKILL);
    EXPECT_TRUE(EndOf(incarnation->pid())->served);
  }
  std::optional<WorkerEnd> EndOf(pid_t pid) {
    MutexLock lock(mu);
    for (const WorkerEnd& end : ends) {
      if (end.pid == pid) return end;
    }
    return std::nullopt;
  }

  const testing::TempFolder folder;
  const std::string path = folder.File("node.sock");
  Mutex mu;
  std::vector<WorkerEnd> ends ABSL_GUARDED_BY(mu);
  std::atomic<int> changes{0};
  std::unique_ptr<NodeServer> node;
};

bool GiveJob(NodeLink* link, char byte) {
  if (link == nullptr) return false;
  RetainedMemory memory(*link, "job", 3, false);
  const absl::StatusOr<Segment> segment = memory.Open("weights", kBytes, 4096);
  if (!segment.ok()) return false;
  std::memset(segment->data(), byte, segment->data_bytes());
  return link->Serve("host:1", "/sock").ok() && link->Whole({"job", 3, 5, "hash"}).ok();
}

bool AllAre(const Segment& segment, char byte, int64_t begin = 0) {
  for (int64_t i = begin; i < segment.data_bytes(); ++i) {
    if (segment.data()[i] != byte) return false;
  }
  return true;
}

TEST_F(NodeLinkTest, WorkerKilled_NextIncarnationFindsItsMemoryWithItsBytes) {
  LiveAndDie();
  const auto link = Link("w", kNewer);
  EXPECT_GT(link->left().incarnation, 0);
  EXPECT_EQ(link->left().address, "address-of-w");
  EXPECT_EQ(link->left().local_socket, "socket-of-w");
  ASSERT_EQ(link->left().jobs.size(), 1u);
  EXPECT_EQ(link->left().jobs[0].job, "job");
  EXPECT_EQ(link->left().jobs[0].epoch, 1);
  EXPECT_EQ(link->left().jobs[0].rank, 5);
  EXPECT_EQ(link->left().jobs[0].plan_hash, "plan");
  RetainedMemory memory(*link, "job", 1, true);
  ASSERT_OK_AND_ASSIGN(const Segment segment, memory.Open("memory-w", kFakeBytes, kFakeOffset));
  EXPECT_EQ(*reinterpret_cast<int*>(segment.data()), 1);
  EXPECT_TRUE(AllAre(segment, 'A', sizeof(int)));
  segment.data()[0] = 2;  // and may write it
}

TEST_F(NodeLinkTest, TakenOver_ByAnotherBuild_IsRefusedWithBothSizes) {
  LiveAndDie();
  const auto link = Link("w", kNewer);
  RetainedMemory memory(*link, "job", 1, true);
  EXPECT_THAT(memory.Open("memory-w", kFakeBytes + 1, kFakeOffset),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       ::testing::AllOf(HasSubstr("65536"), HasSubstr("65537"), HasSubstr("one build"))));
  EXPECT_THAT(memory.Open("memory-w", kFakeBytes, 0),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("data from 64")));
  EXPECT_THAT(memory.Open("moments", kFakeBytes, 0),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("moments of job@1")));
}

TEST_F(NodeLinkTest, ProcessThatExitsWithZero_LeavesNothing) {
  const auto incarnation = Live({"--leave"});
  ASSERT_NE(incarnation, nullptr);
  ASSERT_TRUE(Await([&] { return EndOf(incarnation->pid()).has_value(); }));
  EXPECT_EQ(EndOf(incarnation->pid())->wait_status, 0);
  const auto link = Link("w", kNewer);
  EXPECT_EQ(link->left().incarnation, 0);
  EXPECT_THAT(link->Find("job", 1, "memory-w"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("memory-w")));
}

TEST_F(NodeLinkTest, ConnectionThatCloses_DoesNotEndTheWorker) {
  const auto incarnation = Live({"--close-link"});
  ASSERT_NE(incarnation, nullptr);
  EXPECT_THAT(NodeLink::Connect(path, "w", kNewer, nullptr),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr(absl::StrCat("process ", incarnation->pid()))));
  EXPECT_FALSE(EndOf(incarnation->pid()).has_value());
  // Not the node's notice of the end is waited for: the next incarnation may come the moment the last one is gone.
  kill(incarnation->pid(), SIGKILL);
  ASSERT_TRUE(Await([&] { return incarnation->Ended().has_value(); }));
  EXPECT_GT(Link("w", kNewer)->left().incarnation, 0);
}

TEST_F(NodeLinkTest, NodeDiesAndIsBack_ItIsToldEverythingAnew) {
  const auto link = Link("w", 7);
  ASSERT_TRUE(GiveJob(link.get(), 'A'));
  node.reset();
  ASSERT_TRUE(Await([&] { return !link->connected(); }));
  RetainedMemory later(*link, "later", 1, false);
  ASSERT_OK_AND_ASSIGN(const Segment given_later, later.Open("weights", kBytes, 0));
  std::memset(given_later.data(), 'L', given_later.data_bytes());
  EXPECT_THAT(link->Whole({"later", 1, 0, ""}), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("node.sock")));
  EXPECT_THAT(link->Find("job", 3, "weights"), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("not connected")));
  StartNode();
  ASSERT_TRUE(Await([&] { return link->connected(); }));
  EXPECT_TRUE(Await([&] { return changes.load() == 2; }));

  const auto other = Link("other", 1);
  ASSERT_OK_AND_ASSIGN(const Segment found, other->Find("job", 3, "weights"));
  EXPECT_TRUE(AllAre(found, 'A'));
  ASSERT_OK_AND_ASSIGN(const Segment found_later, other->Find("later", 1, "weights"));
  EXPECT_TRUE(AllAre(found_later, 'L'));
  const auto next = Link("w", 8);  // of the same process, which stands for a killed one
  EXPECT_EQ(next->left().incarnation, 7);
  EXPECT_EQ(next->left().address, "host:1");
  EXPECT_EQ(next->left().jobs.size(), 2u);
}

TEST_F(NodeLinkTest, WhatWasTakenOver_IsGivenToTheNextNodeToo) {
  LiveAndDie();
  const auto link = Link("w", kNewer);
  RetainedMemory memory(*link, "job", 1, true);
  ASSERT_OK(memory.Open("memory-w", kFakeBytes, kFakeOffset));
  ReplaceNode();
  ASSERT_TRUE(Await([&] { return changes.load() == 2 && link->connected(); }));
  ASSERT_OK_AND_ASSIGN(const Segment found, Link("other", 1)->Find("job", 1, "memory-w"));
  EXPECT_TRUE(AllAre(found, 'A', sizeof(int)));
}

TEST_F(NodeLinkTest, Drop_IsOfThisNodeAndOfTheNext) {
  const auto link = Link("w", 7);
  ASSERT_TRUE(GiveJob(link.get(), 'A'));
  RetainedMemory stays(*link, "stays", 1, false);
  ASSERT_OK(stays.Open("weights", kBytes, 0));
  const auto other = Link("other", 1);
  EXPECT_OK(other->Find("job", 3, "weights"));
  link->Drop("job", 3);
  EXPECT_THAT(other->Find("job", 3, "weights"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("job@3")));
  ReplaceNode();
  ASSERT_TRUE(Await([&] { return changes.load() == 4 && link->connected() && other->connected(); }));
  EXPECT_THAT(other->Find("job", 3, "weights"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("job@3")));
  EXPECT_OK(other->Find("stays", 1, "weights"));
  EXPECT_TRUE(Link("w", 8)->left().jobs.empty());
}

TEST_F(NodeLinkTest, RefusedByTheNode_IsAnErrorOfOpen_AndNotTriedAgain) {
  const auto link = Link("w", 7);
  RetainedMemory memory(*link, "job", 1, false);
  EXPECT_THAT(memory.Open(std::string(200, 'n'), kBytes, 0),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("200 bytes")));
  ReplaceNode();
  ASSERT_TRUE(Await([&] { return changes.load() == 2 && link->connected(); }));
  EXPECT_OK(memory.Open("n", kBytes, 0));
}

TEST_F(NodeLinkTest, NoNode_IsUnavailable) {
  node.reset();
  EXPECT_THAT(NodeLink::Connect(path, "w", 7, nullptr), StatusIs(absl::StatusCode::kUnavailable, HasSubstr(path)));
}

TEST_F(NodeLinkTest, ManyThreads_GiveAndDrop_WhileNodesComeAndGo) {
  const auto link = Link("w", 7);
  constexpr int kThreads = 3, kRounds = 20;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&link, t] {
      const std::string job = absl::StrCat("job-", t);
      for (int round = 0; round < kRounds; ++round) {
        RetainedMemory memory(*link, job, round, false);
        EXPECT_OK(memory.Open("a", 4096, 0));
        EXPECT_OK(memory.Open("b", 4096, 0));
        link->Whole({job, round, t, ""}).IgnoreError();
        if (round + 1 < kRounds) link->Drop(job, round);
      }
    });
  }
  for (int i = 0; i < 3; ++i) ReplaceNode();
  for (std::thread& thread : threads) thread.join();
  // The last node knows the last round of each, and nothing else.
  const auto other = Link("other", 1);
  for (int t = 0; t < kThreads; ++t) {
    const std::string job = absl::StrCat("job-", t);
    EXPECT_TRUE(Await([&] { return other->Find(job, kRounds - 1, "b").ok(); }));
    EXPECT_FALSE(other->Find(job, 0, "a").ok());
    EXPECT_FALSE(other->Find(job, kRounds - 2, "a").ok());
  }
  ASSERT_TRUE(Await([&] { return link->connected(); }));
  EXPECT_EQ(Link("w", 8)->left().jobs.size(), static_cast<size_t>(kThreads));
}

}  // namespace
}  // namespace shardmesh
