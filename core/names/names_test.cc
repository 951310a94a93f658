#include "core/names/names.h"

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Name(absl::string_view raw, const NameRules& rules = {}) {
  const auto canonical = Canonical(raw, rules);
  return canonical.ok() ? *canonical : canonical.status().ToString();
}

TEST(CanonicalTest, Wrappers_AtAnyDepth_AreDropped) {
  EXPECT_EQ(Name("_orig_mod.w"), "w");
  EXPECT_EQ(Name("_orig_mod.layers.0._checkpoint_wrapped_module.w"), "layers.0.w");
  EXPECT_EQ(Name("_fsdp_wrapped_module.a._fsdp_wrapped_module._orig_mod._checkpoint_wrapped_module.b.w"), "a.b.w");
  EXPECT_EQ(Name("_orig_mod._orig_mod._orig_mod.w"), "w");
}

// Substring replacement corrupts such names.
TEST(CanonicalTest, SegmentsThatOnlyLookAlike_AreUntouched) {
  for (const char* name :
       {"layers.0._orig_module.w", "my_orig_mod.w", "_orig_mod_.w", "a.b_orig_mod.w", "_Orig_mod.w", "module_.w",
        "_fsdp_wrapped_modules.w", "layers.0.parametrizations.weight.original0", "q.lora_A.default.weight",
        "base_layer.weight", "fp8._extra_state", "w", "0", "\xc3\xa9t\xc3\xa9.w", "a b.w"}) {
    EXPECT_EQ(Name(name), name);
  }
  EXPECT_EQ(Name("_orig_mod.layers.0._orig_module.w"), "layers.0._orig_module.w");
}

TEST(CanonicalTest, LastSegment_IsTheTensorsOwnName) {
  EXPECT_EQ(Name("_orig_mod"), "_orig_mod");
  EXPECT_EQ(Name("a._orig_mod"), "a._orig_mod");
  EXPECT_EQ(Name("_orig_mod._orig_mod"), "_orig_mod");
  EXPECT_EQ(Name("module", {{"module"}, {}, {}}), "module");
  EXPECT_EQ(Name("a.module", {{}, {"a"}, {}}), "a.module");
}

TEST(CanonicalTest, Module_NotDeclared_IsKept) {
  EXPECT_EQ(Name("module.w"), "module.w");
  EXPECT_EQ(Name("_orig_mod.module.w"), "module.w");
  EXPECT_EQ(Name("a.module.w", {{"module"}, {"b"}, {}}), "a.module.w");
}

TEST(CanonicalTest, RootWrappers_AreDroppedAtTheHeadInTheirOrder) {
  EXPECT_EQ(Name("module.w", {{"module"}, {}, {}}), "w");
  EXPECT_EQ(Name("module.module.w", {{"module"}, {}, {}}), "module.w");
  EXPECT_EQ(Name("_orig_mod.module.a.module.w", {{"_orig_mod", "module"}, {}, {}}), "a.module.w");
  EXPECT_EQ(Name("module._orig_mod.w", {{"module", "_orig_mod"}, {}, {}}), "w");
  EXPECT_EQ(Name("module.module.w", {{"module", "module"}, {}, {}}), "w");
  // Another head than declared is another model's: only the allow-list applies.
  EXPECT_EQ(Name("module._orig_mod.w", {{"_orig_mod", "module"}, {}, {}}), "module.w");
  EXPECT_EQ(Name("module.w", {{"_orig_mod", "module"}, {}, {}}), "module.w");
}

TEST(CanonicalTest, WrappedAt_DropsOneModuleBehindThePrefixAsGiven) {
  EXPECT_EQ(Name("enc.module.w", {{}, {"enc"}, {}}), "enc.w");
  EXPECT_EQ(Name("enc.module.module.w", {{}, {"enc"}, {}}), "enc.module.w");
  EXPECT_EQ(Name("enc.module.module.w", {{}, {"enc", "enc.module"}, {}}), "enc.w");
  EXPECT_EQ(Name("encoder.module.w", {{}, {"enc"}, {}}), "encoder.module.w");
  EXPECT_EQ(Name("_orig_mod.enc.module.w", {{}, {"_orig_mod.enc"}, {}}), "enc.w");
  EXPECT_EQ(Name("_orig_mod.enc.module.w", {{}, {"enc"}, {}}), "enc.module.w");
}

