// Certificates with which ranks of a SecureGroup come in, and those with which they do not: the errors of both sides
// name the certificate and what is wrong with it.
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "local/descriptor/fd.h"
#include "local/testing/temp_folder.h"
#include "rpc/testing/test_authority.h"
#include "worker/transport/secure/socket_address.h"
#include "worker/transport/secure/testing/secure_ranks.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;
using Connected = std::vector<absl::StatusOr<std::unique_ptr<SecureGroup>>>;

// Connects to an address as ranks write it.
UniqueFd ConnectTo(const std::string& text) {
  const auto address = ParseAddress(text);
  EXPECT_OK(address);
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(fd.get(), address->get(), address->length), 0);
  return fd;
}

// Of rank 1, at rank 0 of a group of two; rank 0 goes on, and the right one comes.
void ExpectRefused(const SecureOptions& wrong, Code code, const std::string& why) {
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  absl::StatusOr<std::unique_ptr<SecureGroup>> first, second;
  std::thread rank([&] { first = SecureGroup::Connect(rendezvous, OptionsOf(0, 2, true)); });
  EXPECT_THAT(SecureGroup::Connect(rendezvous, wrong), StatusIs(code, AllOf(HasSubstr("rank 0"), HasSubstr(why))));
  second = SecureGroup::Connect(rendezvous, OptionsOf(1, 2, true));
  rank.join();
  EXPECT_OK(first.status());
  EXPECT_OK(second.status());
}

TEST(SecureConnectTls, ACertificateOfAnotherAuthority_IsRefused) {
  SecureOptions wrong = OptionsOf(1, 2, true);
  wrong.tls = TlsFiles("stranger", "ca");
  ExpectRefused(wrong, Code::kPermissionDenied, "unknown ca, the peer's word for this side's certificate, ");
  ExpectRefused(wrong, Code::kPermissionDenied, "stranger.pem");
  wrong.tls = TlsFiles("second", "other_ca");  // it is this rank that does not accept the other's
  ExpectRefused(wrong, Code::kPermissionDenied,
                "certificate verify failed: self-signed certificate in certificate chain");
  ExpectRefused(wrong, Code::kPermissionDenied,
                "the peer's certificate, CN = first, issued by CN = ca, who is not in ");
}

// Both ranks say whose certificate it is and what is wrong with it, in time; the one that listens has nobody else to
// wait for.
TEST(SecureConnectTls, ARevokedCertificate_IsNamedByBothRanks) {
  const testing::TempFolder folder;
  testing::TestAuthority authority(folder.path(), "authority");
  SecureOptions options[2] = {OptionsOf(0, 2, false), OptionsOf(1, 2, false)};
  options[0].tls = authority.Issue("good");
  options[1].tls = authority.Issue("taken-back");
  authority.Revoke("taken-back");
  options[0].tls.ca_file = authority.FileWithList();
  for (SecureOptions& rank : options) rank.timeout = absl::Seconds(2);
  const absl::Time begin = MonotonicNow();
  const Connected groups = ConnectAll(std::make_shared<MemoryRendezvous>(), {options[0], options[1]});
  EXPECT_LT(MonotonicNow() - begin, 2 * absl::Seconds(2));
  EXPECT_THAT(groups[0], StatusIs(Code::kUnavailable, HasSubstr("certificate revoked, of the peer's certificate, CN = "
                                                                "taken-back, issued by CN = authority")));
  EXPECT_THAT(groups[1], StatusIs(Code::kPermissionDenied, AllOf(HasSubstr("certificate revoked, the peer's word for "
                                                                           "this side's certificate, "),
                                                                 HasSubstr("taken-back.pem"))));
}

// The list is of its authority alone; who is not on it comes in.
TEST(SecureConnectTls, WithAList_TheOthersConnect) {
  const testing::TempFolder folder;
  testing::TestAuthority authority(folder.path(), "authority"), other(folder.path(), "other");
  authority.Issue("taken-back");
  authority.Revoke("taken-back");
  const std::string list = authority.FileWithList();
  SecureOptions options[2] = {OptionsOf(0, 2, false), OptionsOf(1, 2, false)};
  options[0].tls = authority.Issue("good");
  options[1].tls = other.Issue("of-another");
  ASSERT_EQ(std::system(absl::StrCat("cat ", other.file(), " >>", list).c_str()), 0);
  for (SecureOptions& rank : options) rank.tls.ca_file = list;
  Connected groups = ConnectAll(std::make_shared<MemoryRendezvous>(), {options[0], options[1]});
  for (const auto& group : groups) EXPECT_OK(group.status());
}

