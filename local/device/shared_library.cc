#include "local/device/shared_library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"

namespace shardmesh {

absl::StatusOr<SharedLibrary> SharedLibrary::Open(const std::vector<std::string>& names) {
  std::string tried;
  bool searched = false;
  for (const std::string& name : names) {
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) {
      link_map* map = nullptr;
      const bool known = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0';
      return SharedLibrary(handle, known ? map->l_name : name);
    }
    searched = searched || name.find('/') == std::string::npos;
    const char* why = dlerror();
    absl::StrAppend(&tried, tried.empty() ? "" : "; ", why != nullptr ? why : name.c_str());
  }
  if (searched) {
    const char* path = std::getenv("LD_LIBRARY_PATH");
    absl::StrAppend(&tried, " (looked in LD_LIBRARY_PATH, which is ", path != nullptr ? path : "not set",
                    ", and in the system's folders)");
  }
  return absl::NotFoundError(tried);
}

void* SharedLibrary::Find(const std::string& name) const { return dlsym(handle_, name.c_str()); }

}  // namespace shardmesh
