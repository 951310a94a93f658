#include "worker/transport/secure/handshake.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>
#include <sys/socket.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "worker/transport/secure/wire.h"

namespace shardmesh {
namespace {

constexpr uint32_t kMagic = 0x48'47'4d'53;  // "SMGH"
enum Kind : uint16_t { kOpen = 1, kChallenge, kHello, kWelcome, kRefusal };
enum Reason : uint32_t {
  kOtherVersion = 1,
  kOtherSecret,
  kOtherEpoch,
  kOtherGroup,
  kOtherSize,
  kOtherRank,
  kSecond,
  kNeedsTls
};
constexpr char kTlsHandshake = 22;  // RFC 8446, 5.1: the first byte of who wants TLS
constexpr char kDials[] = "shardmesh group, who dials", kListens[] = "shardmesh group, who listens";

std::string Head(Kind kind) {
  std::string head;
  AppendNumber(kMagic, head);
  AppendNumber(static_cast<uint16_t>(kind), head);
  AppendNumber(kGroupProtocol, head);
  return head;
}

std::string Refusal(uint32_t reason, uint64_t value) {
  std::string refusal = Head(kRefusal);
  AppendNumber(reason, refusal);
  AppendNumber(value, refusal);
  refusal.resize(kShortBytes);
  return refusal;
}

std::string Digest(absl::string_view text) {
  std::string digest(kDigestBytes, '\0');
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(),
         reinterpret_cast<unsigned char*>(&digest[0]));
  return digest;
}

void AppendClaims(const HelloClaims& claims, std::string& to) {
  AppendNumber(claims.epoch, to);
  for (const uint32_t number : {claims.from, claims.to, claims.size, uint32_t{0}}) AppendNumber(number, to);
  to += claims.group;
}

HelloClaims TakeClaims(absl::string_view& from) {
  HelloClaims claims;
  claims.epoch = TakeNumber<uint64_t>(from);
  claims.from = TakeNumber<uint32_t>(from);
  claims.to = TakeNumber<uint32_t>(from);
  claims.size = TakeNumber<uint32_t>(from);
  from.remove_prefix(4);
  claims.group = std::string(from.substr(0, kDigestBytes));
  from.remove_prefix(kDigestBytes);
  return claims;
}

absl::Status OtherVersion(uint64_t theirs) {
  return absl::FailedPreconditionError(absl::StrCat("speaks version ", theirs,
                                                    " of the protocol of groups, this rank version ", kGroupProtocol,
                                                    "; run the same build on all hosts"));
}

// What a listener's refusal means to who dialed.
absl::Status Refused(uint32_t reason, uint64_t value, const SecureOptions& options) {
  switch (reason) {
    case kOtherVersion:
      return OtherVersion(value);
    case kOtherSecret:
      return absl::PermissionDeniedError("refuses this rank, which has another secret of the job");
    case kOtherEpoch:
      return absl::FailedPreconditionError(
          absl::StrCat("refuses this rank: it is in epoch ", value, ", this rank in epoch ", options.epoch));
    case kOtherGroup:
      return absl::FailedPreconditionError(
          absl::StrCat("refuses this rank: it is in another group than '", options.key, "'"));
    case kOtherSize:
      return absl::FailedPreconditionError(
          absl::StrCat("refuses this rank: its group has ", value, " ranks, this one's ", options.size));
    case kOtherRank:
      return absl::FailedPreconditionError("refuses this rank: it is another rank, or does not wait for this one");
    case kNeedsTls:
      return absl::FailedPreconditionError(
          "uses TLS, and this rank does not; give certificates to all ranks or to none");
    case kSecond:
      return absl::AlreadyExistsError("has a connection with this rank already");
    default:
      return absl::DataLossError(absl::StrCat("refuses this rank for the unknown reason ", reason));
  }
}

}  // namespace

// ---- Both sides. ----

Handshake::Handshake(const SecureOptions& options, std::unique_ptr<Stream> stream)
    : options_(options), stream_(std::move(stream)) {}

absl::Status Handshake::Ended() const {
  if (stream_->end() == Stream::End::kRefused) {
    return absl::PermissionDeniedError(absl::StrCat("and this rank do not accept each other in TLS: ", stream_->why()));
  }
  return absl::UnavailableError(absl::StrCat("ended the connection: ", stream_->why()));
}

