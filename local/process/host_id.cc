#include "local/process/host_id.h"

#include <sys/stat.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace shardmesh {

absl::StatusOr<std::string> HostId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  struct stat network;
  if (!std::getline(file, boot_id) || stat("/proc/self/ns/net", &network) != 0) {
    return absl::UnavailableError("cannot read the boot id and network namespace from /proc; mount it");
  }
  return absl::StrCat(boot_id, "-", network.st_ino);
}

bool IsOnHost(absl::string_view worker_host_id, absl::string_view id) {
  return absl::ConsumePrefix(&worker_host_id, id) && (worker_host_id.empty() || worker_host_id[0] == '/');
}

}  // namespace shardmesh
