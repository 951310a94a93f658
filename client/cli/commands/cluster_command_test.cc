// Every subcommand that needs a service, against a real one: `shardctl up` as a child process, with its coordinator and
// workers, and a tiny job that has taken two steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/shardctl.h"
#include "client/cli/testing/test_cluster.h"
#include "client/cpp/session.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class ClusterCommandTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    absl::StatusOr<std::unique_ptr<Cluster>> cluster =
        Cluster::Start("shared", {"--workers", "2", "--log-level", "warn"});
    ASSERT_OK(cluster);
    cluster_ = cluster->release();
    absl::StatusOr<std::shared_ptr<Job>> job = Train(cluster_->address(), TinyJob("tiny"));
    ASSERT_OK(job);
    job_ = new std::shared_ptr<Job>(*job);
    ASSERT_TRUE(Eventually([] { return RunJson({"versions", "tiny"})["committed_step"] == 2; }));  // by a heartbeat
  }
  static void TearDownTestSuite() {
    delete job_;
    delete cluster_;
  }
  void SetUp() override { ASSERT_NE(job_, nullptr); }

  static CommandResult Run(std::vector<std::string> args) {
    args.insert(args.end(), {"--coordinator", cluster_->address()});
    return RunShardctl(args);
  }
  static std::string Out(const std::vector<std::string>& args) {
    const CommandResult result = Run(args);
    EXPECT_EQ(result.code, kExitOk) << result.err;
    EXPECT_EQ(result.err, "");
    return result.out;
  }
  static Json RunJson(std::vector<std::string> args) {
    args.push_back("--json");
    const Json json = Json::parse(Out(args), nullptr, false);
    EXPECT_FALSE(json.is_discarded());
    return json;
  }
  static std::string Error(const std::vector<std::string>& args, int code = kExitError) {
    const CommandResult result = Run(args);
    EXPECT_EQ(result.code, code) << result.out;
    EXPECT_EQ(result.out, "");
    return result.err;
  }

  static Cluster* cluster_;
  static std::shared_ptr<Job>* job_;
};
Cluster* ClusterCommandTest::cluster_ = nullptr;
std::shared_ptr<Job>* ClusterCommandTest::job_ = nullptr;

TEST_F(ClusterCommandTest, Jobs) {
  EXPECT_THAT(Out({"jobs"}),
              AllOf(ContainsRegex("name +state +epoch +mesh +slots +parameters"),
                    ContainsRegex("workers +note\ntiny +ready +1 +fsdp=2 +1 +4 +2 +[0-9,]*2 +2/2 +-\n")));
  EXPECT_THAT(Out({"jobs", "tiny"}),
              AllOf(HasSubstr("\n\nrank"), ContainsRegex("\n +1 +worker-[01] +yes +yes +[0-9]+")));
  const Json list = RunJson({"jobs"});
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0]["name"], "tiny");
  EXPECT_EQ(list[0]["state"], "ready");
  EXPECT_EQ(list[0]["parameters"], 4);
  EXPECT_EQ(list[0]["workers_alive"], 2);
  EXPECT_EQ(list[0]["error"], "");
  EXPECT_EQ(list[0]["waiting_for"], "");
  EXPECT_EQ(RunJson({"jobs", "tiny"})["members"][1]["rank"], 1);
}

TEST_F(ClusterCommandTest, Jobs_Waiting_SaysForWhat) {
  JobSpec spec = TinyJob("large");
  spec.mesh = ParseMeshSpec("fsdp=3").value();
  ClientOptions options;
  options.ready_timeout = absl::Milliseconds(100);
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(cluster_->address(), options));
  EXPECT_THAT(client.CreateJob(spec), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                               HasSubstr("within 100ms; it waits for 3 live workers on one host; ")));
  EXPECT_THAT(Out({"jobs", "large"}), ContainsRegex("large +waiting .* 0/3 +waiting for 3 live workers on one host"));
  const Json job = RunJson({"jobs", "large"});
  EXPECT_EQ(job["error"], "");
  EXPECT_THAT(job["waiting_for"].get<std::string>(), HasSubstr("3 live workers on one host; host "));
  Out({"delete", "large"});
}

