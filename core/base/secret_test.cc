#include "core/base/secret.h"

#include <gtest/gtest.h>

#include <set>

namespace shardmesh {
namespace {

TEST(Secret, New_IsAnotherEachTime_AndFitsIntoAMessage) {
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(seen.insert(RandomSecret()).second);
  for (const std::string& secret : seen) {
    EXPECT_EQ(secret.size(), 16u);
    EXPECT_LE(secret.size(), kMaxSecretBytes);
  }
}

TEST(Secret, Same_OnlyIfEveryByteIs) {
  const std::string secret("0123\0abcdef\xff", 12);
  EXPECT_TRUE(SameSecret(secret, secret));
  EXPECT_TRUE(SameSecret("", ""));
  EXPECT_FALSE(SameSecret(secret, ""));
  EXPECT_FALSE(SameSecret("", secret));
  EXPECT_FALSE(SameSecret(secret, secret.substr(0, 11)));
  for (size_t i = 0; i < secret.size(); ++i) {
    std::string other = secret;
    other[i] = static_cast<char>(other[i] ^ 0x80);
    EXPECT_FALSE(SameSecret(secret, other)) << i;
  }
}

}  // namespace
}  // namespace shardmesh
