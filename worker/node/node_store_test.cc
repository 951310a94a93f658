#include "worker/node/node_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

UniqueFd Memory(int64_t bytes, int seals = F_SEAL_SHRINK | F_SEAL_GROW) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), bytes), 0);
  EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

v1::NodeHello Hello(const std::string& worker, int64_t incarnation) {
  v1::NodeHello hello;
  hello.set_worker(worker);
  hello.set_incarnation(incarnation);
  return hello;
}

v1::RetainSegment Segment(const std::string& job, int64_t epoch, const std::string& name, int64_t bytes = 4096) {
  v1::RetainSegment keep;
  keep.mutable_owner()->set_job(job);
  keep.mutable_owner()->set_epoch(epoch);
  keep.set_name(name);
  keep.set_num_bytes(bytes);
  keep.set_data_offset(64);
  return keep;
}

v1::RetainedJob Job(const std::string& job, int64_t epoch) {
  v1::RetainedJob retained;
  retained.set_job(job);
  retained.set_epoch(epoch);
  retained.set_rank(3);
  retained.set_plan_hash("abc");
  return retained;
}

v1::NodeServing Address(const std::string& address) {
  v1::NodeServing serving;
  serving.set_address(address);
  serving.set_local_socket("/tmp/" + address);
  return serving;
}

struct NodeStoreTest : ::testing::Test {
  absl::Status Keep(const std::string& worker, const v1::RetainSegment& keep) {
    return store.Keep(worker, keep, Memory(keep.num_bytes()));
  }
  absl::StatusOr<NodeStore::Found> Find(const std::string& asking, const std::string& job, int64_t epoch,
                                        const std::string& name) {
    v1::FindSegment find;
    *find.mutable_owner() = Segment(job, epoch, name).owner();
    find.set_name(name);
    return store.Find(asking, find);
  }
  NodeStore store;
};

TEST_F(NodeStoreTest, Hello_FirstIncarnation_NothingIsLeft) {
  ASSERT_OK_AND_ASSIGN(const v1::NodeReply reply, store.Hello(Hello("w", 7), 100));
  EXPECT_EQ(reply.last_incarnation(), 0);
  EXPECT_EQ(reply.jobs_size(), 0);
  EXPECT_EQ(store.Pid("w"), 100);
  EXPECT_EQ(store.Pid("v"), 0);
}

// The wall clock may have been set back.
TEST_F(NodeStoreTest, EachIncarnation_GetsALargerIncarnation_WhateverItAsksFor) {
  ASSERT_OK_AND_ASSIGN(v1::NodeReply reply, store.Hello(Hello("w", 700), 100));
  EXPECT_EQ(reply.incarnation(), 700);
  store.Ended("w", 100, false, 7);
  ASSERT_OK_AND_ASSIGN(reply, store.Hello(Hello("w", 500), 101));
  EXPECT_EQ(reply.last_incarnation(), 700);
  EXPECT_EQ(reply.incarnation(), 701);
  for (const int64_t known : {500, 701}) {  // a link that lost the answer, and one that had it
    ASSERT_OK_AND_ASSIGN(const v1::NodeReply again, store.Hello(Hello("w", known), 101));
    EXPECT_EQ(again.SerializeAsString(), reply.SerializeAsString()) << known;
  }
  store.Ended("w", 101, false, 8);
  ASSERT_OK_AND_ASSIGN(reply, store.Hello(Hello("w", 900), 102));
  EXPECT_EQ(reply.last_incarnation(), 701);
  EXPECT_EQ(reply.incarnation(), 900);
  EXPECT_THAT(store.Hello(Hello("v", INT64_MAX), 103),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at most 4611686018427387904")));
}

TEST_F(NodeStoreTest, JoinedAsAnotherIncarnation_TheNextIncarnationIsToldThatOne) {
  ASSERT_OK(store.Hello(Hello("w", 700), 100));
  v1::NodeServing serving = Address("a:1");
  ASSERT_OK(store.Serving("w", serving));
  EXPECT_EQ(store.HeartbeatTimeout("w"), absl::ZeroDuration());
  serving.set_incarnation(1000);
  serving.set_heartbeat_timeout_ms(3000);
  ASSERT_OK(store.Serving("w", serving));
  EXPECT_OK(store.Hello(Hello("w", 700), 100)) << "its link knows no other one";
  EXPECT_EQ(store.HeartbeatTimeout("w"), absl::Seconds(3));
  store.Ended("w", 100, false, 7);
  EXPECT_EQ(store.HeartbeatTimeout("w"), absl::Seconds(3));
  ASSERT_OK_AND_ASSIGN(const v1::NodeReply reply, store.Hello(Hello("w", 800), 101));
  EXPECT_EQ(reply.last_incarnation(), 1000);
  EXPECT_EQ(reply.incarnation(), 1001);
  ASSERT_OK(store.Serving("w", Address("a:1")));
  EXPECT_EQ(store.HeartbeatTimeout("w"), absl::Seconds(3)) << "this incarnation has not joined yet";
  serving.set_incarnation(-1);
  EXPECT_THAT(store.Serving("w", serving), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("incarnation -1")));
}

