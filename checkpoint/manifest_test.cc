#include "checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "core/base/digest.h"
#include "core/base/matchers.h"
#include "core/mesh/mesh_spec.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Code = absl::StatusCode;
using Json = nlohmann::ordered_json;

Manifest Some() {
  Manifest manifest;
  manifest.spec.name = "job";
  manifest.spec.mesh = *ParseMeshSpec("ddp=2,fsdp=2");
  manifest.spec.parameters = {{"w", {3, 5}, WeightFormat::kBf16Sr, "", StateFormat::kDyn8}, {"b \"\xc3\xa4\" {[", {7}}};
  manifest.step = 1200;
  manifest.digest = 0x0123456789abcdef;
  manifest.files = {{"model.safetensors", 12}, {"states.safetensors", 0}};
  return manifest;
}

// A text with the right checksum, whatever it says.
std::string Edited(const std::function<void(Json&)>& edit) {
  Json json = Json::parse(ManifestText(Some()));
  edit(json);
  json.erase("checksum");
  Hasher hasher;
  hasher.Add(json.dump());
  json["checksum"] = hasher.Hex();
  return json.dump(1) + "\n";
}

TEST(ManifestTest, Text_SaysItAll) {
  const Manifest manifest = Some();
  ASSERT_OK_AND_ASSIGN(const Manifest read, ParseManifest(ManifestText(manifest)));
  EXPECT_EQ(Difference(manifest.spec, read.spec), "");
  EXPECT_EQ(read.spec.mesh.ToString(), "ddp=2,fsdp=2");
  EXPECT_EQ(read.step, 1200);
  EXPECT_EQ(read.digest, 0x0123456789abcdefu);
  ASSERT_EQ(read.files.size(), 2u);
  EXPECT_EQ(read.files[0].name, "model.safetensors");
  EXPECT_EQ(read.files[0].bytes, 12);
  EXPECT_EQ(ManifestText(read), ManifestText(manifest));
}

TEST(ManifestTest, TheCountOfSaves_IsReadFromItsHead) {
  Manifest manifest = Some();
  const auto head = [&] { return ManifestText(manifest).substr(0, kManifestHead); };
  EXPECT_THAT(ManifestText(manifest), Not(HasSubstr("saved")));  // as older builds wrote it
  EXPECT_EQ(SavedAt(head()), 0);
  manifest.saved = 17;
  EXPECT_EQ(SavedAt(head()), 17);
  ASSERT_OK_AND_ASSIGN(const Manifest read, ParseManifest(ManifestText(manifest)));
  EXPECT_EQ(read.saved, 17);
  manifest.step = manifest.saved = kMaxStep;
  EXPECT_EQ(SavedAt(head()), kMaxStep);
  for (const char* other : {"", "{", "{\n \"format\": \"shardmesh checkpoint\",\n \"version\": 2,\n \"step\": 1,"}) {
    EXPECT_EQ(SavedAt(other), std::nullopt) << other;
  }
}

TEST(ManifestTest, OriginalNames_AreThere_AndMayBeAbsent) {
  Manifest manifest = Some();
  EXPECT_THAT(ManifestText(manifest), Not(HasSubstr("given")));  // as older builds wrote it
  manifest.spec.parameters[0].given = "_orig_mod.w";
  ASSERT_OK_AND_ASSIGN(const Manifest read, ParseManifest(ManifestText(manifest)));
  EXPECT_EQ(read.spec.parameters[0].given, "_orig_mod.w");
  EXPECT_EQ(read.spec.parameters[1].given, "");
}

TEST(ManifestTest, EveryCutAndEveryChangedByte_IsFound) {
  const std::string text = ManifestText(Some());
  for (size_t i = 0; i < text.size(); ++i) {
    EXPECT_FALSE(ParseManifest(text.substr(0, i)).ok()) << i;
    std::string changed = text;
    changed[i] = changed[i] == '7' ? '8' : '7';
    EXPECT_FALSE(ParseManifest(changed).ok()) << i << " " << changed;
  }
}

