// What core/names/names.h allocates: nothing of the size of a bad name, and no rules again for every name.
#include <atomic>
#include <cstdlib>
#include <new>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/names/names.h"

namespace {
std::atomic<size_t> allocated_bytes{0};  // by the whole process since its start
}  // namespace

// Not inlined: the compiler would take malloc and delete, or new and free, for a mismatch.
[[gnu::noinline]] void* operator new(size_t size) {
  allocated_bytes += size;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace shardmesh {
namespace {

TEST(NamesMemoryTest, HugeNamesAndNuls_AreRefusedWithoutACopy) {
  const std::string huge(1 << 20, 'a'), nul(4096, '\0');
  const Canonicalizer canonicalizer;
  AliasTable table;
  const size_t before = allocated_bytes;
  for (const std::string* name : {&huge, &nul}) {
    EXPECT_EQ(Canonical(*name).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(canonicalizer.Canonical(*name).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(table.Add(*name).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(table.Add("a", *name).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_LT(allocated_bytes - before, size_t{1} << 16);
}

TEST(NamesMemoryTest, UseOfManyRules_CopiesNone) {
  NameRules rules;
  for (int i = 0; i < 1000; ++i) rules.wrapped_at.insert(absl::StrCat("layers.", i, ".block_with_a_long_name"));
  ASSERT_OK_AND_ASSIGN(const Canonicalizer canonicalizer, Canonicalizer::Create(rules));
  const size_t before = allocated_bytes;
  for (int i = 0; i < 10; ++i) {
    ASSERT_OK(canonicalizer.Canonical("layers.7.block_with_a_long_name.module.w"));
    ASSERT_OK(canonicalizer.Canonical("layers.7.block_with_a_long_name.w"));
  }
  EXPECT_LT(allocated_bytes - before, size_t{1} << 14);
}

}  // namespace
}  // namespace shardmesh
