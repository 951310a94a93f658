#include "worker/relay/heartbeat_relay.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/clock.h"
#include "core/base/incarnation.h"
#include "core/base/matchers.h"
#include "core/base/sync.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;
using Told = absl::StatusOr<v1::HeartbeatReply>;

// A coordinator: it answers each heartbeat with an assignment of the worker's name, and one that it knows with `same`.
class FakeLink final : public HostsLink {
 public:
  struct Seen {
    bool anew = false;
    std::vector<std::string> workers;  // "2 w1", "2" where it is as before, or "again" for all
  };
  // What tests share with the link, which the relay owns.
  struct State {
    Mutex mu;
    CondVar changed;
    std::vector<Seen> seen ABSL_GUARDED_BY(mu);
    std::vector<absl::Status> ends ABSL_GUARDED_BY(mu);  // of the next exchanges; then all are well
    bool held ABSL_GUARDED_BY(mu) = false;
    int forgets ABSL_GUARDED_BY(mu) = 0;  // answers of the next reply that it leaves out
    absl::Status refuses ABSL_GUARDED_BY(mu);
    bool keeps_none ABSL_GUARDED_BY(mu) = false;
    bool takes_again ABSL_GUARDED_BY(mu) = false;
    int64_t skip_within_ms ABSL_GUARDED_BY(mu) = 0;
    bool stands ABSL_GUARDED_BY(mu) = true;
    bool news ABSL_GUARDED_BY(mu) = false;  // the answer to the next one that is `again` is not the same

    std::vector<Seen> Await(size_t messages) {
      MutexLock lock(mu);
      while (seen.size() < messages) changed.WaitFor(mu, absl::Seconds(1));
      return seen;
    }
    void Hold(bool hold) {
      {
        MutexLock lock(mu);
        held = hold;
      }
      changed.SignalAll();
    }
  };

  explicit FakeLink(State& state) : state_(state) {}

  absl::StatusOr<v1::HostHeartbeatReplies> Exchange(const v1::HostHeartbeats& message, bool anew) override {
    MutexLock lock(state_.mu);
    if (anew) known_.clear();
    Seen seen;
    seen.anew = anew;
    v1::HostHeartbeatReplies replies;
    if (message.again()) {
      EXPECT_EQ(message.workers_size(), 0);
      seen.workers.push_back("again");
      replies.set_same(!std::exchange(state_.news, false));
      for (size_t i = 0; i < last_.size() && !replies.same(); ++i) {
        v1::HostHeartbeatReplies::Answer& answer = *replies.add_answers();
        answer.mutable_reply()->add_assignments()->mutable_spec()->set_name(absl::StrCat("news of ", last_[i]));
        answer.set_kept(true);
      }
    } else {
      last_.clear();
      for (const v1::HostHeartbeats::Worker& worker : message.workers()) last_.push_back(worker.place());
    }
    for (const v1::HostHeartbeats::Worker& worker : message.workers()) {
      const std::string& name = worker.heartbeat().name();
      seen.workers.push_back(worker.has_heartbeat() ? absl::StrCat(worker.place(), " ", name)
                                                    : absl::StrCat(worker.place()));
      v1::HostHeartbeatReplies::Answer& answer = *replies.add_answers();
      if (!worker.has_heartbeat()) {
        EXPECT_TRUE(known_.count(worker.place()) > 0) << "place " << worker.place() << " has none";
        answer.set_same(true);
      } else if (!state_.refuses.ok()) {
        answer.set_code(static_cast<int>(state_.refuses.code()));
        answer.set_message(std::string(state_.refuses.message()));
        answer.set_next_incarnation(NextIncarnationOf(state_.refuses).value_or(0));
      } else {
        answer.mutable_reply()->add_assignments()->mutable_spec()->set_name(name);
      }
      answer.set_kept(answer.code() == 0 && !state_.keeps_none);
      if (worker.has_heartbeat()) known_[worker.place()] = name;
    }
    for (; state_.forgets > 0; --state_.forgets) replies.mutable_answers()->RemoveLast();
    replies.set_takes_again(state_.takes_again);
    replies.set_skip_within_ms(state_.skip_within_ms);
    state_.seen.push_back(std::move(seen));
    state_.changed.SignalAll();
    while (state_.held) state_.changed.WaitFor(state_.mu, absl::Seconds(1));
    if (state_.ends.empty()) return replies;
    const absl::Status end = state_.ends.front();
    state_.ends.erase(state_.ends.begin());
    if (end.ok()) return replies;
    return end;
  }

