#include "core/names/name_scan.h"

#include <cstdio>
#include <random>
#include <string>

#include "core/base/matchers.h"

namespace shardmesh::internal {
namespace {

// The bytes written, or "!" for a refusal. The name lies at the end of its allocation, and so does the output.
template <typename Chunk>
std::string Scanned(absl::string_view name) {
  const std::vector<char> exact(name.begin(), name.end());
  std::vector<char> out(ScanRoom(name.size()));
  const char* end = ScanName<Chunk>(absl::string_view(exact.data(), exact.size()), out.data());
  return end == nullptr ? "!" : std::string(out.data(), end - out.data());
}

// What ScanName is to do, a segment at a time.
std::string Expected(absl::string_view name) {
  std::string kept;
  size_t start = 0;
  for (size_t at = 0; at <= name.size(); ++at) {
    if (at < name.size() && static_cast<signed char>(name[at]) <= 0) return "!";
    if (at < name.size() && name[at] != '.') continue;
    const absl::string_view segment = name.substr(start, at - start);
    if (segment.empty()) return "!";
    bool wrapper = false;
    for (const absl::string_view known : kWrapperSegments) wrapper |= segment == known;
    if (at == name.size() || !wrapper) kept += (kept.empty() ? "" : ".") + std::string(segment);
    start = at + 1;
  }
  return kept;
}

template <typename Chunk>
class NameScanTest : public ::testing::Test {};
using Chunks = ::testing::Types<PlainChunk, NameChunk>;
TYPED_TEST_SUITE(NameScanTest, Chunks);

TYPED_TEST(NameScanTest, Examples) {
  EXPECT_EQ(Scanned<TypeParam>("_orig_mod.layers.0._orig_module.w"), "layers.0._orig_module.w");
  EXPECT_EQ(Scanned<TypeParam>("a._checkpoint_wrapped_module._orig_mod._fsdp_wrapped_module.w"), "a.w");
  EXPECT_EQ(Scanned<TypeParam>("my_orig_mod._orig_mod"), "my_orig_mod._orig_mod");
  EXPECT_EQ(Scanned<TypeParam>("module.encoder.w"), "module.encoder.w");
  for (const absl::string_view refused : {"", ".", "a.", ".a", "a..b", "_orig_mod.", "_orig_mod..w", "\xC3\xA9.w"}) {
    EXPECT_EQ(Scanned<TypeParam>(refused), "!") << refused;
  }
  EXPECT_EQ(Scanned<TypeParam>(absl::string_view("a\0b", 3)), "!");
}

// Every segment at every distance from the borders of chunks.
TYPED_TEST(NameScanTest, RandomNames) {
  const auto seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const absl::string_view pieces[] = {"_orig_mod",
                                      "_checkpoint_wrapped_module",
                                      "_fsdp_wrapped_module",
                                      "_orig_mod2",
                                      "_",
                                      "a",
                                      "weight",
                                      "experts_17",
                                      ".",
                                      "\xFF",
                                      "_orig_mo"};
  for (int i = 0; i < 200'000; ++i) {
    std::string name;
    const int count = static_cast<int>(random() % 8);
    for (int k = 0; k < count; ++k) {
      // Rarely a piece that makes the name bad.
      const size_t piece = random() % (random() % 16 == 0 ? 11 : 8);
      if (k > 0 && random() % 64 != 0) name += ".";
      name.append(pieces[piece].data(), pieces[piece].size());
      name.append(random() % 4, 'x');
    }
    ASSERT_EQ(Scanned<TypeParam>(name), Expected(name)) << name;
  }
}

}  // namespace
}  // namespace shardmesh::internal
