// Checkpoints that somebody damaged, edited or mixed up, and disks that are full: a typed error that says what is
// wrong, and no job, or no checkpoint, by halves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "checkpoint/manifest.h"
#include "checkpoint/stored_files.h"
#include "client/cpp/checkpoint/checkpoint.h"
#include "core/base/matchers.h"
#include "core/base/status.h"
#include "core/format/stream_digest.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/cluster.h"
#include "tests/testing/system/small_disk.h"
#include "tests/testing/training/training.h"

namespace shardmesh {
namespace {

namespace fs = std::filesystem;
using ::shardmesh::testing::Cluster;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr absl::Duration kLong = absl::Seconds(60);
constexpr char kModel[] = "model.safetensors", kStates[] = "states.safetensors", kManifest[] = "manifest.json";

JobSpec Spec(const std::string& name) {
  JobSpec spec = testing::TinyJob(name, "fsdp=2", 2);
  spec.parameters.push_back({"twin.a", {8, 8}});
  spec.parameters.push_back({"twin.b", {8, 8}});
  spec.parameters.push_back({"rows", {50, 300}, WeightFormat::kInt8Row, "", StateFormat::kDyn4});
  return spec;
}

std::string Read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void Write(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

// All of them; a test of a text that is not there would test nothing.
void Replace(const fs::path& path, const std::string& from, const std::string& to) {
  const std::string text = Read(path);
  ASSERT_THAT(text, HasSubstr(from));
  Write(path, absl::StrReplaceAll(text, {{from, to}}));
}

void Flip(const fs::path& path, size_t at) {
  std::string bytes = Read(path);
  bytes.at(at) ^= 16;
  Write(path, bytes);
}

// With the right checksum.
void EditManifest(const fs::path& folder, const std::function<void(Manifest&)>& edit) {
  ASSERT_OK_AND_ASSIGN(Manifest manifest, ParseManifest(Read(folder / kManifest)));
  edit(manifest);
  Write(folder / kManifest, ManifestText(manifest));
}

const FilePart& PartOf(const StoredFiles& files, const std::string& name) {
  for (const FilePart& part : files.parts()) {
    if (part.name == name) return part;
  }
  ADD_FAILURE() << name;
  return files.parts()[0];
}

// In place of a tensor's first bytes.
void WriteInto(const fs::path& folder, const std::string& name, const std::string& bytes) {
  ASSERT_OK_AND_ASSIGN(const StoredFiles files, StoredFiles::Create(Spec("job")));
  const FilePart& part = PartOf(files, name);
  std::fstream file(folder / files.files()[part.file].name, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(part.offset);
  file << bytes;
}

std::string BytesOf(const fs::path& folder, const std::string& name) {
  const StoredFiles files = *StoredFiles::Create(Spec("job"));
  const FilePart& part = PartOf(files, name);
  return Read(folder / files.files()[part.file].name).substr(part.offset, part.bytes);
}

struct Damage {
  const char* name;
  std::function<void(const fs::path& folder, const fs::path& other)> harm;  // other: a like job's checkpoint
  Code code;
  const char* words;
};

std::vector<Damage> DamageOfFiles() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::string not_a_number(reinterpret_cast<const char*>(&nan), sizeof nan);
  return {
      {"Shorter", [](auto& f, auto&) { fs::resize_file(f / kModel, fs::file_size(f / kModel) - 1); }, Code::kDataLoss,
       "it was saved with"},
      {"Longer", [](auto& f, auto&) { fs::resize_file(f / kStates, fs::file_size(f / kStates) + 1); }, Code::kDataLoss,
       "it was saved with"},
      {"Empty", [](auto& f, auto&) { fs::resize_file(f / kModel, 0); }, Code::kDataLoss, "has 0 bytes"},
      {"Missing", [](auto& f, auto&) { fs::remove(f / kStates); }, Code::kDataLoss, "is missing"},
      {"FirstByteOfData", [](auto& f, auto&) { WriteInto(f, "w", "\x7f"); }, Code::kDataLoss, "a file changed since"},
      {"LastByte", [](auto& f, auto&) { Flip(f / kStates, fs::file_size(f / kStates) - 1); }, Code::kDataLoss,
       "a file changed since"},
      {"NanInScalesOfWeights", [=](auto& f, auto&) { WriteInto(f, "rows.scales", not_a_number); }, Code::kDataLoss,
       "a file changed since"},
      {"NanInScalesOfStates", [=](auto& f, auto&) { WriteInto(f, "rows.exp_avg.scales", not_a_number); },
       Code::kDataLoss, "a file changed since"},
      {"TensorsSwapped",
       [](auto& f, auto&) {
         const std::string a = BytesOf(f, "twin.a"), b = BytesOf(f, "twin.b");
         WriteInto(f, "twin.a", b);
         WriteInto(f, "twin.b", a);
       },
       Code::kDataLoss, "a file changed since"},
      {"FilesSwapped",
       [](auto& f, auto&) {
         fs::rename(f / kModel, f / "x");
         fs::rename(f / kStates, f / kModel);
         fs::rename(f / "x", f / kStates);
       },
       Code::kDataLoss, "it was saved with"},
      {"ModelOfAnotherJob",
       [](auto& f, auto& o) { fs::copy_file(o / kModel, f / kModel, fs::copy_options::overwrite_existing); },
       Code::kDataLoss, "a file changed since"},
      {"ManifestOfAnotherJob",
       [](auto& f, auto& o) { fs::copy_file(o / kManifest, f / kManifest, fs::copy_options::overwrite_existing); },
       Code::kDataLoss, "a file changed since"},
      {"Link",
       [](auto& f, auto&) {
         fs::rename(f / kModel, f / "x");
         fs::create_symlink("x", f / kModel);
       },
       Code::kDataLoss, "is no regular file"},
      {"Folder",
       [](auto& f, auto&) {
         fs::remove(f / kModel);
         fs::create_directory(f / kModel);
       },
       Code::kDataLoss, "is no regular file"},
  };
}

std::vector<Damage> DamageOfHeaders() {
  const auto starts = [](const std::string& length) {
    return [=](const fs::path& f, const fs::path&) {
      const std::string bytes = Read(f / kModel);
      Write(f / kModel, length + bytes.substr(8));
    };
  };
  const auto replaces = [](const std::string& from, const std::string& to) {
    return [=](const fs::path& f, const fs::path&) { Replace(f / kModel, from, to); };
  };
  const Code code = Code::kFailedPrecondition;
  const char* const words = "does not begin as this job's file";
  return {
      {"HugeHeader", starts(std::string(8, '\xff')), code, words},
      {"NoHeader", starts(std::string(8, '\0')), code, words},
      {"NamesSwapped",
       [](auto& f, auto&) {
         Replace(f / kModel, "twin.a", "twin.x");
         Replace(f / kModel, "twin.b", "twin.a");
         Replace(f / kModel, "twin.x", "twin.b");
       },
       code, words},
      {"NameTwice", replaces("twin.b", "twin.a"), code, words},
      {"WrongType", replaces(R"("dtype":"I8")", R"("dtype":"U8")"), code, words},
      {"WrongShape", replaces("[50,300]", "[300,50]"), code, words},
      {"Overlapping", replaces("[4000,4256]", "[3999,4255]"), code, words},
      {"HugeOffsets", replaces("[4000,4256]", "[1e99,2e99]"), code, words},
      {"NoJson", replaces("{\"__metadata__\"", "[\"__metadata__\""), code, words},
  };
}

std::vector<Damage> DamageOfManifests() {
  const auto edits = [](const std::function<void(Manifest&)>& edit) {
    return [=](const fs::path& f, const fs::path&) { EditManifest(f, edit); };
  };
  return {
      {"CutManifest", [](auto& f, auto&) { fs::resize_file(f / kManifest, 100); }, Code::kDataLoss, "it was cut"},
      {"EmptyManifest", [](auto& f, auto&) { fs::resize_file(f / kManifest, 0); }, Code::kDataLoss, "it was cut"},
      {"EditedManifest", [](auto& f, auto&) { Replace(f / kManifest, "\"step\": 1", "\"step\": 2"); }, Code::kDataLoss,
       "that was edited"},
      {"ManifestWithAKeyTwice",
       [](auto& f, auto&) { Replace(f / kManifest, "\"step\": 1", "\"step\": 2, \"step\": 1"); }, Code::kDataLoss,
       "key twice"},
      {"LaterManifest", [](auto& f, auto&) { Replace(f / kManifest, "\"version\": 1", "\"version\": 9"); },
       Code::kInvalidArgument, "reads version 1"},
      {"LinkedManifest",
       [](auto& f, auto&) {
         fs::rename(f / kManifest, f / "x");
         fs::create_symlink("x", f / kManifest);
       },
       Code::kNotFound, "is no checkpoint"},
      {"OtherDigest", edits([](Manifest& m) { ++m.digest; }), Code::kDataLoss, "a file changed since"},
      {"OtherShape", edits([](Manifest& m) { m.spec.parameters[0].shape = {1001}; }), Code::kDataLoss, "lists no"},
      {"OtherName", edits([](Manifest& m) { m.spec.parameters[1].name = "twin.c"; }), Code::kFailedPrecondition,
       "does not begin as this job's file"},
      {"OtherFormat", edits([](Manifest& m) { m.spec.parameters[1].format = WeightFormat::kBf16; }), Code::kDataLoss,
       "lists no"},
      {"HugeFile", edits([](Manifest& m) { m.files[0].bytes = int64_t{1} << 62; }), Code::kDataLoss,
       "it was saved with 4611686018427387904"},
      {"NegativeFile", edits([](Manifest& m) { m.files[0].bytes = -1; }), Code::kDataLoss, "which it cannot have"},
      {"FileElsewhere", edits([](Manifest& m) { m.files[0].name = "../../model.safetensors"; }), Code::kDataLoss,
       "which it cannot have"},
      {"FileTwice", edits([](Manifest& m) { m.files.push_back(m.files[0]); }), Code::kDataLoss, "has twice"},
      {"FewerFiles", edits([](Manifest& m) { m.files.pop_back(); }), Code::kDataLoss, "lists no states.safetensors"},
      {"MoreFiles", edits([](Manifest& m) {
         m.files.push_back({"more", 1});
       }),
       Code::kDataLoss, "more is missing"},
  };
}

class CheckpointDamage : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start({.workers = 2}));
    ASSERT_OK_AND_ASSIGN(Client client, cluster_->Connect());
    client_ = std::make_unique<Client>(std::move(client));
  }
  absl::StatusOr<std::shared_ptr<Job>> MakeJob(const std::string& name) {
    ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client_->CreateJob(Spec(name)));
    RETURN_IF_ERROR(testing::Initialize(*job));
    return job;
  }
  absl::Status TrainTo(Job& job, int64_t step) {
    ASSIGN_OR_RETURN(const std::unique_ptr<Session> session, job.Attach({Slot(0), Slot(1)}));
    RETURN_IF_ERROR(session->AwaitWeights(kLong));
    return testing::TrainTo(*session, step);
  }
  absl::StatusOr<SavedCheckpoint> SavedAt(const std::string& name, int64_t step) {
    ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, MakeJob(name));
    RETURN_IF_ERROR(TrainTo(*job, step));
    return SaveCheckpoint(*job, temp_.File(name));
  }
  bool HasJob(const std::string& name) {
    v1::DescribeJobRequest request;
    request.set_job(name);
    return client_->coordinator().DescribeJob(request, kLong).ok();
  }

  testing::TempFolder temp_;
  std::unique_ptr<Cluster> cluster_;
  std::unique_ptr<Client> client_;
};