TEST_F(ClusterCommandTest, Plan) {
  EXPECT_THAT(Out({"plan", "tiny"}), AllOf(HasSubstr("plan " + (*job_)->plan().hash() + " of mesh fsdp=2"),
                                           ContainsRegex("\nhead +a +\\[10,8\\] +0 +0 +80 +- +embed"),
                                           ContainsRegex("shard 1 +\\|\\.\\.\\.\\.\\| +1 +256\n")));
  const Json json = RunJson({"plan", "tiny"});
  EXPECT_EQ(json["hash"], (*job_)->plan().hash());
  EXPECT_EQ(json["shards"], 2);
  EXPECT_EQ(json["placements"][3]["name"], "w");
}

TEST_F(ClusterCommandTest, VersionsAndDigest) {
  EXPECT_THAT(Out({"versions", "tiny"}), ContainsRegex("^committed +published +epoch\n +2 +[0-9,]*2 +1\n$"));
  EXPECT_EQ(RunJson({"versions", "tiny"})["published_steps"].back(), 2);
  ASSERT_OK_AND_ASSIGN(const v1::DigestReply digest, (*job_)->Digest(kLong));
  const std::string hex = absl::StrFormat("%016x", digest.digest());
  EXPECT_EQ(Out({"digest", "tiny"}), absl::StrCat("step 2 digest ", hex, "\n"));
  EXPECT_EQ(RunJson({"digest", "tiny"})["digest"], hex);
}

