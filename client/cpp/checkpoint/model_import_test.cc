#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "client/cpp/checkpoint/model.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

class PlanImportTest : public ::testing::Test {
 protected:
  PlanImportTest() {
    std::string pattern = ::testing::TempDir() + "/import-XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~PlanImportTest() override { std::filesystem::remove_all(folder_); }

  // Of tensors of two elements, with the dtype's bytes all `fill`.
  absl::StatusOr<ImportPlan> PlanOf(const std::vector<std::pair<std::string, std::string>>& names_and_dtypes,
                                    const ImportOptions& options, char fill_last = 0) {
    std::vector<SafetensorsEntry> entries;
    for (const auto& [name, dtype] : names_and_dtypes)
      entries.push_back({name, dtype, {2}, 2 * SafetensorsDtypeBytes(dtype)});
    const std::string to = folder_ + "/" + std::to_string(count_++);
    const auto bytes = [&](size_t i) {
      return std::string(entries[i].bytes, i + 1 == entries.size() ? fill_last : '\0');
    };
    const absl::Status written = WriteModel(to, entries, bytes);
    if (!written.ok()) return written;
    absl::StatusOr<ModelFiles> model = ModelFiles::Open(to);
    if (!model.ok()) return model.status();
    return PlanImport(*model, options);
  }

  std::string folder_;
  int count_ = 0;
};

TEST_F(PlanImportTest, FormatsFollowDtypes) {
  ASSERT_OK_AND_ASSIGN(ImportPlan plan, PlanOf({{"a", "F32"}, {"b", "BF16"}, {"c", "F16"}}, {}));
  ASSERT_EQ(plan.spec.parameters.size(), 3u);
  EXPECT_EQ(plan.spec.parameters[0].format, WeightFormat::kFp32);
  EXPECT_EQ(plan.spec.parameters[1].format, WeightFormat::kBf16Sr);
  EXPECT_EQ(plan.spec.parameters[2].format, WeightFormat::kFp32);
  EXPECT_EQ(plan.spec.parameters[2].shape, std::vector<int64_t>{2});
  ImportOptions options;
  options.weights = WeightFormat::kBf16Plus16;
  options.states = StateFormat::kDyn8;
  ASSERT_OK_AND_ASSIGN(plan, PlanOf({{"a", "F32"}}, options));
  EXPECT_EQ(plan.spec.parameters[0].format, WeightFormat::kBf16Plus16);
  EXPECT_EQ(plan.spec.parameters[0].states, StateFormat::kDyn8);
}

TEST_F(PlanImportTest, NamesBecomeCanonical) {
  ImportOptions options;
  options.rules.root_wrappers = {"module"};
  ASSERT_OK_AND_ASSIGN(const ImportPlan plan,
                       PlanOf({{"module._orig_mod.a.w", "F32"}, {"module.b.w", "F32"}}, options));
  EXPECT_EQ(plan.spec.parameters[0].name, "a.w");
  EXPECT_EQ(plan.spec.parameters[1].name, "b.w");
  EXPECT_THAT(plan.sources, ElementsAre("module._orig_mod.a.w", "module.b.w"));
  EXPECT_EQ(plan.spec.parameters[0].given, "module._orig_mod.a.w");
  EXPECT_THAT(PlanOf({{"a._orig_mod.w", "F32"}, {"a.w", "F32"}}, {}).status(),
              StatusIs(Code::kAlreadyExists, AllOf(HasSubstr("a._orig_mod.w"), HasSubstr("a.w"))));
}

TEST_F(PlanImportTest, OtherTensors) {
  EXPECT_THAT(PlanOf({{"a", "F32"}, {"ids", "I64"}, {"mask", "BOOL"}}, {}).status(),
              StatusIs(Code::kInvalidArgument, AllOf(HasSubstr("2 tensors"), HasSubstr("ids, mask"))));
  ImportOptions options;
  options.skip_others = true;
  ASSERT_OK_AND_ASSIGN(const ImportPlan plan, PlanOf({{"a", "F32"}, {"ids", "I64"}, {"mask", "BOOL"}}, options));
  EXPECT_EQ(plan.spec.parameters.size(), 1u);
  EXPECT_THAT(plan.skipped, ElementsAre("ids", "mask"));
}

TEST_F(PlanImportTest, Ties) {
  ImportOptions options;
  options.ties = {{"head", "embed"}};
  ASSERT_OK_AND_ASSIGN(ImportPlan plan, PlanOf({{"embed", "F32"}}, options));  // not in the files
  ASSERT_EQ(plan.spec.parameters.size(), 2u);
  EXPECT_EQ(plan.spec.parameters[1].name, "head");
  EXPECT_EQ(plan.spec.parameters[1].tied_to, "embed");
  EXPECT_EQ(plan.spec.parameters[1].given, "");
  EXPECT_THAT(plan.sources, ElementsAre("embed", ""));
  ASSERT_OK_AND_ASSIGN(plan, PlanOf({{"embed", "F32"}, {"head", "F32"}}, options));
  EXPECT_EQ(plan.spec.parameters.size(), 2u);
  EXPECT_THAT(PlanOf({{"embed", "F32"}, {"head", "F32"}}, options, 1).status(),
              StatusIs(Code::kInvalidArgument, HasSubstr("other values")));
  options.ties = {{"head", "none"}};
  EXPECT_THAT(PlanOf({{"embed", "F32"}}, options).status(), StatusIs(Code::kInvalidArgument, HasSubstr("\"none\"")));
}

}  // namespace
}  // namespace shardmesh
