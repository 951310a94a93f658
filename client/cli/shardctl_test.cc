// The subcommands that need no service, on argument vectors.
#include "client/cli/shardctl.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

MATCHER_P2(Exits, code, err, "") {
  *result_listener << "exit " << arg.code << ", err: " << arg.err << ", out: " << arg.out;
  return arg.code == code && ::testing::Value(arg.err, HasSubstr(err)) && (code == kExitOk || arg.out.empty());
}

TEST(ShardctlTest, CommandLine_Wrong_IsUsage) {
  EXPECT_THAT(RunShardctl({}), Exits(kExitUsage, "shardctl: a command is required: one of up, jobs, "));
  EXPECT_THAT(RunShardctl({"foo"}), Exits(kExitUsage, "shardctl: no command \"foo\"; it is one of up, jobs, "));
  EXPECT_THAT(RunShardctl({"foo", "mesh"}), Exits(kExitUsage, "--shape is required"));
  EXPECT_THAT(RunShardctl({"\x1b"}), Exits(kExitUsage, "no command \"\\x1b\""));
  EXPECT_THAT(RunShardctl({"nonsense"}), Exits(kExitUsage, "--help"));
  EXPECT_THAT(RunShardctl({"names"}), Exits(kExitUsage, "a command is required: one of canonical, table, job\n"));
  EXPECT_THAT(RunShardctl({"names", "foo"}),
              Exits(kExitUsage, "no command \"foo\"; it is one of canonical, table, job\n"));
  EXPECT_THAT(RunShardctl({"names", "canonical"}), Exits(kExitUsage, "name is required"));
  EXPECT_THAT(RunShardctl({"names", "canonical", "a", "b"}), Exits(kExitUsage, "b"));
  EXPECT_THAT(RunShardctl({"mesh", "--names", "a"}), Exits(kExitUsage, "--shape is required"));
  EXPECT_THAT(RunShardctl({"mesh", "--shape", "2", "--names", "a", "--slice"}), Exits(kExitUsage, "--slice"));
}

TEST(ShardctlTest, Plan_RankThatIsNone_IsUsage) {
  for (const char* rank : {"-1", "2147483648", "99999999999999999999", "1.5", "two", ""}) {
    EXPECT_THAT(RunShardctl({"plan", "--spec", "spec.json", "--rank", rank}),
                Exits(kExitUsage, "is no rank; give a number from 0 to 2147483647"))
        << rank;
  }
}

TEST(ShardctlTest, Help_ShowsExamples) {
  for (const char* command : {"up", "jobs", "status", "plan", "versions", "pull", "digest", "delete", "trace", "top",
                              "mesh", "names", "names canonical", "names table"}) {
    std::vector<std::string> args = absl::StrSplit(command, ' ');
    args.push_back("--help");
    const CommandResult help = RunShardctl(args);
    EXPECT_EQ(help.code, kExitOk) << help.err;
    EXPECT_THAT(help.out, HasSubstr(absl::StrCat("\nExamples:\n  shardctl ", command))) << command;
  }
  EXPECT_THAT(RunShardctl({"--help"}).out, HasSubstr("\nExamples:\n  shardctl up"));
  EXPECT_THAT(RunShardctl({"--help"}).out, AllOf(HasSubstr("mesh"), HasSubstr("names"), HasSubstr("Exit codes")));
  EXPECT_THAT(RunShardctl({"versions", "--help"}).out, HasSubstr("s of the last heartbeat"));
  EXPECT_THAT(RunShardctl({"jobs", "--help"}).out, HasSubstr("as of the last heartbeat"));
  EXPECT_THAT(RunShardctl({"mesh", "--help"}).out, HasSubstr("--slice ddp,fsdp --slice fsdp"));
  EXPECT_THAT(RunShardctl({"names", "canonical", "--help"}).out, HasSubstr("_orig_mod.layers.0._orig_module.w"));
  EXPECT_EQ(RunShardctl({"mesh", "--help"}).code, kExitOk);
}

std::string CanonicalOut(std::vector<std::string> args) {
  args.insert(args.begin(), {"names", "canonical"});
  const CommandResult result = RunShardctl(args);
  return result.code == kExitOk ? result.out : result.err;
}

