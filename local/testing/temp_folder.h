// TempFolder: a new folder of a test, removed with the object and with all that lies in it.
//
// Its path is short: a UNIX socket's path has at most 107 bytes, and the folder that Bazel gives a test may have more.
// Thread-compatible.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace shardmesh::testing {

class TempFolder {
 public:
  TempFolder() {
    if (mkdtemp(path_.data()) == nullptr) path_ = "/nonexistent";  // what is made in it fails, and says so
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_ = "/tmp/smt-XXXXXX";
};

}  // namespace shardmesh::testing
