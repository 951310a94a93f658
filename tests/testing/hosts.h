// Hosts: network namespaces on one bridge, as so many hosts, and this process beside them. Links can be cut, one way
// too, and slowed down. Needs root and the right to make namespaces. For one thread.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace shardmesh::testing {

// They go with the object.
class Hosts {
 public:
  static constexpr char kHere[] = "10.213.79.1";  // of this process, for all hosts

  explicit Hosts(int count);
  ~Hosts();
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;

  // PermissionDenied, Internal: there can be none here, and why.
  absl::Status Create();
  int count() const { return static_cast<int>(names_.size()); }
  const std::string& name(int host) const { return names_[host]; }  // of its namespace
  std::string address(int host) const;
  std::vector<std::string> addresses() const;  // of all, and of this process

  // Nothing comes from the host or to it.
  absl::Status Cut(int host);
  // Nothing comes from the one host to the other. What the other sends arrives.
  absl::Status CutOneWay(int from, int to);
  // So many of a hundred packets to the host, and from it, are lost.
  absl::Status Lose(int host, int percent);
  // The host sends so many 1000 bytes a second, and receives as many.
  absl::Status Slow(int host, int kilobytes);
  // Takes all of that back.
  absl::Status Heal();

 private:
  // In a host's namespace.
  absl::Status Drop(int host, const std::string& rule);

  std::string bridge_;
  std::vector<std::string> names_, links_;  // of a host: what of its link lies on the bridge
  std::vector<std::string> undo_;           // commands that take back what was done
};

}  // namespace shardmesh::testing