TEST_F(NodeStoreTest, Hello_AnotherProcessLives_IsRefusedUntilItEnds) {
  ASSERT_OK(store.Hello(Hello("w", 7), 100));
  EXPECT_THAT(store.Hello(Hello("w", 8), 101), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("process 100")));
  store.Ended("w", 99, false, 7);  // not the one
  EXPECT_THAT(store.Hello(Hello("w", 8), 101), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("--name")));
  store.Ended("w", 100, false, 7);
  EXPECT_OK(store.Hello(Hello("w", 8), 101));
}

TEST_F(NodeStoreTest, KilledIncarnation_NextOneFindsWholeJobs_AndTheRestIsDropped) {
  ASSERT_OK(store.Hello(Hello("w", 7), 100));
  ASSERT_OK(store.Serving("w", Address("a:1")));
  ASSERT_OK(Keep("w", Segment("done", 2, "x")));
  ASSERT_OK(Keep("w", Segment("half", 2, "x")));
  ASSERT_OK(Keep("w", Segment("done", 1, "x")));
  ASSERT_OK(store.Whole("w", Job("done", 2)));
  store.Ended("w", 100, false, 7);
  EXPECT_OK(Find("w", "half", 2, "x"));  // until the next incarnation comes
  ASSERT_OK_AND_ASSIGN(const v1::NodeReply reply, store.Hello(Hello("w", 8), 101));
  EXPECT_EQ(reply.last_incarnation(), 7);
  EXPECT_EQ(reply.last_serving().address(), "a:1");
  EXPECT_EQ(reply.last_serving().local_socket(), "/tmp/a:1");
  ASSERT_EQ(reply.jobs_size(), 1);
  EXPECT_EQ(reply.jobs(0).SerializeAsString(), Job("done", 2).SerializeAsString());
  EXPECT_OK(Find("w", "done", 2, "x"));
  EXPECT_THAT(Find("w", "half", 2, "x"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("half@2")));
  EXPECT_THAT(Find("w", "done", 1, "x"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("done@1")));
}

TEST_F(NodeStoreTest, IncarnationKilledBeforeItServed_TheNextOneIsToldWhereTheOneBeforeDid) {
  ASSERT_OK(store.Hello(Hello("w", 7), 100));
  ASSERT_OK(store.Serving("w", Address("a:1")));
  ASSERT_OK(Keep("w", Segment("job", 1, "x")));
  ASSERT_OK(store.Whole("w", Job("job", 1)));
  EXPECT_TRUE(store.Served("w", 100));
  store.Ended("w", 100, false, 1000);
  ASSERT_OK(store.Hello(Hello("w", 8), 101));
  EXPECT_FALSE(store.Served("w", 101));
  store.Ended("w", 101, false, 2000);
  ASSERT_OK_AND_ASSIGN(const v1::NodeReply reply, store.Hello(Hello("w", 9), 102));
  EXPECT_EQ(reply.last_incarnation(), 8);
  EXPECT_EQ(reply.last_serving().address(), "a:1");
  EXPECT_EQ(reply.jobs_size(), 1);
  EXPECT_EQ(reply.away_since_nanos(), 1000) << "since then nobody served";
  ASSERT_OK(store.Serving("w", Address("a:2")));
  store.Ended("w", 102, false, 3000);
  ASSERT_OK_AND_ASSIGN(const v1::NodeReply next, store.Hello(Hello("w", 10), 103));
  EXPECT_EQ(next.away_since_nanos(), 3000);
}

