#include "rpc/tls.h"

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/status.h"
#include "rpc/deadline.h"

namespace shardmesh {
namespace {

constexpr std::streamsize kMaxPemBytes = 1 << 20;

struct Pem {
  std::string cert, key, ca;
};

absl::StatusOr<std::string> ReadPem(const char* flag, const std::string& path, absl::string_view marker) {
  if (path.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " is missing: TLS needs all of --tls-cert, --tls-key and --tls-ca"));
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxPemBytes, '\0');
  file.read(&text[0], kMaxPemBytes);
  if (!file.is_open() || file.bad()) {
    const int error = errno;
    return absl::Status(absl::ErrnoToStatusCode(error != 0 ? error : EIO),
                        absl::StrCat(flag, ": cannot read ", path, ": ", std::strerror(error != 0 ? error : EIO)));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  if (!absl::StrContains(text, marker)) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": ", path, " has no \"", marker, "\" line; it must be PEM"));
  }
  return text;
}

std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const Pem& pem) {
  grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = pem.ca;
  options.pem_key_cert_pairs.push_back({pem.key, pem.cert});
  return grpc::SslServerCredentials(options);
}

// gRPC notices bad PEM only when a port is added, and an external acceptor does not report it: so add a port to a
// server that is thrown away (in the abstract socket namespace: no file, no TCP port).
absl::Status CheckUsable(const TlsOptions& tls, const Pem& pem) {
  static std::atomic<int> counter{0};
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("unix-abstract:shardmesh-tls-check-", getpid(), "-", counter.fetch_add(1)),
                           MakeServerCredentials(pem));
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server != nullptr) {
    server->Shutdown(DeadlineIn(absl::ZeroDuration()));
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--tls-cert ", tls.cert_file, " and --tls-key ", tls.key_file,
      " cannot be used: damaged, or the key is not the certificate's; or --tls-ca ", tls.ca_file, " is damaged"));
}

absl::StatusOr<Pem> Load(const TlsOptions& tls) {
  Pem pem;
  ASSIGN_OR_RETURN(pem.cert, ReadPem("--tls-cert", tls.cert_file, "-----BEGIN CERTIFICATE-----"));
  ASSIGN_OR_RETURN(pem.key, ReadPem("--tls-key", tls.key_file, "PRIVATE KEY-----"));
  ASSIGN_OR_RETURN(pem.ca, ReadPem("--tls-ca", tls.ca_file, "-----BEGIN CERTIFICATE-----"));
  RETURN_IF_ERROR(CheckUsable(tls, pem));
  return pem;
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> NewServerCredentials(const TlsOptions& tls) {
  ASSIGN_OR_RETURN(const Pem pem, Load(tls));
  return MakeServerCredentials(pem);
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> NewChannelCredentials(const TlsOptions& tls) {
  ASSIGN_OR_RETURN(const Pem pem, Load(tls));
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = pem.ca;
  options.pem_private_key = pem.key;
  options.pem_cert_chain = pem.cert;
  return grpc::SslCredentials(options);
}

}  // namespace shardmesh
