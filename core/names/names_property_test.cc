// Random names and rules. Two oracles: wrapping a known name must be undone exactly, and a brute-force search that goes
// through the rules and looks each up in the text, where the real one goes through the segments.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/matchers.h"
#include "core/names/names.h"
#include "core/names/optimizer_names.h"

namespace shardmesh {
namespace {

const std::vector<std::string> kWrappers = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module",
                                            "module"};
const std::vector<std::string> kOrdinary = {"layers", "0", "w", "_orig_module", "my_orig_mod", "mod", "module_",
                                            "_orig_mod_", "attn", "state", "param_groups",
                                            // buffers, PEFT, parametrizations and extra state: data all of them
                                            "running_mean", "base_model", "model", "base_layer", "lora_A", "default",
                                            "modules_to_save", "parametrizations", "original0", "_extra_state"};

class Randoms {
 public:
  Randoms() {
    const char* fixed = std::getenv("SHARDMESH_TEST_SEED");
    seed = fixed != nullptr ? std::stoul(fixed) : std::random_device()();
    std::printf("seed %u (repeat with SHARDMESH_TEST_SEED)\n", seed);
    rng_.seed(seed);
  }
  int Below(int limit) { return static_cast<int>(rng_() % limit); }
  const std::string& Of(const std::vector<std::string>& pool) { return pool[Below(static_cast<int>(pool.size()))]; }

  unsigned seed;

 private:
  std::mt19937 rng_;
};

// A model's name and what wrapping modules makes of it, with the rules that its module tree would tell.
struct Wrapped {
  std::vector<std::string> clean, raw;
  NameRules rules;
  bool child_behind_wrapper = false;  // a user's child named like a wrapper stands directly behind one

