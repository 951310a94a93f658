#include "checkpoint/stored_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ParameterSpec Parameter(const std::string& name, std::vector<int64_t> shape, WeightFormat format, StateFormat states) {
  ParameterSpec parameter;
  parameter.name = name;
  parameter.shape = std::move(shape);
  parameter.format = format;
  parameter.states = states;
  return parameter;
}

JobSpec EveryFormat() {
  JobSpec spec;
  spec.name = "job";
  spec.mesh = *ParseMeshSpec("fsdp=2");
  spec.parameters = {Parameter("a", {3, 5}, WeightFormat::kFp32, StateFormat::kFp32),
                     Parameter("b", {300}, WeightFormat::kBf16Plus16, StateFormat::kDyn8),
                     Parameter("c", {7, 129}, WeightFormat::kInt8Row, StateFormat::kDyn4),
                     Parameter("d", {}, WeightFormat::kBf16Plus8Sr, StateFormat::kFp8x32),
                     Parameter("e", {0, 4}, WeightFormat::kBf16, StateFormat::kBf16Sr),
                     Parameter("c.scales", {2}, WeightFormat::kBf16Sr, StateFormat::kFp8)};
  spec.parameters.push_back(spec.parameters[0]);
  spec.parameters.back().name = "tied";
  spec.parameters.back().tied_to = "a";
  return spec;
}

struct Entry {
  std::string file, dtype;
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;
};

// As any reader of the format finds them.
std::map<std::string, Entry> EntriesOf(const StoredFiles& stored) {
  std::map<std::string, Entry> entries;
  for (const StoredFile& file : stored.files()) {
    uint64_t length = 0;
    for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(file.head[i]);
    const auto header = nlohmann::json::parse(file.head.substr(8, length));
    for (const auto& [name, value] : header.items()) {
      if (name == "__metadata__") continue;
      const int64_t base = static_cast<int64_t>(8 + length);
      entries[absl::StrCat(file.name, ":", name)] = {file.name, value["dtype"], value["shape"],
                                                     base + value["data_offsets"][0].get<int64_t>(),
                                                     base + value["data_offsets"][1].get<int64_t>()};
    }
  }
  return entries;
}

TEST(StoredFilesTest, EveryFormat_HasItsParts) {
  ASSERT_OK_AND_ASSIGN(const StoredFiles stored, StoredFiles::Create(EveryFormat()));
  std::vector<std::string> found;
  for (const auto& [name, entry] : EntriesOf(stored)) {
    found.push_back(absl::StrCat(name, " ", entry.dtype, " ", entry.end - entry.begin));
  }
  EXPECT_THAT(
      found,
      ElementsAre("model.safetensors:a F32 60", "model.safetensors:b BF16 600", "model.safetensors:c I8 903",
                  "model.safetensors:c.scales BF16 4", "model.safetensors:c.scales_ F32 28",
                  "model.safetensors:d BF16 2", "model.safetensors:e BF16 0", "states.safetensors:a.exp_avg F32 60",
                  "states.safetensors:a.exp_avg_sq F32 60", "states.safetensors:b.exp_avg U8 300",
                  "states.safetensors:b.exp_avg.scales F32 8", "states.safetensors:b.exp_avg_sq U8 300",
                  "states.safetensors:b.exp_avg_sq.scales F32 8", "states.safetensors:b.remainder U16 600",
                  "states.safetensors:c.exp_avg U8 452", "states.safetensors:c.exp_avg.scales F32 32",
                  "states.safetensors:c.exp_avg_sq U8 452", "states.safetensors:c.exp_avg_sq.scales F32 32",
                  "states.safetensors:c.scales.exp_avg F8_E4M3 2", "states.safetensors:c.scales.exp_avg.scales F32 4",
                  "states.safetensors:c.scales.exp_avg_sq F8_E4M3 2",
                  "states.safetensors:c.scales.exp_avg_sq.scales F32 4", "states.safetensors:d.exp_avg U8 1",
                  "states.safetensors:d.exp_avg.scales BF16 2", "states.safetensors:d.exp_avg_sq U8 1",
                  "states.safetensors:d.exp_avg_sq.scales BF16 2", "states.safetensors:d.remainder U8 1",
                  "states.safetensors:e.exp_avg BF16 0", "states.safetensors:e.exp_avg_sq BF16 0"));
}

