#include "client/cli/commands/trace_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardmesh {
namespace {

using Json = nlohmann::ordered_json;

void AddSpan(v1::GetTraceReply& rank, const char* name, int64_t step, uint64_t begin, uint64_t end, int item = -1,
             int bucket = -1) {
  v1::TraceSpan& span = *rank.add_spans();
  span.set_name(name);
  span.set_step(step);
  span.set_bucket(bucket);
  span.set_item(item);
  span.set_thread(40 + rank.rank());
  span.set_begin_nanos(begin);
  span.set_end_nanos(end);
}

std::vector<v1::GetTraceReply> TwoRanks() {
  std::vector<v1::GetTraceReply> ranks(2);
  ranks[1].set_rank(1);
  ranks[1].set_pid(77);
  AddSpan(ranks[0], "step", 6, 1'000'000, 2'000'000);
  AddSpan(ranks[0], "declared", 7, 4'000'000, 4'000'000, 3);
  AddSpan(ranks[0], "step", 7, 4'500'000, 4'700'000);
  AddSpan(ranks[0], "declared", 8, 4'800'000, 4'800'000, 3);
  AddSpan(ranks[1], "range", 7, 3'500'000, 5'000'500, 9, 2);
  AddSpan(ranks[1], "step", 7, 3'000'000, 6'000'000);
  return ranks;
}

Json Named(const Json& trace, const std::string& name) {
  for (const Json& event : trace["traceEvents"]) {
    if (event["name"] == name) return event;
  }
  return Json();
}

TEST(TraceCommandTest, ChromeTrace_HasARowForEveryThread_AndMicroseconds) {
  const Json trace = ChromeTrace(TwoRanks(), 0);
  EXPECT_EQ(trace["traceEvents"].size(), 6u + 2 * 2);
  const Json range = Named(trace, "range 9 of bucket 2");
  EXPECT_EQ(range["ph"], "X");
  EXPECT_EQ(range["pid"], 1);
  EXPECT_EQ(range["tid"], 41);
  EXPECT_EQ(range["ts"], 2500.0);  // from the first span on, which is rank 0's
  EXPECT_EQ(range["dur"], 1500.5);
  EXPECT_EQ(range["args"]["step"], 7);
  const Json declared = Named(trace, "slot 3 declared, step 7");
  EXPECT_EQ(declared["ph"], "i");
  EXPECT_EQ(declared["s"], "p");
  EXPECT_EQ(declared["ts"], 3000.0);
  EXPECT_FALSE(Named(trace, "step 6").is_null());
}

TEST(TraceCommandTest, ChromeTrace_NamesBucketsInFlight) {
  std::vector<v1::GetTraceReply> ranks(1);
  AddSpan(ranks[0], "declared", 3, 1000, 1000, 1, 5);
  AddSpan(ranks[0], "reduce_bucket", 3, 2000, 3000, -1, 5);
  AddSpan(ranks[0], "gather_bucket", 3, 4000, 6000, -1, 0);
  const Json trace = ChromeTrace(ranks, 0);
  EXPECT_FALSE(Named(trace, "slot 1 declared bucket 5, step 3").is_null());
  EXPECT_EQ(Named(trace, "reduce_bucket 5, step 3")["dur"], 1.0);
  EXPECT_EQ(Named(trace, "gather_bucket 0, step 3")["cat"], "gather_bucket");
}

TEST(TraceCommandTest, ChromeTrace_OfTheNewestSteps_BeginsWithThem) {
  const Json trace = ChromeTrace(TwoRanks(), 1);
  EXPECT_TRUE(Named(trace, "step 6").is_null());
  EXPECT_EQ(Named(trace, "range 9 of bucket 2")["ts"], 500.0);  // from rank 1's step on
  EXPECT_FALSE(Named(trace, "slot 3 declared, step 8").is_null());
  for (const int64_t steps : {int64_t{2}, int64_t{3}, INT64_MAX}) {
    EXPECT_EQ(ChromeTrace(TwoRanks(), steps).dump(), ChromeTrace(TwoRanks(), 0).dump()) << steps;
  }
}

TEST(TraceCommandTest, Sum_CountsNoTimeTwice) {
  v1::GetTraceReply rank;
  AddSpan(rank, "step", 1, 0, 9'000'000);
  AddSpan(rank, "step", 2, 10'000'000, 14'000'000);
  AddSpan(rank, "orthogonalize", 2, 10'000'000, 13'000'000);  // within the step
  AddSpan(rank, "range", 2, 13'000'000, 14'000'000);
  AddSpan(rank, "gradients", 2, 9'000'000, 14'000'000);  // of the lead's thread
  AddSpan(rank, "weights", 2, 12'000'000, 16'000'000);
  AddSpan(rank, "merge", 3, 16'000'000, 18'000'000);
  AddSpan(rank, "wait for members", 2, 14'000'000, 15'000'000);
  const TraceSum sum = SumOf(rank, 2);
  EXPECT_EQ(sum.steps, std::set<int64_t>{2});
  EXPECT_EQ(sum.spans, 7);
  EXPECT_DOUBLE_EQ(sum.working, 6e-3);
  EXPECT_DOUBLE_EQ(sum.waiting, 1e-3);
}

TEST(TraceCommandTest, ChromeTrace_OfNothing_IsEmpty) { EXPECT_EQ(ChromeTrace({}, 3)["traceEvents"].size(), 0u); }

}  // namespace
}  // namespace shardmesh
