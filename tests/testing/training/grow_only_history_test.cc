#include "tests/testing/training/grow_only_history.h"

#include <functional>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;
using testing::GrowOnlyHistory;

TEST(GrowOnlyHistory, FindsWhatIsNotLinearizable) {
  const auto with = [](const std::function<void(GrowOnlyHistory&)>& fill) {
    GrowOnlyHistory history;
    history.WriteBegins(1);
    const int64_t before = MonotonicNanos();
    history.WriteEnds(1, true);
    history.Read(before, MonotonicNanos(), 0, "early");
    fill(history);
    return history.Check();
  };
  EXPECT_OK(with([](GrowOnlyHistory&) {}));
  EXPECT_THAT(with([](GrowOnlyHistory& h) { h.Read(MonotonicNanos(), MonotonicNanos(), 0, "late"); }),
              StatusIs(Code::kDataLoss, HasSubstr("late saw version 0 as the newest, when 1")));
  EXPECT_THAT(with([](GrowOnlyHistory& h) {
                h.Read(0, 1, 2, "prophet");
                h.WriteBegins(2);
              }),
              StatusIs(Code::kDataLoss, HasSubstr("before it was written")));
  EXPECT_THAT(with([](GrowOnlyHistory& h) {
                h.WriteBegins(2);
                const int64_t now = MonotonicNanos();
                h.Read(now, now + 1, 2, "first");
                h.Read(now + 2, now + 3, 1, "second");
              }),
              StatusIs(Code::kDataLoss, HasSubstr("second saw version 1")));
}

}  // namespace
}  // namespace shardmesh
