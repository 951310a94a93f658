// How two ranks that have a connection find out that each is who it should be, before anything else crosses.
//
//   who dials                              who listens
//   (TLS, where it is used, with certificates of both)
//   Open: version, a nonce            ->
//                                     <-   Challenge: version, a nonce
//   Hello: claims, proof              ->
//                                     <-   Welcome: proof; or Refusal: a reason
//
// A proof is HMAC-SHA256 (RFC 2104) with the job's secret as its key, of which side it is for, the version, both
// nonces, the binding of the TLS connection (RFC 5705, through RFC 8446, 7.5), and all claims: ranks, size, epoch and a
// digest of the group's key. So what was heard on one connection is worth nothing on another one, and who forwards a
// handshake from one TLS connection into another is found out. In the clear, who can alter packets can take a
// connection over once it is made. Pure but for the streams that it reads and writes. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/transport/secure/secure_options.h"
#include "worker/transport/secure/stream.h"

namespace shardmesh {

inline constexpr uint16_t kGroupProtocol = 1;

inline constexpr size_t kNonceBytes = 32, kDigestBytes = 32, kHeadBytes = 8;
inline constexpr size_t kShortBytes = kHeadBytes + kNonceBytes;  // Open, and every answer
inline constexpr size_t kHelloBytes = kHeadBytes + 8 + 3 * 4 + 4 + kDigestBytes + kDigestBytes;

// What who dials says of itself.
struct HelloClaims {
  uint64_t epoch = 0;
  uint32_t from = 0, to = 0, size = 0;
  std::string group;  // SHA-256 of its key
};

// How each side of a handshake makes progress.
class Handshake {
 public:
  virtual ~Handshake() = default;
  Handshake(const Handshake&) = delete;
  Handshake& operator=(const Handshake&) = delete;

  // Goes on as far as it can without waiting; true: it is done. The message of an error is the rest of a sentence that
  // begins with the peer's name.
  //   Unavailable: the connection ended. DataLoss: the peer speaks something else.
  //   PermissionDenied: one side does not accept the other's certificate or secret.
  //   FailedPrecondition: the peer has another version, epoch, size or group, is not the rank that it should be, or
  //   uses TLS where this rank does not. AlreadyExists: the listener has a connection with this rank.
  virtual absl::StatusOr<bool> Advance() = 0;

  const Stream& stream() const { return *stream_; }
  // REQUIRES: it is done; nothing more is asked of this object.
  std::unique_ptr<Stream> TakeStream() { return std::move(stream_); }

 protected:
  Handshake(const SecureOptions& options, std::unique_ptr<Stream> stream);

  // True: `bytes` bytes of a message are in `read_`.
  absl::StatusOr<bool> Read(size_t bytes);
  // So little that a new connection has room for it. Whether it had is seen when the answer is read.
  void Send(const std::string& message);
  // True: TLS is there.
  absl::StatusOr<bool> Secure();
  // OK: the message in `read_` is of that kind. Otherwise what Advance returns.
  absl::Status CheckHead(uint16_t kind);
  std::string Proof(absl::string_view side, const HelloClaims& claims) const;
  absl::Status Ended() const;

  const SecureOptions& options_;
  std::unique_ptr<Stream> stream_;
  std::string read_, dialer_nonce_, listener_nonce_;
};

// Of who dials.
class DialerHandshake final : public Handshake {
 public:
  // `options` outlive it.
  DialerHandshake(const SecureOptions& options, int peer, std::unique_ptr<Stream> stream);
  absl::StatusOr<bool> Advance() override;

 private:
  absl::Status TakeChallenge();
  absl::Status TakeAnswer();

  enum class Phase { kSecuring, kChallenge, kAnswer };
  Phase phase_ = Phase::kSecuring;
  HelloClaims claims_;
};

// Of who listens. Done: a rank that this one waits for is there, and waits for Welcome or RefuseSecond.
class ListenerHandshake final : public Handshake {
 public:
  ListenerHandshake(const SecureOptions& options, std::unique_ptr<Stream> stream);
  absl::StatusOr<bool> Advance() override;

  // Who it is that dialed, as far as it has proved that: -1: it has not.
  int peer() const { return peer_; }
  void Welcome();
  void RefuseSecond();

 private:
  absl::Status CheckUsesTls();
  absl::Status TakeOpen();
  absl::Status TakeHello();
  absl::Status CheckClaims();
  void Refuse(uint32_t reason, uint64_t value = 0);

  enum class Phase { kSecuring, kOpen, kHello };
  Phase phase_ = Phase::kSecuring;
  HelloClaims claims_;
  int peer_ = -1;
};

}  // namespace shardmesh
