#include "server/seats/reform.h"

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

// "b2" is of host b; a single letter, of host h.
WorkerIdentity Named(const std::string& name) {
  return {name, 1, "a:1", name.size() == 1 ? "h" : name.substr(0, 1), "/s", 1};
}

struct Spare {
  std::string name;
  int num_jobs = 0;
  bool spans_hosts = true;
};

using Left = std::vector<std::pair<std::string, int>>;

Pool PoolOf(const Left& left, const std::vector<Spare>& spares, const std::vector<WorkerIdentity>& identities,
            bool on_several, bool spans_hosts) {
  Pool pool;
  pool.on_several = on_several;
  pool.spans_hosts = spans_hosts;
  for (const auto& [name, was] : left) pool.holders.push_back({Named(name), true, was});
  for (size_t i = 0; i < spares.size(); ++i) {
    pool.spares.push_back({&identities[i], spares[i].num_jobs, {spares[i].spans_hosts}});
  }
  return pool;
}

std::vector<WorkerIdentity> IdentitiesOf(const std::vector<Spare>& spares) {
  std::vector<WorkerIdentity> identities;
  for (const Spare& spare : spares) identities.push_back(Named(spare.name));
  return identities;
}

std::string TextOf(const absl::StatusOr<Reformed>& reformed) {
  if (!reformed.ok()) return std::string(reformed.status().message());
  std::string text = absl::StrCat(reformed->mesh.ToString(), ":");
  for (const MemberRecord& member : reformed->members) {
    EXPECT_FALSE(member.ready);
    absl::StrAppend(&text, " ", member.worker.name, "(", member.was, ")");
  }
  if (!reformed->others.empty()) absl::StrAppend(&text, ";");
  for (const MemberRecord& other : reformed->others)
    absl::StrAppend(&text, " ", other.worker.name, "(", other.was, ")");
  return text;
}

// "mesh: name(was) ..." or the reason.
std::string Outcome(const std::string& defined, const std::string& from, const Left& left,
                    const std::vector<Spare>& spares = {}) {
  const std::vector<WorkerIdentity> identities = IdentitiesOf(spares);
  return TextOf(Reform(ParseMeshSpec(defined).value(), ParseMeshSpec(from).value(),
                       PoolOf(left, spares, identities, /*on_several=*/false, /*spans_hosts=*/false)));
}

// Of a job that was on several hosts.
std::string OnHosts(const std::string& defined, const std::string& from, const Left& left,
                    const std::vector<Spare>& spares = {}) {
  const std::vector<WorkerIdentity> identities = IdentitiesOf(spares);
  return TextOf(Reform(ParseMeshSpec(defined).value(), ParseMeshSpec(from).value(),
                       PoolOf(left, spares, identities, /*on_several=*/true, /*spans_hosts=*/true)));
}

std::string Formed(const std::string& mesh, const Left& left, const std::vector<Spare>& spares, bool on_several,
                   bool spans_hosts = true) {
  const std::vector<WorkerIdentity> identities = IdentitiesOf(spares);
  return TextOf(FormOn(ParseMeshSpec(mesh).value(), PoolOf(left, spares, identities, on_several, spans_hosts)));
}

TEST(Reform, HoldersOfEveryShardFirst_ThenTheOthers_ThenSpares) {
  const std::string mesh = "ddp=2,fsdp=2";  // shards 0 1 0 1
  EXPECT_EQ(Outcome(mesh, mesh, {{"a", 0}, {"c", 2}, {"d", 3}}), "ddp=2,fsdp=1: a(0) d(3); c(2)");
  EXPECT_EQ(Outcome(mesh, mesh, {{"d", 3}, {"c", 2}, {"b", 1}}), "ddp=2,fsdp=1: c(2) b(1); d(3)");
  EXPECT_EQ(Outcome(mesh, mesh, {{"a", 0}, {"c", 2}, {"d", 3}}, {{"x"}}), "ddp=2,fsdp=2: a(0) d(3) c(2) x(-1)");
  EXPECT_EQ(Outcome(mesh, mesh, {{"d", 3}, {"a", 0}}, {{"x", 1}, {"z"}, {"y"}}), "ddp=2,fsdp=2: a(0) d(3) y(-1) z(-1)");
  EXPECT_EQ(Outcome("fsdp=2,ddp=2", "fsdp=2,ddp=2", {{"a", 0}, {"b", 1}, {"d", 3}}), "fsdp=1,ddp=2: a(0) d(3); b(1)")
      << "shards 0 0 1 1";
}

TEST(Reform, MeshIsOfTheOneDefined_NotOfTheLast) {
  EXPECT_EQ(Outcome("ddp=2,fsdp=2", "ddp=2,fsdp=1", {{"d", 1}}, {{"x"}, {"y"}, {"z"}}),
            "ddp=2,fsdp=2: d(1) x(-1) y(-1) z(-1)");
  EXPECT_EQ(Outcome("ddp=2,fsdp=4", "ddp=2,fsdp=3", {{"a", 0}, {"b", 1}, {"f", 5}, {"d", 3}, {"e", 4}}),
            "ddp=2,fsdp=2: a(0) b(1) f(5) d(3); e(4)");
}

