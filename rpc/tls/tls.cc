#include "rpc/tls/tls.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "rpc/base/deadline.h"
#include "rpc/tls/pem.h"
#include "rpc/tls/revocation.h"

namespace shardmesh {
namespace {

constexpr std::streamsize kMaxPemBytes = 1 << 20;

struct Pem {
  std::string cert, key, ca;
};

struct Name {
  TlsPart part;
  const char *flag, *argument, *variable;
  std::string TlsOptions::*value;
};
constexpr Name kNames[] = {
    {kTlsCert, "--tls-cert", "tls_cert=", "SHARDMESH_TLS_CERT", &TlsOptions::cert_file},
    {kTlsKey, "--tls-key", "tls_key=", "SHARDMESH_TLS_KEY", &TlsOptions::key_file},
    {kTlsCa, "--tls-ca", "tls_ca=", "SHARDMESH_TLS_CA", &TlsOptions::ca_file},
    {kTlsName, "--tls-name", "tls_name=", "SHARDMESH_TLS_NAME", &TlsOptions::override_target_name}};
constexpr int kCert = 0, kKey = 1, kCa = 2, kName = 3, kFiles = 3;  // in kNames

const char* Option(const TlsOptions& tls, int which) {
  return tls.words == TlsWords::kPython ? kNames[which].argument : kNames[which].flag;
}

// Who gave it, and what: --tls-ca ca.pem, tls_ca="ca.pem", SHARDMESH_TLS_CA=ca.pem.
std::string Given(const TlsOptions& tls, int which) {
  const Name& name = kNames[which];
  const std::string& value = tls.*name.value;
  if ((tls.from_environment & name.part) != 0) return absl::StrCat(name.variable, "=", value);
  if (tls.words == TlsWords::kPython) return absl::StrCat(name.argument, "\"", value, "\"");
  return absl::StrCat(name.flag, " ", value);
}

absl::StatusOr<std::string> ReadFile(const TlsOptions& tls, int which) {
  const std::string& path = tls.*kNames[which].value;
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxPemBytes, '\0');
  file.read(&text[0], kMaxPemBytes);
  if (!file.is_open() || file.bad()) {
    const int error = errno != 0 ? errno : EIO;
    return absl::Status(absl::ErrnoToStatusCode(error),
                        absl::StrCat(Given(tls, which), " cannot be read: ", std::strerror(error)));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

std::string UtcText(absl::Time time) {
  const time_t seconds = absl::ToTimeT(time);
  tm parts = {};
  char text[sizeof("2026-01-31 12:00:00 UTC") + 8];
  if (gmtime_r(&seconds, &parts) == nullptr || strftime(text, sizeof(text), "%F %T UTC", &parts) == 0) return "a time";
  return text;
}

absl::StatusOr<std::string> ReadPem(const TlsOptions& tls, int which, absl::string_view kind) {
  ASSIGN_OR_RETURN(std::string text, ReadFile(tls, which));
  const absl::StatusOr<std::vector<std::string>> blocks = PemBlocks(text, kind);
  if (!blocks.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(Given(tls, which), " ", blocks.status().message()));
  }
  if (which == kKey) return text;
  // The first of a chain is its owner's; of authorities one may be old.
  absl::Time end = TimesOfCertificate(blocks->front()).not_after;
  for (const std::string& block : *blocks) {
    if (which == kCa) end = std::max(end, TimesOfCertificate(block).not_after);
  }
  if (end > absl::Now()) return text;
  return absl::InvalidArgumentError(
      absl::StrCat(Given(tls, which), " expired at ", UtcText(end), "; have a new certificate made"));
}

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const Pem& pem) {
  grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = pem.ca;
  options.pem_key_cert_pairs.push_back({pem.key, pem.cert});
  return grpc::SslServerCredentials(options);
}

// gRPC's plain credentials cannot look at what is revoked. Without a list there is nothing to look at, and they serve.
std::shared_ptr<grpc::experimental::CertificateProviderInterface> ProviderOf(const Pem& pem) {
  return std::make_shared<grpc::experimental::StaticDataCertificateProvider>(
      pem.ca, std::vector<grpc::experimental::IdentityKeyCertPair>{{pem.key, pem.cert}});
}
void AddChecks(const Pem& pem, bool dials, grpc::experimental::TlsCredentialsOptions& options) {
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_certificate_verifier(NewRevocationVerifier(pem.ca, dials));
}

// gRPC notices bad PEM only when a port is added, and an external acceptor does not report it: so add a port to a
// server that is thrown away (in the abstract socket namespace: no file, no TCP port).
absl::Status CheckUsable(const TlsOptions& tls, const Pem& pem) {
  static std::atomic<int> counter{0};
  grpc::CallbackGenericService none;  // a server without any service does not start
  grpc::ServerBuilder builder;
  builder.RegisterCallbackGenericService(&none);
  builder.AddListeningPort(absl::StrCat("unix-abstract:shardmesh-tls-check-", getpid(), "-", counter.fetch_add(1)),
                           MakeServerCredentials(pem));
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server != nullptr) {
    server->Shutdown(DeadlineIn(absl::ZeroDuration()));
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      Given(tls, kKey), " is not the key of ", Given(tls, kCert), ", or one of them or ", Given(tls, kCa),
      " is damaged; openssl pkey -pubout of the key and openssl x509 -noout -pubkey of the certificate print the same "
      "when they belong together"));
}

