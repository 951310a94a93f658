#include "checkpoint/adopt.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "checkpoint/file_changes.h"
#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "checkpoint/model_files.h"
#include "checkpoint/strict_json.h"
#include "core/base/status.h"
#include "core/format/stream_digest.h"
#include "core/job/stored_values.h"
#include "core/names/names.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPieceBytes = 1 << 16;

struct Given {
  JobSpec spec;
  int64_t step = 0;
};

// As restoring it will: a name that no job can have is refused before a checkpoint has it.
absl::Status CheckNames(const JobSpec& spec) {
  std::vector<std::string> names;
  for (const ParameterSpec& parameter : spec.parameters) names.push_back(parameter.name);
  ASSIGN_OR_RETURN(const Canonicalizer canonicalizer, Canonicalizer::Create(RulesOfCanonical(names)));
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const std::string canonical, canonicalizer.Canonical(name));
    if (canonical == name) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", QuotedName(name), " is not canonical; write ", QuotedName(canonical)));
  }
  return absl::OkStatus();
}

absl::StatusOr<Given> ReadJob(const std::string& path) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(path, error))) {
    return absl::NotFoundError(absl::StrCat(path, " is not there; it says the step and the job"));
  }
  if (!fs::is_regular_file(fs::symlink_status(path, error))) {  // a pipe would be waited for
    return absl::InvalidArgumentError(absl::StrCat(path, " is no regular file"));
  }
  std::ifstream in(path, std::ios::binary);
  std::string text;
  std::vector<char> piece(kPieceBytes);
  while (in && static_cast<int64_t>(text.size()) <= kMaxManifestBytes) {  // it may grow while it is read
    in.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    text.append(piece.data(), static_cast<size_t>(in.gcount()));
  }
  if (static_cast<int64_t>(text.size()) > kMaxManifestBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is no file of at most ", kMaxManifestBytes, " bytes"));
  }
  absl::StatusOr<nlohmann::json> json = ParseStrictJson(text);
  RETURN_IF_ERROR(Annotate(json.status(), path));
  const auto step = json->find("step"), job = json->find("job");
  if (step == json->end() || !step->is_number_integer() || step->get<int64_t>() < 0 ||
      step->get<int64_t>() > kMaxStep) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": step is no number from 0 to ", kMaxStep));
  }
  if (job == json->end() || !job->is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": job is no object; a JobSpec is needed"));
  }
  absl::StatusOr<JobSpec> spec = ParseJobSpec(job->dump());
  RETURN_IF_ERROR(Annotate(spec.status(), path + ": job"));
  RETURN_IF_ERROR(Annotate(CheckNames(*spec), path + ": job"));
  return Given{*std::move(spec), step->get<int64_t>()};
}

bool IsOfModel(const StoredFiles& files, const FilePart& part) {
  return files.files()[part.file].name.rfind(kModelStem, 0) == 0;
}

// The files given, and which of their tensors is which part.
class Source {
 public:
  static absl::StatusOr<Source> Open(const std::string& folder, const StoredFiles& files) {
    Source source;
    ASSIGN_OR_RETURN(source.model_, ModelFiles::Open(folder));
    const std::string states = folder + "/states";
    std::error_code ignored;
    if (fs::exists(states, ignored)) {
      ASSIGN_OR_RETURN(source.states_, ModelFiles::Open(states));
    }
    for (const FilePart& part : files.parts()) {
      ASSIGN_OR_RETURN(const ModelTensor* tensor, source.Find(part, IsOfModel(files, part)));
      source.tensors_.push_back(tensor);
    }
    RETURN_IF_ERROR(source.CheckAllUsed());
    return source;
  }

  absl::StatusOr<std::string> Read(size_t part, bool of_model) const {
    return (of_model ? *model_ : *states_).Read(*tensors_[part]);
  }