TEST_F(ClusterCommandTest, Leases_ReleaseTakesTheNonce) {
  v1::AcquireLeaseRequest acquire;
  acquire.set_job("tiny");
  acquire.set_exact(2);
  acquire.set_ttl_ms(60'000);
  acquire.set_nonce(0x5eed);
  ASSERT_OK_AND_ASSIGN(const v1::Lease lease, (*job_)->worker(Rank(0)).AcquireLease(acquire, kLong));
  const std::string id = absl::StrFormat("%016x", lease.id());
  EXPECT_THAT(Out({"leases", "tiny"}), AllOf(ContainsRegex(" 2 +lease " + id + " at worker-0 +ends in "),
                                             HasSubstr("1 of 3 publications kept")));
  EXPECT_EQ(RunJson({"leases", "tiny"})["holders"][0]["lease"], id);
  EXPECT_THAT(Error({"leases", "tiny", "--release", id}, kExitUsage), HasSubstr("--nonce"));
  EXPECT_THAT(Error({"leases", "tiny", "--release", id, "--nonce", "xyz"}), HasSubstr("nonce \"xyz\" is none"));
  EXPECT_THAT(Error({"leases", "tiny", "--release", id, "--nonce", "5eee"}), HasSubstr("PERMISSION_DENIED"));
  EXPECT_THAT(Out({"leases", "tiny"}), HasSubstr(id));
  EXPECT_EQ(Out({"leases", "tiny", "--release", id, "--nonce", "5eed"}), "released " + id + "\n");
  EXPECT_THAT(Out({"leases", "tiny"}), Not(HasSubstr(id)));
}

TEST_F(ClusterCommandTest, CheckpointAndRestore) {
  const std::string root = ::testing::TempDir() + "tiny-checkpoints", path = root + "/step-0000000000002";
  const std::string hex = RunJson({"digest", "tiny"})["digest"];
  EXPECT_THAT(Out({"checkpoint", "tiny", root}),
              AllOf(HasSubstr("step 2: "), HasSubstr(" in " + path + ", digest " + hex)));
  EXPECT_THAT(Out({"checkpoint", "tiny", root}),
              AllOf(HasSubstr("step 2 was saved before: "), HasSubstr(" in " + path)));
  EXPECT_THAT(Error({"checkpoint", "none", root}), HasSubstr("none"));
  const CommandResult list = RunShardctl({"checkpoints", root});
  EXPECT_THAT(list.out,
              ContainsRegex("step +job +mesh +size +digest +path\n +2 +tiny +fsdp=2 +[0-9.]+ [KM]iB +" + hex + " +/"));
  const CommandResult json = RunShardctl({"checkpoints", root, "--json"});
  EXPECT_EQ(Json::parse(json.out)["checkpoints"][0]["step"], 2);
  EXPECT_EQ(RunShardctl({"checkpoints", root + "/none"}).code, kExitError);
  EXPECT_EQ(Out({"restore", root, "--job", "again", "--mesh", "fsdp=1"}),
            absl::StrCat("job again at step 2 on mesh fsdp=1, digest ", hex, "\n"));
  EXPECT_THAT(Error({"restore", path, "--job", "again", "--mesh", "fsdp=1"}), HasSubstr("has weights already"));
  const auto bucketed = [&](std::string residency) {
    return std::vector<std::string>{"restore",
                                    path,
                                    "--job",
                                    "by-bucket",
                                    "--residency",
                                    residency,
                                    "--bucket-elements",
                                    "1024",
                                    "--prefetch-buckets",
                                    "2",
                                    "--mesh",
                                    "fsdp=1"};
  };
  EXPECT_THAT(Error(bucketed("some")), HasSubstr("\"some\" is no residency; there are full, bucket"));
  EXPECT_EQ(Out(bucketed("bucket")), absl::StrCat("job by-bucket at step 2 on mesh fsdp=1, digest ", hex, "\n"));
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(cluster_->address()));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.OpenJob("by-bucket"));
  const JobSpec& by_bucket = job->spec();
  EXPECT_EQ(by_bucket.residency, Residency::kBucket);
  EXPECT_EQ(by_bucket.bucket_elements, 1024);
  EXPECT_EQ(by_bucket.prefetch_buckets, 2);
  EXPECT_EQ(RunJson({"jobs", "by-bucket"})["residency"], "bucket");
  EXPECT_EQ(RunJson({"jobs", "again"})["residency"], "full");
  Out({"delete", "by-bucket"});
  EXPECT_THAT(Error({"restore", root + "/none"}), HasSubstr(root + "/none"));
  const std::string other = root + "-2";
  const Json saved = RunJson({"checkpoint", "again", other, "--keep-last", "1", "--keep-every", "10"});
  EXPECT_EQ(saved["step"], 2);
  EXPECT_EQ(saved["digest"], hex);
  EXPECT_EQ(saved["removed_steps"].size(), 0u);
  Error({"checkpoint", "again", other, "--keep-every", "10"}, kExitUsage);
  Out({"delete", "again"});
}

TEST_F(ClusterCommandTest, Restore_OfAMeshThatNeedsMoreWorkers) {
  const std::string root = ::testing::TempDir() + "large-checkpoints", given = root + "/given";
  const std::string path = RunJson({"checkpoint", "tiny", root})["path"];
  std::filesystem::create_directories(given + "/states");
  std::filesystem::copy(path + "/model.safetensors", given);
  std::filesystem::copy(path + "/states.safetensors", given + "/states/model.safetensors");
  std::ifstream manifest(path + "/manifest.json");
  Json saved = Json::parse(manifest);
  saved["job"]["mesh"][0]["size"] = 3;
  std::ofstream(given + "/job.json") << saved.dump();
  EXPECT_EQ(RunShardctl({"adopt", given, root + "/adopted"}).code, kExitOk);
  EXPECT_THAT(Error({"restore", root + "/adopted", "--job", "large", "--timeout", "0.1"}),
              HasSubstr("3 live workers on one host"));
  EXPECT_THAT(Out({"restore", root + "/adopted", "--job", "large", "--fit-mesh"}), HasSubstr("on mesh fsdp=2"));
  Out({"delete", "large"});
}

