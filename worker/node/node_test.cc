// shardmesh-node with real processes, and real kills; its worker is the fake one.
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/matchers.h"
#include "local/process/child_process.h"
#include "local/testing/temp_folder.h"
#include "worker/node/testing/await.h"
#include "worker/node/testing/fake_worker.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

// A process that need not be this one's child.
class Process {
 public:
  explicit Process(pid_t pid) : pid_(pid), pidfd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}
  bool Runs() const {
    pollfd ended = {pidfd_.get(), POLLIN, 0};
    return pidfd_.valid() && poll(&ended, 1, 0) == 0;
  }
  void Kill(int signal = SIGKILL) const {
    if (pidfd_.valid()) syscall(SYS_pidfd_send_signal, pidfd_.get(), signal, nullptr, 0);
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
  UniqueFd pidfd_;
};

struct NodeTest : ::testing::Test {
  // What a test that failed has left.
  ~NodeTest() override {
    node.reset();
    for (const char* const name : {"w-0", "w-1"}) {
      for (const FakeIncarnation& incarnation : FakeIncarnations(folder.path(), name)) {
        std::error_code error;
        const auto program = std::filesystem::read_symlink(absl::StrCat("/proc/", incarnation.pid, "/exe"), error);
        if (program.filename() == "fake_worker") kill(incarnation.pid, SIGKILL);
      }
    }
  }

  void Start(int workers, std::vector<std::string> more = {}) {
    std::vector<std::string> args = {"--coordinator", "host:1", "--workers", absl::StrCat(workers), "--name", prefix};
    args.insert(args.end(), {"--worker-binary", binary, "--local-dir", folder.path()});
    args.insert(args.end(), {"--log-dir", folder.File("logs")});
    args.insert(args.end(), more.begin(), more.end());
    auto started = ChildProcess::Start({"node", "worker/shardmesh-node", args, folder.File("node.log")});
    ASSERT_OK(started);
    node = *std::move(started);
  }
  std::string Contents(const std::string& file) const {
    std::ostringstream text;
    text << std::ifstream(folder.File(file)).rdbuf();
    return text.str();
  }
  std::string Log() const { return Contents("node.log"); }
  // A line that has all these words.
  bool Logs(const std::vector<std::string>& words) const {
    for (const absl::string_view line : absl::StrSplit(Log(), '\n')) {
      bool all = true;
      for (const std::string& word : words) all = all && absl::StrContains(absl::StrCat(line, " "), word + " ");
      if (all) return true;
    }
    return false;
  }
  std::vector<FakeIncarnation> Incarnations(const std::string& worker) const {
    return FakeIncarnations(folder.path(), worker);
  }
  bool Reaches(const std::string& worker, size_t incarnations) const {
    const bool reached = Await([&] { return Incarnations(worker).size() >= incarnations; });
    EXPECT_TRUE(reached) << Log();
    return reached;
  }
  Process Current(const std::string& worker) const { return Process(Incarnations(worker).back().pid); }
  // The node's status.
  int StopNode() {
    node->Signal(SIGTERM);
    return EndOfNode();
  }
  int EndOfNode() {
    EXPECT_TRUE(Await([&] { return node->Ended().has_value(); })) << Log();
    return node->Ended().value_or(-1);
  }

  const testing::TempFolder folder;
  std::string prefix = "w", binary = kFakeWorker;
  std::unique_ptr<ChildProcess> node;
};

