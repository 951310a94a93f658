// SharedLibrary: a library that is loaded while the program runs, where there is one. It is never unloaded: such
// libraries have threads of their own. Thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace shardmesh {

class SharedLibrary {
 public:
  // The first of `names` that can be loaded; a name without '/' is looked for as dlopen(3) says.
  // NotFound: none can; the message has where each was looked for, and the loader's words.
  static absl::StatusOr<SharedLibrary> Open(const std::vector<std::string>& names);

  // Null where it has no such function.
  void* Find(const std::string& name) const;
  // The file that it was loaded from.
  const std::string& path() const { return path_; }

 private:
  SharedLibrary(void* handle, std::string path) : handle_(handle), path_(std::move(path)) {}

  void* handle_;
  std::string path_;
};

}  // namespace shardmesh