TEST_F(CheckpointDamage, IsSaid_AndNothingIsLoaded) {
  ASSERT_OK_AND_ASSIGN(const SavedCheckpoint saved, SavedAt("job", 1));
  ASSERT_OK_AND_ASSIGN(const SavedCheckpoint other, SavedAt("other", 2));
  for (const auto& damages : {DamageOfFiles(), DamageOfHeaders(), DamageOfManifests()}) {
    for (const Damage& damage : damages) {
      SCOPED_TRACE(damage.name);
      const fs::path copy = temp_.File(damage.name);
      fs::copy(saved.path, copy, fs::copy_options::recursive);
      ASSERT_NO_FATAL_FAILURE(damage.harm(copy, other.path));
      EXPECT_THAT(RestoreCheckpoint(*client_, copy.string(), {"again", "fsdp=1"}),
                  StatusIs(damage.code, HasSubstr(damage.words)));
      EXPECT_FALSE(HasJob("again"));
    }
  }
  ASSERT_OK_AND_ASSIGN(const auto again, RestoreCheckpoint(*client_, saved.path, {"again", "fsdp=1"}));
  ASSERT_OK_AND_ASSIGN(const v1::DigestReply digest, again->Digest(kLong));
  EXPECT_EQ(digest.digest(), saved.digest);
}

