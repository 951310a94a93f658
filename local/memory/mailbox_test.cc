#include "local/memory/mailbox.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

namespace shardmesh {
namespace {

TEST(MailboxTest, AMessageIsTakenOnce_AndOnlyThenComesTheNext) {
  const auto box = std::make_unique<Mailbox>();
  std::string bytes = "untouched";
  EXPECT_FALSE(TakeMessage(box->request, bytes));
  EXPECT_EQ(bytes, "untouched");
  EXPECT_FALSE(box->open());
  EXPECT_TRUE(PutMessage(box->request, "first"));
  EXPECT_TRUE(box->open());
  EXPECT_FALSE(PutMessage(box->request, "second"));
  EXPECT_TRUE(TakeMessage(box->request, bytes));
  EXPECT_EQ(bytes, "first");
  EXPECT_FALSE(TakeMessage(box->request, bytes));
  EXPECT_TRUE(PutMessage(box->request, ""));
  EXPECT_TRUE(TakeMessage(box->request, bytes));
  EXPECT_EQ(bytes, "");
  box->answered.store(2);
  EXPECT_FALSE(box->open());
}

TEST(MailboxTest, LengthsAreBounded_WhoeverWroteThem) {
  const auto box = std::make_unique<Mailbox>();
  EXPECT_TRUE(PutMessage(box->reply, std::string(kMaxMessageBytes, 'x')));
  std::string bytes;
  EXPECT_TRUE(TakeMessage(box->reply, bytes));
  EXPECT_EQ(bytes, std::string(kMaxMessageBytes, 'x'));
  EXPECT_FALSE(PutMessage(box->reply, std::string(kMaxMessageBytes + 1, 'x')));
  box->reply.num_bytes.store(~0u);
  box->reply.number.fetch_add(1);
  EXPECT_TRUE(TakeMessage(box->reply, bytes));
  EXPECT_EQ(bytes.size(), kMaxMessageBytes);
}

// The numbers of messages start next to their wrap.
TEST(MailboxTest, TwoThreads_EveryMessageArrivesWhole) {
  const auto box = std::make_unique<Mailbox>();
  for (auto* word : {&box->request.number, &box->request.taken, &box->answered}) word->store(~0u - 1000);
  EXPECT_FALSE(box->open());
  constexpr int kMessages = 2000;
  std::thread writer([&] {
    for (int i = 0; i < kMessages; ++i) {
      while (!PutMessage(box->request, std::string(i % 700, static_cast<char>('a' + i % 26))))
        std::this_thread::yield();
    }
  });
  std::string bytes;
  for (int i = 0; i < kMessages; ++i) {
    while (!TakeMessage(box->request, bytes)) std::this_thread::yield();
    ASSERT_EQ(bytes, std::string(i % 700, static_cast<char>('a' + i % 26))) << i;
  }
  writer.join();
  EXPECT_EQ(box->request.number.load(), kMessages - 1001u);
  box->answered.store(box->request.taken.load());
  EXPECT_FALSE(box->open());
}

}  // namespace
}  // namespace shardmesh
