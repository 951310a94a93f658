// Models of the ecosystem (checkpoint/model_files.h): one becomes a job, and a version becomes one. Thread-safe
// functions; they block.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/model_files.h"
#include "checkpoint/model_writer.h"
#include "client/cpp/client.h"
#include "core/job/job.h"
#include "core/names/names.h"

namespace shardmesh {

using OnModelProgress = std::function<void(int64_t done, int64_t total)>;  // bytes of tensors

struct ImportOptions {
  // What the model does not say: name, mesh (without dimensions: the coordinator's default), slots, optimizer, formats
  // of gradients, seed, and so on. Its parameters are not looked at.
  JobSpec job;
  std::optional<WeightFormat> weights;  // unset: bf16_sr of what is BF16, fp32 of F32 and F16
  StateFormat states = StateFormat::kFp32;
  NameRules rules;                          // of the names in the files
  std::map<std::string, std::string> ties;  // name to the name whose storage it shares, both as in the files
  std::set<std::string> buffers;            // tensors in the files that are no parameters; left out
  bool skip_others = false;                 // tensors that are not F32, BF16 or F16 are no parameters; else an error
  absl::Duration timeout = absl::Minutes(10);
  OnModelProgress progress;  // may be empty
};

struct ImportPlan {
  JobSpec spec;
  std::vector<std::string> sources;  // by parameter: its name in the files; empty: a tied one that is not there
  std::vector<std::string> skipped;
  std::vector<std::string> buffers;  // that are in the files, and left out
};

// What ImportModel would create. Pure but for reading tensors that are tied.
//   InvalidArgument: two names that become one, a tie of different values, shapes or unknown names, tensors of other
//   dtypes (all are named), or what JobSpec::Validate refuses. Errors of ModelFiles.
absl::StatusOr<ImportPlan> PlanImport(const ModelFiles& model, const ImportOptions& options);

struct ImportedModel {
  std::shared_ptr<Job> job;
  std::vector<std::string> skipped;
};
// Creates a job with the model's weights, by canonical names. If this fails there is no such job. The buffers of a
// checkpoint, which its manifest names, are left out.
//   AlreadyExists: a job of that name. Errors of PlanImport, ModelFiles::Open and Client::CreateJob.
absl::StatusOr<ImportedModel> ImportModel(Client& client, const std::string& path, const ImportOptions& options);

struct ExportOptions {
  VersionChoice version;
  // A model as ModelFiles::Open takes it, whose names (of wrappers, of ties), dtypes and tensors that are no parameters
  // the new one has as well, and copies of its small files (config.json, tokenizer.json, ...). Empty: canonical names,
  // each storage once, as the version has it.
  std::string like;
  NameRules rules;              // of the names in `like`
  std::string dtype;            // F32, BF16 or F16 of all parameters; empty: as in `like`, or in the version
  bool every_name = false;      // without `like`: tied parameters under each of their names
  bool original_names = false;  // without `like`: names as they were first given, wrappers and all
  int64_t max_file_bytes = kMaxFileBytes;
  absl::Duration timeout = absl::Minutes(10);
  OnModelProgress progress;  // may be empty
};

struct ExportedModel {
  int64_t step = 0;
  int64_t bytes = 0;
  int64_t tensors = 0;
};
// Writes a version to a new folder, whole or not at all.
//   InvalidArgument: `like` is another model (the first difference), or no dtype. FailedPrecondition: parameters that
//   are gathered in codes; a checkpoint has them as stored. Errors of Job::Pull, ModelFiles::Open and WriteModel.
absl::StatusOr<ExportedModel> ExportModel(Job& job, const std::string& folder, const ExportOptions& options);

}  // namespace shardmesh
