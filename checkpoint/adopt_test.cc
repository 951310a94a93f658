#include "checkpoint/adopt.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "checkpoint/folder.h"
#include "checkpoint/model_writer.h"
#include "core/base/matchers.h"
#include "core/format/stream_digest.h"
#include "core/job/stored_values.h"
#include "core/mesh/mesh_spec.h"
#include "local/testing/temp_folder.h"
#include "proto/convert.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Code = absl::StatusCode;

constexpr int64_t kStep = 12;

JobSpec EveryFormat() {
  JobSpec spec;
  spec.name = "job";
  spec.mesh = *ParseMeshSpec("fsdp=2");
  spec.parameters = {{"a", {3, 5}, WeightFormat::kFp32, "", StateFormat::kFp32},
                     {"b", {300}, WeightFormat::kBf16Plus16, "", StateFormat::kDyn8},
                     {"c", {7, 129}, WeightFormat::kInt8Row, "", StateFormat::kDyn4},
                     {"d", {}, WeightFormat::kBf16Plus8Sr, "", StateFormat::kFp8x32},
                     {"e", {0, 4}, WeightFormat::kBf16, "", StateFormat::kBf16Sr},
                     {"f", {1025}, WeightFormat::kBf16Sr, "", StateFormat::kFp8},
                     {"tied", {3, 5}, WeightFormat::kFp32, "a"}};
  return spec;
}

// Other bytes for each part, that a job may have.
std::string BytesOf(const FilePart& part) {
  std::string bytes(part.bytes, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(i * 31 + i / 251 + part.tensor * 7 + part.stream * 3 + (part.extra ? 1 : 0));
  }
  const StoredRule rule = RuleOf(EveryFormat(), part.tensor, part.stream, part.extra);
  while (const auto bad = FindBadEntry(rule, bytes.data(), part.bytes)) {
    bytes[(bad->index + 1) * rule.entry_bytes() - 1] = 16;  // small, and above 0
  }
  return bytes;
}

std::string TextOf(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

class Adopt : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(fs::create_directory(folder_)); }

  void PutJob(const JobSpec& spec, const std::string& step = absl::StrCat(kStep)) {
    std::string json;
    ASSERT_TRUE(google::protobuf::util::MessageToJsonString(ToProto(spec), &json).ok());
    Put("job.json", absl::StrCat("{\"step\": ", step, ", \"job\": ", json, "}"));
  }
  void Put(const std::string& name, const std::string& text) {
    std::ofstream(fs::path(folder_) / name, std::ios::binary) << text;
  }
  // The parts that are weights, or the others, last first, in files of `max_bytes`, but the one that is named.
  // `bad`: of that name in place of its own bytes.
  void PutParts(const StoredFiles& files, bool of_model, int64_t max_bytes, const std::string& without = "",
                const std::pair<std::string, std::string>& bad = {}) {
    std::vector<FilePart> parts;
    std::vector<SafetensorsEntry> entries;
    for (const FilePart& part : files.parts()) {
      const bool is_model = absl::string_view(files.files()[part.file].name).substr(0, 5) == "model";
      if (is_model == of_model && part.name != without) parts.insert(parts.begin(), part);
    }
    for (const FilePart& part : parts) entries.push_back({part.name, part.dtype, part.shape, part.bytes});
    const std::string to = of_model ? temp_.File("weights") : folder_ + "/states";
    fs::remove_all(to);
    ASSERT_OK(WriteModel(
        to, entries,
        [&](size_t i) -> absl::StatusOr<std::string> {
          return parts[i].name == bad.first ? bad.second : BytesOf(parts[i]);
        },
        {}, max_bytes));
    if (!of_model) return;
    for (const auto& file : fs::directory_iterator(to)) {
      fs::copy(file, folder_, fs::copy_options::overwrite_existing);
    }
  }
  void PutAll(const JobSpec& spec, int64_t max_bytes = kMaxFileBytes) {
    ASSERT_OK_AND_ASSIGN(const StoredFiles files, StoredFiles::Create(spec));
    PutJob(spec);
    PutParts(files, true, max_bytes);
    PutParts(files, false, max_bytes);
  }
  void ExpectNothingThere() { EXPECT_TRUE(!fs::exists(root_) || fs::is_empty(root_)) << "something of it is left"; }

  testing::TempFolder temp_;
  const std::string folder_ = temp_.File("given"), root_ = temp_.File("root");
};

