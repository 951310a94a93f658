#include "checkpoint/model_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "checkpoint/model_writer.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;
namespace fs = std::filesystem;

std::string WithLength(const std::string& header, const std::string& data) {
  std::string length;
  for (int i = 0; i < 8; ++i) length.push_back(static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i)));
  return length + header + data;
}

class ModelFilesTest : public ::testing::Test {
 protected:
  ModelFilesTest() {
    std::string pattern = ::testing::TempDir() + "/model-XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~ModelFilesTest() override { fs::remove_all(folder_); }

  std::string Put(const std::string& name, const std::string& content) {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << content;
    return folder_ + "/" + name;
  }
  absl::Status OpenError() { return ModelFiles::Open(folder_).status(); }
  absl::Status HeaderError(const std::string& header, const std::string& data = "12345678") {
    Put("model.safetensors", WithLength(header, data));
    return OpenError();
  }

  std::string folder_;
};

const std::vector<SafetensorsEntry> kEntries = {{"b.w", "F32", {2, 2}, 16},
                                                {"a.w", "BF16", {3}, 6},
                                                {"none", "F32", {0, 5}, 0},
                                                {"scalar", "F16", {}, 2},
                                                {"ids", "I64", {1}, 8}};

absl::StatusOr<std::string> BytesOf(size_t i) {
  switch (i) {
    case 0:
      return FloatsAs("F32", {1, -2, 0.5f, 3e38f});
    case 1:
      return FloatsAs("BF16", {1, -2, 0.5f});
    case 3:
      return FloatsAs("F16", {0.25f});
    default:
      return std::string(kEntries[i].bytes, '\7');
  }
}

TEST_F(ModelFilesTest, WhatIsWritten_IsRead) {
  for (const int64_t max_bytes : {kMaxFileBytes, int64_t{20}, int64_t{1}}) {
    const std::string to = absl::StrCat(folder_, "/", max_bytes);
    ASSERT_OK(WriteModel(to, kEntries, BytesOf, {{"config.json", "{}"}}, max_bytes));
    EXPECT_TRUE(fs::exists(to + "/config.json"));
    EXPECT_EQ(fs::exists(to + "/model.safetensors.index.json"), max_bytes < 100);
    ASSERT_OK_AND_ASSIGN(const ModelFiles model, ModelFiles::Open(to));
    EXPECT_EQ(model.tensors().size(), kEntries.size());
    EXPECT_EQ(model.num_bytes(), 32);
    for (size_t i = 0; i < kEntries.size(); ++i) {
      const ModelTensor* const tensor = model.Find(kEntries[i].name);
      ASSERT_NE(tensor, nullptr);
      EXPECT_EQ(tensor->dtype, kEntries[i].dtype);
      EXPECT_EQ(tensor->shape, kEntries[i].shape);
      EXPECT_EQ(model.Read(*tensor).value(), BytesOf(i).value());
    }
    EXPECT_EQ(model.ReadFloats(*model.Find("b.w")).value(), (std::vector<float>{1, -2, 0.5f, 3e38f}));
    EXPECT_EQ(model.ReadFloats(*model.Find("a.w")).value(), (std::vector<float>{1, -2, 0.5f}));
    EXPECT_EQ(model.ReadFloats(*model.Find("scalar")).value(), std::vector<float>{0.25f});
    EXPECT_THAT(model.ReadFloats(*model.Find("ids")), StatusIs(Code::kInvalidArgument, HasSubstr("I64")));
    EXPECT_EQ(model.Find("c.w"), nullptr);
  }
}

TEST_F(ModelFilesTest, Write_LeavesNothingOfAFailure) {
  const std::string to = folder_ + "/new";
  const auto fails = [](size_t i) -> absl::StatusOr<std::string> {
    if (i == 3) return absl::UnavailableError("gone");
    return BytesOf(i);
  };
  EXPECT_THAT(WriteModel(to, kEntries, fails), StatusIs(Code::kUnavailable, HasSubstr("gone")));
  EXPECT_THAT(WriteModel(to, kEntries, [](size_t) { return std::string("x"); }),
              StatusIs(Code::kInvalidArgument, HasSubstr("\"b.w\" has 1 bytes, not 16")));
  EXPECT_THAT(WriteModel(to, kEntries, BytesOf, {{"../config.json", ""}}),
              StatusIs(Code::kInvalidArgument, HasSubstr("../config.json")));
  EXPECT_TRUE(fs::is_empty(folder_));
  ASSERT_OK(WriteModel(to, kEntries, BytesOf));
  EXPECT_THAT(WriteModel(to, kEntries, BytesOf), StatusIs(Code::kAlreadyExists, HasSubstr("/new")));
  EXPECT_THAT(WriteModel(folder_ + "/no/new", kEntries, BytesOf), StatusIs(Code::kNotFound, HasSubstr("/no/")));
}

TEST_F(ModelFilesTest, WhereNothingIs) {
  EXPECT_THAT(OpenError(), StatusIs(Code::kNotFound, HasSubstr("neither model.safetensors nor")));
  EXPECT_THAT(ModelFiles::Open(folder_ + "/x.safetensors").status(),
              StatusIs(Code::kNotFound, HasSubstr("x.safetensors")));
  ASSERT_EQ(mkfifo((folder_ + "/model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(OpenError(), StatusIs(Code::kInvalidArgument, HasSubstr("no regular file")));
}

TEST_F(ModelFilesTest, Links_AreFollowed) {
  ASSERT_OK(WriteModel(folder_ + "/blob", kEntries, BytesOf));
  fs::create_directory(folder_ + "/snapshot");
  fs::create_symlink("../blob/model.safetensors", folder_ + "/snapshot/model.safetensors");
  EXPECT_OK(ModelFiles::Open(folder_ + "/snapshot").status());
}

TEST_F(ModelFilesTest, DamagedHeaders) {
  const std::pair<const char*, const char*> cases[] = {
      {"[]", "no JSON object"},
      {R"({"a":)", "no JSON object"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
       "\"a\" twice"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"shape":[2]}})", "\"shape\" twice"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,99]}})", "lies at [0,99]; the file has 8"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "lies at [8,0]"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", "lies at [-8,0]"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]}})", "lies at"},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", "has 8 bytes; its shape and dtype take 12"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})", "too large for any file"},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}})", "something else than sizes"},
      {R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,8]}})", "something else than sizes"},
      {R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", "has no shape"},
      {R"({"a":{"dtype":7,"shape":[2],"data_offsets":[0,8]}})", "has no dtype"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", "has no data_offsets"},
      {R"({"a":7})", "something else than an object"},
      {R"({"__metadata__":7})", "__metadata__ is no object"},
      {R"({"__metadata__":{"a":7}})", "something else than text"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "end at 4, the file at 8"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "begins at 4, where the one before it ends at 0"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "begins at 4, where the one before it ends at 8"},
  };
  for (const auto& [header, what] : cases) {
    const absl::Status status = HeaderError(header);
    EXPECT_THAT(status, StatusIs(Code::kDataLoss, HasSubstr(what))) << header;
    EXPECT_THAT(status, StatusIs(Code::kDataLoss, HasSubstr("model.safetensors"))) << header;
  }
  EXPECT_THAT(HeaderError(R"({"a":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}})"),
              StatusIs(Code::kInvalidArgument, HasSubstr("\"F4\"")));
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  EXPECT_OK(HeaderError(good));
  EXPECT_OK(HeaderError(good + "   "));
  EXPECT_THAT(HeaderError("\xEF\xBB\xBF" + good), StatusIs(Code::kDataLoss, HasSubstr("byte order mark")));
  EXPECT_THAT(HeaderError(" " + good), StatusIs(Code::kDataLoss, HasSubstr("does not begin with {")));
  EXPECT_THAT(HeaderError(std::string(1000, '[')), StatusIs(Code::kDataLoss, HasSubstr("brackets")));
}

