#include "bench/harness/two_namespaces.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/descriptor/fd.h"

namespace shardmesh::bench {
namespace {

absl::Status Ip(const std::string& arguments) {
  if (std::system(absl::StrCat("ip ", arguments, " 2>/dev/null").c_str()) == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("`ip ", arguments, "` failed"));
}

}  // namespace

TwoNamespaces::TwoNamespaces()
    : names_{absl::StrCat("shardmesh-bench-", getpid(), "-0"), absl::StrCat("shardmesh-bench-", getpid(), "-1")} {}

TwoNamespaces::~TwoNamespaces() {
  for (const std::string& host : names_) Ip("netns del " + host).IgnoreError();
}

absl::Status TwoNamespaces::Create() {
  if (geteuid() != 0) return absl::PermissionDeniedError("only root may make network namespaces");
  for (const std::string& host : names_) RETURN_IF_ERROR(Ip("netns add " + host));
  RETURN_IF_ERROR(Ip(absl::StrCat("-n ", names_[0], " link add veth0 type veth peer name veth0 netns ", names_[1])));
  for (int h : {0, 1}) {
    RETURN_IF_ERROR(Ip(absl::StrCat("-n ", names_[h], " link set lo up")));
    RETURN_IF_ERROR(Ip(absl::StrCat("-n ", names_[h], " addr add ", kAddresses[h], "/24 dev veth0")));
    RETURN_IF_ERROR(Ip(absl::StrCat("-n ", names_[h], " link set veth0 up")));
  }
  return absl::OkStatus();
}

absl::Status TwoNamespaces::Limit(int megabytes) {
  if (megabytes == 0 && !limited_) return absl::OkStatus();
  for (const std::string& host : names_) {
    const std::string tc = absl::StrCat("netns exec ", host, " tc qdisc ");
    RETURN_IF_ERROR(Ip(megabytes == 0 ? absl::StrCat(tc, "del dev veth0 root")
                                      : absl::StrCat(tc, "replace dev veth0 root tbf rate ", 8 * megabytes,
                                                     "mbit burst 512kb latency 10ms")));
  }
  limited_ = megabytes != 0;
  return absl::OkStatus();
}

absl::Status EnterNamespace(const std::string& name) {
  const UniqueFd fd(open(absl::StrCat("/var/run/netns/", name).c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.valid() && setns(fd.get(), CLONE_NEWNET) == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("cannot enter the network namespace ", name, ": ", std::strerror(errno)));
}

}  // namespace shardmesh::bench
