// NcclLibrary: NCCL, loaded while the program runs, so that one program serves machines with and without it.
//
//   ASSIGN_OR_RETURN(const NcclLibrary nccl, NcclLibrary::Load());
//   nccl.api().GetUniqueId(&id);
//
// A value; it is never unloaded, so the functions stay for the life of the process. Thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "worker/transport/nccl/nccl_api.h"

namespace shardmesh {

class NcclLibrary {
 public:
  // From the file `path`, or, where that is empty, libnccl.so.2 from where the system looks for libraries.
  // Unimplemented: there is none (the message has where it was looked for), it is older than kOldestNccl, or it lacks a
  // function (which is named).
  static absl::StatusOr<NcclLibrary> Load(const std::string& path = "");

  const NcclApi& api() const { return api_; }
  // As ncclGetVersion counts, and as people write it.
  int version() const { return version_; }
  std::string VersionText() const;
  const std::string& path() const { return path_; }

 private:
  NcclLibrary() = default;

  NcclApi api_ = {};
  int version_ = 0;
  std::string path_;
};

}  // namespace shardmesh