TEST_F(NodeTest, WorkerKilled_IsStartedAgainAtOnce_AndFindsItsBytes) {
  Start(2, {"--", "--threads", "3"});
  ASSERT_TRUE(Reaches("w-0", 1) && Reaches("w-1", 1));
  for (int incarnation = 1; incarnation <= 3; ++incarnation) {
    const Process worker = Current("w-1");
    worker.Kill();
    ASSERT_TRUE(Reaches("w-1", incarnation + 1));
    EXPECT_TRUE(Logs({absl::StrCat("pid=", worker.pid()), "event=worker_ended", "worker=w-1", "signal=KILL",
                      "served=true", "restart_ms=0"}))
        << Log();
    const FakeIncarnation next = Incarnations("w-1").back();
    EXPECT_EQ(next.incarnation, incarnation + 1);  // counted in the memory
    EXPECT_GT(next.last_incarnation, 0);
    EXPECT_EQ(next.last_address, "address-of-w-1");
  }
  EXPECT_TRUE(Logs({"event=worker_started", "worker=w-1"}));
  EXPECT_TRUE(Logs({"event=worker_restarted", "worker=w-1"}));
  EXPECT_EQ(Incarnations("w-0").size(), 1u);
  EXPECT_EQ(Incarnations("w-0")[0].arguments,
            absl::StrCat("--name,w-0,--node,", folder.path(), "/node.sock,--heartbeats,unix:", folder.path(),
                         "/node.sock.relay,--coordinator,host:1,--local-dir,", folder.path(), ",--threads,3"));
  EXPECT_EQ(StopNode(), 0);
}