absl::StatusOr<Pem> Load(const TlsOptions& tls) {
  Pem pem;
  // A file that is wrong is said before one that is missing.
  if (!tls.cert_file.empty()) {
    ASSIGN_OR_RETURN(pem.cert, ReadPem(tls, kCert, "CERTIFICATE"));
  }
  if (!tls.key_file.empty()) {
    ASSIGN_OR_RETURN(pem.key, ReadPem(tls, kKey, "PRIVATE KEY"));
  }
  if (!tls.ca_file.empty()) {
    ASSIGN_OR_RETURN(pem.ca, ReadPem(tls, kCa, "CERTIFICATE"));
    const absl::Status lists = HasRevocationList(pem.ca) ? CheckRevocationLists(pem.ca) : absl::OkStatus();
    if (!lists.ok()) return absl::InvalidArgumentError(absl::StrCat(Given(tls, kCa), " ", lists.message()));
  }
  RETURN_IF_ERROR(CheckTlsComplete(tls));
  RETURN_IF_ERROR(CheckUsable(tls, pem));
  return pem;
}

// What gRPC's words for a connection that did not come about mean, and what to do; empty: nothing of TLS.
std::string Advice(absl::string_view message, const TlsOptions& tls) {
  if (!absl::StrContains(message, "failed to connect to all addresses")) return "";
  if (absl::StrContains(message, "is not in peer certificate") ||
      absl::StrContains(message, "Hostname Verification Check failed")) {
    return absl::StrCat(
        "the server's certificate is not for that name; dial one that it has (openssl x509 -noout -ext subjectAltName "
        "-in FILE prints them), or give one of them as ",
        Option(tls, kName), " or SHARDMESH_TLS_NAME");
  }
  if (absl::StrContains(message, "certificate revoked")) {
    return absl::StrCat("the server's certificate is on the revocation list in ", Given(tls, kCa),
                        "; start the server with a new one");
  }
  if (absl::StrContains(message, "certificate verify failed")) {
    return absl::StrCat("the authority in ", Given(tls, kCa),
                        " did not sign the server's certificate, or that has expired; give the authority that did, or "
                        "start the server with a certificate of this one");
  }
  if (absl::StrContains(message, "wrong version number")) {
    return absl::StrCat("the server does not use TLS; start it with certificates, or leave out ", Given(tls, kCert),
                        " and the others (a variable is left out when it is unset)");
  }
  if (!absl::StrContains(message, "Socket closed") && !absl::StrContains(message, "Connection reset")) return "";
  if (!tls.enabled())
    return absl::StrCat("the server ended the connection at once; if it uses TLS, ", HowToGiveTls(tls));
  return absl::StrCat("the server ended the TLS handshake, as it does when its own --tls-ca did not sign ",
                      Given(tls, kCert),
                      " or has it on a revocation list; give a certificate of its authority, and look at its log");
}

}  // namespace

TlsOptions WithTlsEnvironment(TlsOptions tls) {
  for (const Name& name : kNames) {
    const char* const value = std::getenv(name.variable);
    if (value == nullptr || *value == '\0' || !(tls.*name.value).empty()) continue;
    tls.*name.value = value;
    tls.from_environment |= name.part;
  }
  return tls;
}

absl::Status CheckTlsComplete(const TlsOptions& tls) {
  std::vector<std::string> missing, instead, given;
  for (int which = 0; which < kFiles; ++which) {
    if (!(tls.*kNames[which].value).empty()) {
      given.push_back(Given(tls, which));
      continue;
    }
    missing.push_back(Option(tls, which));
    instead.push_back(kNames[which].variable);
  }
  if (given.empty() || missing.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(absl::StrJoin(missing, " and "), missing.size() == 1 ? " is" : " are", " missing: TLS needs all of ",
                   Option(tls, kCert), ", ", Option(tls, kKey), " and ", Option(tls, kCa), ", and has ",
                   absl::StrJoin(given, " and "), " alone; give the rest, or set ", absl::StrJoin(instead, " and ")));
}

std::string HowToGiveTls(const TlsOptions& tls) {
  return absl::StrCat("give ", Option(tls, kCert), ", ", Option(tls, kKey), " and ", Option(tls, kCa),
                      ", or set SHARDMESH_TLS_CERT, SHARDMESH_TLS_KEY and SHARDMESH_TLS_CA");
}

absl::Status ExplainTlsFailure(const absl::Status& status, const TlsOptions& tls) {
  if (!absl::IsUnavailable(status)) return status;
  const std::string advice = Advice(status.message(), tls);
  return advice.empty() ? status : absl::UnavailableError(absl::StrCat(status.message(), "; ", advice));
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> NewServerCredentials(const TlsOptions& tls) {
  ASSIGN_OR_RETURN(const Pem pem, Load(tls));
  if (!HasRevocationList(pem.ca)) return MakeServerCredentials(pem);
  grpc::experimental::TlsServerCredentialsOptions options(ProviderOf(pem));
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  AddChecks(pem, /*dials=*/false, options);
  return grpc::experimental::TlsServerCredentials(options);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> NewChannelCredentials(const TlsOptions& tls) {
  ASSIGN_OR_RETURN(const Pem pem, Load(tls));
  if (HasRevocationList(pem.ca)) {
    grpc::experimental::TlsChannelCredentialsOptions options;
    options.set_certificate_provider(ProviderOf(pem));
    options.set_check_call_host(false);  // the verifier has
    AddChecks(pem, /*dials=*/true, options);
    return grpc::experimental::TlsCredentials(options);
  }
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = pem.ca;
  options.pem_private_key = pem.key;
  options.pem_cert_chain = pem.cert;
  return grpc::SslCredentials(options);
}

}  // namespace shardmesh