TEST(SecureConnectTls, ARankWithoutTls_IsRefused) {
  ExpectRefused(OptionsOf(1, 2, false), Code::kFailedPrecondition, "give certificates to all ranks or to none");
}

TEST(SecureConnectTls, ARankWithTls_IsRefusedInTheClear) {
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  absl::StatusOr<std::unique_ptr<SecureGroup>> first, second;
  std::thread rank([&] { first = SecureGroup::Connect(rendezvous, OptionsOf(0, 2, false)); });
  EXPECT_THAT(SecureGroup::Connect(rendezvous, OptionsOf(1, 2, true)),
              StatusIs(Code::kPermissionDenied, AllOf(HasSubstr("rank 0"), HasSubstr("TLS"))));
  second = SecureGroup::Connect(rendezvous, OptionsOf(1, 2, false));
  rank.join();
  EXPECT_OK(first.status());
  EXPECT_OK(second.status());
}

// A program that does not look at the time of its own certificate.
TEST(SecureConnectTls, AnExpiredCertificate_IsRefused) {
  SecureOptions expired = OptionsOf(1, 2, true);
  expired.tls = TlsFiles("expired");
  EXPECT_THAT(SecureGroup::Connect(std::make_shared<MemoryRendezvous>(), expired),
              StatusIs(Code::kInvalidArgument, HasSubstr("expired")));

  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  absl::StatusOr<std::unique_ptr<SecureGroup>> group;
  SecureOptions options = OptionsOf(0, 2, true);
  options.timeout = absl::Seconds(3);
  std::thread rank([&] { group = SecureGroup::Connect(rendezvous, options); });
  const auto address = rendezvous->Get("group/0", absl::Seconds(20));
  ASSERT_OK(address);
  SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
  ASSERT_EQ(SSL_CTX_use_certificate_chain_file(context, expired.tls.cert_file.c_str()), 1);
  ASSERT_EQ(SSL_CTX_use_PrivateKey_file(context, expired.tls.key_file.c_str(), SSL_FILETYPE_PEM), 1);
  SSL* const ssl = SSL_new(context);
  const UniqueFd fd = ConnectTo(*address);
  SSL_set_fd(ssl, fd.get());
  EXPECT_EQ(SSL_connect(ssl), 1);
  char answer = 0;
  EXPECT_LE(SSL_read(ssl, &answer, 1), 0) << "it was let in";
  SSL_free(ssl);
  SSL_CTX_free(context);
  rank.join();
  EXPECT_THAT(group, StatusIs(Code::kUnavailable, AllOf(HasSubstr("rank 1 did not come"),
                                                        HasSubstr("certificate has expired, of the peer's "
                                                                  "certificate, CN = expired, issued"))));
}

// One that has no certificate at all.
TEST(SecureConnectTls, WithoutACertificate_NobodyIsLetIn) {
  const auto rendezvous = std::make_shared<MemoryRendezvous>();
  absl::StatusOr<std::unique_ptr<SecureGroup>> group;
  SecureOptions options = OptionsOf(0, 2, true);
  options.timeout = absl::Seconds(2);
  std::thread rank([&] { group = SecureGroup::Connect(rendezvous, options); });
  const auto address = rendezvous->Get("group/0", absl::Seconds(20));
  ASSERT_OK(address);
  SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
  SSL* const ssl = SSL_new(context);
  const UniqueFd fd = ConnectTo(*address);
  SSL_set_fd(ssl, fd.get());
  (void)SSL_connect(ssl);
  char answer = 0;
  EXPECT_LE(SSL_read(ssl, &answer, 1), 0) << "it was let in";
  SSL_free(ssl);
  SSL_CTX_free(context);
  rank.join();
  EXPECT_THAT(group, StatusIs(Code::kUnavailable, HasSubstr("peer did not return a certificate")));
}

}  // namespace
}  // namespace shardmesh
