#include "checkpoint/buffers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/model_files.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"
#include "local/testing/temp_folder.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

JobSpec Spec() {
  JobSpec spec;
  spec.name = "job";
  spec.mesh = *ParseMeshSpec("fsdp=1");
  spec.parameters = {{"bn.weight", {3}}, {"rows", {2, 4}, WeightFormat::kInt8Row}};
  return spec;
}

BufferValue Value(const std::string& name, const std::string& dtype, std::vector<int64_t> shape, std::string bytes) {
  return {*MakeSafetensorsEntry(name, dtype, std::move(shape)), std::move(bytes)};
}

std::vector<BufferValue> Values() {
  return {Value("bn.running_mean", "F32", {3}, "twelve bytes"), Value("bn.num_batches_tracked", "I64", {}, "8 bytes!"),
          Value("mask", "BOOL", {3}, std::string("\1\0\1", 3)), Value("none", "F64", {0, 2}, ""),
          Value("rows.scales", "C64", {1}, "complex.")};
}

class BuffersTest : public ::testing::Test {
 protected:
  absl::StatusOr<OpenedCheckpoint> Save(const std::vector<BufferValue>& values) {
    Manifest manifest;
    manifest.spec = Spec();
    auto described = DescribeBuffers(values);
    if (!described.ok()) return described.status();
    manifest.buffers = *described;
    auto files = StoredFiles::Create(manifest.spec, manifest.buffer_entries());
    if (!files.ok()) return files.status();
    auto checkpoint = NewCheckpoint::Begin(temp_.File("root"));
    for (const StoredFile& file : files->files()) {
      EXPECT_OK((*checkpoint)->AddFile(file.name, file.head, file.bytes));
      manifest.files.push_back({file.name, file.bytes});
    }
    EXPECT_OK(WriteBuffers(*files, values, **checkpoint));
    EXPECT_OK((*checkpoint)->Finish(manifest));
    return OpenCheckpoint(temp_.File("root"));
  }

  testing::TempFolder temp_;
};

TEST_F(BuffersTest, TheyComeBack_AndAnyLoaderReadsThem) {
  ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint opened, Save(Values()));
  ASSERT_OK_AND_ASSIGN(const std::vector<BufferValue> read, ReadBuffers(opened));
  const std::vector<BufferValue> values = Values();
  ASSERT_OK_AND_ASSIGN(const ModelFiles model, ModelFiles::Open(opened.path));
  ASSERT_EQ(read.size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(read[i].bytes, values[i].bytes);
    const ModelTensor* const tensor = model.Find(values[i].entry.name);
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->dtype, values[i].entry.dtype);
    EXPECT_EQ(tensor->shape, values[i].entry.shape);
    ASSERT_OK_AND_ASSIGN(const std::string bytes, model.Read(*tensor));
    EXPECT_EQ(bytes, values[i].bytes);
  }
  EXPECT_NE(model.Find("rows.scales_"), nullptr);  // of the weights, beside a buffer of that name
}

TEST_F(BuffersTest, OneThatChanged_IsNamed) {
  ASSERT_OK_AND_ASSIGN(const OpenedCheckpoint opened, Save(Values()));
  const std::filesystem::path file = opened.path + "/model.safetensors";
  std::fstream(file, std::ios::binary | std::ios::in | std::ios::out)
      .seekp(static_cast<std::streamoff>(std::filesystem::file_size(file)) - 1)
      .put('!');
  EXPECT_THAT(ReadBuffers(opened), StatusIs(Code::kDataLoss, HasSubstr("buffer \"rows.scales\" is not what was saved")));
}

TEST_F(BuffersTest, WhatCannotBe_IsRefused) {
  EXPECT_THAT(Save({Value("bn.weight", "F32", {3}, "twelve bytes")}),
              StatusIs(Code::kInvalidArgument, HasSubstr("two tensors of the model are named \"bn.weight\"")));
  EXPECT_THAT(Save({Value("a", "F32", {3}, "short")}), StatusIs(Code::kInvalidArgument, HasSubstr("has 5 bytes")));
  EXPECT_THAT(MakeSafetensorsEntry("a", "C128", {3}), StatusIs(Code::kInvalidArgument, HasSubstr("\"C128\"")));
  EXPECT_THAT(MakeSafetensorsEntry("a", "F32", {-3}), StatusIs(Code::kInvalidArgument, HasSubstr("-3")));
  EXPECT_THAT(MakeSafetensorsEntry("", "F32", {3}), StatusIs(Code::kInvalidArgument, HasSubstr("empty")));
}

}  // namespace
}  // namespace shardmesh
