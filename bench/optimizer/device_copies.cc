#include "bench/optimizer/device_copies.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr int64_t kCopyBytes = 1 << 30;  // far beyond any cache
constexpr double kMoved = 2.0 * kCopyBytes;

}  // namespace

absl::Status DeviceStatus(const char* error) {
  return error == nullptr ? absl::OkStatus() : absl::InternalError(absl::StrCat("the device: ", error));
}

absl::Status DeviceCopies::AddTo(Rounds& rounds) {
  from_ = std::make_unique<DeviceBlock>(kCopyBytes);
  to_ = std::make_unique<DeviceBlock>(kCopyBytes);
  if (from_->data() == nullptr || to_->data() == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no ", 2 * kCopyBytes, " bytes on the device for the copies"));
  }
  RETURN_IF_ERROR(DeviceStatus(FillZero(from_->data(), kCopyBytes)));
  const auto add = [&](const char* name, const char* (*copy)(void*, const void*, int64_t)) {
    rounds.Add(name, [this, copy] {
      const auto once = [this, copy] { return DeviceStatus(copy(to_->data(), from_->data(), kCopyBytes)); };
      return SecondsOnDevice(once, kStepsInARow);
    });
  };
  add("driver", CopyByDriver);
  add("kernel", CopyByKernel);
  return absl::OkStatus();
}

absl::StatusOr<double> DeviceCopies::SecondsOnDevice(const std::function<absl::Status()>& work, int times) {
  double seconds = 0;
  RETURN_IF_ERROR(DeviceStatus(timer_.Start()));
  for (int i = 0; i < times; ++i) RETURN_IF_ERROR(work());
  RETURN_IF_ERROR(DeviceStatus(timer_.Stop(&seconds)));
  return seconds / times;
}

std::vector<double> DeviceCopies::SecondsToMove(double bytes, const Rounds& rounds) {
  const std::vector<double>&driver = rounds.seconds("driver"), &kernel = rounds.seconds("kernel");
  std::vector<double> seconds;
  for (size_t i = 0; i < driver.size(); ++i) seconds.push_back(std::min(driver[i], kernel[i]) * bytes / kMoved);
  return seconds;
}

std::string DeviceCopies::Describe(const Rounds& rounds) {
  return absl::StrFormat("A copy of %.2f GB (read and written): driver %.0f GB/s, kernel %.0f GB/s.", kMoved * 1e-9,
                         kMoved * 1e-9 / SpreadOf(rounds.seconds("driver")).median,
                         kMoved * 1e-9 / SpreadOf(rounds.seconds("kernel")).median);
}

}  // namespace shardmesh::bench
