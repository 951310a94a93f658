// The work of bench/host_groups and of the links in bench/hosts: two ranks as processes, connected by groups of every
// kind that hosts have, and by raw TCP. Tasks are for a WorkerTeam, both ranks at once. For one thread of the parent.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "bench/harness/worker_team.h"
#include "rpc/tls/tls.h"

namespace shardmesh::bench {

enum class HostWay { kRaw, kGloo, kClear, kTls };  // how bytes cross
inline constexpr const char* kHostWayNames[] = {"raw TCP", "gloo", "clear", "TLS"};
inline constexpr int kHostWays = 4;

// A certificate of an authority, in the folder. FailedPrecondition: the openssl program could not make them.
absl::Status MakeCertificates(const std::string& folder);
TlsOptions BenchCertificate(const std::string& folder);

class HostGroupsJob {
 public:
  enum Task {
    kBulk,     // each rank's bytes become the other's, at the same time
    kCheck,    // the same, and every byte is looked at
    kBarrier,  // kCalls of them; raw TCP: one byte each way
    kGather,   // kCalls of kGatherBytes
  };
  static constexpr int kCalls = 500;
  static constexpr int64_t kGatherBytes = 64;

  // Where a rank is.
  struct Place {
    std::string net_namespace;  // of the network; empty: this process's
    std::string address = "127.0.0.1";
  };

  // `bytes` of a rank. Errors of the openssl program, which makes certificates, and of the groups.
  static absl::StatusOr<std::unique_ptr<HostGroupsJob>> Create(int64_t bytes) { return Create(bytes, {}, {}); }
  static absl::StatusOr<std::unique_ptr<HostGroupsJob>> Create(int64_t bytes, Place first, Place second);
  ~HostGroupsJob();

  // The seconds until both ranks have done it. Internal: one of them failed, as it says on standard error.
  absl::StatusOr<double> Run(Task task, HostWay way) { return team_->Run(task * kHostWays + static_cast<int>(way)); }
  // Processor time that the ranks have used so far.
  double ProcessorSeconds() const { return team_->ProcessorSeconds(); }

 private:
  class Rank;

  HostGroupsJob(int64_t bytes, std::string folder, Place first, Place second)
      : bytes_(bytes), folder_(std::move(folder)), places_{std::move(first), std::move(second)} {}
  absl::Status Start();

  const int64_t bytes_;
  const std::string folder_;  // for certificates and addresses; it is removed
  const Place places_[2];
  std::unique_ptr<WorkerTeam> team_;
};

}  // namespace shardmesh::bench