TEST_F(NodeStoreTest, OrderlyEnd_LeavesNothing) {
  ASSERT_OK(store.Hello(Hello("w", 7), 100));
  ASSERT_OK(Keep("w", Segment("job", 1, "x")));
  ASSERT_OK(store.Whole("w", Job("job", 1)));
  store.Ended("w", 100, true, 7);
  EXPECT_THAT(Find("w", "job", 1, "x"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("job@1")));
  ASSERT_OK_AND_ASSIGN(const v1::NodeReply reply, store.Hello(Hello("w", 8), 101));
  EXPECT_EQ(reply.last_incarnation(), 0);
}

TEST_F(NodeStoreTest, HelloAgainOfOneIncarnation_SameReply_AndItsMemoryStays) {
  ASSERT_OK(store.Hello(Hello("w", 7), 100));
  ASSERT_OK(Keep("w", Segment("job", 1, "x")));
  ASSERT_OK_AND_ASSIGN(const v1::NodeReply again, store.Hello(Hello("w", 7), 100));
  EXPECT_EQ(again.last_incarnation(), 0);
  EXPECT_OK(Find("w", "job", 1, "x"));
  // The same process, but a newer incarnation: as if the last one had been killed.
  ASSERT_OK_AND_ASSIGN(const v1::NodeReply next, store.Hello(Hello("w", 8), 100));
  EXPECT_EQ(next.last_incarnation(), 7);
  EXPECT_THAT(Find("w", "job", 1, "x"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("job@1")));
  EXPECT_THAT(store.Hello(Hello("w", 7), 100), StatusIs(absl::StatusCode::kAborted, HasSubstr("incarnation 8")));
}

TEST_F(NodeStoreTest, Find_LooksAtAllWorkers_OwnMemoryFirst) {
  for (const char* const worker : {"a", "b", "c"}) ASSERT_OK(store.Hello(Hello(worker, 1), worker[0]));
  ASSERT_OK(Keep("b", Segment("job", 1, "x", 100)));
  ASSERT_OK(Keep("c", Segment("job", 1, "x", 200)));
  ASSERT_OK_AND_ASSIGN(const NodeStore::Found of_b, Find("b", "job", 1, "x"));
  ASSERT_OK_AND_ASSIGN(const NodeStore::Found of_c, Find("c", "job", 1, "x"));
  EXPECT_OK(Find("a", "job", 1, "x"));
  EXPECT_EQ(of_b.num_bytes, 100);
  EXPECT_EQ(of_c.num_bytes, 200);
  EXPECT_EQ(of_c.data_offset, 64);
  struct stat info;
  ASSERT_EQ(fstat(of_c.fd, &info), 0);
  EXPECT_EQ(info.st_size, 200);
}

TEST_F(NodeStoreTest, Drop_IsOfOneJobOfOneWorker) {
  for (const char* const worker : {"a", "b"}) {
    ASSERT_OK(store.Hello(Hello(worker, 1), worker[0]));
    for (const int epoch : {1, 2}) {
      ASSERT_OK(Keep(worker, Segment("job", epoch, absl::StrCat(worker, "-x"))));
      ASSERT_OK(Keep(worker, Segment("job", epoch, absl::StrCat(worker, "-y"))));
    }
  }
  ASSERT_OK(store.Whole("a", Job("job", 1)));
  v1::DropJob drop;
  drop.set_job("job");
  drop.set_epoch(1);
  ASSERT_OK(store.Drop("a", drop));
  EXPECT_THAT(Find("a", "job", 1, "a-x"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("a-x")));
  EXPECT_THAT(Find("a", "job", 1, "a-y"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("a-y")));
  EXPECT_OK(Find("a", "job", 2, "a-x"));
  EXPECT_OK(Find("a", "job", 1, "b-x"));
  store.Ended("a", 'a', false, 7);
  ASSERT_OK_AND_ASSIGN(const v1::NodeReply reply, store.Hello(Hello("a", 2), 300));
  EXPECT_EQ(reply.jobs_size(), 0);
}

