#include "worker/transport/nccl/nccl_library.h"

#include "absl/strings/str_cat.h"
#include "core/base/status.h"
#include "local/device/shared_library.h"

namespace shardmesh {
namespace {

constexpr absl::string_view kRemedy =
    "install NCCL 2.28 or newer (the package libnccl2, or nvidia-nccl-cu13 of Python), or take another kind of group";

// 2.28.9 of 22809.
std::string TextOf(int version) { return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100); }

absl::Status Lacks(const std::string& path, absl::string_view function) {
  return absl::UnimplementedError(absl::StrCat(path, " has no function nccl", function, "; ", kRemedy));
}

}  // namespace

absl::StatusOr<NcclLibrary> NcclLibrary::Load(const std::string& path) {
  const auto library = SharedLibrary::Open({path.empty() ? "libnccl.so.2" : path});
  if (!library.ok()) {
    return absl::UnimplementedError(absl::StrCat("no NCCL here: ", library.status().message(), "; ", kRemedy));
  }
  NcclLibrary nccl;
  nccl.path_ = library->path();
  // The version first: an old library is told by its age, not by what it lacks.
  nccl.api_.GetVersion = reinterpret_cast<decltype(NcclApi::GetVersion)>(library->Find("ncclGetVersion"));
  if (nccl.api_.GetVersion == nullptr) return Lacks(nccl.path_, "GetVersion");
  if (nccl.api_.GetVersion(&nccl.version_) != kNcclSuccess || nccl.version_ < kOldestNccl) {
    return absl::UnimplementedError(
        absl::StrCat(nccl.path_, " is NCCL ", TextOf(nccl.version_), "; it is too old: ", kRemedy));
  }
#define SHARDMESH_FIND(name)                                                               \
  nccl.api_.name = reinterpret_cast<decltype(NcclApi::name)>(library->Find("nccl" #name)); \
  if (nccl.api_.name == nullptr) return Lacks(nccl.path_, #name);
  SHARDMESH_NCCL_FUNCTIONS(SHARDMESH_FIND)
#undef SHARDMESH_FIND
  return nccl;
}

std::string NcclLibrary::VersionText() const { return TextOf(version_); }

}  // namespace shardmesh
