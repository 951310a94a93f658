#include "rpc/tls/tls.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/matchers.h"
#include "core/base/sync.h"
#include "rpc/base/status.h"
#include "rpc/calls/caller_share.h"
#include "rpc/channel.h"
#include "rpc/server.h"
#include "rpc/testing/echo_service.h"

namespace shardmesh {
namespace {

using ::shardmesh::rpc::testing::Echo;
using ::shardmesh::rpc::testing::EchoRequest;
using ::shardmesh::rpc::testing::EchoResponse;
using ::testing::AllOf;
using ::testing::ElementsAre;
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
void MakeCertificate(const std::string& name, const std::string& ca, int days = 2) {
  Run(absl::StrCat("openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=", name, " -keyout ",
                   name, ".key -out ", name,
                   ".csr && printf 'subjectAltName=DNS:localhost,DNS:shardmesh.test,IP:127.0.0.1'", " > ", name,
                   ".ext && openssl x509 -req -days ", days, " -in ", name, ".csr -CA ", ca, ".pem -CAkey ", ca,
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
    MakeCertificate("expired", "ca", -1);
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
    return ExplainTlsFailure(Call(channel), tls);
  }

  testing::EchoService service_;
};

TEST_F(TlsTest, ClientWithCertificate_IsServed) {
  auto server = Start("127.0.0.1:0");
  EXPECT_OK(Call(server->address(), Tls("client", "ca")));
  EXPECT_OK(Call(absl::StrCat("localhost:", server->port()), Tls("client", "ca")));
}

// Says who counts as the caller of each call.
class KeyService final : public Echo::CallbackService {
 public:
  grpc::ServerUnaryReactor* Echo(grpc::CallbackServerContext* context, const EchoRequest*, EchoResponse*) override {
    {
      MutexLock lock(mu_);
      keys_.push_back(CallerKey(*context));
    }
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
  std::vector<std::string> keys() {
    MutexLock lock(mu_);
    return keys_;
  }

 private:
  Mutex mu_;
  std::vector<std::string> keys_ ABSL_GUARDED_BY(mu_);
};

TEST_F(TlsTest, CallerKey_IsTheCertificatesName_AndOnThisHostWithoutOneNothing) {
  KeyService service;
  ServerOptions options;
  options.listen = "127.0.0.1:0";
  {
    ASSERT_OK_AND_ASSIGN(const auto plain, Server::Start(options, {&service}));
    EXPECT_OK(Call(plain->address(), {}));
  }
  options.tls = Tls("server", "ca");
  ASSERT_OK_AND_ASSIGN(const auto server, Server::Start(options, {&service}));
  EXPECT_OK(Call(server->address(), Tls("client", "ca")));
  EXPECT_THAT(service.keys(), ElementsAre("", "CN=client"));
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

TEST_F(TlsTest, BadFile_SaysWhichAndWhy) {
  TlsOptions tls = Tls("expired", "ca");
  EXPECT_THAT(NewChannelCredentials(tls),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("--tls-cert"), HasSubstr("expired.pem expired at 20"))));
  shardmesh::Run("openssl pkey -in client.key -aes128 -passout pass:word -out locked.key");
  tls = Tls("client", "ca");
  tls.key_file = File("locked.key");
  EXPECT_THAT(NewChannelCredentials(tls),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("--tls-key"), HasSubstr("locked.key has a key"), HasSubstr("passphrase"))));
  shardmesh::Run("head -3 client.pem >short.pem && (head -3 client.pem; tail -1 client.pem) >hole.pem");
  for (const auto& [file, why] : {std::pair("short.pem", "cut off"), std::pair("hole.pem", "damaged")}) {
    tls = Tls("client", "ca");
    tls.cert_file = File(file);
    EXPECT_THAT(NewServerCredentials(tls), StatusIs(absl::StatusCode::kInvalidArgument,
                                                    AllOf(HasSubstr("--tls-cert"), HasSubstr(file), HasSubstr(why))));
  }
  shardmesh::Run("cat expired.pem ca.pem >bundle.pem");  // of authorities one may be old
  tls = Tls("client", "ca");
  tls.ca_file = File("bundle.pem");
  EXPECT_OK(NewChannelCredentials(tls));
}

TEST_F(TlsTest, Refused_SaysWhatToDo) {
  auto server = Start("127.0.0.1:0");
  EXPECT_THAT(
      Call(server->address(), Tls("stranger", "ca")),
      StatusIs(absl::StatusCode::kUnavailable, AllOf(HasSubstr("did not sign --tls-cert"), HasSubstr("stranger.pem"))));
  EXPECT_THAT(
      Call(server->address(), Tls("client", "other_ca")),
      StatusIs(absl::StatusCode::kUnavailable, AllOf(HasSubstr("--tls-ca"), HasSubstr("other_ca.pem did not sign"))));
  TlsOptions tls = Tls("client", "ca");
  tls.override_target_name = "somebody.else";
  EXPECT_THAT(Call(server->address(), tls),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("--tls-name or SHARDMESH_TLS_NAME")));
  tls.words = TlsWords::kPython;
  EXPECT_THAT(Call(server->address(), tls),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("tls_name= or SHARDMESH_TLS_NAME")));
  EXPECT_THAT(Call(server->address(), {}), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("SHARDMESH_TLS_CERT")));

  ServerOptions open;
  open.listen = "127.0.0.1:0";
  testing::EchoService service;
  ASSERT_OK_AND_ASSIGN(auto plain, Server::Start(open, {&service}));
  EXPECT_THAT(Call(plain->address(), Tls("client", "ca")),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("does not use TLS")));
}