  std::string Clean() const { return absl::StrJoin(clean, "."); }
  std::string Raw() const { return absl::StrJoin(raw, "."); }
};

Wrapped RandomWrapped(Randoms& random) {
  Wrapped w;
  const int depth = 1 + random.Below(5);
  for (int d = 0; d < depth; ++d) {
    int wrappers = random.Below(2) == 0 ? 0 : random.Below(4);
    for (int i = 0; i < wrappers; ++i) {
      const std::string& wrapper = random.Of(kWrappers);
      if (d == 0) w.rules.root_wrappers.push_back(wrapper);
      if (d > 0 && wrapper == "module") w.rules.wrapped_at.insert(w.Raw());
      w.raw.push_back(wrapper);
    }
    const bool like_a_wrapper = random.Below(5) == 0;
    w.clean.push_back(like_a_wrapper ? random.Of(kWrappers) : random.Of(kOrdinary));
    w.raw.push_back(w.clean.back());
    if (!like_a_wrapper || d + 1 == depth) continue;
    w.rules.literal.insert(w.Raw());
    w.child_behind_wrapper |= wrappers > 0;
  }
  return w;
}

TEST(NamesPropertyTest, Wrapping_InAnyOrderAndDepth_IsUndoneExactly) {
  Randoms random;
  for (int round = 0; round < 50000; ++round) {
    const Wrapped w = RandomWrapped(random);
    const std::string what = absl::StrCat("seed ", random.seed, " round ", round, ": ", w.Raw());
    ASSERT_OK_AND_ASSIGN(const std::string canonical, Canonical(w.Raw(), w.rules));
    ASSERT_EQ(canonical, w.Clean()) << what;
    ASSERT_OK_AND_ASSIGN(const NameRules rules, CanonicalRules(w.rules));
    ASSERT_EQ(Canonical(canonical, rules).value(), canonical) << what;
    if (!w.child_behind_wrapper) {
      ASSERT_EQ(Canonical(canonical, w.rules).value(), canonical) << what;
    }
  }
}

TEST(NamesPropertyTest, OptimizerState_OfWrappedParameters_IsUndoneExactly) {
  Randoms random;
  const std::vector<std::string> prefixes = {"optim", "optimizer", "app.optim"};
  for (int round = 0; round < 30000; ++round) {
    const Wrapped w = RandomWrapped(random);
    const std::string head = absl::StrCat(random.Below(2) == 0 ? "" : absl::StrCat(random.Of(prefixes), "."),
                                          random.Below(2) == 0 ? "state." : "param_groups.");
    const std::string tail = absl::StrCat(".", random.Below(3) == 0 ? random.Of(kWrappers) : random.Of(kOrdinary));
    const std::string raw = absl::StrCat(head, w.Raw(), tail), clean = absl::StrCat(head, w.Clean(), tail);
    ASSERT_OK_AND_ASSIGN(const Canonicalizer canonicalizer, Canonicalizer::Create(w.rules));
    ASSERT_OK_AND_ASSIGN(const Canonicalizer again, Canonicalizer::Create(CanonicalRules(w.rules).value()));
    ASSERT_EQ(CanonicalOptimizerName(raw, canonicalizer, prefixes).value(), clean)
        << "seed " << random.seed << ": " << raw;
    ASSERT_EQ(CanonicalOptimizerName(clean, again, prefixes).value(), clean) << "seed " << random.seed << ": " << raw;
    ASSERT_EQ(ParseOptimizerName(raw, prefixes).value().ToString(), raw) << "seed " << random.seed;
  }
}

// Few clean names, each wrapped in many ways and tied at random: a table of what is where tells what must happen.
TEST(NamesPropertyTest, Collisions_NameBothSidesAndChangeNothing) {
  Randoms random;
  for (int round = 0; round < 3000; ++round) {
    AliasTable table;
    std::map<std::string, std::string> raw_of,
        owner_of;  // by canonical name: the first raw one; by raw name: its storage
    std::vector<std::string> added = {"none"}, storages;
    for (int i = 0; i < 8; ++i) {
      std::string raw = absl::StrCat("a.", random.Below(2), ".w");
      for (int wraps = random.Below(3); wraps > 0; --wraps) raw = absl::StrCat(kWrappers[random.Below(3)], ".", raw);
      const std::string clean = raw.substr(raw.find("a."));
      const bool tie = random.Below(3) == 0;
      const std::string target = random.Of(added);
      const std::string what = absl::StrCat("seed ", random.seed, ": ", raw, tie ? " tied to " + target : "");
      const auto result = tie ? table.Add(raw, target) : table.Add(raw);
      if (tie && owner_of.count(target) == 0) {
        ASSERT_EQ(result.status().code(), absl::StatusCode::kNotFound) << what;
        continue;
      }
      const std::string storage = tie ? owner_of[target] : raw;
      if (raw_of.count(clean) > 0 && owner_of[raw_of[clean]] != storage) {
        ASSERT_EQ(result.status().code(), absl::StatusCode::kAlreadyExists) << what;
        for (const std::string& side : {raw, clean}) {
          ASSERT_THAT(std::string(result.status().message()), ::testing::HasSubstr(absl::StrCat("\"", side, "\"")))
              << what;
        }
        if (owner_of.count(raw) == 0) {
          ASSERT_THAT(std::string(result.status().message()),
                      ::testing::HasSubstr(absl::StrCat("\"", raw_of[clean], "\"")))
              << what;
        }
      } else {
        ASSERT_EQ(result.value(), clean) << what;
        if (owner_of.emplace(raw, storage).second) added.push_back(raw);
        if (raw_of.emplace(clean, raw).second && !tie) storages.push_back(clean);
      }
      ASSERT_EQ(table.num_raw_names(), owner_of.size()) << what;
      ASSERT_EQ(table.Storages(), storages) << what;
    }
  }
}

// Where the segments that a rule drops begin, found by searching the text for each rule in turn.
std::string Oracle(const std::string& raw, const NameRules& rules, const std::set<std::string>& literal) {
  const std::string text = raw + ".";
  std::set<size_t> dropped;
  for (const char* word : {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}) {
    for (size_t at = text.find(word); at != text.npos; at = text.find(word, at + 1)) {
      const bool starts = at == 0 || text[at - 1] == '.';
      if (starts && text[at + std::string(word).size()] == '.') dropped.insert(at);
    }
  }
  const std::string head = absl::StrJoin(rules.root_wrappers, ".") + ".";
  if (!rules.root_wrappers.empty() && text.rfind(head, 0) == 0 && text.size() > head.size()) {
    size_t at = 0;
    for (const std::string& wrapper : rules.root_wrappers) {
      dropped.insert(at);
      at += wrapper.size() + 1;
    }
  }
  for (const std::string& prefix : rules.wrapped_at) {
    if (text.rfind(prefix + ".module.", 0) == 0) dropped.insert(prefix.size() + 1);
  }
  for (const std::string& prefix : literal) {
    if (text.rfind(prefix + ".", 0) == 0) dropped.erase(prefix.rfind('.') + 1);  // npos + 1 is 0
  }
  dropped.erase(raw.rfind('.') + 1);
  std::string canonical;
  for (size_t at = 0; at < text.size(); at = text.find('.', at) + 1) {
    if (dropped.count(at) == 0) canonical += text.substr(at, text.find('.', at) + 1 - at);
  }
  canonical.pop_back();
  return canonical;
}

std::string RandomName(Randoms& random, int max_segments) {
  std::vector<std::string> segments;
  const int num_segments = 1 + random.Below(max_segments);
  for (int s = 0; s < num_segments; ++s) {
    segments.push_back(random.Below(2) == 0 ? random.Of(kWrappers) : random.Below(3) == 0 ? random.Of(kOrdinary) : "a");
  }
  return absl::StrJoin(segments, ".");
}

TEST(NamesPropertyTest, AnyRules_EqualTheBruteForceSearch) {
  Randoms random;
  for (int round = 0; round < 50000; ++round) {
    NameRules rules;
    for (int i = random.Below(3); i > 0; --i) rules.root_wrappers.push_back(random.Of(kWrappers));
    for (int i = random.Below(4); i > 0; --i) rules.wrapped_at.insert(RandomName(random, 3));
    for (int i = random.Below(4); i > 0; --i) rules.literal.insert(RandomName(random, 3));
    const std::set<std::string> given(rules.literal.begin(), rules.literal.end());
    std::set<std::string> literal = given;
    for (const std::string& prefix : given) {
      const std::string canonical = Oracle(prefix, rules, given);
      if (prefix.rfind(canonical + ".", 0) != 0) literal.insert(canonical);
    }
    const std::string raw = RandomName(random, 7);
    ASSERT_EQ(Canonical(raw, rules).value(), Oracle(raw, rules, literal))
        << "seed " << random.seed << " round " << round << ": " << raw << "; root "
        << absl::StrJoin(rules.root_wrappers, ",") << "; at " << absl::StrJoin(rules.wrapped_at, ",") << "; literal "
        << absl::StrJoin(rules.literal, ",");
    ASSERT_EQ(Canonical(Canonical(raw).value()).value(), Canonical(raw).value()) << raw;
  }
}

TEST(NamesPropertyTest, RandomBytes_AreAcceptedUnchangedOrRefused) {
  Randoms random;
  const std::string alphabet = std::string("\0.ab_\x7f\x80\xbf\xc0\xc2\xc3\xe0\xa0\xed\xf0\x90\xf4\x8f\xff", 19);
  for (int round = 0; round < 50000; ++round) {
    std::string bytes;
    for (int i = random.Below(6); i >= 0; --i) bytes += alphabet[random.Below(static_cast<int>(alphabet.size()))];
    const auto canonical = Canonical(bytes);
    if (canonical.ok()) {
      ASSERT_EQ(*canonical, bytes) << "seed " << random.seed;
    } else {
      ASSERT_EQ(canonical.status().code(), absl::StatusCode::kInvalidArgument);
      for (const char c : canonical.status().message()) ASSERT_TRUE(c >= ' ' && c <= '~') << canonical.status();
    }
  }
}

}  // namespace
}  // namespace shardmesh
