// TwoHosts: two network namespaces joined by a pair of virtual interfaces, as two hosts. Needs root and the right to
// make namespaces. For one thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/system/process.h"

namespace shardmesh::testing {

inline constexpr char kAddressA[] = "10.213.77.1", kAddressB[] = "10.213.77.2";

// They go with the object.
class TwoHosts {
 public:
  TwoHosts();
  ~TwoHosts();
  // PermissionDenied, Internal: there can be none here, and why.
  absl::Status Create();
  // The link between them drops everything from now on, or carries again.
  absl::Status CutLink();
  absl::Status JoinLink();
  const std::string& a() const { return a_; }
  const std::string& b() const { return b_; }

 private:
  const std::string a_, b_;
};

// Runs on one of the hosts.
absl::StatusOr<std::unique_ptr<Process>> StartOn(const std::string& host, std::vector<std::string> command,
                                                 const std::string& log_file);

// NAME.pem, NAME.key and NAME.ca in the folder: good for these addresses. Every name is signed by an authority of
// its own; what all of them trust is that of "good".
absl::Status MakeCertificate(const TempFolder& folder, const std::string& name,
                             const std::vector<std::string>& addresses = {kAddressA, kAddressB});
// A server's flags, with the certificate "good".
std::vector<std::string> TlsFlags(const TempFolder& folder);

}  // namespace shardmesh::testing