 private:
  absl::StatusOr<const ModelTensor*> Find(const FilePart& part, bool of_model) const {
    const std::optional<ModelFiles>& files = of_model ? model_ : states_;
    const ModelTensor* const tensor = files.has_value() ? files->Find(part.name) : nullptr;
    const auto says = [](const std::string& dtype, const std::vector<int64_t>& shape) {
      return absl::StrCat(dtype, " [", absl::StrJoin(shape, ","), "]");
    };
    const std::string needed = says(part.dtype, part.shape);
    if (tensor == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("the ", of_model ? "model" : "states", " have no tensor ",
                                                     QuotedName(part.name), ", ", needed, ", which the job has"));
    }
    if (tensor->dtype == part.dtype && tensor->shape == part.shape) return tensor;
    return absl::InvalidArgumentError(absl::StrCat("tensor ", QuotedName(part.name), " is ",
                                                   says(tensor->dtype, tensor->shape), "; the job stores ", needed));
  }

  absl::Status CheckAllUsed() const {
    const std::set<const ModelTensor*> used(tensors_.begin(), tensors_.end());
    for (const auto* const files : {&model_, &states_}) {
      if (!files->has_value()) continue;
      for (const ModelTensor& tensor : (*files)->tensors()) {
        if (used.count(&tensor) > 0) continue;
        return absl::InvalidArgumentError(absl::StrCat("tensor ", QuotedName(tensor.name), " of the ",
                                                       files == &model_ ? "model" : "states",
                                                       " is of no parameter of the job; leave it out"));
      }
    }
    return absl::OkStatus();
  }

  std::optional<ModelFiles> model_, states_;
  std::vector<const ModelTensor*> tensors_;  // by part
};

// The parts of one file, behind its head. Adds up their digest.
absl::Status WriteParts(const Source& source, const JobSpec& spec, const StoredFiles& files, int file,
                        const std::string& path, uint64_t& digest) {
  const UniqueFd fd(open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.valid()) return FailedTo("open", path, errno);
  for (size_t p = 0; p < files.parts().size(); ++p) {
    const FilePart& part = files.parts()[p];
    if (part.file != file) continue;
    ASSIGN_OR_RETURN(const std::string bytes, source.Read(p, IsOfModel(files, part)));
    const StoredRule rule = RuleOf(spec, part.tensor, part.stream, part.extra);
    if (const std::optional<BadEntry> bad = FindBadEntry(rule, bytes.data(), part.bytes); bad.has_value()) {
      return absl::DataLossError(absl::StrCat(BadEntryText(part.name, rule, *bad, 0),
                                              ", or training goes wrong without a word; repair what was stored"));
    }
    if (lseek(fd.get(), part.offset, SEEK_SET) < 0) return FailedTo("write", path, errno);
    RETURN_IF_ERROR(WriteAll(fd.get(), bytes, path));
    const uint64_t key = DigestKey(static_cast<uint32_t>(part.tensor), part.stream, part.extra ? 1 : 0);
    digest += DigestWords(key, 0, DigestWordBytes(part.layout), bytes.data(), part.bytes);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<AdoptedCheckpoint> AdoptFiles(const std::string& given_folder, const std::string& root,
                                             int64_t max_file_bytes) {
  const std::string folder = fs::absolute(given_folder).lexically_normal().string();
  ASSIGN_OR_RETURN(Given given, ReadJob(folder + "/job.json"));
  ASSIGN_OR_RETURN(const StoredFiles files, StoredFiles::Create(given.spec, /*buffers=*/{}, max_file_bytes));
  ASSIGN_OR_RETURN(const Source source, Source::Open(folder, files));
  ASSIGN_OR_RETURN(const auto checkpoint, NewCheckpoint::Begin(fs::absolute(root).lexically_normal().string()));
  Manifest manifest;
  manifest.step = given.step;
  const auto add = [&](const std::string& name, const std::string& head, int64_t bytes) {
    manifest.files.push_back({name, bytes});
    return checkpoint->AddFile(name, head, bytes);
  };
  for (size_t f = 0; f < files.files().size(); ++f) {
    const StoredFile& file = files.files()[f];
    RETURN_IF_ERROR(add(file.name, file.head, file.bytes));
    const std::string path = absl::StrCat(checkpoint->path(), "/", file.name);
    RETURN_IF_ERROR(WriteParts(source, given.spec, files, static_cast<int>(f), path, manifest.digest));
  }
  if (!files.index().empty()) {
    RETURN_IF_ERROR(add(kIndexFile, files.index(), static_cast<int64_t>(files.index().size())));
  }
  manifest.spec = std::move(given.spec);
  AdoptedCheckpoint adopted{manifest.spec.name, "", manifest.step, manifest.digest, files.num_bytes()};
  ASSIGN_OR_RETURN(NewCheckpoint::Finished finished, checkpoint->Finish(manifest));
  adopted.path = std::move(finished.path);
  return adopted;
}

}  // namespace shardmesh