TEST_F(Adopt, EveryFormat_InAnyOrderAndFiles_IsTheCheckpointOfThatJob) {
  const JobSpec spec = EveryFormat();
  for (const auto& [given_bytes, file_bytes] : std::vector<std::pair<int64_t, int64_t>>{
           {kMaxFileBytes, kMaxFileBytes}, {100, kMaxFileBytes}, {kMaxFileBytes, 1000}}) {
    SCOPED_TRACE(absl::StrCat(given_bytes, ", ", file_bytes));
    fs::remove_all(root_);
    ASSERT_NO_FATAL_FAILURE(PutAll(spec, given_bytes));
    ASSERT_OK_AND_ASSIGN(const AdoptedCheckpoint adopted, AdoptFiles(folder_, root_, file_bytes));
    ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint opened, OpenCheckpoint(root_));
    EXPECT_EQ(adopted.path, opened.path);
    EXPECT_EQ(opened.manifest.step, kStep);
    EXPECT_EQ(opened.manifest.spec.parameters.size(), spec.parameters.size());
    EXPECT_THAT(Difference(spec, opened.manifest.spec), IsEmpty());
    ASSERT_OK_AND_ASSIGN(const StoredFiles files, StoredFiles::Create(spec, /*buffers=*/{}, file_bytes));
    uint64_t digest = 0;
    for (const FilePart& part : files.parts()) {
      const std::string bytes = BytesOf(part), text = TextOf(fs::path(opened.path) / files.files()[part.file].name);
      EXPECT_TRUE(text.substr(part.offset, part.bytes) == bytes) << part.name;
      digest += DigestPart(DigestKey(part.tensor, part.stream, part.extra ? 1 : 0), part.layout, 0, bytes.data(),
                           spec.parameters[part.tensor].NumElements());
    }
    for (const StoredFile& file : files.files()) {
      const std::string text = TextOf(fs::path(opened.path) / file.name);
      EXPECT_EQ(text.size(), file.bytes);
      EXPECT_TRUE(text.substr(0, file.head.size()) == file.head) << file.name;
    }
    EXPECT_EQ(TextOf(fs::path(opened.path) / kIndexFile), files.index());
    EXPECT_EQ(opened.manifest.digest, digest);
    EXPECT_EQ(adopted.digest, digest);
  }
}

TEST_F(Adopt, AJobWithoutStates_NeedsNone) {
  JobSpec spec = EveryFormat();
  spec.optimizer = OptimizerHyper::Defaults(OptimizerKind::kSgd);
  spec.parameters = {spec.parameters[0]};
  ASSERT_OK_AND_ASSIGN(const StoredFiles files, StoredFiles::Create(spec));
  PutJob(spec);
  PutParts(files, true, kMaxFileBytes);
  ASSERT_OK_AND_ASSIGN(const AdoptedCheckpoint adopted, AdoptFiles(folder_, root_));
  EXPECT_FALSE(fs::exists(adopted.path + "/states.safetensors"));
}

