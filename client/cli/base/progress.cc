#include "client/cli/base/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "client/cli/base/connection.h"
#include "core/base/clock.h"

namespace shardmesh {
namespace {
constexpr absl::Duration kEvery = absl::Milliseconds(100);
}  // namespace

Progress::Progress(std::string what)
    : what_(std::move(what)), shown_(isatty(STDERR_FILENO) == 1), start_(MonotonicNow()) {}

Progress::~Progress() {
  if (drawn_) std::fputs("\r\033[K", stderr);
}

bool Progress::IsTime() {
  const absl::Time now = MonotonicNow();
  if (!shown_ || now < next_) return false;
  next_ = now + kEvery;
  drawn_ = true;
  return true;
}

void Progress::ShowCount(int64_t done, int64_t total) {
  if (!IsTime()) return;
  std::fprintf(stderr, "\r%s %d of %d, for %d s\033[K", what_.c_str(), static_cast<int>(done), static_cast<int>(total),
               static_cast<int>(absl::ToInt64Seconds(MonotonicNow() - start_)));
}

void Progress::Show(int64_t done, int64_t total) {
  if (!IsTime()) return;
  const double seconds = std::max(1e-3, absl::ToDoubleSeconds(MonotonicNow() - start_));
  std::fprintf(stderr, "\r%s %3d%%  %s of %s  %s/s\033[K", what_.c_str(),
               static_cast<int>(100.0 * done / std::max<int64_t>(1, total)), HumanBytes(done).c_str(),
               HumanBytes(total).c_str(), HumanBytes(static_cast<int64_t>(done / seconds)).c_str());
}

}  // namespace shardmesh
