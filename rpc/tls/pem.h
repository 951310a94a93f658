// What is looked at in PEM files before they are given to gRPC, whose errors name no file.
// Pure functions, thread-safe. They check no signature: the TLS library does.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace shardmesh {

// The bytes of each block of `text` whose label ends with `kind` ("CERTIFICATE", "PRIVATE KEY"), in order. Text around
// blocks is passed over.
// InvalidArgument: there is none, one has no end or is not base64, its bytes are not one whole DER sequence, or it is a
// key that is encrypted. The message is the rest of a sentence that begins with the file's name.
absl::StatusOr<std::vector<std::string>> PemBlocks(absl::string_view text, absl::string_view kind);

// From when until when a certificate is good; without an end on a side where that cannot be told.
struct CertificateTimes {
  absl::Time not_before = absl::InfinitePast(), not_after = absl::InfiniteFuture();
};
// Of a certificate in DER (RFC 5280, 4.1.2.5).
CertificateTimes TimesOfCertificate(absl::string_view der);
// False: a certificate in DER lists purposes (extended key usage, RFC 5280, 4.2.1.12), and a server is none of them.
bool MayServe(absl::string_view der);

}  // namespace shardmesh