TEST(ManifestTest, WhatCannotBe_IsRefused) {
  const auto refused = [](Code code, const char* words, const std::function<void(Json&)>& edit) {
    EXPECT_THAT(ParseManifest(Edited(edit)), StatusIs(code, HasSubstr(words)));
  };
  refused(Code::kInvalidArgument, "no manifest", [](Json& j) { j["format"] = "other"; });
  refused(Code::kInvalidArgument, "no manifest", [](Json& j) { j.erase("format"); });
  refused(Code::kInvalidArgument, "version 2; this build of shardmesh reads version 1",
          [](Json& j) { j["version"] = 2; });
  refused(Code::kDataLoss, "without a step", [](Json& j) { j["step"] = -1; });
  refused(Code::kDataLoss, "without a step", [](Json& j) { j["step"] = kMaxStep + 1; });
  refused(Code::kDataLoss, "without a step", [](Json& j) { j["step"] = "1"; });
  refused(Code::kDataLoss, "16 hexadecimal digits", [](Json& j) { j["digest"] = "xyz"; });
  refused(Code::kDataLoss, "without a job", [](Json& j) { j.erase("job"); });
  refused(Code::kInvalidArgument, "not one that this build knows", [](Json& j) { j["job"]["from_the_future"] = 1; });
  refused(Code::kInvalidArgument, "the manifest's job", [](Json& j) { j["job"]["num_slots"] = 1000000; });
  refused(Code::kDataLoss, "without a list of files", [](Json& j) { j["files"] = 3; });
  refused(Code::kDataLoss, "has no name", [](Json& j) { j["files"].push_back(1); });
  for (const char* name : {"", ".", "..", "../x", "/etc/passwd", "a/b", "a\nb", ".hidden", "model.safetensors"}) {
    refused(Code::kDataLoss, "which it cannot have, or has twice", [&](Json& j) {
      j["files"].push_back({{"name", name}, {"bytes", 1}});
    });
  }
  refused(Code::kDataLoss, "of -1 bytes", [](Json& j) { j["files"].push_back({{"name", "x"}, {"bytes", -1}}); });
}

// Readers differ in which of two they take.
TEST(ManifestTest, AKeyThatIsThereTwice_IsRefused) {
  const std::string text = ManifestText(Some());
  for (const char* before : {"\"step\": 1200", "\"name\": \"model.safetensors\"", "\"num_slots\": 1"}) {
    const std::string twice = absl::StrReplaceAll(text, {{before, absl::StrCat("\"step\": 7, ", before)}});
    const std::string same = absl::StrReplaceAll(text, {{before, absl::StrCat(before, ", ", before)}});
    if (twice == text) continue;
    EXPECT_THAT(ParseManifest(twice), StatusIs(Code::kDataLoss, HasSubstr("that was edited"))) << before;
    EXPECT_THAT(ParseManifest(same), StatusIs(Code::kDataLoss, HasSubstr("key twice"))) << before;
  }
  EXPECT_THAT(ParseManifest(text + " "), StatusIs(Code::kDataLoss, HasSubstr("set out in another way")));
}

TEST(ManifestTest, NumbersThatAreNone_AreRefused) {
  for (const Json& number : {Json(1e300), Json(1.5), Json(uint64_t{1} << 63), Json(~uint64_t{0}), Json(true), Json()}) {
    EXPECT_THAT(ParseManifest(Edited([&](Json& j) { j["step"] = number; })),
                StatusIs(Code::kDataLoss, HasSubstr("without a step")));
    EXPECT_THAT(ParseManifest(Edited([&](Json& j) { j["files"][0]["bytes"] = number; })),
                StatusIs(Code::kDataLoss, HasSubstr("with a file")));
  }
}

TEST(ManifestTest, TextsThatAreNone_AreRefused) {
  const std::string deep(1 << 20, '[');
  for (const std::string& text : {std::string(), std::string("null"), std::string("[]"), std::string("{"), deep,
                                  std::string("{\"a\":") + deep, std::string("\xff\xfe")}) {
    EXPECT_FALSE(ParseManifest(text).ok());
  }
}

}  // namespace
}  // namespace shardmesh
