#include "rpc/tls/tls_files.h"

#include <sys/stat.h>

#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/status.h"

namespace shardmesh {

absl::StatusOr<CertificateTimes> ReadCertificateTimes(absl::string_view pem) {
  const auto blocks = PemBlocks(pem, "CERTIFICATE");
  if (!blocks.ok()) return Annotate(blocks.status(), "not a certificate in PEM");
  return TimesOfCertificate(blocks->front());
}

std::vector<std::string> TlsFileWarnings(const std::string& cert_file, const std::string& key_file, absl::Time now) {
  std::vector<std::string> warnings;
  std::ifstream file(cert_file, std::ios::binary);
  const std::string pem{std::istreambuf_iterator<char>(file), {}};
  const absl::StatusOr<CertificateTimes> times = ReadCertificateTimes(pem);
  if (times.ok() && now > times->not_after) {
    warnings.push_back(absl::StrCat("--tls-cert ", cert_file, " expired on ", absl::FormatTime(times->not_after),
                                    ", so peers refuse it; give a new certificate and start again"));
  }
  if (times.ok() && now < times->not_before) {
    warnings.push_back(absl::StrCat("--tls-cert ", cert_file, " is valid from ", absl::FormatTime(times->not_before),
                                    " only, so peers refuse it; look at this machine's clock"));
  }
  const auto blocks = PemBlocks(pem, "CERTIFICATE");
  if (blocks.ok() && !MayServe(blocks->front())) {
    warnings.push_back(absl::StrCat("--tls-cert ", cert_file, " is for clients alone (its extended key usage has no ",
                                    "serverAuth), so clients refuse it; give a certificate for a server"));
  }
  struct stat key;
  if (stat(key_file.c_str(), &key) == 0 && (key.st_mode & 077) != 0) {
    warnings.push_back(absl::StrCat("--tls-key ", key_file, " has mode ", absl::StrFormat("%04o", key.st_mode & 07777),
                                    ", so other users of this machine may read the private key; run chmod 600"));
  }
  return warnings;
}

}  // namespace shardmesh
