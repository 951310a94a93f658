// TlsContext: TLS 1.3 for the connections between ranks, by OpenSSL. Both sides show a certificate that the authority
// of TlsOptions has signed, whose time is not over, and which no list beside that authority has revoked (revocation.h).
// Names in it are not compared, since what makes a peer a rank is that it knows the job's secret (handshake.h).
//
// AES-128-GCM is preferred: with the processor's AES instructions it is the fastest. Keys are renewed before so many
// records that RFC 8446, 5.5, asks for it. The kernel encrypts what is sent where OpenSSL and the kernel can
// (SSL_OP_ENABLE_KTLS); such keys are not renewed, since OpenSSL 3.0 has no way to.
// Thread-safe; its streams are not.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "local/descriptor/fd.h"
#include "rpc/tls/tls.h"
#include "worker/transport/secure/stream.h"

namespace shardmesh {

// RFC 8446, 5.5: 2^24.5 full records with one key of AES-GCM.
inline constexpr int64_t kRecordsPerKey = int64_t{1} << 23;

// Whether this host's kernel can encrypt what a socket sends. It is asked once.
bool KernelOffersTls();

// How a stream sends.
struct TlsSending {
  int64_t records_per_key = kRecordsPerKey;
  bool in_kernel = KernelOffersTls();  // OpenSSL has the socket itself, and asks the kernel
};

class TlsContext {
 public:
  // Reads the files, and ignores SIGPIPE for the process where that would end it: OpenSSL may write to connections that
  // peers have closed. Errors: those of NewServerCredentials, which name the file. REQUIRES: tls.enabled().
  static absl::StatusOr<std::shared_ptr<const TlsContext>> Load(const TlsOptions& tls);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  // `dials`: this end has opened the connection. Null: OpenSSL has no memory. The context may end before the stream.
  // REQUIRES: a socket that does not block.
  std::unique_ptr<Stream> NewStream(UniqueFd fd, bool dials, const TlsSending& sending = {}) const;

 private:
  TlsContext(void* context, const TlsOptions& files)
      : context_(context), files_(std::make_shared<const TlsOptions>(files)) {}

  void* const context_;  // SSL_CTX
  const std::shared_ptr<const TlsOptions> files_;
};

}  // namespace shardmesh