TEST_F(ClusterCommandTest, Status) {
  const std::string table = Out({"status"});
  EXPECT_THAT(table, AllOf(HasSubstr("publications"), HasSubstr("gathered  transport  error\n"),
                           ContainsRegex("worker-0 +[0-9]+ +cpu +tiny +[01] +1 +2 +[0-9,]*2 ")));
  const Json workers = RunJson({"status", "tiny"});
  ASSERT_EQ(workers.size(), 2u);
  for (const Json& worker : workers) {
    EXPECT_EQ(worker["answered"], true);
    EXPECT_EQ(worker["device"], "cpu");
    EXPECT_EQ(worker["jobs"][0]["committed_step"], 2);
    EXPECT_GT(worker["jobs"][0]["shard_bytes"], 0);
    EXPECT_EQ(worker["jobs"][0]["transport"], "");
    EXPECT_GE(worker["jobs"][0]["window_bytes"], (*job_)->plan().version_bytes());
  }
}

TEST_F(ClusterCommandTest, Pull_Table) {
  const std::string table = Out({"pull", "tiny"});
  EXPECT_THAT(table, AllOf(HasSubstr("step 2\n"), ContainsRegex("\nhead +fp32 +\\[10,8\\] +80 +0.99[0-9]* +0.99"),
                           ContainsRegex("\nw +bf16 +\\[3,5\\] +15 +0.[45]")));
  EXPECT_EQ(Out({"pull", "tiny", "--at-least", "2"}), table);
  const Json one = RunJson({"pull", "tiny", "--exact", "2", "--name", "norm"});
  EXPECT_EQ(one["step"], 2);
  ASSERT_EQ(one["parameters"].size(), 1u);
  EXPECT_EQ(one["parameters"][0]["elements"], 7);
  EXPECT_NEAR(one["parameters"][0]["mean"], -2, 0.02);
}

TEST_F(ClusterCommandTest, Pull_OnDemand_SaysAtOnceThatNobodyHadAVersionMade) {
  JobSpec spec = TinyJob("demand");
  spec.publish_every = kPublishOnDemand;
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(cluster_->address()));
  ASSERT_OK(client.CreateJob(spec));
  EXPECT_THAT(Error({"pull", "demand"}), AllOf(HasSubstr("no version of it is there"), HasSubstr("shardctl publish demand")));
  EXPECT_THAT(Error({"pull", "demand", "--at-least", "0", "--timeout", "2"}), HasSubstr("the job publishes on demand"));
  Out({"delete", "demand"});
}

TEST_F(ClusterCommandTest, Pull_Output_IsSafetensors) {
  const std::string file = ::testing::TempDir() + "/tiny.safetensors";
  EXPECT_THAT(Out({"pull", "tiny", "--output", file}), HasSubstr("step 2: 4 parameters, "));
  const std::string bytes = Contents(file);
  uint64_t length = 0;
  ASSERT_GT(bytes.size(), sizeof(length));
  std::memcpy(&length, bytes.data(), sizeof(length));
  ASSERT_LT(length, bytes.size() - 8);
  const Json header = Json::parse(bytes.substr(8, length), nullptr, false);
  EXPECT_EQ(header["__metadata__"]["job"], "tiny");
  EXPECT_EQ(header["__metadata__"]["step"], "2");
  EXPECT_EQ(header["w"]["dtype"], "BF16");
  ASSERT_OK_AND_ASSIGN(const Version version, (*job_)->Pull({VersionChoice::kExact, Step(2)}, kLong));
  size_t total = 0;
  for (const char* name : {"embed", "head", "norm", "w"}) {
    ASSERT_OK_AND_ASSIGN(const ConstTensorView view, version.parameter(name));
    const size_t begin = header[name]["data_offsets"][0], end = header[name]["data_offsets"][1];
    ASSERT_EQ(static_cast<int64_t>(end - begin), view.num_elements * BytesPerElement(view.format)) << name;
    EXPECT_EQ(std::memcmp(bytes.data() + 8 + length + begin, view.data, end - begin), 0) << name;
    total += end - begin;
  }
  EXPECT_EQ(bytes.size(), 8 + length + total);
}

