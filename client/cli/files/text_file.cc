#include "client/cli/files/text_file.h"

#include <fstream>
#include <iostream>

#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

constexpr size_t kMaxFileBytes = size_t{256} << 20;

}  // namespace

absl::StatusOr<std::string> ReadTextFile(const std::string& path) {
  std::ifstream opened;
  if (path != "-") opened.open(path, std::ios::binary);
  std::istream& file = path == "-" ? std::cin : opened;
  const auto unreadable = [&] {
    return absl::NotFoundError(
        absl::StrCat(path, ": cannot be read; give a file that is there, or - for standard input"));
  };
  if (!file) return unreadable();
  std::string text;
  char block[1 << 16];
  while (file.read(block, sizeof(block)) || file.gcount() > 0) {
    text.append(block, file.gcount());
    if (text.size() <= kMaxFileBytes) continue;
    return absl::ResourceExhaustedError(absl::StrCat(path, ": longer than ", kMaxFileBytes, " bytes"));
  }
  if (file.bad()) return unreadable();  // a folder
  return text;
}

}  // namespace shardmesh