  bool Stands() override {
    MutexLock lock(state_.mu);
    return state_.stands;
  }

 private:
  State& state_;
  std::map<int, std::string> known_;
  std::vector<int> last_;
};

class RelayTest : public ::testing::Test {
 protected:
  // Waits for all workers that it knows.
  static HeartbeatRelayOptions Patient() {
    HeartbeatRelayOptions options;
    options.wait = options.wait_with_news = absl::Seconds(600);
    options.hurry = absl::ZeroDuration();
    return options;
  }
  void Start(const HeartbeatRelayOptions& options) {
    relay_ = std::make_unique<HeartbeatRelay>(std::make_unique<FakeLink>(state_), options);
  }
  std::future<Told> Take(const std::string& name, int64_t step = 0) {
    v1::HeartbeatRequest heartbeat;
    heartbeat.set_name(name);
    heartbeat.set_incarnation(step + 1);
    auto promise = std::make_shared<std::promise<Told>>();
    std::future<Told> told = promise->get_future();
    relay_->Take(heartbeat, [promise](Told answer) { promise->set_value(std::move(answer)); });
    return told;
  }
  // Those wait while the link is held, and go in one message after it.
  std::vector<Told> TakeTogether(const std::vector<std::string>& names, int64_t step = 0) {
    state_.Hold(true);
    const size_t before = Messages();
    std::future<Told> first = Take(names[0], step);
    state_.Await(before + 1);
    std::vector<std::future<Told>> rest;
    for (size_t i = 1; i < names.size(); ++i) rest.push_back(Take(names[i], step));
    state_.Hold(false);
    std::vector<Told> told = {first.get()};
    for (std::future<Told>& one : rest) told.push_back(one.get());
    return told;
  }
  // All that it knows, so that they go in one message: what each is told.
  std::vector<std::string> TakeAll(const std::vector<std::string>& names, int64_t step = 0) {
    std::vector<std::future<Told>> all;
    for (const std::string& name : names) all.push_back(Take(name, step));
    std::vector<std::string> told;
    for (std::future<Told>& one : all) told.push_back(NameIn(one.get()));
    return told;
  }
  size_t Messages() {
    MutexLock lock(state_.mu);
    return state_.seen.size();
  }
  static std::string NameIn(const Told& told) { return told.ok() ? told->assignments(0).spec().name() : ""; }

  FakeLink::State state_;
  std::unique_ptr<HeartbeatRelay> relay_;
};