absl::StatusOr<bool> Handshake::Secure() {
  switch (stream_->Shake()) {
    case Stream::Shaken::kDone:
      return true;
    case Stream::Shaken::kLater:
      return false;
    case Stream::Shaken::kEnded:
      break;
  }
  return Ended();
}

absl::StatusOr<bool> Handshake::Read(size_t bytes) {
  while (read_.size() < bytes) {
    char some[kHelloBytes];
    const int64_t got = stream_->Read(some, static_cast<int64_t>(bytes - read_.size()));
    if (got < 0) return Ended();
    if (got == 0) return false;
    read_.append(some, static_cast<size_t>(got));
    // What is not of this protocol may be shorter than its messages: an HTTP request, say.
    if (read_.size() >= 4 && read_.compare(0, 4, Head(kOpen), 0, 4) != 0) {
      return absl::DataLossError(
          "sent bytes that are not of the protocol of groups; give certificates to all ranks or to none");
    }
  }
  return true;
}

void Handshake::Send(const std::string& message) {
  (void)stream_->Write(message.data(), static_cast<int64_t>(message.size()));
  (void)stream_->Flush();
}

absl::Status Handshake::CheckHead(uint16_t kind) {
  absl::string_view head = read_;
  head.remove_prefix(4);
  const auto theirs = TakeNumber<uint16_t>(head), version = TakeNumber<uint16_t>(head);
  if (theirs == kRefusal && kind != kOpen && kind != kHello) {
    const auto reason = TakeNumber<uint32_t>(head);
    return Refused(reason, TakeNumber<uint64_t>(head), options_);
  }
  if (version != kGroupProtocol) return OtherVersion(version);
  if (theirs == kind) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("sent message ", theirs, " of a handshake where ", kind, " was due"));
}

std::string Handshake::Proof(absl::string_view side, const HelloClaims& claims) const {
  std::string text(side);
  AppendNumber(kGroupProtocol, text);
  absl::StrAppend(&text, dialer_nonce_, listener_nonce_, stream_->Binding());
  AppendClaims(claims, text);
  std::string proof(kDigestBytes, '\0');
  unsigned length = 0;
  HMAC(EVP_sha256(), options_.secret.data(), static_cast<int>(options_.secret.size()),
       reinterpret_cast<const unsigned char*>(text.data()), text.size(), reinterpret_cast<unsigned char*>(&proof[0]),
       &length);
  return proof;
}

// ---- Who dials. ----

DialerHandshake::DialerHandshake(const SecureOptions& options, int peer, std::unique_ptr<Stream> stream)
    : Handshake(options, std::move(stream)) {
  claims_ = {options.epoch, static_cast<uint32_t>(options.rank), static_cast<uint32_t>(peer),
             static_cast<uint32_t>(options.size), Digest(options.key)};
}

absl::StatusOr<bool> DialerHandshake::Advance() {
  if (phase_ == Phase::kSecuring) {
    ASSIGN_OR_RETURN(const bool secure, Secure());
    if (!secure) return false;
    dialer_nonce_ = RandomBytes(kNonceBytes);
    Send(Head(kOpen) + dialer_nonce_);
    phase_ = Phase::kChallenge;
  }
  while (true) {
    ASSIGN_OR_RETURN(const bool there, Read(kShortBytes));
    if (!there) return false;
    if (phase_ == Phase::kAnswer) {
      RETURN_IF_ERROR(TakeAnswer());
      return true;
    }
    RETURN_IF_ERROR(TakeChallenge());
    read_.clear();
    phase_ = Phase::kAnswer;
  }
}

absl::Status DialerHandshake::TakeChallenge() {
  RETURN_IF_ERROR(CheckHead(kChallenge));
  listener_nonce_ = read_.substr(kHeadBytes);
  std::string hello = Head(kHello);
  AppendClaims(claims_, hello);
  Send(hello + Proof(kDials, claims_));
  return absl::OkStatus();
}

absl::Status DialerHandshake::TakeAnswer() {
  RETURN_IF_ERROR(CheckHead(kWelcome));
  if (SameSecret(read_.substr(kHeadBytes), Proof(kListens, claims_))) return absl::OkStatus();
  return absl::PermissionDeniedError("does not know the job's secret; somebody else listens at its address");
}

// ---- Who listens. ----