TEST(StoredFilesTest, Parts_LieWhereTheHeadersSay_AndFillTheFiles) {
  ASSERT_OK_AND_ASSIGN(const StoredFiles stored, StoredFiles::Create(EveryFormat()));
  const auto entries = EntriesOf(stored);
  ASSERT_EQ(entries.size(), stored.parts().size());
  std::map<std::string, int64_t> ends;
  for (const FilePart& part : stored.parts()) {
    const StoredFile& file = stored.files()[part.file];
    const Entry& entry = entries.at(absl::StrCat(file.name, ":", part.name));
    EXPECT_EQ(part.offset, entry.begin) << part.name;
    EXPECT_EQ(part.offset + part.bytes, entry.end) << part.name;
    EXPECT_EQ(stored.Find(part.tensor, part.stream, part.extra), &part);
    ends[file.name] = std::max(ends[file.name], entry.end);
  }
  for (const StoredFile& file : stored.files()) EXPECT_EQ(ends[file.name], file.bytes) << file.name;
}

TEST(StoredFilesTest, Nf4_LiesPackedWithAScaleForEach64) {
  JobSpec spec = EveryFormat();
  spec.parameters = {Parameter("base", {7, 129}, WeightFormat::kNf4, StateFormat::kFp32)};
  spec.parameters[0].frozen = true;
  ASSERT_OK_AND_ASSIGN(const StoredFiles stored, StoredFiles::Create(spec));
  std::vector<std::string> found;
  for (const auto& [name, entry] : EntriesOf(stored)) {
    found.push_back(absl::StrCat(name, " ", entry.dtype, " [", absl::StrJoin(entry.shape, ","), "]"));
  }
  EXPECT_THAT(found, ElementsAre("model.safetensors:base U8 [452]", "model.safetensors:base.scales F32 [15]"));
}

TEST(StoredFilesTest, Mesh_ChangesNothing) {
  JobSpec spec = EveryFormat();
  ASSERT_OK_AND_ASSIGN(const StoredFiles two, StoredFiles::Create(spec));
  spec.mesh = *ParseMeshSpec("ddp=2,fsdp=3");
  ASSERT_OK_AND_ASSIGN(const StoredFiles six, StoredFiles::Create(spec));
  ASSERT_EQ(two.files().size(), six.files().size());
  for (size_t i = 0; i < two.files().size(); ++i) EXPECT_EQ(two.files()[i].head, six.files()[i].head);
}

TEST(StoredFilesTest, LargeModels_AreCut_AndTheIndexSaysWhere) {
  ASSERT_OK_AND_ASSIGN(const StoredFiles stored, StoredFiles::Create(EveryFormat(), /*buffers=*/{}, 700));
  EXPECT_EQ(stored.files()[0].name, "model-00001-of-00003.safetensors");
  const auto index = nlohmann::json::parse(stored.index());
  EXPECT_EQ(index["metadata"]["total_size"], 60 + 600 + 903 + 28 + 2 + 4);
  const auto entries = EntriesOf(stored);
  for (const auto& [name, file] : index["weight_map"].items()) {
    EXPECT_EQ(entries.count(absl::StrCat(file.get<std::string>(), ":", name)), 1u) << name;
  }
  EXPECT_EQ(index["weight_map"].size(), 7u);
  ASSERT_OK_AND_ASSIGN(const StoredFiles one, StoredFiles::Create(EveryFormat()));
  EXPECT_EQ(one.index(), "");
}

TEST(StoredFilesTest, BadSpecification_IsRefused) {
  JobSpec spec = EveryFormat();
  spec.parameters[0].name = "__metadata__";
  EXPECT_THAT(StoredFiles::Create(spec), StatusIs(absl::StatusCode::kInvalidArgument, ::testing::_));
  spec = EveryFormat();
  spec.num_slots = 0;
  EXPECT_THAT(StoredFiles::Create(spec), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("slot")));
}

}  // namespace
}  // namespace shardmesh
