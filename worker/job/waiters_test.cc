#include "worker/job/waiters.h"

#include <atomic>
#include <thread>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

struct Counted final : Waiter {
  explicit Counted(const std::atomic<bool>& ready) : ready(ready) {}
  bool Try() override {
    tries.fetch_add(1);
    return ready.load();
  }
  const std::atomic<bool>& ready;
  std::atomic<int> tries{0};
};

TEST(WaitersTest, KeptUntilAnswered) {
  std::atomic<bool> ready{false};
  Waiters waiters;
  const auto waiter = std::make_shared<Counted>(ready);
  waiters.Add(waiter);
  EXPECT_EQ(waiter->tries.load(), 1);
  EXPECT_EQ(waiter.use_count(), 2);
  waiters.Notify();
  EXPECT_EQ(waiter->tries.load(), 2);
  ready.store(true);
  waiters.Notify();
  EXPECT_EQ(waiter->tries.load(), 3);
  EXPECT_EQ(waiter.use_count(), 1);  // forgotten
  waiters.Notify();
  EXPECT_EQ(waiter->tries.load(), 3);
}

TEST(WaitersTest, AnsweredAtOnce_IsNotKept) {
  std::atomic<bool> ready{true};
  Waiters waiters;
  const auto waiter = std::make_shared<Counted>(ready);
  waiters.Add(waiter);
  EXPECT_EQ(waiter.use_count(), 1);
}

// A waiter that adds another one while it is tried: no lock is held.
TEST(WaitersTest, MayAddOthersWhileTried) {
  struct Adder final : Waiter {
    bool Try() override {
      waiters->Add(next);
      return true;
    }
    Waiters* waiters;
    std::shared_ptr<Waiter> next;
  };
  std::atomic<bool> ready{false};
  Waiters waiters;
  const auto next = std::make_shared<Counted>(ready);
  const auto adder = std::make_shared<Adder>();
  adder->waiters = &waiters;
  adder->next = next;
  waiters.Add(adder);
  waiters.Notify();
  EXPECT_EQ(next->tries.load(), 2);
}

// A change that comes while Add tries, after the waiter has looked: its Notify finds the waiter.
TEST(WaitersTest, ChangeDuringAdd_IsNotMissed) {
  struct LooksEarly final : Waiter {
    bool Try() override {
      if (++tries > 1) return true;
      waiters->Notify();
      return false;
    }
    Waiters* waiters;
    int tries = 0;
  };
  Waiters waiters;
  const auto waiter = std::make_shared<LooksEarly>();
  waiter->waiters = &waiters;
  waiters.Add(waiter);
  EXPECT_EQ(waiter->tries, 2);
  EXPECT_EQ(waiter.use_count(), 1);
}

TEST(WaitersTest, AddAndNotifyAtOnce_AnswersAll) {
  for (int round = 0; round < 300; ++round) {
    std::atomic<bool> ready{false};
    Waiters waiters;
    std::vector<std::shared_ptr<Counted>> all;
    for (int i = 0; i < 8; ++i) all.push_back(std::make_shared<Counted>(ready));
    std::thread adder([&] {
      for (const auto& waiter : all) waiters.Add(waiter);
    });
    ready.store(true);
    waiters.Notify();
    adder.join();
    for (const auto& waiter : all) ASSERT_EQ(waiter.use_count(), 1) << "round " << round;
  }
}

}  // namespace
}  // namespace shardmesh