TEST(CanonicalTest, Literal_KeepsTheLastSegmentOfThePrefixAsGiven) {
  EXPECT_EQ(Name("a._orig_mod.w", {{}, {}, {"a._orig_mod"}}), "a._orig_mod.w");
  EXPECT_EQ(Name("a._orig_mod._orig_mod.w", {{}, {}, {"a._orig_mod"}}), "a._orig_mod.w");
  EXPECT_EQ(Name("a._orig_mod._orig_mod.w", {{}, {}, {"a._orig_mod._orig_mod"}}), "a._orig_mod.w");
  EXPECT_EQ(Name("a._orig_mod.w", {{}, {}, {"a._orig_mod._orig_mod"}}), "a.w");
  EXPECT_EQ(Name("_orig_mod.a._orig_mod.w", {{}, {}, {"_orig_mod.a._orig_mod"}}), "a._orig_mod.w");
  EXPECT_EQ(Name("a._orig_mod.w", {{}, {}, {"_orig_mod.a._orig_mod"}}), "a._orig_mod.w");  // canonical already
  EXPECT_EQ(Name("module.w", {{"module"}, {}, {"module"}}), "module.w");
  EXPECT_EQ(Name("b.module.w", {{}, {"b"}, {"b.module"}}), "b.module.w");
}

TEST(CanonicalTest, BadNames_AreRefusedWithTheValueEscaped) {
  struct Case {
    std::string name;
    std::string message;
  };
  const std::vector<Case> cases = {
      {"", "name \"\" is empty"},
      {".w", "empty segment at offset 0"},
      {"a..w", "name \"a..w\" has an empty segment at offset 2"},
      {"a.", "empty segment at offset 2"},
      {".", "empty segment at offset 0"},
      {std::string("a.\0z", 4), "name \"a.\\x00z\" has a NUL byte at offset 2"},
      {"a.\xff", "name \"a.\\xff\" is not UTF-8 at offset 2"},
      {"\x80", "not UTF-8 at offset 0"},                  // continuation without a head
      {"a\xc3", "not UTF-8 at offset 1"},                 // cut
      {"\xc0\xae", "not UTF-8 at offset 0"},              // overlong "."
      {"\xe0\x80\xae", "not UTF-8 at offset 0"},          // overlong, 3 bytes
      {"\xf0\x80\x80\xae", "not UTF-8 at offset 0"},      // overlong, 4 bytes
      {"\xed\xa0\x80", "not UTF-8 at offset 0"},          // surrogate
      {"\xf4\x90\x80\x80", "not UTF-8 at offset 0"},      // above U+10FFFF
      {"\xf8\x88\x80\x80\x80", "not UTF-8 at offset 0"},  // five bytes
      {std::string(4097, 'a'), "has 4097 bytes; at most 4096"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(Canonical(c.name), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.message)));
    EXPECT_THAT(AliasTable().Add(c.name), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.message)));
  }
  EXPECT_LT(Canonical(std::string(1 << 20, '\xff')).status().message().size(), 1000u);
}

TEST(CanonicalTest, NamesAtTheEdgesOfTheLimits_AreFine) {
  EXPECT_OK(Canonical(std::string(4096, 'a')));
  for (const char* name : {"\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
                           "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ(Name(name), name);
  }
}

TEST(CanonicalTest, BadRules_AreRefused) {
  EXPECT_THAT(Canonical("w", {{"layers"}, {}, {}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("root wrapper \"layers\" is no wrapper segment"), HasSubstr("_orig_mod"))));
  EXPECT_THAT(Canonical("w", {{}, {"a."}, {}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("wrapped-at prefix: name \"a.\"")));
  EXPECT_THAT(AliasTable({{}, {}, {""}}).Add("w"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("literal prefix: name \"\" is empty")));
  EXPECT_THAT(CanonicalRules({{}, {}, {""}}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("literal")));
}

// Names that accelerate's fsdp2_canonicalize_names (accelerate/utils/fsdp_utils.py) changes into others, as it replaces
// substrings, or leaves wrapped.
TEST(CanonicalTest, NamesThatSubstringReplacementGetsWrong_AreRight) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"layers.0._orig_module.w", "layers.0._orig_module.w"},
      {"layers.0._orig_models.w", "layers.0._orig_models.w"},
      {"layers.0._orig_mod_scale", "layers.0._orig_mod_scale"},
      {"layers.0._checkpoint_wrapped_module_x.w", "layers.0._checkpoint_wrapped_module_x.w"},
      {"_orig_mod.my_orig_mod.w", "my_orig_mod.w"},
      {"_orig_mod.my_orig_mod.lin.weight", "my_orig_mod.lin.weight"},
      {"_orig_mod.a_orig_mod.b_orig_mod.w", "a_orig_mod.b_orig_mod.w"},
      {"my_checkpoint_wrapped_module.lin.weight", "my_checkpoint_wrapped_module.lin.weight"},
      {"_checkpoint_wrapped_module.w", "w"},
      {"_checkpoint_wrapped_module._orig_mod.w", "w"},
      {"_fsdp_wrapped_module.a.w", "a.w"},
      {"a._fsdp_wrapped_module.w", "a.w"},
      {"_orig_mod._fsdp_wrapped_module.a.w", "a.w"},
      {"_fsdp_wrapped_module._orig_mod.a.w", "a.w"},
      {"a._orig_mod._fsdp_wrapped_module.w", "a.w"},
      {"a._fsdp_wrapped_module._orig_mod.w", "a.w"},
      {"x._orig_mod", "x._orig_mod"},
      {"l._orig_mod_scale", "l._orig_mod_scale"},
      {"l_scale", "l_scale"},
  };
  for (const auto& [raw, canonical] : cases) EXPECT_EQ(Name(raw), canonical);
  EXPECT_EQ(Name("module._orig_mod.w", {{"module", "_orig_mod"}, {}, {}}), "w");
  // A user's own root child, beside a child lin.
  const NameRules literal = {{}, {}, {"_orig_mod"}};
  EXPECT_EQ(Name("_orig_mod.weight", literal), "_orig_mod.weight");
  EXPECT_EQ(Name("lin.weight", literal), "lin.weight");
}

