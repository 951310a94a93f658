// AddSeconds: a command-line flag of seconds, for every program: 0.001 to 86400, and no NaN (which CLI::Range lets
// through).
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {

inline constexpr double kMinSeconds = 0.001;
inline constexpr double kMaxSeconds = 86400;

// Empty when `text` is such a number; else what is wrong with it.
inline std::string CheckSeconds(const std::string& text) {
  double value;
  if (absl::SimpleAtod(text, &value) && value >= kMinSeconds && value <= kMaxSeconds) return "";
  return absl::StrCat("\"", text, "\" is no number of seconds from ", kMinSeconds, " to ", kMaxSeconds);
}

inline CLI::Option* AddSeconds(CLI::App& app, const std::string& flag, double& seconds, const std::string& help) {
  return app.add_option(flag, seconds, help)->check(CLI::Validator(CheckSeconds, "SECONDS"))->capture_default_str();
}

}  // namespace shardmesh