// Both workers took both steps, a range within each of them; the digest that another test asks for may be there too.
TEST_F(ClusterCommandTest, Trace_IsATimelineOfBothWorkers) {
  const std::string file = ::testing::TempDir() + "/tiny.trace.json";
  EXPECT_THAT(Out({"trace", "tiny", "--output", file}),
              AllOf(ContainsRegex("\n +1 +[0-9]+ +2 +[0-9]+ +[0-9.]+ +[0-9.]+\n"), HasSubstr("ui.perfetto.dev")));
  const Json events = Json::parse(Contents(file), nullptr, false)["traceEvents"];
  for (const int rank : {0, 1}) {
    for (const int step : {1, 2}) {
      double begin = -1, end = -1;
      int ranges = 0;
      for (const Json& event : events) {
        if (event["pid"] != rank || event["name"] != absl::StrCat("step ", step)) continue;
        begin = event["ts"];
        end = begin + event["dur"].get<double>();
      }
      ASSERT_GE(begin, 0) << "rank " << rank << " step " << step;
      for (const Json& event : events) {
        if (event["pid"] != rank || event["ph"] != "X" || event["cat"] != "range") continue;
        if (event["args"]["step"] != step || event["ts"] < begin) continue;
        ranges += event["ts"].get<double>() + event["dur"].get<double>() <= end + 0.001;
      }
      EXPECT_GE(ranges, 1) << "rank " << rank << " step " << step;
    }
  }
  const Json newest = RunJson({"trace", "tiny", "--steps", "1", "--output", file});
  ASSERT_EQ(newest["workers"].size(), 2u);
  EXPECT_EQ(newest["workers"][1]["steps"], 1);
  EXPECT_GT(newest["workers"][0]["working_seconds"], 0);
  EXPECT_EQ(newest["bytes"], Contents(file).size());
}

// Codes are written as they are, with their scales beside them.
TEST_F(ClusterCommandTest, Pull_QuantizedWeights) {
  JobSpec spec = TinyJob("quantized");
  spec.parameters = {{"q", {3, 64}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kFp8Row},
                     {"m", {2, 64}, WeightFormat::kFp32, "", StateFormat::kFp32, GatherFormat::kMx8},
                     {"i", {3, 5}, WeightFormat::kInt8Row},
                     {"n", {3, 25}, WeightFormat::kBf16, "", StateFormat::kFp32, GatherFormat::kNf4, 0, true}};
  ASSERT_OK_AND_ASSIGN(Client client, Client::Connect(cluster_->address()));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, client.CreateJob(spec));
  ASSERT_OK(job->Initialize({{"q", std::vector<float>(192, 2.0f)},
                             {"m", std::vector<float>(128, 448.0f)},
                             {"i", std::vector<float>(15, 254.0f)},
                             {"n", std::vector<float>(75, 0.5f)}},
                            kLong));
  const Json pulled = RunJson({"pull", "quantized", "--at-least", "0"});
  EXPECT_EQ(pulled["parameters"][0]["format"], "fp8_row");
  EXPECT_EQ(pulled["parameters"][0]["elements"], 192);
  EXPECT_FALSE(pulled["parameters"][0].contains("mean"));
  EXPECT_THAT(Out({"pull", "quantized"}), ContainsRegex("\nm +mx8 +\\[2,64\\] +128 +- +- +-"));
  EXPECT_THAT(Out({"plan", "quantized"}), ContainsRegex("fp32>fp8_row"));
  EXPECT_EQ(RunJson({"plan", "quantized"})["placements"][0]["scales"], 3);
  const std::string file = ::testing::TempDir() + "/quantized.safetensors";
  Out({"pull", "quantized", "--output", file});
  const std::string bytes = Contents(file);
  uint64_t length = 0;
  ASSERT_GT(bytes.size(), sizeof(length));
  std::memcpy(&length, bytes.data(), sizeof(length));
  const Json header = Json::parse(bytes.substr(8, length), nullptr, false);
  EXPECT_EQ(header["__metadata__"]["gather q"], "fp8_row");
  EXPECT_EQ(header["q"]["dtype"], "F8_E4M3");
  EXPECT_EQ(header["q.scales"]["dtype"], "F32");
  EXPECT_EQ(header["q.scales"]["shape"], Json({3, 1}));
  EXPECT_EQ(header["m.scales"]["dtype"], "U8");
  EXPECT_EQ(header["m.scales"]["shape"], Json({2, 2}));
  float scale;
  std::memcpy(&scale, bytes.data() + 8 + length + header["q.scales"]["data_offsets"][0].get<size_t>(), sizeof(scale));
  EXPECT_EQ(scale, 224.0f);  // 448 / 2
  EXPECT_EQ(bytes[8 + length + header["q"]["data_offsets"][0].get<size_t>()], 0x7E);
  EXPECT_EQ(bytes[8 + length + header["m.scales"]["data_offsets"][0].get<size_t>()], 127);  // 1
  EXPECT_EQ(header["i"]["dtype"], "I8");
  EXPECT_EQ(bytes[8 + length + header["i"]["data_offsets"][0].get<size_t>()], 127);
  EXPECT_EQ(header["i.scales"]["shape"], Json({3}));
  std::memcpy(&scale, bytes.data() + 8 + length + header["i.scales"]["data_offsets"][0].get<size_t>(), sizeof(scale));
  EXPECT_EQ(scale, 2.0f);
  EXPECT_EQ(header["n"]["dtype"], "U8");
  EXPECT_EQ(header["n"]["shape"], Json({38})) << "two in a byte";
  EXPECT_EQ(header["__metadata__"]["shape n"], "[3,25]");
  EXPECT_EQ(header["n.scales"]["dtype"], "I8");
  EXPECT_EQ(header["n.scales"]["shape"], Json({2}));
  EXPECT_EQ(header["n.factors"]["shape"], Json({1}));
  std::memcpy(&scale, bytes.data() + 8 + length + header["n.mean"]["data_offsets"][0].get<size_t>(), sizeof(scale));
  EXPECT_EQ(scale, 0.5f);
  Out({"delete", "quantized"});
}

