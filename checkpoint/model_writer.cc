#include "checkpoint/model_writer.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "checkpoint/file_changes.h"
#include "checkpoint/manifest.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;

// A folder that is removed with the object, unless it was renamed.
class NewFolder {
 public:
  static absl::StatusOr<std::unique_ptr<NewFolder>> Make(const fs::path& final_path) {
    const fs::path pattern =
        final_path.parent_path() / absl::StrCat(".", final_path.filename().string(), ".part-XXXXXX");
    ASSIGN_OR_RETURN(std::string path, MakeNewFolder(pattern.string()));
    return std::unique_ptr<NewFolder>(new NewFolder(std::move(path)));
  }
  ~NewFolder() {
    if (!path_.empty()) RemoveFolder(path_).IgnoreError();
  }
  const std::string& path() const { return path_; }
  absl::Status MoveTo(const fs::path& final_path) {
    fs::permissions(path_, fs::perms(0755));
    RETURN_IF_ERROR(SyncFolder(path_));
    RETURN_IF_ERROR(Rename(path_, final_path.string()));
    path_.clear();
    return SyncFolder(final_path.parent_path().string());
  }

 private:
  explicit NewFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// Which entries lie in which file.
std::vector<std::vector<size_t>> Cut(const std::vector<SafetensorsEntry>& entries, int64_t max_file_bytes) {
  std::vector<std::vector<size_t>> files(1);
  int64_t bytes = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!files.back().empty() && entries[i].bytes > max_file_bytes - bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(i);
    bytes += entries[i].bytes;
  }
  return files;
}

std::string FileName(size_t file, size_t files) {
  if (files == 1) return "model.safetensors";
  return absl::StrFormat("model-%05d-of-%05d.safetensors", file + 1, files);
}

absl::Status WriteSynced(const std::string& path, const std::function<absl::Status(int fd)>& write) {
  ASSIGN_OR_RETURN(const UniqueFd fd, MakeFile(path));
  RETURN_IF_ERROR(write(fd.get()));
  return SyncFile(path);
}

absl::Status WriteTensors(const std::string& path, const std::vector<SafetensorsEntry>& entries,
                          const std::vector<size_t>& which, const TensorBytes& bytes_of) {
  std::vector<SafetensorsEntry> there;
  for (const size_t i : which) there.push_back(entries[i]);
  ASSIGN_OR_RETURN(const std::string head, SafetensorsHead(there, {{"format", "pt"}}));
  return WriteSynced(path, [&](int fd) -> absl::Status {
    RETURN_IF_ERROR(WriteAll(fd, head, path));
    for (const size_t i : which) {
      ASSIGN_OR_RETURN(const std::string bytes, bytes_of(i));
      if (static_cast<int64_t>(bytes.size()) != entries[i].bytes) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensor \"", entries[i].name, "\" has ", bytes.size(), " bytes, not ", entries[i].bytes));
      }
      RETURN_IF_ERROR(WriteAll(fd, bytes, path));
    }
    return absl::OkStatus();
  });
}

std::string IndexText(const std::vector<SafetensorsEntry>& entries, const std::vector<std::vector<size_t>>& files) {
  nlohmann::json map = nlohmann::json::object();
  int64_t bytes = 0;
  for (size_t f = 0; f < files.size(); ++f) {
    for (const size_t i : files[f]) {
      map[entries[i].name] = FileName(f, files.size());
      bytes += entries[i].bytes;
    }
  }
  return nlohmann::json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(1) + "\n";
}

}  // namespace

absl::Status WriteModel(const std::string& folder, const std::vector<SafetensorsEntry>& entries,
                        const TensorBytes& bytes_of, const std::map<std::string, std::string>& other_files,
                        int64_t max_file_bytes) {
  fs::path path = fs::absolute(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(path, ignored))) {
    return absl::AlreadyExistsError(absl::StrCat(path.string(), " is there already; name a folder that is not"));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<NewFolder> made, NewFolder::Make(path));
  const std::vector<std::vector<size_t>> files = Cut(entries, max_file_bytes);
  for (size_t f = 0; f < files.size(); ++f) {
    RETURN_IF_ERROR(WriteTensors(made->path() + "/" + FileName(f, files.size()), entries, files[f], bytes_of));
  }
  std::map<std::string, std::string> others = other_files;
  if (files.size() > 1) others[kIndexFile] = IndexText(entries, files);
  for (const auto& [name, content] : others) {
    if (!IsPlainFileName(name))
      return absl::InvalidArgumentError(absl::StrCat("\"", name, "\" is no plain name of a file"));
    const std::string other = made->path() + "/" + name, &bytes = content;
    RETURN_IF_ERROR(WriteSynced(other, [&](int fd) { return WriteAll(fd, bytes, other); }));
  }
  return made->MoveTo(path);
}

}  // namespace shardmesh