ListenerHandshake::ListenerHandshake(const SecureOptions& options, std::unique_ptr<Stream> stream)
    : Handshake(options, std::move(stream)) {}

absl::StatusOr<bool> ListenerHandshake::Advance() {
  if (phase_ == Phase::kSecuring) {
    if (options_.tls.enabled()) RETURN_IF_ERROR(CheckUsesTls());
    ASSIGN_OR_RETURN(const bool secure, Secure());
    if (!secure) return false;
    phase_ = Phase::kOpen;
  }
  if (phase_ == Phase::kOpen) {
    const absl::StatusOr<bool> there = Read(kShortBytes);
    if (absl::IsDataLoss(there.status()) && read_[0] == kTlsHandshake) Refuse(kOtherVersion);  // to whom it is not TLS
    RETURN_IF_ERROR(there);
    if (!*there) return false;
    RETURN_IF_ERROR(TakeOpen());
    read_.clear();
    phase_ = Phase::kHello;
  }
  ASSIGN_OR_RETURN(const bool there, Read(kHelloBytes));
  if (!there) return false;
  RETURN_IF_ERROR(TakeHello());
  return true;
}

// OpenSSL would end the connection without a word.
absl::Status ListenerHandshake::CheckUsesTls() {
  std::string begins(4, '\0');
  const ssize_t got = recv(stream_->fd(), &begins[0], begins.size(), MSG_PEEK | MSG_DONTWAIT);
  if (got != 4 || begins != Head(kOpen).substr(0, 4)) return absl::OkStatus();
  const std::string refusal = Refusal(kNeedsTls, 0);
  (void)send(stream_->fd(), refusal.data(), refusal.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  return absl::FailedPreconditionError("does not use TLS; give certificates to all ranks or to none");
}

absl::Status ListenerHandshake::TakeOpen() {
  const absl::Status head = CheckHead(kOpen);
  if (absl::IsFailedPrecondition(head)) Refuse(kOtherVersion, kGroupProtocol);
  RETURN_IF_ERROR(head);
  dialer_nonce_ = read_.substr(kHeadBytes);
  listener_nonce_ = RandomBytes(kNonceBytes);
  Send(Head(kChallenge) + listener_nonce_);
  return absl::OkStatus();
}

absl::Status ListenerHandshake::TakeHello() {
  RETURN_IF_ERROR(CheckHead(kHello));
  absl::string_view rest = read_;
  rest.remove_prefix(kHeadBytes);
  claims_ = TakeClaims(rest);
  if (!SameSecret(rest, Proof(kDials, claims_))) {
    Refuse(kOtherSecret);
    return absl::PermissionDeniedError("does not know the job's secret");
  }
  if (claims_.from < static_cast<uint32_t>(kMaxGroupRanks)) peer_ = static_cast<int>(claims_.from);
  return CheckClaims();
}

absl::Status ListenerHandshake::CheckClaims() {
  const auto size = static_cast<uint32_t>(options_.size), rank = static_cast<uint32_t>(options_.rank);
  if (claims_.group != Digest(options_.key)) {
    Refuse(kOtherGroup);
    return absl::FailedPreconditionError(absl::StrCat("is in another group than '", options_.key, "'"));
  }
  if (claims_.epoch != options_.epoch) {
    Refuse(kOtherEpoch, options_.epoch);
    return absl::FailedPreconditionError(
        absl::StrCat("is in epoch ", claims_.epoch, ", this rank in epoch ", options_.epoch));
  }
  if (claims_.size != size) {
    Refuse(kOtherSize, size);
    return absl::FailedPreconditionError(
        absl::StrCat("is in a group of ", claims_.size, " ranks, this rank in one of ", size));
  }
  if (claims_.to != rank || claims_.from <= rank || claims_.from >= size) {
    Refuse(kOtherRank);
    return absl::FailedPreconditionError(
        absl::StrCat("dials rank ", claims_.to, " as rank ", claims_.from, "; this is rank ", rank, " of ", size));
  }
  return absl::OkStatus();
}

void ListenerHandshake::Refuse(uint32_t reason, uint64_t value) { Send(Refusal(reason, value)); }
void ListenerHandshake::Welcome() { Send(Head(kWelcome) + Proof(kListens, claims_)); }
void ListenerHandshake::RefuseSecond() { Refuse(kSecond); }

}  // namespace shardmesh