TEST_F(ClusterCommandTest, Errors_AreOneLine) {
  for (const char* command : {"jobs", "plan", "versions", "digest", "status", "pull", "delete"}) {
    EXPECT_THAT(Error({command, "nobody"}),
                AllOf(HasSubstr("shardctl: NOT_FOUND: "), HasSubstr("tiny"), ContainsRegex("^[^\n]*\n$")))
        << command;
  }
  EXPECT_THAT(Error({"pull", "tiny", "--exact", "77"}), HasSubstr("OUT_OF_RANGE"));
  EXPECT_THAT(Error({"pull", "tiny", "--at-least", "77", "--timeout", "0.3"}), HasSubstr("DEADLINE_EXCEEDED"));
  EXPECT_THAT(Error({"pull", "tiny", "--name", "nothing"}), HasSubstr("no parameter \"nothing\""));
  // Before anybody is asked: for the job there would be another error.
  EXPECT_THAT(Error({"pull", "nobody", "--output", "/none/x"}), HasSubstr("NOT_FOUND: cannot create /none/x: there is "
                                                                          "no folder /none"));
  EXPECT_THAT(Error({"trace", "nobody", "--output", ::testing::TempDir() + "/t"}), HasSubstr("NOT_FOUND"));
  EXPECT_THAT(Error({"trace", "tiny", "--output", "/none/x"}), HasSubstr("there is no folder /none"));
  EXPECT_THAT(Error({"trace", "tiny"}, kExitUsage), HasSubstr("--output"));
  EXPECT_THAT(Error({"trace", "tiny", "--output", "x", "--steps", "0"}, kExitUsage), HasSubstr("--steps"));
  EXPECT_THAT(Error({"pull", "nobody", "--output", ::testing::TempDir()}), HasSubstr("INVALID_ARGUMENT"));
  EXPECT_THAT(Error({"pull", "tiny", "--exact", "1", "--at-least", "1"}, kExitUsage), HasSubstr("excludes"));
  EXPECT_THAT(Error({"pull", "tiny", "--exact", "-1"}, kExitUsage), HasSubstr("--exact"));
  EXPECT_THAT(Error({"jobs", "--timeout", "nan"}, kExitUsage), HasSubstr("no number of seconds"));
  EXPECT_THAT(Error({"digest"}, kExitUsage), HasSubstr("JOB is required"));
}