TEST_F(NodeTest, EventsDevicesAndAddresses) {
  Start(2, {"--events", folder.File("events"), "--device", "cuda:0,cuda:7", "--address-dir", folder.File("at")});
  ASSERT_TRUE(Reaches("w-0", 1) && Reaches("w-1", 1));
  const Process killed = Current("w-1");
  killed.Kill();
  ASSERT_TRUE(Reaches("w-1", 2));
  const pid_t other = Current("w-0").pid(), next = Current("w-1").pid();
  EXPECT_THAT(Incarnations("w-0")[0].arguments,
              HasSubstr(absl::StrCat(",--address-file,", folder.File("at/w-0"), ",--device,cuda:0")));
  EXPECT_THAT(Incarnations("w-1")[1].arguments, HasSubstr("at/w-1,--device,cuda:7"));
  EXPECT_TRUE(std::filesystem::is_directory(folder.File("at")));
  EXPECT_EQ(StopNode(), 0);
  const std::vector<std::string> lines = absl::StrSplit(Contents("events"), '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 6u) << Contents("events");
  EXPECT_EQ(lines[0], absl::StrCat("started w-0 pid ", other));
  EXPECT_EQ(lines[1], absl::StrCat("started w-1 pid ", killed.pid()));
  EXPECT_EQ(lines[2], absl::StrCat("ended w-1 pid ", killed.pid(), " signal KILL"));
  EXPECT_EQ(lines[3], absl::StrCat("started w-1 pid ", next));
  EXPECT_THAT((std::vector<std::string>{lines[4], lines[5]}),
              ::testing::UnorderedElementsAre(absl::StrCat("ended w-0 pid ", other, " status 0"),
                                              absl::StrCat("ended w-1 pid ", next, " status 0")));
}

TEST_F(NodeTest, NodeKilled_WorkersLiveOn_AndTheNextNodeHasTheirMemory) {
  Start(2);
  ASSERT_TRUE(Reaches("w-0", 1) && Reaches("w-1", 1));
  const Process lives_on = Current("w-0"), dies_too = Current("w-1");
  node->Signal(SIGKILL);
  EndOfNode();
  dies_too.Kill();
  ASSERT_TRUE(Await([&] { return !dies_too.Runs(); }));
  Start(2);
  ASSERT_TRUE(Await([&] {
    return Logs({"event=worker_adopted", "worker=w-0", absl::StrCat("pid=", lives_on.pid())});
  })) << Log();
  ASSERT_TRUE(Reaches("w-1", 2));
  EXPECT_TRUE(lives_on.Runs());
  EXPECT_EQ(Incarnations("w-0").size(), 1u);
  EXPECT_EQ(Incarnations("w-1").back().incarnation, 1);  // nobody had its memory

  // Once its link has told the new node everything.
  ASSERT_TRUE(Await([&] { return absl::StrContains(Contents("logs/w-0.log"), "event=node_back worker=w-0"); }));
  lives_on.Kill();
  ASSERT_TRUE(Reaches("w-0", 2));
  EXPECT_EQ(Incarnations("w-0").back().incarnation, 2) << Log();
  EXPECT_TRUE(Logs({"event=worker_ended", "worker=w-0", "status=unknown", "restart_ms=0"})) << Log();
  EXPECT_EQ(StopNode(), 0);
}

TEST_F(NodeTest, AdoptedWorkers_StopWithTheNode) {
  Start(2);
  ASSERT_TRUE(Reaches("w-0", 1) && Reaches("w-1", 1));
  const Process a = Current("w-0"), b = Current("w-1");
  node->Signal(SIGKILL);
  EndOfNode();
  Start(2);
  ASSERT_TRUE(Await([&] {
    return Logs({"event=worker_adopted", "worker=w-0"}) && Logs({"event=worker_adopted", "worker=w-1"});
  })) << Log();
  EXPECT_TRUE(a.Runs() && b.Runs());
  EXPECT_EQ(StopNode(), 0);
  EXPECT_FALSE(a.Runs() || b.Runs());
}

TEST_F(NodeTest, WorkersThatLeave_AreNotStartedAgain_AndTheNodeEnds) {
  Start(2, {"--", "--leave"});
  EXPECT_EQ(EndOfNode(), 0);
  EXPECT_TRUE(Logs({"event=worker_ended", "worker=w-0", "status=0", "restart_ms=none"})) << Log();
  EXPECT_TRUE(Logs({"event=all_workers_left"})) << Log();
  EXPECT_FALSE(absl::StrContains(Log(), "worker_restarted")) << Log();
  EXPECT_EQ(Incarnations("w-0").size(), 1u);
  EXPECT_EQ(Incarnations("w-1").size(), 1u);
}

TEST_F(NodeTest, WorkerThatEndsBeforeItServes_IsStartedLaterAndLater) {
  Start(1, {"--", "--crash-before-serving"});
  for (const char* const wait : {"restart_ms=100", "restart_ms=200", "restart_ms=400"}) {
    EXPECT_TRUE(Await([&] { return Logs({"event=worker_ended", "status=1", "served=false", wait}); })) << Log();
  }
  EXPECT_EQ(StopNode(), 0);
}

TEST_F(NodeTest, Stop_WorkersEndInOrder_AndTheStubbornAreKilled) {
  Start(1, {"--stop-grace", "0.5", "--", "--stubborn"});
  ASSERT_TRUE(Reaches("w-0", 1));
  const Process stubborn = Current("w-0");
  EXPECT_EQ(StopNode(), 0);
  EXPECT_FALSE(stubborn.Runs());
  EXPECT_TRUE(Logs({"event=worker_ended", "signal=KILL", "restart_ms=none"})) << Log();
  EXPECT_FALSE(std::filesystem::exists(folder.File("node.sock")));

  Start(1);
  ASSERT_TRUE(Reaches("w-0", 2));
  EXPECT_EQ(Incarnations("w-0").back().incarnation, 1);  // the first node's memory went with it
  EXPECT_EQ(StopNode(), 0);
  EXPECT_TRUE(Logs({"event=worker_ended", "status=0", "restart_ms=none"})) << Log();
}

TEST_F(NodeTest, WrongFlags_AreNamed) {
  binary = "/nonexistent/worker";
  Start(1);
  EXPECT_EQ(WEXITSTATUS(EndOfNode()), 1);
  EXPECT_THAT(Log(), HasSubstr("/nonexistent/worker"));
  EXPECT_THAT(Log(), HasSubstr("--worker-binary"));
  Start(0);
  EXPECT_EQ(WEXITSTATUS(EndOfNode()), 2);
  prefix = "no name";
  Start(1);
  EXPECT_EQ(WEXITSTATUS(EndOfNode()), 1);
  EXPECT_THAT(Log(), HasSubstr("--name"));
}

TEST_F(NodeTest, SecondNodeAtOneSocket_IsRefused) {
  Start(1);
  ASSERT_TRUE(Reaches("w-0", 1));
  const auto first = std::move(node);
  Start(1);
  EXPECT_EQ(WEXITSTATUS(EndOfNode()), 1);
  EXPECT_THAT(Log(), HasSubstr("a live process listens at"));
  node.reset();
  first->Signal(SIGTERM);
  EXPECT_TRUE(Await([&] { return first->Ended().has_value(); }));
  EXPECT_EQ(Incarnations("w-0").size(), 1u);
}

}  // namespace
}  // namespace shardmesh
