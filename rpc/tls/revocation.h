// Certificates that their authority has taken back. An authority's revocation lists (RFC 5280, 5; PEM, "X509 CRL")
// stand in the file of its certificate, --tls-ca. With none there, nothing is revoked.
//
// An authority without a list has revoked nothing. Of one whose list is past its time (nextUpdate) no certificate is
// accepted: what it has revoked since is not known. Functions are thread-safe.
#pragma once

#include <grpcpp/security/tls_certificate_verifier.h>
#include <openssl/x509_vfy.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

bool HasRevocationList(absl::string_view authorities_pem);
// InvalidArgument: a list cannot be read, is past its time, or its authority may not sign one. The message is the rest of a sentence that begins with
// the file's name.
absl::Status CheckRevocationLists(absl::string_view authorities_pem);

// From now on who verifies with `store` refuses what its lists name. REQUIRES: the callback of the verification is, or
// calls, PassWithoutList.
void UseRevocationLists(X509_STORE* store);
// A verify_cb of OpenSSL's: what an authority without a list has signed passes.
int PassWithoutList(int ok, X509_STORE_CTX* context);

// Who showed a certificate, and who signed it, in OpenSSL's words: "CN = worker-2, issued by CN = authority". Printable
// ASCII, at most some hundred characters.
std::string DescribeCertificate(X509* certificate);

// For gRPC, which has checked signatures and times: refuses what the lists in `authorities_pem` name, and says so in
// the log. `dials`: the peer is a server, so its name must be the one that was dialed, as without a verifier.
std::shared_ptr<grpc::experimental::CertificateVerifier> NewRevocationVerifier(absl::string_view authorities_pem,
                                                                               bool dials);

}  // namespace shardmesh