// As another program, or a training that went wrong, would have saved it: with a digest that is right.
TEST_F(CheckpointDamage, ValuesThatNoJobMayHave_AreNotLoaded_WhateverTheDigestSays) {
  ASSERT_OK_AND_ASSIGN(const SavedCheckpoint saved, SavedAt("job", 1));
  const auto as_bytes = [](float value) { return std::string(reinterpret_cast<const char*>(&value), sizeof value); };
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  for (const auto& [part, value, text] : std::vector<std::tuple<std::string, float, std::string>>{
           {"w", nan, "is nan"},
           {"w", -infinity, "is -inf"},
           {"w.exp_avg", infinity, "is inf"},
           {"w.exp_avg_sq", -1, "is -1; it must be finite, not below 0"},
           {"rows.scales", -2, "is -2"},
           {"rows.exp_avg.scales", nan, "is nan"},
           {"rows.exp_avg_sq.scales", infinity, "is inf"}}) {
    SCOPED_TRACE(absl::StrCat(part, " ", text));
    const fs::path copy = temp_.File("copy");
    fs::remove_all(copy);
    fs::copy(saved.path, copy, fs::copy_options::recursive);
    ASSERT_NO_FATAL_FAILURE(WriteInto(copy, part, as_bytes(value)));
    ASSERT_OK_AND_ASSIGN(const StoredFiles files, StoredFiles::Create(Spec("job")));
    uint64_t digest = 0;
    for (const FilePart& each : files.parts()) {
      digest += DigestPart(DigestKey(each.tensor, each.stream, each.extra ? 1 : 0), each.layout, 0,
                           BytesOf(copy, each.name).data(), Spec("job").parameters[each.tensor].NumElements());
    }
    EditManifest(copy, [&](Manifest& manifest) { manifest.digest = digest; });
    for (const char* mesh : {"fsdp=2", "fsdp=1"}) {
      EXPECT_THAT(RestoreCheckpoint(*client_, copy.string(), {"again", mesh}),
                  StatusIs(Code::kDataLoss, HasSubstr(absl::StrCat(part, ": entry 0 ", text))));
      EXPECT_FALSE(HasJob("again"));
    }
  }
}

