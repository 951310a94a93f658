// What a waiting session is told of the other trainers.
#include "worker/doors/trainer_watch.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "worker/lead/step_mail.h"
#include "worker/testing/step_fixture.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using State = v1::AwaitedTrainer;

constexpr uint64_t kHolder = uint64_t{1} << 32 | 7;

struct TrainerWatchTest : StepFixture {
  TrainerWatchTest() { PlaceWeights(); }

  void Attach(int slot, int64_t pid) {
    ASSERT_OK(protocol.slots().Take(Slot(slot), kHolder));
    host.control()->slots[slot].holder_pid.store(pid);
  }
  void Leave(int slot) { GiveSlotsBack(protocol, {slot}, kHolder, stop); }

  static std::vector<int> StatesOf(const v1::TrainerReply& reply) {
    std::vector<int> states;
    for (const State& each : reply.awaited()) states.push_back(each.state());
    return states;
  }

  const std::atomic<bool> stop{false};
};

TEST_F(TrainerWatchTest, OneThatLeftBeforeTheSessionBegan_IsAbsent_OneThatLeftSince_HasLeft) {
  Attach(0, 0);
  Attach(1, 0);
  Leave(1);
  const TrainerWatch watch(protocol);
  v1::TrainerReply reply;
  EXPECT_FALSE(watch.Tell(protocol, reply));
  EXPECT_THAT(StatesOf(reply), ElementsAre(State::ATTACHED, State::ABSENT, State::ABSENT));

  Leave(0);
  Attach(2, 0);
  v1::TrainerReply later;
  EXPECT_TRUE(watch.Tell(protocol, later));
  EXPECT_THAT(StatesOf(later), ElementsAre(State::LEFT, State::ABSENT, State::ATTACHED));
  Attach(0, 0);  // another one in its place
  v1::TrainerReply again;
  EXPECT_FALSE(watch.Tell(protocol, again));
}

TEST_F(TrainerWatchTest, SlotThatIsComplete_IsNotWaitedFor) {
  const TrainerWatch watch(protocol);
  Attach(0, 0);
  GradientShards(1, 1);
  ASSERT_OK(Declare({Slot(1)}, 1));
  Leave(0);
  v1::TrainerReply reply;
  EXPECT_TRUE(watch.Tell(protocol, reply));
  ASSERT_EQ(reply.awaited_size(), 2);
  EXPECT_EQ(reply.awaited(0).slot(), 0);
  EXPECT_EQ(reply.awaited(1).slot(), 2);
}

TEST_F(TrainerWatchTest, StoppedProcess_IsToldAsStopped) {
  const pid_t child = fork();
  if (child == 0) {
    raise(SIGSTOP);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
  Attach(0, child);
  v1::TrainerReply reply;
  EXPECT_FALSE(TrainerWatch(protocol).Tell(protocol, reply));
  EXPECT_EQ(reply.awaited(0).state(), State::STOPPED);
  EXPECT_EQ(reply.awaited(0).pid(), child);
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
}

}  // namespace
}  // namespace shardmesh
