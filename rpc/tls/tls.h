// TLS with certificates on both sides: who may reach a server beyond its own machine.
// Files are read when credentials are made and not watched: restart to change a certificate. Functions are thread-safe
// as long as no thread changes the environment.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

// What of TlsOptions, as bits.
enum TlsPart : unsigned { kTlsCert = 1, kTlsKey = 2, kTlsCa = 4, kTlsName = 8 };

// How messages call the options: --tls-cert of programs, tls_cert= of Python.
enum class TlsWords { kFlags, kPython };

struct TlsOptions {
  std::string cert_file;  // --tls-cert: own certificate chain, PEM
  std::string key_file;   // --tls-key: its private key, PEM
  // --tls-ca: the authority that must have signed the peer's certificate, PEM; with its revocation lists, if it has
  // some (revocation.h)
  std::string ca_file;
  // --tls-name: the name that a client expects in servers' certificates, when it is not the one that it dials: for port
  // forwarding, and for one name in the certificates of all servers. Servers do not use it.
  std::string override_target_name;
  TlsWords words = TlsWords::kFlags;
  unsigned from_environment = 0;  // the TlsParts that WithTlsEnvironment filled in

  // True when any file is named. All three are then needed.
  bool enabled() const { return !cert_file.empty() || !key_file.empty() || !ca_file.empty(); }
};

// `tls` with what it lacks from SHARDMESH_TLS_CERT, SHARDMESH_TLS_KEY, SHARDMESH_TLS_CA and SHARDMESH_TLS_NAME. A
// variable that is empty counts as unset.
TlsOptions WithTlsEnvironment(TlsOptions tls);

// OK: no file is named, or all three are.
// InvalidArgument: some are; names those that are missing, and who gave the others.
absl::Status CheckTlsComplete(const TlsOptions& tls);

// What to do where TLS is needed and not given: "give --tls-cert, --tls-key and --tls-ca, or set ...".
std::string HowToGiveTls(const TlsOptions& tls);

// Server: a client without a certificate signed by ca_file is refused in the handshake, or right behind it if a list in
// ca_file has it revoked. Client: so is such a server.
//   InvalidArgument: as CheckTlsComplete; or a file is not PEM of its kind, is damaged, is a key with a passphrase or
//   an expired certificate; or key and certificate do not belong together. NotFound / PermissionDenied /
//   FailedPrecondition: a file cannot be read. All name the file and who gave it.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> NewServerCredentials(const TlsOptions& tls);
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> NewChannelCredentials(const TlsOptions& tls);

// `status`, of a call over a channel that was made with `tls`. If it is Unavailable since client and server could not
// agree on TLS, its message also says what that means and what to do.
absl::Status ExplainTlsFailure(const absl::Status& status, const TlsOptions& tls);

}  // namespace shardmesh
