#include "server/seats/reform.h"

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

WorkerIdentity Named(const std::string& name) { return {name, 1, "a:1", "h", "/s", 1}; }

struct Spare {
  std::string name;
  int num_jobs = 0;
};

// "mesh: name(was) ..." or the reason.
std::string Outcome(const std::string& defined, const std::string& from,
                    const std::vector<std::pair<std::string, int>>& left, const std::vector<Spare>& spares = {}) {
  std::vector<MemberRecord> holders;
  for (const auto& [name, was] : left) holders.push_back({Named(name), true, was});
  std::vector<WorkerIdentity> identities;
  for (const Spare& spare : spares) identities.push_back(Named(spare.name));
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < spares.size(); ++i) candidates.push_back({&identities[i], spares[i].num_jobs, {}});
  const auto reformed = Reform(ParseMeshSpec(defined).value(), ParseMeshSpec(from).value(), holders, candidates);
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

}  // namespace
}  // namespace shardmesh
