#include "worker/lead/step_mail.h"

#include <thread>

#include "absl/strings/str_cat.h"
#include "local/memory/mailbox.h"
#include "worker/testing/step_fixture.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr uint64_t kOne = uint64_t{1} << 32 | 7, kOther = uint64_t{2} << 32 | 9;  // sessions

// Slots 0 and 1 are held by session kOne, which writes into the mailbox of slot 0; slot 2 by kOther.
struct StepMailTest : StepFixture {
  StepMailTest() {
    for (const int slot : {0, 1}) EXPECT_OK(protocol.slots().Take(Slot(slot), kOne));
    EXPECT_OK(protocol.slots().Take(Slot(2), kOther));
  }

  static v1::TrainerRequest Request(uint64_t session, std::vector<int> slots, int64_t step) {
    v1::TrainerRequest request;
    request.set_session(session);
    request.mutable_step()->set_step(step);
    for (const int slot : slots) request.mutable_step()->add_slots(slot);
    return request;
  }
  bool Put(int slot, const v1::TrainerRequest& request) {
    return PutMessage(host.mailbox(slot).request, request.SerializeAsString());
  }
  // The answer in a mailbox: "code: message", or "step N".
  std::string Answer(int slot) {
    std::string bytes;
    v1::TrainerReply reply;
    if (!TakeMessage(host.mailbox(slot).reply, bytes)) return "none";
    if (!reply.ParseFromString(bytes)) return "no reply";
    if (reply.code() == 0) return absl::StrCat("step ", reply.step().step());
    return absl::StrCat(absl::StatusCodeToString(static_cast<Code>(reply.code())), ": ", reply.message(), " of step ",
                        reply.step().step());
  }

  // The step of each slot that was declared.
  std::vector<int64_t> declared() {
    std::vector<int64_t> steps;
    for (const TraceSpan& span : trace.Spans()) steps.push_back(span.step);
    return steps;
  }
  Trace trace;
  StepProtocol traced{host.control(), &host.notifier(), &job,     &plan, MemberNames(4),
                      std::nullopt,   Rank(0),          Epoch(0), &trace};
  const TrainerRequests requests{traced};
  StepMail mail{host, traced, 3, requests};
};

TEST_F(StepMailTest, AMessageIsDeclaredOnce_AndAnsweredAtTheCommit) {
  PlaceWeights();
  ASSERT_TRUE(Put(0, Request(kOne, {0, 1}, 1)));
  mail.Poll();
  mail.Poll();
  EXPECT_THAT(declared(), ElementsAre(1, 1));
  EXPECT_EQ(Answer(0), "none");
  EXPECT_TRUE(host.mailbox(0).open());
  ASSERT_TRUE(Put(2, Request(kOther, {2}, 1)));
  mail.Poll();
  Finish();
  mail.Poll();
  EXPECT_EQ(Answer(0), "step 1");
  EXPECT_EQ(Answer(2), "step 1");
  EXPECT_FALSE(host.mailbox(0).open());
  mail.Poll();
  EXPECT_EQ(Answer(0), "none");
  ASSERT_TRUE(Put(0, Request(kOne, {0, 1}, 1)));  // repeated: answered at once
  mail.Poll();
  EXPECT_EQ(Answer(0), "step 1");
}

TEST_F(StepMailTest, WhatIsWrong_IsAnsweredAtOnce) {
  PlaceWeights();
  for (const int foreign : {2, 3, -1}) {
    ASSERT_TRUE(Put(0, Request(kOne, {0, foreign}, 1)));
    mail.Poll();
    EXPECT_EQ(Answer(0),
              absl::StrCat("INVALID_ARGUMENT: slot ", foreign, " is not one that this session attached to of step 1"));
  }
  ASSERT_TRUE(Put(0, Request(kOne, {0, 1}, 2)));
  mail.Poll();
  EXPECT_THAT(Answer(0), HasSubstr("FAILED_PRECONDITION: step 2 is ahead"));
  EXPECT_FALSE(host.mailbox(0).open());
  EXPECT_EQ(protocol.control()->slots[0].declared.load(), 0);
}

TEST_F(StepMailTest, MessagesOfOtherSessions_AndNoMessages_DoNothing) {
  PlaceWeights();
  for (const uint64_t session : {uint64_t{0}, kOther, kOne | kLeaving}) {
    ASSERT_TRUE(Put(0, Request(session, {0, 1}, 1)));
    mail.Poll();
    EXPECT_EQ(Answer(0), "none") << session;
    EXPECT_FALSE(host.mailbox(0).open());
  }
  protocol.slots().Give(Slot(2), kOther);
  ASSERT_TRUE(Put(2, Request(0, {2}, 1)));  // of a slot that nobody holds
  ASSERT_TRUE(PutMessage(host.mailbox(0).request, "\xff\xff nonsense"));
  mail.Poll();
  EXPECT_EQ(Answer(0), "none");
  EXPECT_THAT(declared(), ElementsAre());
}

