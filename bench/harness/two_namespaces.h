// TwoNamespaces: two network namespaces joined by a pair of virtual interfaces, as two hosts; they go with the object.
// Needs root. For one thread.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace shardmesh::bench {

class TwoNamespaces {
 public:
  static constexpr const char* kAddresses[] = {"10.213.78.1", "10.213.78.2"};

  TwoNamespaces();
  ~TwoNamespaces();
  TwoNamespaces(const TwoNamespaces&) = delete;
  TwoNamespaces& operator=(const TwoNamespaces&) = delete;

  // PermissionDenied: there can be none here, and why.
  absl::Status Create();
  // From now on the link carries so many 10^6 bytes a second each way, all connections together; 0: as many as it can.
  // PermissionDenied: it cannot be limited here.
  absl::Status Limit(int megabytes);

  const std::string& name(int host) const { return names_[host]; }

 private:
  const std::string names_[2];
  bool limited_ = false;
};

// The calling thread is in the namespace `name` from now on, with all threads and processes that it makes.
// PermissionDenied: it may not, or there is none.
absl::Status EnterNamespace(const std::string& name);

}  // namespace shardmesh::bench
