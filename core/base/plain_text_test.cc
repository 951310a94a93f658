#include "core/base/plain_text.h"

#include "gtest/gtest.h"

namespace shardmesh {
namespace {

TEST(PlainText, KeepsPrintableAscii_AndTheLimit) {
  EXPECT_EQ(PlainText("host b: ~refused~ ", 100), "host b: ~refused~ ");
  EXPECT_EQ(PlainText("abcdef", 4), "abcd");
  EXPECT_EQ(PlainText("", 4), "");
}

TEST(PlainText, WhatATerminalOrALogWouldObey_IsQuestionMarks) {
  EXPECT_EQ(PlainText("a\nb\tc\x1b[31m\x7f\xc3\xa9", 100), "a?b?c?[31m???");
  EXPECT_EQ(PlainText(absl::string_view("a\0b", 3), 100), "a?b");
}

}  // namespace
}  // namespace shardmesh
