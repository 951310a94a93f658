#include "tests/testing/system/altered_system.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "local/descriptor/fd.h"

namespace shardmesh::testing {
namespace {
constexpr char kLibrary[] = "tests/testing/system/altered_system_preload.so";
}  // namespace

absl::StatusOr<std::unique_ptr<AlteredSystem>> AlteredSystem::Make(const std::string& path) {
  const UniqueFd file(open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  void* memory = MAP_FAILED;
  if (file.valid() && ftruncate(file.get(), sizeof(SystemChanges)) == 0) {
    memory = mmap(nullptr, sizeof(SystemChanges), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  }
  if (memory == MAP_FAILED) return absl::InternalError(absl::StrCat("cannot make ", path, ": ", std::strerror(errno)));
  return std::unique_ptr<AlteredSystem>(new AlteredSystem(path, new (memory) SystemChanges()));
}

AlteredSystem::~AlteredSystem() { munmap(changes_, sizeof(SystemChanges)); }

std::vector<std::string> AlteredSystem::Environment() const {
  return {absl::StrCat("LD_PRELOAD=", std::filesystem::absolute(kLibrary).string()),
          absl::StrCat(kSystemChangesVariable, "=", std::filesystem::absolute(path_).string())};
}

}  // namespace shardmesh::testing