TEST(NamesCommandTest, Canonical_PrintsTheName) {
  EXPECT_EQ(CanonicalOut({"_orig_mod.layers.0._orig_module.w"}), "layers.0._orig_module.w\n");
  EXPECT_EQ(CanonicalOut({"[a]._orig_mod.[b,c]"}), "[a].[b,c]\n");
  EXPECT_EQ(CanonicalOut({"--", "-w"}), "-w\n");
}

TEST(NamesCommandTest, Canonical_Rules) {
  EXPECT_EQ(CanonicalOut({"--root-wrapper", "module", "--root-wrapper", "_orig_mod", "module._orig_mod.w"}), "w\n");
  EXPECT_EQ(CanonicalOut({"--wrapped-at=enc", "--wrapped-at", "dec", "dec.module.w"}), "dec.w\n");
  EXPECT_EQ(CanonicalOut({"a._orig_mod.w", "--literal", "a._orig_mod"}), "a._orig_mod.w\n");
}

TEST(NamesCommandTest, Canonical_Json) {
  EXPECT_EQ(CanonicalOut({"_orig_mod.\"q\".w", "--json"}),
            "{\"raw\":\"_orig_mod.\\\"q\\\".w\",\"canonical\":\"\\\"q\\\".w\"}\n");
}

TEST(NamesCommandTest, Canonical_BadName_IsAnError) {
  EXPECT_THAT(RunShardctl({"names", "canonical", "a..w"}),
              Exits(kExitError, "INVALID_ARGUMENT: name \"a..w\" has an empty"));
  EXPECT_THAT(RunShardctl({"names", "canonical", ""}), Exits(kExitError, "is empty"));
  EXPECT_THAT(RunShardctl({"names", "canonical", "\xff", "--json"}), Exits(kExitError, "name \"\\xff\" is not UTF-8"));
  EXPECT_THAT(RunShardctl({"names", "canonical", "w", "--root-wrapper", "x"}),
              Exits(kExitError, "\"x\" is no wrapper"));
}

TEST(NamesCommandTest, Table_TranslatesAFile_TiesAndCollisions) {
  const std::string path = ::testing::TempDir() + "/names.txt";
  std::ofstream(path) << "_orig_mod.embed.w\n\nhead.w\t_orig_mod.embed.w\r\n";
  EXPECT_EQ(RunShardctl({"names", "table", path}).out,
            "raw                canonical  stored as\n"
            "_orig_mod.embed.w  embed.w    embed.w\n"
            "head.w             head.w     embed.w\n"
            "2 names, 1 tensors stored\n");
  EXPECT_EQ(RunShardctl({"names", "table", path, "--json"}).out,
            "{\"names\":[{\"raw\":\"_orig_mod.embed.w\",\"canonical\":\"embed.w\",\"storage\":\"embed.w\"},"
            "{\"raw\":\"head.w\",\"canonical\":\"head.w\",\"storage\":\"embed.w\"}],\"storages\":[\"embed.w\"]}\n");
  std::ofstream(path) << "a.w\n_orig_mod.a.w\n";
  EXPECT_THAT(RunShardctl({"names", "table", path}),
              Exits(kExitError, "names.txt line 2: names \"a.w\" and \"_orig_mod.a.w\" both"));
  EXPECT_THAT(RunShardctl({"names", "table", "/nowhere/n"}), Exits(kExitError, "/nowhere/n: cannot be read"));
  EXPECT_THAT(RunShardctl({"names", "table", ::testing::TempDir()}), Exits(kExitError, "cannot be read"));
}

CommandResult MeshResult(std::vector<std::string> args) {
  args.insert(args.begin(), {"mesh", "--shape", "2,2,2", "--names", "ddp,fsdp,abcd"});
  return RunShardctl(args);
}

TEST(MeshCommandTest, SliceOfSlice_Json) {
  const CommandResult result = MeshResult({"--slice", "ddp,fsdp", "--slice", "fsdp", "--json"});
  EXPECT_EQ(result.code, kExitOk) << result.err;
  EXPECT_EQ(result.out,
            "{\"names\":[\"fsdp\"],\"sizes\":[2],\"instances\":[[0,2],[1,3],[4,6],[5,7]],"
            "\"groups\":{\"fsdp\":[[0,2],[1,3],[4,6],[5,7]]}}\n");
}