// Sets a variable for as long as it lives.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) { setenv(name, value.c_str(), 1); }
  ~Variable() { unsetenv(name_); }

 private:
  const char* const name_;
};

TEST_F(TlsTest, Environment_IsBelowWhatIsGiven) {
  const Variable cert("SHARDMESH_TLS_CERT", File("client.pem")), key("SHARDMESH_TLS_KEY", File("client.key"));
  const Variable name("SHARDMESH_TLS_NAME", "shardmesh.test");
  TlsOptions tls;
  tls.ca_file = File("ca.pem");
  tls.key_file = File("server.key");
  tls = WithTlsEnvironment(tls);
  EXPECT_EQ(tls.cert_file, File("client.pem"));
  EXPECT_EQ(tls.key_file, File("server.key"));
  EXPECT_EQ(tls.ca_file, File("ca.pem"));
  EXPECT_EQ(tls.override_target_name, "shardmesh.test");
  EXPECT_EQ(tls.from_environment, unsigned{kTlsCert | kTlsName});
  EXPECT_THAT(NewChannelCredentials(tls), StatusIs(absl::StatusCode::kInvalidArgument,
                                                   AllOf(HasSubstr("--tls-key"), HasSubstr("SHARDMESH_TLS_CERT"))));
  const Variable empty("SHARDMESH_TLS_CA", "");
  EXPECT_EQ(WithTlsEnvironment({}).ca_file, "");
}

TEST_F(TlsTest, Incomplete_NamesWhatIsMissingAndWhereTheRestCameFrom) {
  const Variable cert("SHARDMESH_TLS_CERT", "c.pem");
  TlsOptions tls;
  tls.key_file = "k.pem";
  tls.words = TlsWords::kPython;
  tls = WithTlsEnvironment(tls);
  EXPECT_THAT(CheckTlsComplete(tls),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("tls_ca= is missing"),
                             HasSubstr("has SHARDMESH_TLS_CERT=c.pem and tls_key=\"k.pem\" alone"),
                             HasSubstr("set SHARDMESH_TLS_CA"))));
  EXPECT_OK(CheckTlsComplete({}));
  EXPECT_OK(CheckTlsComplete(Tls("client", "ca")));
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