TEST_F(RelayTest, ThoseThatCameTogether_GoInOneMessage_AndEachGetsItsAnswer) {
  Start(Patient());
  const std::vector<Told> told = TakeTogether({"a", "b", "c", "d"});
  for (size_t i = 0; i < told.size(); ++i) EXPECT_EQ(NameIn(told[i]), std::string(1, static_cast<char>('a' + i)));
  const std::vector<FakeLink::Seen> seen = state_.Await(2);
  EXPECT_TRUE(seen[0].anew);
  EXPECT_THAT(seen[0].workers, ElementsAre("0 a"));
  EXPECT_FALSE(seen[1].anew);
  EXPECT_THAT(seen[1].workers, ElementsAre("1 b", "2 c", "3 d"));
  // From now on it waits for all of them.
  std::future<Told> c = Take("c");
  EXPECT_EQ(c.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  std::future<Told> b = Take("b"), d = Take("d", 1), a = Take("a");
  EXPECT_EQ(NameIn(a.get()), "a");
  EXPECT_EQ(NameIn(b.get()), "b");
  EXPECT_EQ(NameIn(c.get()), "c");
  EXPECT_EQ(NameIn(d.get()), "d");
  EXPECT_THAT(state_.Await(3)[2].workers, ElementsAre("0", "1", "2", "3 d"));
}

TEST_F(RelayTest, AllAreAsBefore_TheMessageSaysThatAlone) {
  Start(Patient());
  {
    MutexLock lock(state_.mu);
    state_.takes_again = true;
  }
  TakeTogether({"a", "b"});
  EXPECT_EQ(TakeAll({"a", "b"}), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(TakeAll({"b", "a"}), (std::vector<std::string>{"b", "a"})) << "in whatever order they come";
  {
    MutexLock lock(state_.mu);
    state_.news = true;
  }
  EXPECT_EQ(TakeAll({"a", "b"}), (std::vector<std::string>{"news of 0", "news of 1"}));
  EXPECT_EQ(TakeAll({"a", "b"}), (std::vector<std::string>{"news of 0", "news of 1"})) << "as they were told last";
  TakeAll({"a", "b"}, 1);
  std::vector<std::string> sent;
  for (const FakeLink::Seen& seen : state_.Await(7)) sent.push_back(absl::StrJoin(seen.workers, ","));
  // The second has b alone; then come both.
  EXPECT_THAT(sent, ElementsAre("0 a", "1 b", "0,1", "again", "again", "again", "0 a,1 b"));
}

class SkippingRelayTest : public RelayTest {
 protected:
  void SetUp() override {
    Start(Patient());
    SetSkip(60'000);
    {
      MutexLock lock(state_.mu);
      state_.takes_again = true;
    }
    TakeTogether(kBoth);
    EXPECT_EQ(TakeAll(kBoth), kBoth);
    seen_ = Messages();
  }
  void SetSkip(int64_t ms) {
    MutexLock lock(state_.mu);
    state_.skip_within_ms = ms;
  }
  static void LetPass(absl::Duration time) {
    for (const absl::Time until = MonotonicNow() + time; MonotonicNow() < until;) std::this_thread::yield();
  }
  // What was sent since.
  std::vector<std::string> Sent() {
    std::vector<std::string> sent;
    MutexLock lock(state_.mu);
    for (; seen_ < state_.seen.size(); ++seen_) sent.push_back(absl::StrJoin(state_.seen[seen_].workers, ","));
    return sent;
  }

  const std::vector<std::string> kBoth = {"a", "b"};
  size_t seen_ = 0;
};

TEST_F(SkippingRelayTest, EverySecondMessageThatSaysNothingNew_IsLeftOut) {
  for (int i = 0; i < 4; ++i) EXPECT_EQ(TakeAll(kBoth), kBoth);
  EXPECT_THAT(Sent(), ElementsAre("again", "again"));
}

TEST_F(SkippingRelayTest, News_IsSent_AndWhatFollowsItMayBeLeftOut) {
  EXPECT_EQ(TakeAll(kBoth, 1), kBoth);
  EXPECT_THAT(Sent(), ElementsAre("0 a,1 b"));
  EXPECT_EQ(TakeAll(kBoth, 1), kBoth);
  EXPECT_THAT(Sent(), ElementsAre());
  EXPECT_EQ(TakeAll(kBoth, 1), kBoth);
  EXPECT_THAT(Sent(), ElementsAre("again"));
}

TEST_F(SkippingRelayTest, WhoeverIsLeftOut_IsToldWhatItWasToldLast) {
  EXPECT_EQ(TakeAll(kBoth), kBoth);
  {
    MutexLock lock(state_.mu);
    state_.news = true;
  }
  const std::vector<std::string> news = {"news of 0", "news of 1"};
  EXPECT_EQ(TakeAll(kBoth), news);
  EXPECT_THAT(Sent(), ElementsAre("again"));
  EXPECT_EQ(TakeAll(kBoth), news);
  EXPECT_THAT(Sent(), ElementsAre());
}

TEST_F(SkippingRelayTest, NoneIsLeftOut_LongAfterTheLastOne_OrWhereTheCoordinatorDoesNotSaySo) {
  SetSkip(1);
  EXPECT_EQ(TakeAll(kBoth), kBoth);  // left out: that was not said yet
  for (int i = 0; i < 3; ++i) {
    LetPass(absl::Milliseconds(2));
    if (i == 2) SetSkip(0);
    EXPECT_EQ(TakeAll(kBoth), kBoth);
  }
  for (int i = 0; i < 2; ++i) EXPECT_EQ(TakeAll(kBoth), kBoth);
  EXPECT_THAT(Sent(), ElementsAre("again", "again", "again", "again", "again"));
}

TEST_F(SkippingRelayTest, NoneIsLeftOut_WhereTheCallHasEnded) {
  {
    MutexLock lock(state_.mu);
    state_.stands = false;
    state_.ends = {absl::UnavailableError("gone")};
  }
  std::future<Told> a = Take("a"), b = Take("b");
  EXPECT_THAT(a.get(), StatusIs(Code::kUnavailable, HasSubstr("gone")));
  EXPECT_THAT(b.get(), StatusIs(Code::kUnavailable, HasSubstr("gone")));
  EXPECT_THAT(Sent(), ElementsAre("again"));
}

TEST_F(RelayTest, WorkersThatSpeakSoonAgain_AreNotLeftOut) {
  HeartbeatRelayOptions options = Patient();
  options.hurry = absl::Minutes(1);
  Start(options);
  {
    MutexLock lock(state_.mu);
    state_.takes_again = true;
    state_.skip_within_ms = 120'000;
  }
  EXPECT_EQ(TakeAll({"a"}), (std::vector<std::string>{"a"}));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(TakeAll({"a"}), (std::vector<std::string>{"a"}));
  std::vector<std::string> sent;
  for (const FakeLink::Seen& seen : state_.Await(1)) sent.push_back(absl::StrJoin(seen.workers, ","));
  EXPECT_THAT(sent, ElementsAre("0 a", "again", "again", "again"));
}

TEST_F(RelayTest, AnotherBatchThanTheLast_IsNotLeftOut) {
  HeartbeatRelayOptions options = Patient();
  options.wait = options.wait_with_news = absl::Milliseconds(1);
  Start(options);
  {
    MutexLock lock(state_.mu);
    state_.takes_again = true;
    state_.skip_within_ms = 60'000;
  }
  TakeTogether({"a", "b"});
  for (const char* name : {"a", "b"}) EXPECT_EQ(NameIn(Take(name).get()), name);
  std::vector<std::string> sent;
  for (const FakeLink::Seen& seen : state_.Await(1)) sent.push_back(absl::StrJoin(seen.workers, ","));
  EXPECT_THAT(sent, ElementsAre("0 a", "1 b", "0", "1"));
}

TEST_F(RelayTest, AHeartbeatThatTheOthersDoNotFollow_GoesAlone) {
  HeartbeatRelayOptions options = Patient();
  options.wait = options.wait_with_news = absl::Milliseconds(1);
  Start(options);
  TakeTogether({"a", "b", "c"});
  EXPECT_EQ(NameIn(Take("b", 7).get()), "b");
  EXPECT_THAT(state_.Await(3)[2].workers, ElementsAre("1 b"));
  EXPECT_EQ(NameIn(Take("b", 7).get()), "b");
  EXPECT_THAT(state_.Await(4)[3].workers, ElementsAre("1"));
}

TEST_F(RelayTest, TheCallEnds_AllAreTold_AndTheNextCallBeginsAnew) {
  Start(Patient());
  TakeTogether({"a", "b"});
  {
    MutexLock lock(state_.mu);
    state_.ends = {absl::UnavailableError("gone")};
  }
  std::future<Told> a = Take("a"), b = Take("b");
  EXPECT_THAT(a.get(), StatusIs(Code::kUnavailable, HasSubstr("gone")));
  EXPECT_THAT(b.get(), StatusIs(Code::kUnavailable, HasSubstr("gone")));
  EXPECT_EQ(NameIn(Take("b").get()), "b");
  const std::vector<FakeLink::Seen> seen = state_.Await(4);
  EXPECT_TRUE(seen[3].anew);
  EXPECT_THAT(seen[3].workers, ElementsAre("0 b"));
}

TEST_F(RelayTest, ARefusal_IsTold_WithTheNextIncarnation) {
  Start(Patient());
  {
    MutexLock lock(state_.mu);
    state_.refuses = WithNextIncarnation(absl::AbortedError("stale"), 12);
  }
  for (int i = 0; i < 2; ++i) {
    const Told told = Take("a").get();
    EXPECT_THAT(told, StatusIs(Code::kAborted, HasSubstr("stale")));
    EXPECT_EQ(NextIncarnationOf(told.status()), 12);
  }
  EXPECT_THAT(state_.Await(2)[1].workers, ElementsAre("0 a")) << "it was not kept";
}

TEST_F(RelayTest, WhatTheCoordinatorDoesNotKeep_IsSentWhole) {
  Start(Patient());
  {
    MutexLock lock(state_.mu);
    state_.keeps_none = true;
  }
  for (int i = 0; i < 2; ++i) EXPECT_EQ(NameIn(Take("a").get()), "a");
  EXPECT_THAT(state_.Await(2)[1].workers, ElementsAre("0 a"));
}

TEST_F(RelayTest, AHeartbeatThatWaitedTooLong_IsNotSent) {
  HeartbeatRelayOptions options = Patient();
  options.give_up = absl::ZeroDuration();
  Start(options);
  EXPECT_THAT(Take("a").get(), StatusIs(Code::kDeadlineExceeded, HasSubstr("too long")));
  EXPECT_EQ(Messages(), 0u);
}

TEST_F(RelayTest, FewerAnswersThanHeartbeats_NobodyGetsAnothersAnswer) {
  Start(Patient());
  TakeTogether({"a", "b", "c"});
  {
    MutexLock lock(state_.mu);
    state_.forgets = 1;
  }
  std::future<Told> a = Take("a"), b = Take("b"), c = Take("c");
  for (std::future<Told>* const one : {&a, &b, &c}) {
    EXPECT_THAT(one->get(), StatusIs(Code::kInternal, HasSubstr("2 of 3")));
  }
}

TEST_F(RelayTest, ALaterHeartbeatOfAWorker_TakesTheEarlierOnesPlace) {
  Start(Patient());
  TakeTogether({"a", "b", "c"});
  std::future<Told> first = Take("a", 1);
  std::future<Told> second = Take("a", 2), b = Take("b"), c = Take("c");
  EXPECT_THAT(first.get(), StatusIs(Code::kAborted, HasSubstr("later heartbeat")));
  EXPECT_EQ(NameIn(second.get()), "a");
  EXPECT_EQ(NameIn(b.get()), "b");
}

TEST_F(RelayTest, PlacesAreUsedUp_TheNextCallGivesThemAnew) {
  HeartbeatRelayOptions options = Patient();
  options.max_places = 2;
  options.wait = options.wait_with_news = absl::ZeroDuration();
  Start(options);
  for (const char* name : {"a", "b", "c"}) EXPECT_EQ(NameIn(Take(name).get()), name);
  const std::vector<FakeLink::Seen> seen = state_.Await(3);
  EXPECT_FALSE(seen[1].anew);
  EXPECT_TRUE(seen[2].anew);
  EXPECT_THAT(seen[2].workers, ElementsAre("0 c"));
}

TEST_F(RelayTest, MoreThanAMessageHolds_GoInSeveral) {
  HeartbeatRelayOptions options = Patient();
  options.max_message_bytes = 5;  // each has five: a name of one letter, and a number
  Start(options);
  EXPECT_EQ(TakeTogether({"a", "b", "c"}).size(), 3);
  EXPECT_THAT(state_.Await(3)[2].workers, ElementsAre("2 c"));
}

TEST_F(RelayTest, AnOldCall_IsRenewed) {
  HeartbeatRelayOptions options = Patient();
  options.renew_after = absl::ZeroDuration();
  Start(options);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(NameIn(Take("a").get()), "a");
  EXPECT_TRUE(state_.Await(2)[1].anew);
}

TEST_F(RelayTest, Stop_AnswersAll) {
  Start(Patient());
  TakeTogether({"a", "b", "c"});
  std::future<Told> waits = Take("a");
  relay_->Stop();
  EXPECT_THAT(waits.get(), StatusIs(Code::kUnavailable, HasSubstr("stops")));
  EXPECT_THAT(Take("a").get(), StatusIs(Code::kUnavailable, HasSubstr("stops")));
}

}  // namespace
}  // namespace shardmesh