TEST(Canonical, RulesOfCanonical_LeaveNamesAsTheyAre) {
  const std::vector<std::string> names = {"_orig_mod.w", "a._orig_mod._fsdp_wrapped_module.w", "module.w", "plain",
                                          "b._checkpoint_wrapped_module"};
  const NameRules rules = RulesOfCanonical(names);
  for (const std::string& name : names) EXPECT_EQ(Name(name, rules), name);
  EXPECT_TRUE(RulesOfCanonical({"module.w", "a.b"}).empty());
}

TEST(AliasTableTest, NamesThatSubstringReplacementMakesOne_AreTwoOrRefused) {
  AliasTable two;
  for (const char* name : {"a._orig_mod_b", "a_b", "x._checkpoint_wrapped_module_w", "x_w"}) EXPECT_OK(two.Add(name));
  EXPECT_EQ(two.Storages().size(), 4u);
  AliasTable one;
  ASSERT_OK(one.Add("layers.0.w"));
  for (const std::string name : {"layers.0._orig_mod.w", "_orig_mod.layers.0.w"}) {
    EXPECT_THAT(one.Add(name), StatusIs(absl::StatusCode::kAlreadyExists,
                                        AllOf(HasSubstr("\"layers.0.w\""), HasSubstr(absl::StrCat("\"", name, "\"")))));
  }
}

TEST(CanonicalizerTest, RulesGivenOnce_ApplyToEveryName) {
  ASSERT_OK_AND_ASSIGN(const Canonicalizer canonicalizer,
                       Canonicalizer::Create({{"module"}, {"module.enc"}, {"module.a._orig_mod"}}));
  EXPECT_EQ(canonicalizer.Canonical("module.enc.module.w").value(), "enc.w");
  EXPECT_EQ(canonicalizer.Canonical("module.a._orig_mod.w").value(), "a._orig_mod.w");
  EXPECT_EQ(canonicalizer.Canonical("a._orig_mod.w").value(), "a._orig_mod.w");  // canonical already
  EXPECT_EQ(canonicalizer.Canonical("plain.w").value(), "plain.w");
  EXPECT_THAT(canonicalizer.Canonical("a..w"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("empty segment")));
  EXPECT_THAT(Canonicalizer::Create({{"x"}, {}, {}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"x\" is no wrapper")));
}

TEST(CanonicalizerTest, CanonicalAll_IsEachNamesOwn) {
  const std::vector<std::string> raw = {"_orig_mod.a.w", "\xC3\xA9._orig_mod.w", "module.enc.module.w", "w"};
  for (const NameRules& rules : {NameRules{}, NameRules{{"module"}, {"module.enc"}, {}}}) {
    const Canonicalizer canonicalizer = Canonicalizer::Create(rules).value();
    const absl::StatusOr<PackedNames> all = canonicalizer.CanonicalAll(raw);
    ASSERT_OK(all);
    ASSERT_EQ(all->size(), raw.size());
    for (size_t i = 0; i < raw.size(); ++i) EXPECT_EQ((*all)[i], Canonical(raw[i], rules).value());
  }
  const Canonicalizer canonicalizer;
  EXPECT_EQ(canonicalizer.CanonicalAll({})->size(), 0u);
  EXPECT_THAT(canonicalizer.CanonicalAll({"a", "b..c", ""}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"b..c\" has an empty segment")));
  EXPECT_THAT(canonicalizer.CanonicalAll({std::string(kMaxNameBytes + 1, 'a')}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at most 4096")));
}

TEST(AliasTableTest, Add_TranslatesBothWays) {
  AliasTable table;
  EXPECT_EQ(table.Add("_orig_mod.b.w").value(), "b.w");
  EXPECT_EQ(table.Add("_orig_mod.a.w").value(), "a.w");
  EXPECT_EQ(table.CanonicalOf("_orig_mod.a.w").value(), "a.w");
  EXPECT_THAT(table.RawOf("a.w").value(), ElementsAre("_orig_mod.a.w"));
  EXPECT_THAT(table.Storages(), ElementsAre("b.w", "a.w"));
  EXPECT_THAT(table.CanonicalOf("a.w"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"a.w\" was not added")));
  for (const absl::Status& status :
       {table.RawOf("c").status(), table.StorageOf("c").status(), table.ExportNames("c").status()}) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kNotFound, HasSubstr("canonical name \"c\"")));
  }
}

