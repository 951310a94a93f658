// What a rank makes of a peer that has proved who it is, and then sends what no rank sends.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "worker/transport/secure/frame.h"
#include "worker/transport/secure/handshake.h"
#include "worker/transport/secure/socket_address.h"
#include "worker/transport/secure/testing/secure_ranks.h"
#include "worker/transport/secure/tls_stream.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kPlenty = absl::Seconds(20);
constexpr int64_t kBytes = 1000;
const CallHeader kGather = {5, 1, CallKind::kAllGather, 0, kBytes};

std::string Bytes(FrameType type, uint32_t length, const CallHeader& call, const std::string& behind = "") {
  std::string bytes;
  AppendFrame({type, length, call}, bytes);
  return bytes + behind;
}
std::string Call() { return Bytes(FrameType::kCall, 0, kGather); }
std::string Data(int64_t bytes) {
  return Bytes(FrameType::kData, static_cast<uint32_t>(bytes), kGather, std::string(static_cast<size_t>(bytes), 'd'));
}

class SecureFrames : public ::testing::Test {
 protected:
  // Rank 0, over connections whose other ends the test has.
  void SetUp() override { Connect(/*tls=*/false); }
  void Connect(bool tls, int size = 2) {
    const auto rendezvous = std::make_shared<MemoryRendezvous>();
    std::thread rank([&] {
      SecureOptions options = OptionsOf(0, size, tls);
      options.names = {7, 2};
      group_ = SecureGroup::Connect(rendezvous, options);
    });
    const auto address = rendezvous->Get("group/0", kPlenty);
    ASSERT_OK(address);
    for (int peer = size - 1; peer >= 1; --peer) ConnectPeer(*address, OptionsOf(peer, size, tls));
    rank.join();
    ASSERT_OK(group_.status());
  }
  void ConnectPeer(const std::string& address, const SecureOptions& options) {
    const SocketAddress to = ParseAddress(address).value();
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(fd.get(), to.get(), to.length), 0);
    if (peer_.valid()) others_.push_back(std::move(peer_));
    peer_ = UniqueFd(dup(fd.get()));
    dialer_ = options;
    const bool tls = options.tls.enabled();
    handshake_ = std::make_unique<DialerHandshake>(
        dialer_, 0,
        tls ? (*TlsContext::Load(dialer_.tls))->NewStream(std::move(fd), true) : NewClearStream(std::move(fd)));
    ASSERT_THAT(handshake_->Advance(), IsOk());
    if (!tls) handshake_.reset();
  }
  void Send(const std::string& bytes) {
    EXPECT_EQ(send(peer_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  absl::Status Gather(absl::Duration timeout = kPlenty) {
    std::vector<char> mine(kBytes), all(2 * kBytes + 64, 'g');
    const absl::Status status = (*group_)->AllGather(mine.data(), all.data(), kBytes, timeout);
    EXPECT_EQ(all[2 * kBytes], 'g') << "bytes were written behind the memory";
    EXPECT_TRUE(!status.ok() || all[2 * kBytes - 1] == 'd');
    return status;
  }
  void ExpectEnded(Code code, const std::string& why) {
    EXPECT_THAT(Gather(), StatusIs(code, AllOf(HasSubstr("rank 9"), HasSubstr(why))));
    EXPECT_THAT((*group_)->Barrier(kPlenty), StatusIs(Code::kAborted, HasSubstr(why)));
  }

  SecureOptions dialer_;
  std::unique_ptr<DialerHandshake> handshake_;  // has the connection's TLS
  absl::StatusOr<std::unique_ptr<SecureGroup>> group_;
  UniqueFd peer_;  // of rank 1
  std::vector<UniqueFd> others_;
};

TEST_F(SecureFrames, WhatARankSends_IsTaken) {
  Send(Call() + Data(1) + Data(kBytes - 1));
  EXPECT_OK(Gather());
}

TEST_F(SecureFrames, BytesOneByOne_AreTaken) {
  std::thread sender([&] {
    for (const char byte : Call() + Data(kBytes)) Send(std::string(1, byte));
  });
  EXPECT_OK(Gather());
  sender.join();
}

TEST_F(SecureFrames, Garbage_IsDataLossOfThatPeer) {
  Send(std::string(10'000, 'x'));
  ExpectEnded(Code::kDataLoss, "sent bytes where a frame was due");
}
// Somebody on the way puts bytes into the connection.
TEST_F(SecureFrames, BytesThatAreNotOfTheTlsConnection_AreDataLoss) {
  Connect(/*tls=*/true);
  Send(std::string("\x17\x03\x03\x01\x00", 5) + std::string(256, 'x'));
  ExpectEnded(Code::kDataLoss, "what TLS does not accept: decryption failed");
  Connect(/*tls=*/true);
  Send(Call());
  ExpectEnded(Code::kDataLoss, "what TLS does not accept");
}
// The frames themselves are as in the clear.
TEST_F(SecureFrames, GarbageInsideOfTls_IsDataLoss) {
  Connect(/*tls=*/true);
  const std::string garbage(1000, 'x');
  const std::unique_ptr<Stream> stream = handshake_->TakeStream();
  ASSERT_EQ(stream->Write(garbage.data(), 1000), 1000);
  ASSERT_TRUE(stream->Flush());
  ExpectEnded(Code::kDataLoss, "sent bytes where a frame was due");
}
TEST_F(SecureFrames, AHandshakeAgain_IsDataLoss) {
  Send(std::string("SMGH\1\0\1\0", 8) + std::string(40, 'n'));
  ExpectEnded(Code::kDataLoss, "sent bytes where a frame was due");
}
TEST_F(SecureFrames, MoreBytesThanAFrameHas_IsDataLoss) {
  Send(Call() + Bytes(FrameType::kData, 0xfffffff0, kGather));
  ExpectEnded(Code::kDataLoss, "4294967280 bytes");
}
TEST_F(SecureFrames, MoreBytesThanTheCallExpects_IsDataLoss) {
  Send(Call() + Data(kBytes + 1));
  ExpectEnded(Code::kDataLoss, "sent 1001 bytes of all-gather 1");
}
TEST_F(SecureFrames, BytesBeforeTheirCall_IsDataLoss) {
  Send(Data(kBytes));
  ExpectEnded(Code::kDataLoss, "where 0 at most were due");
}
TEST_F(SecureFrames, BytesOfAnotherCall_IsDataLoss) {
  CallHeader other = kGather;
  other.number = 2;
  Send(Call() + Bytes(FrameType::kData, 10, other, "0123456789"));
  ExpectEnded(Code::kDataLoss, "sent 10 bytes of all-gather 2");
}
TEST_F(SecureFrames, NoBytes_IsDataLoss) {
  Send(Call() + Data(0));
  ExpectEnded(Code::kDataLoss, "sent 0 bytes");
}
TEST_F(SecureFrames, MoreThanAllBytes_IsDataLossOfTheNextCall) {
  Send(Call() + Data(kBytes));
  ASSERT_OK(Gather());
  Send(Data(1));
  ExpectEnded(Code::kDataLoss, "sent 1 bytes of all-gather 1");
}
TEST_F(SecureFrames, TheNextCallBeforeAllBytes_IsDataLoss) {
  CallHeader next = kGather;
  next.number = 2;
  Send(Call() + Data(10) + Bytes(FrameType::kCall, 0, next));
  ExpectEnded(Code::kDataLoss, "before its bytes");
}
TEST_F(SecureFrames, AnotherCall_IsFailedPreconditionAndNamesBoth) {
  CallHeader other = kGather;
  other.bytes = kBytes + 1;
  Send(Bytes(FrameType::kCall, 0, other));
  ExpectEnded(Code::kFailedPrecondition,
              "rank 9 is at all-gather 1 of 1001 bytes in epoch 5, rank 7 at all-gather 1 of 1000");
}
TEST_F(SecureFrames, AnUnknownCallOrFrame_IsAnError) {
  CallHeader other = kGather;
  other.kind = static_cast<CallKind>(77);
  Send(Bytes(FrameType::kCall, 0, other));
  ExpectEnded(Code::kFailedPrecondition, "unknown call");
}
TEST_F(SecureFrames, WhoLeft_IsMissedAtTheNextCall) {
  Send(Call() + Data(kBytes) + Bytes(FrameType::kLeft, 0, kGather));
  EXPECT_OK(Gather());
  EXPECT_THAT(Gather(), StatusIs(Code::kUnavailable,
                                 HasSubstr("rank 9 left the group after call 1; it does not come to call 2")));
}
TEST_F(SecureFrames, FramesOfWhoLeft_AreDataLoss) {
  Send(Call() + Data(kBytes) + Bytes(FrameType::kLeft, 0, kGather) + Call());
  ExpectEnded(Code::kDataLoss, "sent a frame after it had left");
}
TEST_F(SecureFrames, TheReasonOfAnEnd_IsShownAsPlainText) {
  Send(Bytes(FrameType::kEnd, 9, {}, "no\n\x1b[2J\xff!"));
  EXPECT_THAT(Gather(), StatusIs(Code::kAborted, HasSubstr("no??[2J?!")));
}
// Whom a peer waits for may be more or less than there are ranks.
TEST_F(SecureFrames, NewsOfLateRanks_OfAnyLength) {
  Send(Bytes(FrameType::kLate, 0, {}) + Bytes(FrameType::kLate, 128, {}, std::string(128, '\xff')) +
       Bytes(FrameType::kLate, 1, {}, "\xff"));
  EXPECT_THAT(Gather(absl::Milliseconds(100)), StatusIs(Code::kUnavailable, HasSubstr("rank 9 did not come")));
}
// A peer that is late and says that it waits for another one is not blamed; and this rank says whom it waits for.
TEST_F(SecureFrames, WhoWaitsForAnother_IsNotNamed) {
  others_.clear();
  Connect(/*tls=*/false, /*size=*/3);
  Send(Bytes(FrameType::kLate, 128, {}, std::string(1, '\4') + std::string(127, '\0')));
  std::vector<char> mine(kBytes), all(3 * kBytes);
  const absl::Status status = (*group_)->AllGather(mine.data(), all.data(), kBytes, absl::Milliseconds(100));
  EXPECT_THAT(status, StatusIs(Code::kUnavailable, HasSubstr("rank 11 did not come to all-gather 1")));
  EXPECT_THAT(status.message(), ::testing::Not(HasSubstr("rank 9")));
  std::string told(10'000, '\0');
  told.resize(static_cast<size_t>(std::max<ssize_t>(recv(peer_.get(), told.data(), told.size(), 0), 0)));
  EXPECT_THAT(told, HasSubstr(Bytes(FrameType::kLate, 128, kGather, std::string(1, '\6') + std::string(127, '\0'))));
  EXPECT_THAT(told, HasSubstr("rank 11 did not come"));
}
TEST_F(SecureFrames, ConnectionsThatEnd_WhereverTheyDo_AreUnavailable) {
  const std::string all = Call() + Data(kBytes);
  for (const size_t length : {size_t{0}, size_t{1}, kFrameBytes - 1, kFrameBytes, kFrameBytes + 1, 2 * kFrameBytes,
                              2 * kFrameBytes + 1, all.size() - 1}) {
    SetUp();
    Send(all.substr(0, length));
    peer_.reset();
    ExpectEnded(Code::kUnavailable, "is gone");
  }
}
// A connection that is reset, with the first bytes of a call in it.
TEST_F(SecureFrames, AConnectionThatIsReset_IsUnavailable) {
  Send(Call() + Bytes(FrameType::kData, kBytes, kGather, "some"));
  const linger at_once = {1, 0};
  ASSERT_EQ(setsockopt(peer_.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)), 0);
  peer_.reset();
  ExpectEnded(Code::kUnavailable, "is gone");
}
// Bytes that are altered anywhere: an error or other bytes, and the group ends in time.
TEST_F(SecureFrames, AlteredFrames_EndInTypedErrors) {
  constexpr uint64_t kSeed = 20250303;
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 100; ++round) {
    SetUp();
    std::string bytes = Call() + Data(10) + Data(kBytes - 10);
    for (int changes = 0; changes < 3; ++changes)
      bytes[random() % (3 * kFrameBytes + 10)] = static_cast<char>(random());
    Send(bytes);
    const absl::Status status = Gather(absl::Milliseconds(50));
    EXPECT_THAT(status.code(),
                AnyOf(Code::kOk, Code::kDataLoss, Code::kFailedPrecondition, Code::kUnavailable, Code::kAborted))
        << status << ", seed " << kSeed << ", round " << round;
    peer_.reset();
    group_ = absl::UnknownError("ended");
  }
}

}  // namespace
}  // namespace shardmesh