TEST_F(ClusterCommandTest, Coordinator_IsTakenFromTheEnvironment) {
  setenv("SHARDMESH_COORDINATOR", cluster_->address().c_str(), 1);
  EXPECT_THAT(RunShardctl({"jobs"}).out, HasSubstr("tiny"));
  setenv("SHARDMESH_COORDINATOR", "127.0.0.1:1", 1);
  const CommandResult result = RunShardctl({"jobs", "--timeout", "2"});
  EXPECT_EQ(result.code, kExitError);
  EXPECT_THAT(result.err, AllOf(HasSubstr("127.0.0.1:1"), ContainsRegex("^[^\n]*\n$")));
  unsetenv("SHARDMESH_COORDINATOR");
}

TEST_F(ClusterCommandTest, Delete) {
  ASSERT_OK(Train(cluster_->address(), TinyJob("gone")));
  EXPECT_EQ(Out({"delete", "gone"}), "deleted gone\n");
  EXPECT_THAT(Error({"jobs", "gone"}), HasSubstr("NOT_FOUND"));
}

TEST_F(ClusterCommandTest, ExportAndImport) {
  const std::string folder = ::testing::TempDir() + "/exported", again = ::testing::TempDir() + "/exported-again";
  const Json exported = RunJson({"export", "tiny", folder, "--exact", "2"});
  EXPECT_EQ(exported["step"], 2);
  EXPECT_THAT(Error({"export", "tiny", folder}), HasSubstr("is there already"));
  EXPECT_THAT(Error({"export", "tiny", again, "--dtype", "I8"}), HasSubstr("F32, BF16 or F16 is needed"));
  EXPECT_THAT(Error({"export", "none", again}), HasSubstr("none"));
  const Json imported = RunJson({"import", folder, "--name", "tiny-again", "--mesh", "fsdp=1"});
  EXPECT_EQ(imported["mesh"], "fsdp=1");
  EXPECT_EQ(imported["parameters"], exported["tensors"]);
  EXPECT_THAT(Error({"import", folder, "--name", "tiny-again"}), HasSubstr("there is a job tiny-again"));
  EXPECT_THAT(Error({"import", folder + "/none", "--name", "x"}), HasSubstr("none"));
  EXPECT_THAT(Error({"import", folder, "--name", "x", "--tie", "a"}), HasSubstr("NAME=OWNER"));
  EXPECT_THAT(Error({"import", folder, "--name", "x", "--mesh", "fsdp=0"}), HasSubstr("fsdp"));
  EXPECT_THAT(Error({"jobs", "x"}), HasSubstr("x"));
  Out({"export", "tiny-again", again, "--like", folder, "--file-gigabytes", "0.00000001"});
  EXPECT_NE(Contents(again + "/model.safetensors.index.json"), "");
  EXPECT_THAT(Error({"export", "tiny", again + "-2", "--like", folder, "--every-name"}, kExitUsage),
              HasSubstr("--like"));
  const Json third = RunJson({"import", again, "--name", "tiny-third", "--mesh", "fsdp=2"});
  EXPECT_EQ(third["elements"], imported["elements"]);
  Out({"export", "tiny-third", again + "-3"});
  EXPECT_EQ(Contents(again + "-3/model.safetensors"), Contents(folder + "/model.safetensors"));
  Out({"delete", "tiny-again"});
  Out({"delete", "tiny-third"});
}