TEST(Reform, NothingToGoOnWith_SaysWhy) {
  const std::string mesh = "ddp=2,fsdp=2";
  EXPECT_EQ(Outcome(mesh, mesh, {{"a", 0}, {"c", 2}}, {{"x"}}), "shard 1 has no other copy");
  EXPECT_EQ(Outcome(mesh, mesh, {}), "shard 0 has no other copy");
  EXPECT_EQ(Outcome(mesh, "ddp=1,fsdp=2", {{"a", 0}}, {{"x"}}), "its mesh has no replicas");
  EXPECT_EQ(Outcome("fsdp=2", "fsdp=2", {{"a", 0}}), "its mesh has no replicas");
}

TEST(Reform, OnSeveralHosts_EquallyManyOnEach_HostByHost) {
  const std::string mesh = "ddp=2,fsdp=2";
  const Left second = {{"b1", 2}, {"b2", 3}};  // host a was lost
  EXPECT_EQ(OnHosts(mesh, mesh, second), "ddp=1,fsdp=2: b1(2) b2(3)");
  EXPECT_EQ(OnHosts(mesh, mesh, second, {{"c1"}, {"c2"}}), "ddp=2,fsdp=2: b1(2) b2(3) c1(-1) c2(-1)");
  EXPECT_EQ(OnHosts(mesh, mesh, second, {{"c1"}, {"b3"}, {"b4"}}), "ddp=2,fsdp=2: b1(2) b2(3) b3(-1) b4(-1)");
  EXPECT_EQ(OnHosts(mesh, mesh, second, {{"c1"}, {"c2"}, {"b3"}, {"b4"}}), "ddp=2,fsdp=2: b1(2) b2(3) c1(-1) c2(-1)")
      << "replicas on two hosts rather than one";
  EXPECT_EQ(OnHosts(mesh, mesh, {{"a1", 0}, {"b1", 2}, {"b2", 3}}), "ddp=2,fsdp=1: a1(0) b1(2); b2(3)")
      << "b2 gives shard 1, and leaves";
  EXPECT_EQ(OnHosts(mesh, mesh, {{"a1", 0}, {"b1", 2}, {"b2", 3}}, {{"a3"}}), "ddp=2,fsdp=2: a1(0) a3(-1) b1(2) b2(3)");
  EXPECT_EQ(OnHosts(mesh, mesh, second, {{"c1", 0, false}, {"c2", 0, false}}), "ddp=1,fsdp=2: b1(2) b2(3)")
      << "other hosts do not reach c1 and c2";
  EXPECT_EQ(OnHosts("fsdp=2,ddp=2", "fsdp=2,ddp=2", second), "shard 0 has no other copy");
}

TEST(Reform, ThreeHosts_LoseOne) {
  const std::string mesh = "ddp=3,fsdp=2";
  EXPECT_EQ(OnHosts(mesh, mesh, {{"c2", 5}, {"c1", 4}, {"a2", 1}, {"a1", 0}}), "ddp=2,fsdp=2: a1(0) a2(1) c1(4) c2(5)");
}

TEST(FormOn, AJobOnOneHost_StaysThereIfItCan) {
  const Left left = {{"a1", 0}, {"a2", 1}};
  EXPECT_EQ(Formed("fsdp=4", left, {{"a3"}, {"a4"}, {"b1"}, {"b2"}}, false), "fsdp=4: a1(0) a2(1) a3(-1) a4(-1)");
  EXPECT_EQ(Formed("fsdp=4", left, {{"b1"}, {"b2"}}, false), "fsdp=4: a1(0) a2(1) b1(-1) b2(-1)");
  EXPECT_EQ(Formed("fsdp=1", left, {}, false), "fsdp=1: a1(0); a2(1)");
  EXPECT_EQ(Formed("fsdp=4", left, {{"a3"}}, false, false),
            "mesh fsdp=4 needs 4 workers of its host; there are its 2 and 1 others");
  EXPECT_EQ(Formed("fsdp=4", left, {{"b1"}}, false),
            "mesh fsdp=4 needs 4 workers of one host, or evenly of several; there are its 2 and 1 others");
}

TEST(FormOn, AJobOnSeveralHosts_KeepsReplicasApart_ElseTakesTheFewest) {
  const Left left = {{"a1", 0}, {"a2", 1}, {"b1", 2}, {"b2", 3}};
  EXPECT_EQ(Formed("fsdp=2", left, {}, true), "fsdp=2: a1(0) a2(1); b1(2) b2(3)");
  EXPECT_EQ(Formed("ddp=2", left, {}, true), "ddp=2: a1(0) b1(2); a2(1) b2(3)");
  EXPECT_EQ(Formed("fsdp=4", left, {}, true), "fsdp=4: a1(0) a2(1) b1(2) b2(3)");
  EXPECT_EQ(Formed("fsdp=4", left, {{"b3"}, {"b4"}}, true), "fsdp=4: b1(2) b2(3) b3(-1) b4(-1); a1(0) a2(1)");
}

}  // namespace
}  // namespace shardmesh
