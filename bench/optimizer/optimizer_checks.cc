#include "bench/optimizer/optimizer_checks.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "bench/optimizer/table_step.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

const std::vector<int64_t> kSizes = {70'001, 3, 768, 25'600};
constexpr int kWeights = 1, kFirstCodes = 3, kSecondCodes = 5;  // of OptimizerJob::streams()
constexpr double kWeightBound = 1e-6;

void Advance(OptimizerJob& job, int steps) {
  for (int step = 0; step < steps; ++step) {
    job.FillGradients(step);
    job.Step();
  }
}

double LargestDifference(const float* a, const float* b, int64_t n) {
  double largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - b[i]);
    if (!(difference <= largest)) largest = difference;  // a NaN stays
  }
  return largest;
}

}  // namespace

absl::Status CheckAgainstReference(const StepFormats& formats) {
  ThreadTeam alone(1), both(2);
  ASSIGN_OR_RETURN(const auto reference, OptimizerJob::Create(kSizes, formats, alone, OptimizerStepReference));
  ASSIGN_OR_RETURN(const auto best, OptimizerJob::Create(kSizes, formats, both));
  Advance(*reference, 3);
  Advance(*best, 3);
  for (size_t stream = 0; stream < best->streams().size(); ++stream) {
    const Mapping &a = best->streams()[stream], &b = reference->streams()[stream];
    if (std::memcmp(a.data(), b.data(), a.num_bytes()) == 0) continue;
    return absl::InternalError(absl::StrCat(formats.ToString(), ": stream ", stream, " is not the reference's"));
  }
  return absl::OkStatus();
}

absl::Status CheckTableStep() {
  const StepFormats formats = {WeightFormat::kFp32, StateFormat::kDyn8, Format::kFp32};
  constexpr int64_t kElements = 1 << 16, kMayDiffer = kElements / 1000;
  ThreadTeam both(2);
  ASSIGN_OR_RETURN(const auto table, OptimizerJob::Create({kElements}, formats, both, TableStep));
  ASSIGN_OR_RETURN(const auto best, OptimizerJob::Create({kElements}, formats, both));
  Advance(*table, 3);
  Advance(*best, 3);
  const auto data = [](const auto& job, int stream) { return job->streams()[stream].data(); };
  const auto weights = [&](const auto& job) { return reinterpret_cast<const float*>(data(job, kWeights)); };
  int64_t differ = 0;
  for (int64_t i = 0; i < kElements; ++i) {
    const bool same = data(table, kFirstCodes)[i] == data(best, kFirstCodes)[i] &&
                      data(table, kSecondCodes)[i] == data(best, kSecondCodes)[i] &&
                      std::abs(weights(table)[i] - weights(best)[i]) <= kWeightBound;
    if (!same) ++differ;
  }
  if (differ <= kMayDiffer) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("table loop: ", differ, " of ", kElements, " elements differ"));
}

absl::StatusOr<double> CheckAgainstTorch(Rival& rival) {
  constexpr int64_t kElements = 100'000;
  constexpr int kSteps = 20;
  ThreadTeam both(2);
  ASSIGN_OR_RETURN(const auto job, OptimizerJob::Create({kElements}, StepFormats(), both));
  Advance(*job, kSteps);
  std::string path = (std::filesystem::temp_directory_path() / "shardmesh-adamw-XXXXXX").string();
  const int fd = mkstemp(path.data());
  if (fd < 0) return absl::PermissionDeniedError(absl::StrCat("cannot write ", path));
  close(fd);
  const auto remove = absl::MakeCleanup([&] { std::filesystem::remove(path); });
  RETURN_IF_ERROR(rival.Ask(absl::StrCat("adamw ", path, " ", kElements, " ", kSteps)).status());
  std::vector<float> theirs(kElements);
  std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(theirs.data()), 4 * kElements);
  const auto* ours = reinterpret_cast<const float*>(job->streams()[kWeights].data());
  const double largest = LargestDifference(ours, theirs.data(), kElements);
  if (largest <= kWeightBound) return largest;
  return absl::InternalError(absl::StrCat("a weight differs by ", largest, " from torch's after ", kSteps, " steps"));
}

}  // namespace shardmesh::bench