TEST(AliasTableTest, Add_CollisionWithoutTie_NamesBothAndChangesNothing) {
  AliasTable table;
  ASSERT_OK(table.Add("_orig_mod.a.w"));
  EXPECT_THAT(table.Add("a._fsdp_wrapped_module.w"),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       AllOf(HasSubstr("\"_orig_mod.a.w\""), HasSubstr("\"a._fsdp_wrapped_module.w\""),
                             HasSubstr("the canonical name \"a.w\""))));
  EXPECT_THAT(table.RawOf("a.w").value(), ElementsAre("_orig_mod.a.w"));
  EXPECT_EQ(table.num_raw_names(), 1u);
}

TEST(AliasTableTest, Tie_OneStorage_AllNamesOnExport) {
  AliasTable table;
  ASSERT_OK(table.Add("_orig_mod.embed.w"));
  ASSERT_OK(table.Add("other"));
  EXPECT_EQ(table.Add("_orig_mod.head.w", "_orig_mod.embed.w").value(), "head.w");
  EXPECT_EQ(table.Add("embed.w", "_orig_mod.head.w").value(),
            "embed.w");  // a tie to a tie, and the same canonical name
  EXPECT_THAT(table.Storages(), ElementsAre("embed.w", "other"));
  EXPECT_EQ(table.StorageOf("head.w").value(), "embed.w");
  EXPECT_THAT(table.RawOf("embed.w").value(), ElementsAre("_orig_mod.embed.w", "embed.w"));
  EXPECT_THAT(table.ExportNames("head.w").value(), ElementsAre("_orig_mod.embed.w", "_orig_mod.head.w", "embed.w"));
}

TEST(AliasTableTest, Tie_ToAnUnknownName_IsNotFound) {
  AliasTable table;
  EXPECT_THAT(table.Add("head.w", "embed.w"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("\"embed.w\"")));
  EXPECT_EQ(table.num_raw_names(), 0u);
}

TEST(AliasTableTest, Tie_WhoseCanonicalNameHasAnotherStorage_NamesBoth) {
  AliasTable table;
  ASSERT_OK(table.Add("a"));
  ASSERT_OK(table.Add("b"));
  EXPECT_THAT(table.Add("_orig_mod.a", "b"),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       AllOf(HasSubstr("names \"a\" and \"_orig_mod.a\""), HasSubstr("canonical name \"a\""))));
}

TEST(AliasTableTest, Add_TheSameAgain_ChangesNothing) {
  AliasTable table;
  for (int repeat = 0; repeat < 3; ++repeat) {
    EXPECT_EQ(table.Add("_orig_mod.a").value(), "a");
    EXPECT_EQ(table.Add("b", "_orig_mod.a").value(), "b");
  }
  EXPECT_EQ(table.num_raw_names(), 2u);
  EXPECT_THAT(table.ExportNames("a").value(), ElementsAre("_orig_mod.a", "b"));
  EXPECT_THAT(table.Add("b"), StatusIs(absl::StatusCode::kAlreadyExists,
                                       AllOf(HasSubstr("\"b\""), HasSubstr("in one storage with \"_orig_mod.a\""))));
}

TEST(AliasTableTest, HundredThousandNames_WithRulesForEach_AreListedOldestFirst) {
  constexpr int kNames = 100000;
  NameRules rules;
  for (int i = 0; i < kNames; ++i) rules.wrapped_at.insert(absl::StrCat("layers.", i));
  AliasTable table(rules);
  std::vector<std::string> canonical;
  for (int i = 0; i < kNames; ++i) {
    const int64_t layer = int64_t{i} * 77777 % kNames;  // each once, in no order of the names
    canonical.push_back(absl::StrCat("layers.", layer, ".w"));
    ASSERT_EQ(table.Add(absl::StrCat("layers.", layer, ".module.w")).value(), canonical.back());
  }
  EXPECT_EQ(table.Storages(), canonical);
}

}  // namespace
}  // namespace shardmesh