TEST_F(ModelFilesTest, FilesOfOtherKinds_AreNamed) {
  const std::string rest(1000, 'x');
  for (const auto& [bytes, what] :
       std::vector<std::pair<std::string, const char*>>{{std::string("PK\x03\x04\x00\x00\x08\x08", 8), "a zip archive"},
                                                        {std::string("\x80\x02\x8a\x0al\xfc\x9c\x46", 8), "a pickle"},
                                                        {std::string("\x93NUMPY\x01\x00", 8), "an array of numpy"}}) {
    Put("model.safetensors", bytes + rest);
    EXPECT_THAT(ModelFiles::Open(folder_),
                StatusIs(Code::kInvalidArgument, AllOf(HasSubstr(what), HasSubstr("pickle-based files"))));
  }
}

TEST_F(ModelFilesTest, CutFiles) {
  ASSERT_OK(WriteModel(folder_ + "/m", kEntries, BytesOf));
  const std::string path = folder_ + "/m/model.safetensors";
  const auto size = static_cast<int64_t>(fs::file_size(path));
  for (int64_t bytes = size - 1; bytes >= 0; bytes -= 7) {
    fs::resize_file(path, bytes);
    EXPECT_THAT(ModelFiles::Open(folder_ + "/m").status(), StatusIs(Code::kDataLoss, HasSubstr("/m/model.safetensors")))
        << bytes;
  }
  Put("model.safetensors", std::string(8, '\xff'));
  EXPECT_THAT(OpenError(), StatusIs(Code::kDataLoss, HasSubstr("18446744073709551615 bytes")));
}

