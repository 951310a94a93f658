// TLS with certificates on both sides: who may reach a server beyond its own machine.
// Files are read when credentials are made and not watched: restart to change a certificate. Functions are thread-safe.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace shardmesh {

struct TlsOptions {
  std::string cert_file;  // --tls-cert: own certificate chain, PEM
  std::string key_file;   // --tls-key: its private key, PEM
  std::string ca_file;    // --tls-ca: the authority that must have signed the peer's certificate, PEM
  // The name a client expects in the server's certificate when it is not the one dialled. For tests and port
  // forwarding.
  std::string override_target_name;

  // True when any file is named. All three are then needed.
  bool enabled() const { return !cert_file.empty() || !key_file.empty() || !ca_file.empty(); }
};

// Server: a client without a certificate signed by ca_file is refused in the handshake. Client: so is such a server.
//   InvalidArgument: one of the three flags is missing (named), or a file is not PEM of its kind, or key and
//   certificate do not belong together. NotFound / PermissionDenied / FailedPrecondition: a file cannot be read (named,
//   with errno).
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> NewServerCredentials(const TlsOptions& tls);
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> NewChannelCredentials(const TlsOptions& tls);

}  // namespace shardmesh
