#include "client/cli/base/table.h"

#include <gtest/gtest.h>

namespace shardmesh {
namespace {

TEST(TableTest, Columns_OfNumbersRight_OfTextLeft) {
  Table table({"version", "bytes", "holder", "age"});
  table.AddRow({"9", "1024", "reader-a", "3 s"});
  table.AddRow({"10", "16", "-", "120 s"});
  EXPECT_EQ(table.ToString(),
            "version  bytes  holder      age\n"
            "      9   1024  reader-a    3 s\n"
            "     10     16  -         120 s\n");
}

TEST(TableTest, ShortAndLongRows_ArePadded) {
  Table table({"a", "b"});
  table.AddRow({"x"});
  table.AddRow({"1", "2", "333"});
  table.AddRow({});
  EXPECT_EQ(table.ToString(),
            "a  b\n"
            "x\n"
            "1  2  333\n"
            "\n");
}

TEST(TableTest, NoRows_IsTheHeader) { EXPECT_EQ(Table({"a", "b"}).ToString(), "a  b\n"); }

TEST(TableTest, ControlBytes_AreEscaped) {
  Table table({"name"});
  table.AddRow({std::string("\x1b[2J\n\0\x7f", 7)});
  EXPECT_EQ(table.ToString(), "name\n\\x1b[2J\\x0a\\x00\\x7f\n");
}

TEST(TableTest, Utf8_CountsCodePoints) {
  Table table({"name", "n"});
  table.AddRow({"\xc3\xa9t\xc3\xa9", "1"});
  table.AddRow({"abc", "22"});
  EXPECT_EQ(table.ToString(),
            "name   n\n"
            "\xc3\xa9t\xc3\xa9    1\n"
            "abc   22\n");
}

TEST(TableTest, LooksLikeNumber_KnowsSignsPointsAndUnits) {
  for (const char* cell : {"0", "-3", "+1.5", "12%", "64 KiB", "3s", ".5"}) EXPECT_TRUE(LooksLikeNumber(cell)) << cell;
  for (const char* cell : {"", "-", "1.2.3", "1,2", "1 ", "a1", "1  s", "1 reader-a", "127.0.0.1", "--1", "."}) {
    EXPECT_FALSE(LooksLikeNumber(cell)) << cell;
  }
}

}  // namespace
}  // namespace shardmesh
