#include "bench/harness/folder.h"

#include <stdlib.h>

#include <filesystem>

#include "absl/strings/str_cat.h"

namespace shardmesh::bench {

absl::StatusOr<std::unique_ptr<Folder>> Folder::Make(const std::string& parent) {
  const std::filesystem::path in =
      parent.empty() ? std::filesystem::temp_directory_path() : std::filesystem::path(parent);
  std::string path = (std::filesystem::absolute(in) / "shardmesh-bench-XXXXXX").string();
  if (mkdtemp(path.data()) == nullptr)
    return absl::PermissionDeniedError(absl::StrCat("cannot make a folder like ", path));
  return std::unique_ptr<Folder>(new Folder(path));
}

Folder::~Folder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace shardmesh::bench
