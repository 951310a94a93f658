// Two ends of a TLS connection, over sockets between which the test carries what each of them writes.
#include "worker/transport/secure/tls_stream.h"

#include <signal.h>
#include <sys/socket.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/matchers.h"
#include "worker/transport/secure/testing/secure_ranks.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;
using Shaken = Stream::Shaken;

struct Ends {
  Ends() {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    near = UniqueFd(fds[0]);
    far = UniqueFd(fds[1]);
  }
  UniqueFd near, far;
};

class TlsStreams : public ::testing::Test {
 protected:
  void Open(const TlsOptions& dials, const TlsOptions& listens, const TlsSending& sending = {}) {
    ASSERT_OK_AND_ASSIGN(const auto dialer, TlsContext::Load(dials));
    ASSERT_OK_AND_ASSIGN(const auto listener, TlsContext::Load(listens));
    dialer_ = dialer->NewStream(std::move(ends_[0].near), /*dials=*/true, sending);
    listener_ = listener->NewStream(std::move(ends_[1].near), /*dials=*/false, sending);
  }
  // Carries what is there from one to the other; `alter` sees it on the way.
  void Carry(const std::function<void(std::string&)>& alter = [](std::string&) {}) {
    for (int from = 0; from < 2; ++from) {
      std::string bytes(1 << 20, '\0');
      const ssize_t got = recv(ends_[from].far.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (got <= 0) continue;
      bytes.resize(static_cast<size_t>(got));
      alter(bytes);
      carried_ += got;
      ASSERT_EQ(send(ends_[1 - from].far.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(bytes.size()));
    }
  }
  std::pair<Shaken, Shaken> Shake() {
    Shaken dials = Shaken::kLater, listens = Shaken::kLater;
    for (int turn = 0; turn < 5; ++turn) {
      if (dials == Shaken::kLater) dials = dialer_->Shake();
      Carry();
      if (listens == Shaken::kLater) listens = listener_->Shake();
      Carry();
    }
    return {dials, listens};
  }
  // One piece from the dialer to the listener; how many bytes arrived as they were sent.
  int64_t Send(int64_t bytes) {
    std::vector<char> out(static_cast<size_t>(bytes)), in(static_cast<size_t>(bytes));
    for (int64_t i = 0; i < bytes; ++i) out[i] = static_cast<char>(i * 7 + i / 251);
    int64_t sent = 0, got = 0;
    for (int turn = 0; turn < 10'000 && got < bytes; ++turn) {
      if (sent < bytes) sent += std::max<int64_t>(dialer_->Write(&out[sent], bytes - sent), 0);
      dialer_->Flush();
      Carry();
      while (got < bytes) {
        const int64_t more = listener_->Read(&in[got], bytes - got);
        if (more <= 0) break;
        got += more;
      }
      if (listener_->end() != Stream::End::kNone) break;
    }
    return in == out ? got : -1;
  }

  Ends ends_[2];
  std::unique_ptr<Stream> dialer_, listener_;
  int64_t carried_ = 0;
};

TEST_F(TlsStreams, CertificatesOfOneAuthority_MakeAConnection) {
  Open(TlsFiles("first"), TlsFiles("second"));
  EXPECT_EQ(Shake(), std::pair(Shaken::kDone, Shaken::kDone));
  EXPECT_EQ(dialer_->Binding(), listener_->Binding());
  EXPECT_NE(dialer_->Binding(), std::string(32, '\0'));
  EXPECT_THAT(dialer_->Protection(), HasSubstr("TLSv1.3 TLS_AES_128_GCM_SHA256"));
  EXPECT_EQ(Send(300'000), 300'000);
  char byte = 0;
  EXPECT_EQ(listener_->Read(&byte, 1), 0);
  EXPECT_EQ(listener_->end(), Stream::End::kNone);
}

TEST_F(TlsStreams, BindingsOfTwoConnections_Differ) {
  Open(TlsFiles("first"), TlsFiles("second"));
  Shake();
  const std::string first = dialer_->Binding();
  ends_[0] = Ends();
  ends_[1] = Ends();
  Open(TlsFiles("first"), TlsFiles("second"));
  Shake();
  EXPECT_NE(dialer_->Binding(), first);
}

// In TLS 1.3 who dials is done before the other end has seen its certificate: it learns of it when it reads.
TEST_F(TlsStreams, AnotherAuthoritysCertificate_IsRefusedByBothEnds) {
  Open(TlsFiles("stranger"), TlsFiles("first"));
  EXPECT_EQ(Shake(), std::pair(Shaken::kDone, Shaken::kEnded));
  EXPECT_EQ(listener_->end(), Stream::End::kRefused);
  EXPECT_THAT(listener_->why(), HasSubstr("unable to get local issuer certificate"));
  char byte = 0;
  EXPECT_EQ(dialer_->Read(&byte, 1), -1);
  EXPECT_EQ(dialer_->end(), Stream::End::kRefused);
  EXPECT_THAT(dialer_->why(), HasSubstr("unknown ca"));

  ends_[0] = Ends();
  ends_[1] = Ends();
  Open(TlsFiles("first"), TlsFiles("stranger"));
  EXPECT_EQ(Shake().first, Shaken::kEnded);
  EXPECT_THAT(dialer_->why(), HasSubstr("certificate verify failed"));
}

TEST(TlsContext, AnExpiredCertificate_IsNotLoaded) {
  EXPECT_THAT(TlsContext::Load(TlsFiles("expired")), StatusIs(Code::kInvalidArgument, HasSubstr("expired")));
}

// Each renewal is a record, so more is carried; what arrives is the same.
TEST_F(TlsStreams, KeysAreRenewed) {
  constexpr int64_t kBytes = 1'000'000, kRecords = kBytes / (16 << 10) + 1, kKeyUpdate = 27;
  int64_t carried[2];
  for (const int64_t records : {kRecordsPerKey, int64_t{2}}) {
    ends_[0] = Ends();
    ends_[1] = Ends();
    Open(TlsFiles("first"), TlsFiles("second"), {records});
    Shake();
    carried_ = 0;
    EXPECT_EQ(Send(kBytes), kBytes);
    carried[records == 2] = carried_;
  }
  EXPECT_GE(carried[1], carried[0] + kRecords / 2 * kKeyUpdate - kKeyUpdate);
}

// As where the kernel encrypts; OpenSSL does it where the kernel turns out not to.
TEST_F(TlsStreams, ThroughTheSocketItself) {
  Open(TlsFiles("first"), TlsFiles("second"), {kRecordsPerKey, /*in_kernel=*/true});
  EXPECT_EQ(Shake(), std::pair(Shaken::kDone, Shaken::kDone));
  EXPECT_EQ(Send(1'000'000), 1'000'000);
  dialer_.reset();
  for (Ends& ends : ends_) ends.far.reset();
  EXPECT_EQ(listener_->Write("x", 1), -1);
  EXPECT_EQ(listener_->end(), Stream::End::kClosed);
}

TEST_F(TlsStreams, AlteredBytes_AreRefused) {
  Open(TlsFiles("first"), TlsFiles("second"));
  Shake();
  ASSERT_EQ(dialer_->Write("gradients", 9), 9);
  ASSERT_TRUE(dialer_->Flush());
  Carry([](std::string& bytes) { bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1); });
  char byte = 0;
  EXPECT_EQ(listener_->Read(&byte, 1), -1);
  EXPECT_EQ(listener_->end(), Stream::End::kRefused);
  EXPECT_THAT(listener_->why(), HasSubstr("bad record mac"));
}

TEST_F(TlsStreams, ReplayedBytes_AreRefused) {
  Open(TlsFiles("first"), TlsFiles("second"));
  Shake();
  ASSERT_EQ(dialer_->Write("gradients", 9), 9);
  ASSERT_TRUE(dialer_->Flush());
  Carry([](std::string& bytes) { bytes += bytes; });
  char bytes[9];
  EXPECT_EQ(listener_->Read(bytes, 9), 9);
  EXPECT_EQ(listener_->Read(bytes, 9), -1);
  EXPECT_EQ(listener_->end(), Stream::End::kRefused);
}

// What came before is still read after a write that failed; the process lives.
TEST_F(TlsStreams, APeerThatIsGone_IsTheEndOfWhatComes) {
  Open(TlsFiles("first"), TlsFiles("second"));
  Shake();
  ASSERT_EQ(dialer_->Write("last words", 10), 10);
  ASSERT_TRUE(dialer_->Flush());
  Carry();
  dialer_.reset();
  for (Ends& ends : ends_) ends.far.reset();
  (void)listener_->Write("x", 1);
  EXPECT_FALSE(listener_->Flush());
  EXPECT_EQ(listener_->end(), Stream::End::kClosed);
  char words[10];
  EXPECT_EQ(listener_->Read(words, 10), 10);
  EXPECT_EQ(listener_->Read(words, 10), -1);
  EXPECT_EQ(listener_->end(), Stream::End::kClosed) << listener_->why();
}

}  // namespace
}  // namespace shardmesh