TEST_F(Adopt, WhatDoesNotFit_IsNamed_AndNothingIsThere) {
  JobSpec spec = EveryFormat();
  ASSERT_OK_AND_ASSIGN(const StoredFiles files, StoredFiles::Create(spec));
  const auto refused = [&](Code code, const std::string& words) {
    EXPECT_THAT(AdoptFiles(folder_, root_), StatusIs(code, HasSubstr(words)));
    ExpectNothingThere();
  };
  refused(Code::kNotFound, "job.json");
  const std::string pipe = fs::path(folder_) / "job.json";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  refused(Code::kInvalidArgument, "is no regular file");  // and is not waited for
  ASSERT_TRUE(fs::remove(pipe));
  PutJob(spec);
  refused(Code::kNotFound, "model.safetensors");
  PutAll(spec);
  PutParts(files, false, kMaxFileBytes, "b.exp_avg.scales");
  refused(Code::kInvalidArgument, "no tensor \"b.exp_avg.scales\", F32 [2]");
  fs::remove_all(folder_ + "/states");
  refused(Code::kInvalidArgument, "the states have no tensor \"a.exp_avg\"");
  PutAll(spec);
  spec.parameters[0].shape = spec.parameters[6].shape = {5, 3};
  PutJob(spec);
  refused(Code::kInvalidArgument, "tensor \"a\" is F32 [3,5]; the job stores F32 [5,3]");
  spec = EveryFormat();
  spec.parameters[5].states = StateFormat::kDyn8;
  PutJob(spec);
  refused(Code::kInvalidArgument, "tensor \"f.exp_avg\" is F8_E4M3 [1025]; the job stores U8 [1025]");
  spec = EveryFormat();
  spec.parameters.erase(spec.parameters.begin() + 1);
  PutJob(spec);
  refused(Code::kInvalidArgument, "tensor \"b\" of the model is of no parameter");
  PutJob(EveryFormat(), "-1");
  refused(Code::kInvalidArgument, "step is no number");
  spec = EveryFormat();
  spec.parameters[1].name = "../../etc/passwd";
  PutJob(spec);
  refused(Code::kInvalidArgument, "../../etc/passwd");
  spec = EveryFormat();
  spec.num_slots = 0;
  PutJob(spec);
  refused(Code::kInvalidArgument, "slots");
  Put("job.json", "{\"step\": 1, \"job\": {\"nme\": \"x\"}}");
  refused(Code::kInvalidArgument, "nme");
  Put("job.json", "{\"step\": 1");
  refused(Code::kDataLoss, "no JSON object");
}

TEST_F(Adopt, ValuesThatNoJobMayHave_AreNamed_AndNothingIsThere) {
  const JobSpec spec = EveryFormat();
  ASSERT_OK_AND_ASSIGN(const StoredFiles files, StoredFiles::Create(spec));
  ASSERT_NO_FATAL_FAILURE(PutAll(spec));
  int checked = 0;
  for (const FilePart& part : files.parts()) {
    const StoredRule rule = RuleOf(spec, part.tensor, part.stream, part.extra);
    if (rule.entry == StoredRule::Entry::kAny || part.bytes == 0) continue;
    SCOPED_TRACE(part.name);
    std::string bytes = BytesOf(part);
    for (const char* value : {"nan", "-1"}) {  // as bits: of the last entry
      if (*value == '-' && rule.negative) continue;
      const std::string top = *value == '-' ? std::string("\0\0\x80\xbf", 4) : std::string("\0\0\xff\x7f", 4);
      const int64_t size = rule.entry_bytes();
      bytes.replace(bytes.size() - size, size, top.substr(4 - size));
      if (size == 1) bytes.back() = static_cast<char>(*value == '-' ? 0xb8 : 0x7f);
      const bool of_model = absl::string_view(files.files()[part.file].name).substr(0, 5) == "model";
      PutParts(files, of_model, kMaxFileBytes, "", {part.name, bytes});
      EXPECT_THAT(AdoptFiles(folder_, root_),
                  StatusIs(Code::kDataLoss, HasSubstr(absl::StrCat(part.name, ": entry ", part.bytes / size - 1, " is ",
                                                                   value, "; it must be finite"))));
      ExpectNothingThere();
      PutParts(files, of_model, kMaxFileBytes);
      ++checked;
    }
  }
  EXPECT_GT(checked, 20);
  EXPECT_OK(AdoptFiles(folder_, root_));
}

TEST_F(Adopt, AStepThatIsThere_StaysAsItIs) {
  ASSERT_NO_FATAL_FAILURE(PutAll(EveryFormat()));
  ASSERT_OK_AND_ASSIGN(const AdoptedCheckpoint adopted, AdoptFiles(folder_, root_));
  const std::string manifest = TextOf(adopted.path + "/manifest.json");
  ASSERT_OK_AND_ASSIGN(const AdoptedCheckpoint again, AdoptFiles(folder_, root_));  // the same bits
  EXPECT_EQ(again.path, adopted.path);
  EXPECT_EQ(TextOf(adopted.path + "/manifest.json"), manifest);
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), {}), 1);
}

}  // namespace
}  // namespace shardmesh
