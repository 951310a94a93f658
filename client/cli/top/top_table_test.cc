#include "client/cli/top/top_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TopView OneJob() {
  JobView job;
  job.name = "tiny";
  job.state = "ready";
  job.epoch = 3;
  job.committed_step = 42;
  job.steps_per_second = 12.5;
  job.median_period = 0.08;
  job.longest_period = 0.8125;
  job.longest_pause = 0.75;
  job.pause_before_step = 40;
  job.periods = 30;
  WorkerView well, silent;
  well.name = "w0";
  well.device = "cpu";
  well.transport = "tls";
  well.pid = 100;
  well.answered = true;
  well.epoch = 3;
  well.busy = 0.25;
  well.waiting = 0.0125;
  well.restarts = 2;
  well.last_pause = 0.1025;
  silent.name = "w1";
  silent.rank = 1;
  silent.pid = 101;
  silent.error = "UNAVAILABLE: gone";
  job.workers = {well, silent};
  job.slots = {{0, 43, 0.5, false}, {1, -1, std::nullopt, true}};
  return {absl::FromUnixSeconds(1'000'000'000), {job}, ""};
}

TEST(TopTableTest, Text_JobsWorkersAndSlots) {
  EXPECT_EQ(TopText(OneJob()),
            "2001-09-09T01:46:40Z\n"
            "job   state  epoch  committed  steps/s  step ms  longest ms  pause ms  before step  note\n"
            "tiny  ready      3         42    12.50   80.000     812.500   750.000           40     -\n"
            "\n"
            "job   worker  rank  pid  device  transport  epoch   busy  waiting  restarts  last pause ms  state\n"
            "tiny  w0         0  100  cpu     tls            3  25.0%     1.2%         2        102.500  ok\n"
            "tiny  w1         1  101  -       -              -      -        -         -              -  no answer\n"
            "\n"
            "job   slot  last step   idle  waited for\n"
            "tiny     0         43  50.0%  -\n"
            "tiny     1          -      -  by the others\n");
}

TEST(TopTableTest, TrainersThatPullSlots) {
  TopView view = OneJob();
  view.jobs[0].slots.clear();
  view.jobs[0].trainers = {{0, 200, 17, 1.5, 0.25}, {2, 201, 3, 0.5, std::nullopt}};
  EXPECT_THAT(TopText(view), HasSubstr("\n"
                                       "\n"
                                       "job   trainer  pid  slots finished   idle\n"
                                       "tiny        0  200              17  25.0%\n"
                                       "tiny        2  201               3      -\n"));
  EXPECT_EQ(TopJson(view)["jobs"][0]["trainers"].dump(),
            R"([{"seat":0,"pid":200,"slots_finished":17,"idle_seconds":1.5,"idle_share":0.25},)"
            R"({"seat":2,"pid":201,"slots_finished":3,"idle_seconds":0.5,"idle_share":null}])");
}

TEST(TopTableTest, Text_WithoutJobs_AndWithAnError) {
  TopView view = OneJob();
  view.coordinator_error = "UNAVAILABLE: \x1b[2J";
  view.jobs[0].workers[0].error = "worker w1 died";
  EXPECT_THAT(TopText(view), AllOf(HasSubstr("the coordinator does not answer, jobs are as before: UNAVAILABLE: \\x1b"),
                                   HasSubstr("  worker w1 died\n"), Not(HasSubstr("\x1b"))));
  EXPECT_EQ(TopText({absl::UnixEpoch(), {}, ""}), "1970-01-01T00:00:00Z\nno jobs\n");
}

TEST(TopTableTest, Json_WhatIsNotKnownIsNull) {
  const nlohmann::ordered_json json = TopJson(OneJob());
  EXPECT_EQ(json["time"], "2001-09-09T01:46:40Z");
  EXPECT_EQ(json["coordinator_error"], "");
  const nlohmann::ordered_json& job = json["jobs"][0];
  EXPECT_EQ(job["name"], "tiny");
  EXPECT_EQ(job["committed_step"], 42);
  EXPECT_EQ(job["steps_per_second"], 12.5);
  EXPECT_EQ(job["median_period_seconds"], 0.08);
  EXPECT_EQ(job["longest_period_seconds"], 0.8125);
  EXPECT_EQ(job["longest_pause_seconds"], 0.75);
  EXPECT_EQ(job["pause_before_step"], 40);
  EXPECT_EQ(job["workers"][0]["transport"], "tls");
  EXPECT_EQ(job["workers"][1]["transport"], "");
  EXPECT_EQ(job["workers"][0]["busy_share"], 0.25);
  EXPECT_EQ(job["workers"][0]["waiting_share"], 0.0125);
  EXPECT_EQ(job["workers"][0]["restarts"], 2);
  EXPECT_EQ(job["workers"][0]["last_pause_seconds"], 0.1025);
  EXPECT_TRUE(job["workers"][1]["epoch"].is_null());
  EXPECT_TRUE(job["workers"][1]["restarts"].is_null());
  EXPECT_TRUE(job["workers"][1]["last_pause_seconds"].is_null());
  EXPECT_EQ(job["workers"][1]["answered"], false);
  EXPECT_EQ(job["workers"][1]["error"], "UNAVAILABLE: gone");
  EXPECT_EQ(job["slots"][0]["idle_share"], 0.5);
  EXPECT_TRUE(job["slots"][1]["idle_share"].is_null());
  EXPECT_EQ(job["slots"][1]["last_step"], -1);
  EXPECT_EQ(job["slots"][1]["waited_for"], true);
  EXPECT_EQ(TopJson({absl::UnixEpoch(), {}, ""})["jobs"].dump(), "[]");
}

TEST(TopTableTest, Redraw_InPlaceOnATerminalOnly) {
  EXPECT_EQ(Redraw("block\n", false, true), "block\n");
  EXPECT_EQ(Redraw("block\n", false, false), "\nblock\n");
  EXPECT_EQ(Redraw("block\n", true, true), "\x1b[H\x1b[2Jblock\n");
  EXPECT_EQ(Redraw("block\n", true, false), "\x1b[H\x1b[2Jblock\n");
}

}  // namespace
}  // namespace shardmesh