TEST_F(NodeStoreTest, MemoryThatCouldBeCutUnderItsReaders_IsRefused) {
  ASSERT_OK(store.Hello(Hello("w", 1), 100));
  const v1::RetainSegment keep = Segment("job", 1, "x");
  EXPECT_THAT(store.Keep("w", keep, Memory(4096, F_SEAL_GROW)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("F_SEAL_SHRINK")));
  EXPECT_THAT(store.Keep("w", keep, Memory(4095)), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("4095")));
  EXPECT_THAT(store.Keep("w", keep, UniqueFd()), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("without")));
  EXPECT_THAT(store.Keep("w", keep, UniqueFd(open("/dev/zero", O_RDONLY | O_CLOEXEC))),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("0 bytes")));
  EXPECT_OK(store.Keep("w", keep, Memory(5000)));
  for (const int64_t offset : {-1, 4097}) {
    v1::RetainSegment off = keep;
    off.set_data_offset(offset);
    EXPECT_THAT(Keep("w", off), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(absl::StrCat(offset))));
  }
}

TEST_F(NodeStoreTest, Limits_AreNamed_AndNothingIsChanged) {
  ASSERT_OK(store.Hello(Hello("w", 1), 100));
  EXPECT_THAT(Keep("w", Segment("job", 1, std::string(193, 'n'))),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("193 bytes")));
  EXPECT_THAT(Keep("w", Segment("job", 1, "")), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("0 bytes")));
  EXPECT_OK(Keep("w", Segment("job", 1, std::string(192, 'n'))));
  EXPECT_THAT(store.Serving("w", Address(std::string(5000, 'a'))),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("5000")));
  EXPECT_THAT(store.Hello(Hello("no name", 1), 5), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("worker")));
  EXPECT_THAT(store.Hello(Hello("w", 0), 100), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("positive")));
  for (int i = 0; i < kMaxRetainedJobs; ++i) ASSERT_OK(store.Whole("w", Job("job", i)));
  EXPECT_OK(store.Whole("w", Job("job", 0)));
  EXPECT_THAT(store.Whole("w", Job("job", -1)), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("64 whole")));
}

TEST_F(NodeStoreTest, SegmentsOfAWorker_AreLimited_AndOneInPlaceOfAnotherCountsOnce) {
  ASSERT_OK(store.Hello(Hello("w", 1), 100));
  // Few descriptors are enough for the test: all are of one memory, and closed with the store.
  const UniqueFd memory = Memory(4096);
  for (int i = 0; i < 200; ++i) {
    ASSERT_OK(store.Keep("w", Segment("job", 1, absl::StrCat("s", i % 2)),
                         UniqueFd(fcntl(memory.get(), F_DUPFD_CLOEXEC, 0))));
  }
  absl::Status status;
  int retained = 2;
  while (status.ok() && retained < kMaxRetainedSegments) {
    UniqueFd fd(fcntl(memory.get(), F_DUPFD_CLOEXEC, 0));
    if (!fd.valid()) GTEST_SKIP() << "this process may have only " << retained << " descriptors";
    status = store.Keep("w", Segment("job", 1, absl::StrCat("t", retained)), std::move(fd));
    retained += status.ok();
  }
  EXPECT_EQ(retained, kMaxRetainedSegments);
  EXPECT_THAT(Keep("w", Segment("job", 1, "one-more")),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("4096 segments")));
  EXPECT_OK(Keep("w", Segment("job", 1, "s0")));
}

TEST_F(NodeStoreTest, WhoDidNotSayHello_MayOnlyFind) {
  EXPECT_THAT(Keep("w", Segment("job", 1, "x")), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("hello")));
  EXPECT_THAT(store.Serving("", Address("a")), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("hello")));
  EXPECT_THAT(store.Whole("w", Job("job", 1)), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("hello")));
  EXPECT_THAT(store.Drop("w", {}), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("hello")));
  EXPECT_THAT(Find("", "job", 1, "x"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("job@1")));
}

}  // namespace
}  // namespace shardmesh
