#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "checkpoint/manifest.h"
#include "client/cpp/checkpoint/model.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxSmallFile = int64_t{64} << 20;

struct Entry {
  int parameter = -1;                   // of the job; -1: `copied`
  const ModelTensor* copied = nullptr;  // of the model that this one is like
};

struct ExportPlan {
  std::vector<SafetensorsEntry> entries;
  std::vector<Entry> sources;
};

std::string DtypeOf(Format format) { return format == Format::kFp32 ? "F32" : "BF16"; }

absl::StatusOr<std::vector<float>> FloatsOf(const ConstTensorView& view) {
  std::vector<float> values(view.num_elements);
  if (view.format == Format::kFp32) {
    if (!values.empty()) std::memcpy(values.data(), view.data, values.size() * sizeof(float));
    return values;
  }
  const auto* const halves = static_cast<const uint16_t*>(view.data);
  std::transform(halves, halves + values.size(), values.begin(), Bf16ToFloat);
  return values;
}

// One export: what goes where, and its bytes.
class Exporter {
 public:
  Exporter(const Job& job, const Version& version, const ExportOptions& options)
      : job_(job), version_(version), options_(options) {}

  absl::Status PlanAll() {
    const std::vector<ParameterSpec>& parameters = job_.spec().parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].tied_to.empty() && !options_.every_name) continue;
      const std::string& name = options_.original_names ? parameters[i].original_name() : parameters[i].name;
      RETURN_IF_ERROR(Add(name, static_cast<int>(i), ""));
    }
    return absl::OkStatus();
  }

  absl::Status PlanLike(const ModelFiles& like) {
    ASSIGN_OR_RETURN(const Canonicalizer canonicalizer, Canonicalizer::Create(options_.rules));
    for (const ModelTensor& tensor : like.tensors()) {
      ASSIGN_OR_RETURN(const std::string name, canonicalizer.Canonical(tensor.name));
      const int parameter = Find(name);
      if (parameter < 0 && !IsFloatDtype(tensor.dtype)) {
        AddEntry({tensor.name, tensor.dtype, tensor.shape, tensor.bytes}, {-1, &tensor});
        continue;
      }
      RETURN_IF_ERROR(CheckLike(tensor, name, parameter));
      RETURN_IF_ERROR(Add(tensor.name, parameter, tensor.dtype));
    }
    return CheckEveryStorage();
  }

  absl::StatusOr<std::string> BytesOf(const ModelFiles* like, size_t i) {
    done_ += plan_.entries[i].bytes;
    if (options_.progress) options_.progress(done_, num_bytes());
    const Entry& source = plan_.sources[i];
    if (source.copied != nullptr) return like->Read(*source.copied);
    ASSIGN_OR_RETURN(const ConstTensorView view, version_.parameter(job_.spec().parameters[source.parameter].name));
    if (plan_.entries[i].dtype == DtypeOf(view.format)) {
      return std::string(static_cast<const char*>(view.data), static_cast<size_t>(view.data_bytes()));
    }
    ASSIGN_OR_RETURN(const std::vector<float> values, FloatsOf(view));
    return FloatsAs(plan_.entries[i].dtype, values);
  }

  const std::vector<SafetensorsEntry>& entries() const { return plan_.entries; }
  int64_t num_bytes() const {
    int64_t bytes = 0;
    for (const SafetensorsEntry& entry : plan_.entries) bytes += entry.bytes;
    return bytes;
  }

 private:
  void AddEntry(SafetensorsEntry entry, Entry source) {
    plan_.entries.push_back(std::move(entry));
    plan_.sources.push_back(source);
  }

  // -1: the job has no such parameter.
  int Find(const std::string& name) const {
    const std::vector<ParameterSpec>& parameters = job_.spec().parameters;
    const auto found =
        std::find_if(parameters.begin(), parameters.end(), [&](const ParameterSpec& p) { return p.name == name; });
    return found == parameters.end() ? -1 : static_cast<int>(found - parameters.begin());
  }

  absl::Status CheckLike(const ModelTensor& tensor, const std::string& name, int parameter) const {
    if (parameter < 0) {
      return absl::InvalidArgumentError(absl::StrCat("job ", job_.spec().name, " has no parameter ", QuotedName(name),
                                                     ", which ", options_.like, " has; it is another model"));
    }
    const std::vector<int64_t>& shape = job_.spec().parameters[parameter].shape;
    if (shape == tensor.shape) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("parameter ", QuotedName(name), " has the shape [",
                                                   absl::StrJoin(shape, ","), "]; in ", options_.like, " [",
                                                   absl::StrJoin(tensor.shape, ","), "]"));
  }

  absl::Status CheckEveryStorage() const {
    std::set<int> written;
    for (const Entry& source : plan_.sources) {
      if (source.parameter >= 0) written.insert(job_.spec().StorageOf(source.parameter));
    }
    for (size_t i = 0; i < job_.spec().parameters.size(); ++i) {
      if (written.count(job_.spec().StorageOf(static_cast<int>(i))) > 0) continue;
      return absl::InvalidArgumentError(absl::StrCat(options_.like, " has no parameter ",
                                                     QuotedName(job_.spec().parameters[i].name), ", which job ",
                                                     job_.spec().name, " has; it is another model"));
    }
    return absl::OkStatus();
  }

  absl::Status Add(const std::string& name, int parameter, const std::string& like_dtype) {
    const ParameterSpec& spec = job_.spec().parameters[parameter];
    ASSIGN_OR_RETURN(const ConstTensorView view, version_.parameter(spec.name));
    if (view.gather != GatherFormat::kStored) {
      return absl::FailedPreconditionError(absl::StrCat("parameter ", QuotedName(spec.name), " is published in codes (",
                                                        GatherFormatName(view.gather),
                                                        "); save a checkpoint, which has it as it is stored"));
    }
    std::string dtype = options_.dtype;
    if (dtype.empty()) dtype = like_dtype.empty() ? DtypeOf(view.format) : like_dtype;
    if (!IsFloatDtype(dtype)) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", QuotedName(spec.name), " cannot be written as ", dtype, "; F32, BF16 or F16"));
    }
    const int64_t bytes = view.num_elements * SafetensorsDtypeBytes(dtype);
    AddEntry({name, std::move(dtype), spec.shape, bytes}, {parameter, nullptr});
    return absl::OkStatus();
  }

  const Job& job_;
  const Version& version_;
  const ExportOptions& options_;
  ExportPlan plan_;
  int64_t done_ = 0;
};

