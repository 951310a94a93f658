#include "rpc/tls.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/matchers.h"
#include "rpc/channel.h"
#include "rpc/server.h"
#include "rpc/status.h"
#include "rpc/testing/echo_service.h"

namespace shardmesh {
namespace {

using ::shardmesh::rpc::testing::Echo;
using ::shardmesh::rpc::testing::EchoRequest;
using ::shardmesh::rpc::testing::EchoResponse;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string File(const std::string& name) { return absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name); }

void Run(const std::string& command) {
  ASSERT_EQ(std::system(absl::StrCat("cd ", std::getenv("TEST_TMPDIR"), " && ", command, " 2>openssl.log").c_str()), 0)
      << command;
}

// An authority `ca`, and a certificate `name` signed by it, for localhost and 127.0.0.1.
void MakeAuthority(const std::string& ca) {
  Run(absl::StrCat("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=", ca,
                   " -keyout ", ca, ".key -out ", ca, ".pem"));
}
void MakeCertificate(const std::string& name, const std::string& ca) {
  Run(absl::StrCat("openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=", name, " -keyout ",
                   name, ".key -out ", name,
                   ".csr && printf 'subjectAltName=DNS:localhost,DNS:shardmesh.test,IP:127.0.0.1'", " > ", name,
                   ".ext && openssl x509 -req -days 2 -in ", name, ".csr -CA ", ca, ".pem -CAkey ", ca,
                   ".key -CAcreateserial -extfile ", name, ".ext -out ", name, ".pem"));
}

TlsOptions Tls(const std::string& name, const std::string& ca) {
  return {File(name + ".pem"), File(name + ".key"), File(ca + ".pem"), ""};
}

class TlsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    MakeAuthority("ca");
    MakeAuthority("other_ca");
    MakeCertificate("server", "ca");
    MakeCertificate("client", "ca");
    MakeCertificate("stranger", "other_ca");
  }

  std::unique_ptr<Server> Start(const std::string& listen) {
    ServerOptions options;
    options.listen = listen;
    options.tls = Tls("server", "ca");
    auto server = Server::Start(options, {&service_});
    EXPECT_OK(server);
    return server.ok() ? *std::move(server) : nullptr;
  }

  static absl::Status Call(const std::shared_ptr<grpc::Channel>& channel) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
    EchoResponse response;
    return FromGrpc(Echo::NewStub(channel)->Echo(&context, EchoRequest(), &response), "server Echo.Echo");
  }
  static absl::Status Call(const std::string& address, const TlsOptions& tls) {
    ASSIGN_OR_RETURN(const auto channel, NewChannel(address, tls));
    return Call(channel);
  }

  testing::EchoService service_;
};

TEST_F(TlsTest, ClientWithCertificate_IsServed) {
  auto server = Start("127.0.0.1:0");
  EXPECT_OK(Call(server->address(), Tls("client", "ca")));
  EXPECT_OK(Call(absl::StrCat("localhost:", server->port()), Tls("client", "ca")));
}

TEST_F(TlsTest, OffLoopback_IsServed) {
  auto server = Start("0.0.0.0:0");
  EXPECT_OK(Call(absl::StrCat("127.0.0.1:", server->port()), Tls("client", "ca")));
}

TEST_F(TlsTest, OverrideTargetName_IsTheNameExpected) {
  auto server = Start("127.0.0.1:0");
  TlsOptions tls = Tls("client", "ca");
  tls.override_target_name = "shardmesh.test";
  EXPECT_OK(Call(server->address(), tls));
  tls.override_target_name = "somebody.else";
  EXPECT_THAT(Call(server->address(), tls), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("server Echo.Echo")));
}

TEST_F(TlsTest, ClientWithoutCertificate_IsRefused) {
  auto server = Start("127.0.0.1:0");
  std::ifstream ca(File("ca.pem"));
  grpc::SslCredentialsOptions options;
  options.pem_root_certs.assign(std::istreambuf_iterator<char>(ca), {});
  EXPECT_THAT(Call(grpc::CreateChannel(server->address(), grpc::SslCredentials(options))),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("server")));
}

TEST_F(TlsTest, ClientOfAnotherAuthority_IsRefused) {
  auto server = Start("127.0.0.1:0");
  TlsOptions stranger = Tls("stranger", "ca");  // trusts the server, but is not trusted
  EXPECT_THAT(Call(server->address(), stranger), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("server")));
}

TEST_F(TlsTest, ServerOfAnotherAuthority_IsRefusedByTheClient) {
  auto server = Start("127.0.0.1:0");
  EXPECT_THAT(Call(server->address(), Tls("client", "other_ca")),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("server")));
}

TEST_F(TlsTest, PlaintextClient_IsRefused) {
  auto server = Start("127.0.0.1:0");
  EXPECT_THAT(Call(server->address(), {}), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("server")));
  EXPECT_OK(Call(server->address(), Tls("client", "ca")));
}

TEST_F(TlsTest, BadFiles_NameTheFlagAndTheFile) {
  TlsOptions tls = Tls("client", "ca");
  tls.ca_file = "";
  EXPECT_THAT(NewServerCredentials(tls),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--tls-ca is missing")));
  tls.ca_file = File("no_such_file");
  EXPECT_THAT(NewServerCredentials(tls),
              StatusIs(absl::StatusCode::kNotFound, AllOf(HasSubstr("--tls-ca"), HasSubstr("no_such_file"))));
  tls.ca_file = File("");
  EXPECT_FALSE(NewServerCredentials(tls).ok());  // a folder
  tls.ca_file = File("client.key");
  EXPECT_THAT(NewServerCredentials(tls), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("BEGIN CERTIFICATE")));
}

TEST_F(TlsTest, KeyOfAnotherCertificate_InvalidArgumentOnBothSides) {
  TlsOptions tls = Tls("client", "ca");
  tls.key_file = File("server.key");
  EXPECT_THAT(NewServerCredentials(tls), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("server.key")));
  EXPECT_THAT(NewChannelCredentials(tls), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("server.key")));
}

TEST_F(TlsTest, DamagedCertificate_InvalidArgument) {
  std::ofstream(File("damaged.pem")) << "-----BEGIN CERTIFICATE-----\nbm90IG9uZQ==\n-----END CERTIFICATE-----\n";
  TlsOptions tls = Tls("client", "ca");
  tls.cert_file = File("damaged.pem");
  EXPECT_THAT(NewServerCredentials(tls), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("damaged.pem")));
  tls = Tls("client", "ca");
  tls.ca_file = File("damaged.pem");
  EXPECT_THAT(NewServerCredentials(tls), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("damaged.pem")));
}

}  // namespace
}  // namespace shardmesh