TEST_F(ModelFilesTest, AFileThatIsCutLater_IsAnError) {
  ASSERT_OK(WriteModel(folder_ + "/m", kEntries, BytesOf));
  ASSERT_OK_AND_ASSIGN(const ModelFiles model, ModelFiles::Open(folder_ + "/m"));
  fs::resize_file(folder_ + "/m/model.safetensors", 100);
  EXPECT_THAT(model.Read(*model.Find("b.w")), StatusIs(Code::kDataLoss, HasSubstr("was longer")));
}

TEST_F(ModelFilesTest, DamagedIndexes) {
  const std::string tensor = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  Put("one.safetensors", WithLength(tensor, "12345678"));
  Put("two.safetensors", WithLength(tensor, "12345678"));
  const auto error = [&](const std::string& index) {
    Put("model.safetensors.index.json", index);
    return OpenError();
  };
  EXPECT_OK(error(R"({"weight_map":{"a":"one.safetensors"}})"));
  EXPECT_THAT(error(R"({"weight_map":{"a":"../one.safetensors"}})"),
              StatusIs(Code::kInvalidArgument, HasSubstr("\"../one.safetensors\"")));
  EXPECT_THAT(error(R"({"weight_map":{"a":"/etc/passwd"}})"),
              StatusIs(Code::kInvalidArgument, HasSubstr("/etc/passwd")));
  EXPECT_THAT(error(R"({"weight_map":{"a":7}})"), StatusIs(Code::kInvalidArgument, HasSubstr("beside the index")));
  EXPECT_THAT(error(R"({"weight_map":{"a":"none.safetensors"}})"),
              StatusIs(Code::kNotFound, HasSubstr("none.safetensors")));
  EXPECT_THAT(error(R"({"weight_map":{"a":"one.safetensors","b":"one.safetensors"}})"),
              StatusIs(Code::kDataLoss, HasSubstr("no tensor \"b\"")));
  EXPECT_THAT(error(R"({"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})"),
              StatusIs(Code::kDataLoss, HasSubstr("no tensor \"b\"")));
  EXPECT_THAT(error(R"({"weight_map":{"a":"one.safetensors","a":"two.safetensors"}})"),
              StatusIs(Code::kDataLoss, HasSubstr("\"a\" twice")));
  EXPECT_THAT(error(R"({"weight_map":[]})"), StatusIs(Code::kDataLoss, HasSubstr("no weight_map")));
  EXPECT_THAT(error("{"), StatusIs(Code::kDataLoss, HasSubstr("index.json: it is no JSON object")));
}

}  // namespace
}  // namespace shardmesh
