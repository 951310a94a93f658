#include "client/cli/plan/hosts_of_job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

v1::JobDescription JobOn(const std::vector<std::pair<std::string, int>>& host_and_shard) {
  v1::JobDescription job;
  for (const auto& [host, shard] : host_and_shard) {
    v1::Member& member = *job.add_members();
    member.set_rank(job.members_size() - 1);
    member.set_worker("w" + std::to_string(member.rank()));
    member.set_host_id(host);
    member.set_shard(shard);
  }
  return job;
}

TEST(HostsOfJob, ReplicasApart_LoseNothingWithAHost) {
  const auto hosts = HostsOfJob(JobOn({{"a", 0}, {"a", 1}, {"b", 0}, {"b", 1}}).members());
  const std::string text = DrawHosts(hosts, OnLoss::kFail, 1);
  EXPECT_THAT(text, HasSubstr("host  ranks  workers  shards  no replica elsewhere\n"
                              "a     0,1    w0,w1    0,1                        -\n"
                              "b     2,3    w2,w3    0,1                        -\n"));
  EXPECT_THAT(text, HasSubstr("have a replica of each shard if any one of these hosts is lost"));
  EXPECT_EQ(HostsToJson(hosts)[1].dump(),
            R"({"host":"b","ranks":[2,3],"workers":["w2","w3"],"shards":[0,1],"only_here":[]})");
}

TEST(HostsOfJob, ShardsOfOneHost_AreSaid) {
  const auto hosts = HostsOfJob(JobOn({{"a", 0}, {"a", 0}, {"b", 1}, {"b", 1}}).members());
  EXPECT_THAT(DrawHosts(hosts, OnLoss::kFail, 1), HasSubstr("b     2,3    w2,w3         1                     1\n"));
  EXPECT_THAT(DrawHosts(hosts, OnLoss::kFail, 1), HasSubstr("The job fails if it loses a host"));
  EXPECT_THAT(DrawHosts(hosts, OnLoss::kCheckpoint, 1),
              HasSubstr("goes back to its newest checkpoint if it loses a host"));
  EXPECT_THAT(DrawHosts(hosts, OnLoss::kFail, 2), HasSubstr("The next host keeps a copy of each shard"));
  EXPECT_EQ(HostsToJson(hosts)[0]["only_here"].dump(), "[0]");
}

TEST(HostsOfJob, WithoutMembers_NothingIsSaid) {
  EXPECT_EQ(DrawHosts(HostsOfJob(v1::JobDescription().members()), OnLoss::kFail, 1), "");
}

}  // namespace
}  // namespace shardmesh
