#include "worker/control/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <thread>

namespace shardmesh {
namespace {

TEST(TraceTest, HoldsTheNewestSpans_OldestFirst) {
  Trace trace;
  EXPECT_TRUE(trace.Spans().empty());
  for (int64_t step = 1; step <= Trace::kMaxSpans + 3; ++step) trace.Add({"step", step});
  const std::vector<TraceSpan> spans = trace.Spans();
  ASSERT_EQ(spans.size(), static_cast<size_t>(Trace::kMaxSpans));
  for (size_t i = 0; i < spans.size(); ++i) ASSERT_EQ(spans[i].step, static_cast<int64_t>(i) + 4);
}

TEST(TraceTest, ScopedSpan_NestsInTime_AndKnowsItsThread) {
  Trace trace;
  {
    const ScopedSpan outer(&trace, "outer", 7);
    std::thread([&] { const ScopedSpan inner(&trace, "inner", 7, 2, 3); }).join();
    const ScopedSpan none(nullptr, "none", 7);
  }
  const std::vector<TraceSpan> spans = trace.Spans();
  ASSERT_EQ(spans.size(), 2u);
  EXPECT_STREQ(spans[0].name, "inner");
  EXPECT_EQ(spans[0].bucket, 2);
  EXPECT_EQ(spans[0].item, 3);
  EXPECT_STREQ(spans[1].name, "outer");
  EXPECT_NE(spans[0].thread, spans[1].thread);
  EXPECT_LE(spans[1].begin_nanos, spans[0].begin_nanos);
  EXPECT_LE(spans[0].begin_nanos, spans[0].end_nanos);
  EXPECT_LE(spans[0].end_nanos, spans[1].end_nanos);
}

TEST(TraceTest, ManyThreads_LoseNothing) {
  Trace trace;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&trace, t] {
      for (int i = 0; i < Trace::kMaxSpans / 4; ++i) trace.Add({"range", t, 0, i});
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<std::pair<int64_t, int32_t>> seen;
  for (const TraceSpan& span : trace.Spans()) seen.emplace(span.step, span.item);
  EXPECT_EQ(seen.size(), static_cast<size_t>(Trace::kMaxSpans));
}

}  // namespace
}  // namespace shardmesh