class CheckpointOnASmallDisk : public CheckpointDamage {
 protected:
  void SetUp() override {  // before any other process is there: they see it, too
    const auto disk = testing::SmallDisk::Mount(temp_.File("try"), 4096);
    if (!disk.ok()) GTEST_SKIP() << "SKIPPED: no file systems of a test's own here: " << disk.status().message();
    for (int pages = 1; pages <= kPages; ++pages) {
      ASSERT_OK_AND_ASSIGN(disks_.emplace_back(), testing::SmallDisk::Mount(Root(pages), pages * 4096));
    }
    CheckpointDamage::SetUp();
  }
  std::string Root(int pages) const { return temp_.File(absl::StrCat("disk-", pages)); }

  static constexpr int kPages = 50;
  std::vector<std::unique_ptr<testing::SmallDisk>> disks_;
};

TEST_F(CheckpointOnASmallDisk, WhateverFits_IsThere_AndNothingElse) {
  ASSERT_OK_AND_ASSIGN(const auto job, MakeJob("job"));
  std::vector<int> pages_of_saved;
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_OK(TrainTo(*job, step));
    for (int pages = 1; pages <= kPages; ++pages) {
      SCOPED_TRACE(absl::StrCat("step ", step, ", pages ", pages));
      const auto before = ListCheckpoints(Root(pages));
      ASSERT_OK(before);
      const auto saved = SaveCheckpoint(*job, Root(pages));
      if (!saved.ok()) {
        EXPECT_THAT(saved, StatusIs(Code::kResourceExhausted, HasSubstr("No space left on device")));
      }
      ASSERT_OK_AND_ASSIGN(const auto after, ListCheckpoints(Root(pages)));
      EXPECT_EQ(after.size(), before->size() + (saved.ok() ? 1 : 0));
      EXPECT_EQ(std::distance(fs::directory_iterator(Root(pages)), {}), static_cast<int>(after.size()));
      for (const FoundCheckpoint& each : after) EXPECT_OK(OpenCheckpoint(each.path));
      if (saved.ok()) pages_of_saved.push_back(pages);
    }
  }
  ASSERT_FALSE(pages_of_saved.empty());
  const int needed = pages_of_saved[0];
  EXPECT_GT(needed, 4);
  EXPECT_EQ(pages_of_saved.size(), static_cast<size_t>(kPages - needed + 1 + kPages - 2 * needed + 1)) << needed;
}

}  // namespace
}  // namespace shardmesh