TEST(MeshCommandTest, Slice_Json_NestsBySizes) {
  EXPECT_EQ(MeshResult({"--json", "--slice=abcd,ddp"}).out,
            "{\"names\":[\"abcd\",\"ddp\"],\"sizes\":[2,2],\"instances\":[[[0,4],[1,5]],[[2,6],[3,7]]],"
            "\"groups\":{\"abcd\":[[0,1],[4,5],[2,3],[6,7]],\"ddp\":[[0,4],[1,5],[2,6],[3,7]]}}\n");
  EXPECT_THAT(MeshResult({"--json"}).out, HasSubstr("\"instances\":[[[[0,1],[2,3]],[[4,5],[6,7]]]]"));
}

TEST(MeshCommandTest, Operations_ApplyInTheOrderGiven) {
  EXPECT_THAT(MeshResult({"--json", "--flatten", "ddp,fsdp=dp", "--transpose", "abcd,dp", "--slice", "dp"}).out,
              HasSubstr("\"instances\":[[0,2,4,6],[1,3,5,7]]"));
  EXPECT_THAT(MeshResult({"--json", "--transpose", "fsdp,ddp,abcd", "--slice", "ddp,fsdp"}).out,
              HasSubstr("\"names\":[\"ddp\",\"fsdp\"]"));
  EXPECT_THAT(MeshResult({"--json", "--slice", "ddp,fsdp", "--transpose", "fsdp,ddp,abcd"}),
              Exits(kExitError, "no dimension is named \"abcd\"; this mesh has ddp, fsdp"));
}

TEST(MeshCommandTest, Ranks_AreUsedInTheirOrder) {
  EXPECT_THAT(MeshResult({"--json", "--ranks", "7,6,5,4,3,2,1,0", "--slice", "abcd"}).out,
              HasSubstr("\"instances\":[[7,6],[5,4],[3,2],[1,0]]"));
}

TEST(MeshCommandTest, Drawing_OneDimension) {
  EXPECT_EQ(MeshResult({"--slice", "fsdp"}).out,
            "mesh fsdp=2: 4 instances of 2 ranks\n"
            "\n"
            "instance  fsdp=0  fsdp=1\n"
            "       0       0       2\n"
            "       1       1       3\n"
            "       2       4       6\n"
            "       3       5       7\n");
}

TEST(MeshCommandTest, Drawing_TwoAndMoreDimensions) {
  EXPECT_EQ(MeshResult({"--slice", "ddp,fsdp"}).out,
            "mesh ddp=2 x fsdp=2: 2 instances of 4 ranks\n"
            "\n"
            "instance 0  fsdp=0  fsdp=1\n"
            "ddp=0            0       2\n"
            "ddp=1            4       6\n"
            "\n"
            "instance 1  fsdp=0  fsdp=1\n"
            "ddp=0            1       3\n"
            "ddp=1            5       7\n");
  EXPECT_EQ(MeshResult({}).out,
            "mesh ddp=2 x fsdp=2 x abcd=2: 1 instance of 8 ranks\n"
            "\n"
            "ddp=0   abcd=0  abcd=1\n"
            "fsdp=0       0       1\n"
            "fsdp=1       2       3\n"
            "\n"
            "ddp=1   abcd=0  abcd=1\n"
            "fsdp=0       4       5\n"
            "fsdp=1       6       7\n");
}

TEST(MeshCommandTest, Drawing_OfALargeMesh_SaysWhatIsLeftOut) {
  const CommandResult result = RunShardctl({"mesh", "--shape", "1024,1024", "--names", "a,b"});
  EXPECT_THAT(result.out, HasSubstr("mesh a=1024 x b=1024: 1 instance of 1048576 ranks\n"));
  EXPECT_THAT(result.out, HasSubstr("... 1008 more columns\n... 992 more rows\n"));
}