TEST_F(StepMailTest, AnAnswerThatWasGivenUp_DoesNotKeepTheNextOneBack) {
  PlaceWeights();
  ASSERT_TRUE(Put(0, Request(kOne, {0, 5}, 1)));
  mail.Poll();  // answered, but the trainer has gone on
  ASSERT_TRUE(Put(0, Request(kOne, {0, 1}, 9)));
  mail.Poll();
  mail.Poll();
  EXPECT_THAT(Answer(0), HasSubstr("slot 5"));
  EXPECT_TRUE(host.mailbox(0).open());
  mail.Poll();  // now there is room: what was wrong with the second message is not lost
  EXPECT_THAT(Answer(0), HasSubstr("FAILED_PRECONDITION: step 9 is ahead"));
  EXPECT_FALSE(host.mailbox(0).open());
  ASSERT_TRUE(Put(0, Request(kOne, {0, 1}, 1)));
  ASSERT_TRUE(Put(2, Request(kOther, {2}, 1)));
  mail.Poll();
  Finish();
  mail.Poll();
  EXPECT_EQ(Answer(0), "step 1");
}

TEST_F(StepMailTest, AnAnswerWithoutRoom_IsReplacedByThatToANewerMessage) {
  PlaceWeights();
  ASSERT_TRUE(Put(0, Request(kOne, {0, 5}, 1)));
  mail.Poll();
  for (const int64_t step : {8, 9}) {  // both given up
    ASSERT_TRUE(Put(0, Request(kOne, {0, 1}, step)));
    mail.Poll();
  }
  EXPECT_THAT(Answer(0), HasSubstr("slot 5"));
  mail.Poll();
  EXPECT_THAT(Answer(0), HasSubstr("step 9 is ahead"));
  mail.Poll();
  EXPECT_EQ(Answer(0), "none");
  // And by none, as long as that one's step is not committed.
  for (const int64_t step : {8, 9, 1}) {
    ASSERT_TRUE(Put(0, Request(kOne, {0, 1}, step)));
    mail.Poll();
  }
  EXPECT_THAT(Answer(0), HasSubstr("step 8 is ahead"));
  mail.Poll();
  EXPECT_EQ(Answer(0), "none");
}

TEST_F(StepMailTest, AnAnswer_HasTheIdOfItsMessage) {
  PlaceWeights();
  v1::TrainerRequest request = Request(kOne, {0, 1}, 7);
  request.set_id(kOne << 32 | 3);
  ASSERT_TRUE(Put(0, request));
  mail.Poll();
  std::string bytes;
  v1::TrainerReply reply;
  ASSERT_TRUE(TakeMessage(host.mailbox(0).reply, bytes) && reply.ParseFromString(bytes));
  EXPECT_EQ(reply.id(), request.id());
}

TEST_F(StepMailTest, AbortedJob_OpenMessagesAreToldWhy) {
  PlaceWeights();
  ASSERT_TRUE(Put(0, Request(kOne, {0, 1}, 1)));
  mail.Poll();
  protocol.members().Abort(AbortReason::kGone, 3, Rank(0));
  mail.Poll();
  EXPECT_THAT(Answer(0), HasSubstr("UNAVAILABLE: "));
}

// Numbers of messages, and the count of those under way, from next to their wrap.
TEST_F(StepMailTest, NumbersOfMessages_NextToTheirWrap) {
  PlaceWeights();
  Mailbox &box = host.mailbox(0), &other = host.mailbox(2);
  for (Mailbox* each : {&box, &other}) {
    for (auto* word :
         {&each->request.number, &each->request.taken, &each->answered, &each->reply.number, &each->reply.taken}) {
      word->store(~0u - 2);
    }
  }
  protocol.control()->taking_messages.store(~0u - 3);
  for (int64_t step = 1; step <= 6; ++step) {
    ASSERT_TRUE(Put(0, Request(kOne, {0, 1}, step)));
    EXPECT_FALSE(Put(0, Request(kOne, {0, 1}, step))) << "one at a time";
    mail.Poll();
    EXPECT_TRUE(box.open());
    mail.TakeOver();  // the lead's next incarnation takes it again
    mail.Poll();
    EXPECT_EQ(Answer(0), "none");
    ASSERT_TRUE(Put(2, Request(kOther, {2}, step)));
    mail.Poll();
    Finish();
    mail.Poll();
    EXPECT_EQ(Answer(0), absl::StrCat("step ", step));
    EXPECT_EQ(Answer(2), absl::StrCat("step ", step));
    EXPECT_FALSE(box.open() || other.open());
    EXPECT_EQ(protocol.control()->taking_messages.load() % 2, 0u);
  }
  EXPECT_EQ(box.request.number.load(), 3u);
}

TEST_F(StepMailTest, SlotsAreFree_WhenTheLeadIsInNoMessageOfTheirSession) {
  std::atomic<bool> stop{false}, given{false};
  protocol.control()->taking_messages.store(1);  // as in the middle of one
  std::thread leaving([&] {
    GiveSlotsBack(protocol, {0, 1}, kOne, stop);
    given.store(true);
  });
  while (protocol.slots().HolderOf(Slot(1)) == kOne) std::this_thread::yield();
  EXPECT_FALSE(given.load());
  EXPECT_THAT(protocol.slots().Take(Slot(0), kOther),
              StatusIs(Code::kFailedPrecondition, HasSubstr("session 7 attached to rank 0")));
  protocol.control()->taking_messages.store(2);
  leaving.join();
  EXPECT_OK(protocol.slots().Take(Slot(0), kOther));
  EXPECT_EQ(protocol.slots().HolderOf(Slot(1)), 0u);

  protocol.control()->taking_messages.store(3);
  stop.store(true);
  GiveSlotsBack(protocol, {2}, kOther, stop);  // comes back
  EXPECT_EQ(protocol.slots().HolderOf(Slot(2)), kOther | kLeaving);
}

}  // namespace
}  // namespace shardmesh