// What a model's folder has beside its weights, of files that a loader may want.
std::map<std::string, std::string> SmallFiles(const std::string& folder) {
  std::map<std::string, std::string> files;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string(), extension = entry->path().extension().string();
    const bool wanted = extension == ".json" || extension == ".txt" || extension == ".model" || extension == ".jinja";
    std::error_code ignored;
    if (!wanted || absl::EndsWith(name, ".index.json") || name == "manifest.json" || !IsPlainFileName(name) ||
        !entry->is_regular_file(ignored) || static_cast<int64_t>(entry->file_size(ignored)) > kMaxSmallFile) {
      continue;
    }
    std::ifstream in(entry->path(), std::ios::binary);
    std::ostringstream content;
    content << in.rdbuf();
    files[name] = content.str();
  }
  return files;
}

}  // namespace

absl::StatusOr<ExportedModel> ExportModel(Job& job, const std::string& folder, const ExportOptions& options) {
  if (!options.dtype.empty() && !IsFloatDtype(options.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("dtype ", options.dtype, "; F32, BF16 or F16 is needed"));
  }
  absl::StatusOr<ModelFiles> like = absl::NotFoundError("none");
  if (!options.like.empty()) {
    like = ModelFiles::Open(options.like);
    RETURN_IF_ERROR(like.status());
  }
  ASSIGN_OR_RETURN(const Version version, job.Pull(options.version, options.timeout));
  Exporter exporter(job, version, options);
  RETURN_IF_ERROR(like.ok() ? exporter.PlanLike(*like) : exporter.PlanAll());
  const ModelFiles* const model = like.ok() ? &*like : nullptr;
  RETURN_IF_ERROR(WriteModel(
      folder, exporter.entries(), [&](size_t i) { return exporter.BytesOf(model, i); },
      model != nullptr ? SmallFiles(model->folder()) : std::map<std::string, std::string>(), options.max_file_bytes));
  return ExportedModel{version.step().value(), exporter.num_bytes(), static_cast<int64_t>(exporter.entries().size())};
}

}  // namespace shardmesh