TEST_F(ClusterCommandTest, Reshard) {
  ASSERT_OK(Train(cluster_->address(), TinyJob("moving")));
  const Json before = RunJson({"digest", "moving"});
  const Json moved = RunJson({"reshard", "moving", "--mesh", "fsdp=1"});
  EXPECT_EQ(moved["mesh"], "fsdp=1");
  EXPECT_EQ(moved["workers"], 1);
  EXPECT_GT(moved["epoch"], 1);
  EXPECT_EQ(RunJson({"digest", "moving"}), before);
  EXPECT_THAT(Out({"reshard", "moving", "--mesh", "ddp=2"}), HasSubstr("is on mesh ddp=2, 2 workers, epoch "));
  EXPECT_EQ(RunJson({"digest", "moving"}), before);
  EXPECT_THAT(Error({"reshard", "moving", "--mesh", "fsdp=5"}), HasSubstr("needs 5 workers of its host"));
  EXPECT_THAT(Error({"reshard", "moving", "--mesh", "fsdp"}), HasSubstr("fsdp"));
  EXPECT_THAT(Error({"reshard", "none", "--mesh", "fsdp=1"}), HasSubstr("no job none"));
  EXPECT_EQ(Error({"reshard", "moving"}, kExitUsage).empty(), false);
  Out({"delete", "moving"});
}

TEST_F(ClusterCommandTest, Checkpoints_OnASchedule) {
  EXPECT_THAT(Error({"checkpoint", "tiny", "root", "--count", "2"}, kExitUsage), HasSubstr("--every"));
  ASSERT_OK_AND_ASSIGN(const std::shared_ptr<Job> job, Train(cluster_->address(), TinyJob("saved")));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Session> session, job->Connect({Slot(0)}));
  ASSERT_OK(session->AwaitWeights(absl::Seconds(30)));
  const std::string root = ::testing::TempDir() + "/scheduled";
  CommandResult result;
  std::atomic<bool> done{false};
  ::testing::internal::CaptureStdout();
  std::thread saver([&] {
    result = Run({"checkpoint", "saved", root, "--every", "2", "--count", "3", "--keep-last", "2", "--json"});
    done.store(true);
  });
  while (!done.load() && session->Step().ok()) continue;
  saver.join();
  EXPECT_EQ(result.code, kExitOk) << result.err;
  std::istringstream lines(::testing::internal::GetCapturedStdout());
  std::vector<int64_t> steps;
  for (std::string line; std::getline(lines, line);) steps.push_back(Json::parse(line)["step"]);
  ASSERT_EQ(steps.size(), 3u);
  const Json left = Json::parse(RunShardctl({"checkpoints", root, "--json"}).out)["checkpoints"];
  ASSERT_EQ(left.size(), 2u);
  EXPECT_EQ(left[1]["step"], steps[2]);
}

TEST_F(ClusterCommandTest, OriginalNames_ComeBack) {
  JobSpec spec = TinyJob("wrapped");
  for (ParameterSpec& p : spec.parameters) p.name = "_orig_mod." + p.name;
  spec.parameters[1].tied_to = spec.parameters[0].name;
  ASSERT_OK(Train(cluster_->address(), spec));
  const std::string folder = ::testing::TempDir() + "/original", root = ::testing::TempDir() + "/original-root";
  RunJson({"checkpoint", "wrapped", root});
  Out({"delete", "wrapped"});
  RunJson({"restore", root, "--mesh", "fsdp=1"});
  const std::string first = spec.parameters[0].name, canonical = first.substr(strlen("_orig_mod."));
  const Json names = RunJson({"names", "job", "wrapped"});
  EXPECT_EQ(names["names"][0], Json({{"canonical", canonical}, {"original", first}, {"tied_to", ""}}));
  RunJson({"export", "wrapped", folder, "--original-names"});
  EXPECT_THAT(Contents(folder + "/model.safetensors"), HasSubstr("\"" + first + "\""));
  RunJson({"export", "wrapped", folder + "-2"});
  EXPECT_THAT(Contents(folder + "-2/model.safetensors"), HasSubstr("\"" + canonical + "\""));
}

}  // namespace
}  // namespace shardmesh
