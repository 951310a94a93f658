// What an authority has taken back, as servers and clients of gRPC see it.
#include "rpc/tls/revocation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "rpc/base/status.h"
#include "rpc/channel.h"
#include "rpc/server.h"
#include "rpc/testing/echo_service.h"
#include "rpc/testing/test_authority.h"
#include "rpc/tls/tls.h"

namespace shardmesh {
namespace {

using ::shardmesh::rpc::testing::Echo;
using ::shardmesh::rpc::testing::EchoRequest;
using ::shardmesh::rpc::testing::EchoResponse;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

class Revocation : public ::testing::Test {
 protected:
  Revocation() : server_(authority_.Issue("server")), client_(authority_.Issue("client")) {
    revoked_ = authority_.Issue("taken-back");
    authority_.Revoke("taken-back");
    list_ = authority_.FileWithList();
  }
  static TlsOptions With(TlsOptions tls, const std::string& ca_file) {
    tls.ca_file = ca_file;
    return tls;
  }
  // A call of `client` to a server of `server`.
  absl::Status Call(const TlsOptions& server, const TlsOptions& client, const std::string& host = "127.0.0.1") {
    ServerOptions options;
    options.listen = "127.0.0.1:0";
    options.tls = server;
    ASSIGN_OR_RETURN(const auto started, Server::Start(options, {&service_}));
    ASSIGN_OR_RETURN(const auto channel, NewChannel(absl::StrCat(host, ":", started->port()), client));
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
    EchoResponse response;
    return ExplainTlsFailure(FromGrpc(Echo::NewStub(channel)->Echo(&context, EchoRequest(), &response), "server"),
                             client);
  }

  const testing::TempFolder folder_;
  testing::TestAuthority authority_{folder_.path(), "authority"};
  const TlsOptions server_, client_;
  TlsOptions revoked_;
  std::string list_;
  testing::EchoService service_;
};

TEST_F(Revocation, AClientThatIsRevoked_IsRefusedByServersThatHaveTheList) {
  EXPECT_OK(Call(server_, revoked_));  // nobody has told this server
  EXPECT_THAT(Call(With(server_, list_), revoked_),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("taken-back.pem or has it on a revocation list"))));
  EXPECT_OK(Call(With(server_, list_), client_));
}

TEST_F(Revocation, AServerThatIsRevoked_IsRefusedByClientsThatHaveTheList) {
  EXPECT_THAT(Call(revoked_, With(client_, list_)),
              StatusIs(Code::kUnavailable, AllOf(HasSubstr("certificate revoked: CN = taken-back, issued by CN = "
                                                           "authority"),
                                                 HasSubstr("start the server with a new one"))));
  EXPECT_OK(Call(server_, With(client_, list_)));
  EXPECT_OK(Call(With(server_, list_), With(client_, list_)));
}

// Everything else is as without a list.
TEST_F(Revocation, WithAList_NamesAndAuthoritiesStillCount) {
  EXPECT_OK(Call(server_, With(client_, list_), "localhost"));
  TlsOptions elsewhere = With(client_, list_);
  elsewhere.override_target_name = "somebody.else";
  EXPECT_THAT(Call(server_, elsewhere), StatusIs(Code::kUnavailable, HasSubstr("--tls-name or SHARDMESH_TLS_NAME")));
  elsewhere.override_target_name = "localhost";
  EXPECT_OK(Call(server_, elsewhere));
  testing::TestAuthority other(folder_.path(), "other");
  const TlsOptions stranger = other.Issue("stranger");
  EXPECT_THAT(Call(With(server_, list_), With(stranger, authority_.file())),
              StatusIs(Code::kUnavailable, HasSubstr("did not sign --tls-cert")));
  EXPECT_THAT(Call(stranger, With(client_, list_)),
              StatusIs(Code::kUnavailable, HasSubstr("did not sign the server's certificate")));
}

// The tool that makes certificates, as a user runs it.
TEST_F(Revocation, MakeCerts_RevokesWhatItHasMade) {
  const std::string certs = folder_.File("certs"), tool = "deploy/make_certs.sh ";
  const auto run = [](const std::string& command) { return std::system((command + " >/dev/null").c_str()); };
  ASSERT_EQ(run(absl::StrCat(tool, certs, " one=127.0.0.1 two=127.0.0.1 three=127.0.0.1")), 0);
  const auto of = [&](const std::string& name) {
    TlsOptions tls;
    tls.cert_file = absl::StrCat(certs, "/", name, ".pem");
    tls.key_file = absl::StrCat(certs, "/", name, ".key");
    tls.ca_file = certs + "/ca-with-list.pem";
    return tls;
  };
  for (const std::string name : {"two", "three"}) {
    ASSERT_EQ(run(absl::StrCat(tool, "--revoke ", certs, " ", name)), 0);
    EXPECT_EQ(Call(of("one"), of("two")).code(), Code::kUnavailable);
    EXPECT_EQ(Call(of("one"), of("three")).code(), name == "two" ? Code::kOk : Code::kUnavailable);
  }
  EXPECT_OK(Call(of("one"), of("one")));
  EXPECT_NE(run(absl::StrCat(tool, "--revoke ", certs, " four 2>&1")), 0);
}

// Its time is over, it is not whole, or its authority may not sign one: nobody can start with it.
TEST_F(Revocation, AListThatCannotCount_IsRefusedWithItsFile) {
  const std::string old = authority_.FileWithList(/*over=*/true);
  EXPECT_THAT(NewServerCredentials(With(server_, old)).status(),
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("--tls-ca " + old +
                                                               " has a revocation list of CN = "
                                                               "authority whose time is over"))));
  ASSERT_EQ(
      std::system(absl::StrCat("cd ", folder_.path(),
                               " && openssl req -x509 -key authority.key -subj /CN=authority -days 2 -out may-not.pem "
                               "-addext keyUsage=critical,keyCertSign 2>openssl.log && "
                               "cat may-not.pem authority.crl >may-not-list.pem")
                      .c_str()),
      0);
  EXPECT_THAT(NewServerCredentials(With(server_, folder_.File("may-not-list.pem"))).status(),
              StatusIs(Code::kInvalidArgument, HasSubstr("whose certificate there may not sign one")));
  const std::string damaged = folder_.File("damaged.pem");
  std::ofstream(damaged) << std::ifstream(authority_.file()).rdbuf() << "-----BEGIN X509 CRL-----\nAAAA\n"
                         << "-----END X509 CRL-----\n";
  EXPECT_THAT(
      NewChannelCredentials(With(client_, damaged)).status(),
      StatusIs(Code::kInvalidArgument, HasSubstr("damaged.pem has a revocation list (X509 CRL) that is damaged")));
}

}  // namespace
}  // namespace shardmesh
