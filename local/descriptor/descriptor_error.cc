#include "local/descriptor/descriptor_error.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace shardmesh {

std::string DescriptorLimit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return "raise this process's RLIMIT_NOFILE (ulimit -n)";
  return absl::StrCat("RLIMIT_NOFILE is ", limit.rlim_cur, "; raise it (ulimit -n 4096)");
}

std::string DescriptorError(int error) {
  if (error != EMFILE) return std::strerror(error);
  return absl::StrCat(std::strerror(error), ": ", DescriptorLimit());
}

}  // namespace shardmesh
