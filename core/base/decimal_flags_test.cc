#include "core/base/decimal_flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

TEST(CheckDecimal, Integers) {
  for (const char* good : {"0", "1024", "-5", "+7", "18446744073709551615"}) EXPECT_EQ(CheckDecimal(good, true), "") << good;
  for (const char* bad : {"0x400", "0X400", "0b11", "0o17", "010", "1e3", "1.0", "", "-", "1'000", "1_000", " 1", "nan"}) {
    EXPECT_THAT(CheckDecimal(bad, true), HasSubstr("is not a decimal integer")) << bad;
  }
}

TEST(CheckDecimal, Numbers) {
  for (const char* good : {"0", "1.5", ".5", "1e-3", "-2E+4", "007"}) EXPECT_EQ(CheckDecimal(good, false), "") << good;
  for (const char* bad : {"0x1p3", "inf", "nan", "", "1f"}) {
    EXPECT_THAT(CheckDecimal(bad, false), HasSubstr("is not a decimal number")) << bad;
  }
}

TEST(DecimalNumbersOnly, OptionsOfCommandsAndSubcommands_TextIsLeftAlone) {
  int number = 0, inner = 0;
  double real = 0;
  std::string text;
  CLI::App app;
  app.add_option("--number", number)->check(CLI::Range(1, 5000));
  app.add_option("--real", real);
  app.add_option("--text", text);
  app.add_subcommand("command")->add_option("--inner", inner)->type_name("STEP");
  DecimalNumbersOnly(app);
  const auto parse = [&](std::vector<std::string> words) { app.parse(std::vector(words.rbegin(), words.rend())); };
  EXPECT_THROW(parse({"--number", "0x400"}), CLI::ValidationError);
  EXPECT_THROW(parse({"--real", "0x1p3"}), CLI::ValidationError);
  EXPECT_THROW(parse({"command", "--inner", "0x10"}), CLI::ValidationError);
  parse({"--number", "1024", "--real", "0.5", "--text", "0x400", "command", "--inner", "16"});
  EXPECT_EQ(number, 1024);
  EXPECT_EQ(real, 0.5);
  EXPECT_EQ(text, "0x400");
  EXPECT_EQ(inner, 16);
}

}  // namespace
}  // namespace shardmesh