TEST(MeshCommandTest, ConcatenateUnflattenRestrict) {
  EXPECT_THAT(MeshResult({"--json", "--concatenate", "abcd/ddp,fsdp=dp"}).out,
              HasSubstr("{\"names\":[\"abcd\",\"dp\"],\"sizes\":[2,4],\"instances\":[[[0,2,4,6],[1,3,5,7]]]"));
  EXPECT_THAT(MeshResult({"--json", "--flatten", "ddp,fsdp=dp", "--unflatten", "dp=a:2,b:2", "--slice", "b"}).out,
              HasSubstr("\"instances\":[[0,2],[1,3],[4,6],[5,7]]"));
  EXPECT_THAT(MeshResult({"--json", "--restrict", "5,4,0,1", "--slice", "ddp,abcd"}).out,
              HasSubstr("\"instances\":[[[0,1],[4,5]]]"));
  EXPECT_THAT(MeshResult({"--concatenate", "ddp/ddp"}), Exits(kExitError, "INVALID_ARGUMENT"));
  EXPECT_THAT(MeshResult({"--restrict", "0,1,2"}), Exits(kExitError, "INVALID_ARGUMENT"));
  EXPECT_THAT(MeshResult({"--unflatten", "ddp=a:3,b:2"}), Exits(kExitError, "INVALID_ARGUMENT"));
}

TEST(MeshCommandTest, BadInput_SaysWhatAndWhatWouldBeRight) {
  EXPECT_THAT(RunShardctl({"mesh", "--shape", "2,x", "--names", "a,b"}),
              Exits(kExitUsage, "--shape \"2,x\" is not a list"));
  EXPECT_THAT(RunShardctl({"mesh", "--shape", "", "--names", "a"}), Exits(kExitUsage, "--shape \"\""));
  EXPECT_THAT(MeshResult({"--ranks", "0,99999999999"}), Exits(kExitUsage, "write it like 0,2,1,3"));
  EXPECT_THAT(MeshResult({"--flatten", "ddp,fsdp"}), Exits(kExitUsage, "write it like a,b=ab"));
  EXPECT_THAT(MeshResult({"--concatenate", "ddp/abcd="}), Exits(kExitUsage, "write it like c/a,b=ab"));
  EXPECT_THAT(MeshResult({"--unflatten", "ddp=a:2,b"}), Exits(kExitUsage, "write it like a=b:2,c:4"));
  EXPECT_THAT(MeshResult({"--restrict", "0,,1"}), Exits(kExitUsage, "write it like 0,1,4,5"));
  EXPECT_THAT(MeshResult({"--slice", ""}), Exits(kExitError, "name at least one of ddp, fsdp, abcd"));
  EXPECT_THAT(MeshResult({"--ranks", "0,1"}), Exits(kExitError, "INVALID_ARGUMENT: mesh: 2 ranks are given"));
  EXPECT_THAT(RunShardctl({"mesh", "--shape", "2,0", "--names", "a,b"}), Exits(kExitError, "b has size 0"));
  EXPECT_THAT(RunShardctl({"mesh", "--shape", "2,2", "--names", "a"}), Exits(kExitError, "2 sizes but 1 names"));
  EXPECT_THAT(RunShardctl({"mesh", "--shape", "9999999999,9999999999", "--names", "a,b"}),
              Exits(kExitError, "RESOURCE_EXHAUSTED"));
}

TEST(ShardctlTest, RandomArguments_NeverThrow) {
  const unsigned seed = std::random_device()();
  std::printf("seed %u\n", seed);
  std::mt19937 rng(seed);
  const std::vector<std::string> words = {"mesh", "names",   "canonical", "--shape", "2,2",      "--names",
                                          "a,b",  "--slice", "a",         "--",      "--json",   "-x",
                                          "",     "\xff",    "[a,b]",     "{}",      "--all",    "=",
                                          "a=b",  "-",       "--=x",      "--help",  "--shape=", "%%"};
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> args;
    for (size_t i = rng() % 8; i > 0; --i) args.push_back(words[rng() % words.size()]);
    const CommandResult result = RunShardctl(args);
    ASSERT_TRUE(result.code >= kExitOk && result.code <= kExitUsage) << ::testing::PrintToString(args);
    ASSERT_TRUE(result.code == kExitOk || !result.err.empty()) << ::testing::PrintToString(args);
  }
}

}  // namespace
}  // namespace shardmesh
