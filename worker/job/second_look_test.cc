#include "worker/job/second_look.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <new>

namespace shardmesh {
namespace {

struct SecondLookTest : ::testing::Test {
  void SetUp() override {
    child = fork();
    if (child == 0) {
      while (true) pause();
    }
  }
  void TearDown() override {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  ControlBlock control{};
  pid_t child = 0;
};

TEST_F(SecondLookTest, AProcessThatLivesOn_StepsLookFromTheBeginning_AndGoOn) {
  for (uint32_t sessions = 1; sessions <= 2; ++sessions) {
    const SecondLook look(control, child);
    EXPECT_EQ(control.looks_again.load(), sessions);
  }
  EXPECT_EQ(control.looks_again.load(), 2u);
}

TEST_F(SecondLookTest, AProcessThatEndsAMomentLater_StepsLookNoMore) {
  {
    const SecondLook look(control, child);
    EXPECT_EQ(control.looks_again.load(), 1u);
    kill(child, SIGKILL);
  }
  EXPECT_EQ(control.looks_again.load(), 0u);
  { const SecondLook look(control, child); }  // ended, and not waited for by its parent
  EXPECT_EQ(control.looks_again.load(), 0u);
}

TEST_F(SecondLookTest, AProcessThatIsNotSeenFromHere_CountsAsAlive) {
  { const SecondLook look(control, 0); }
  EXPECT_EQ(control.looks_again.load(), 1u);
}

}  // namespace
}  // namespace shardmesh
