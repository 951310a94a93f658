// DecimalNumbersOnly: numbers on a command line are decimal. CLI11 also takes hexadecimal, octal and binary integers
// ("0x400", "010") and hexadecimal floating-point numbers; a person who types one of them has mostly made a slip.
//
//   CLI::App app{...};
//   AddFlags(app, flags);
//   DecimalNumbersOnly(app);   // after all options and subcommands were added
//
// A template, so that core/ needs no command-line library. Call it once for each program.
#pragma once

#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

// Empty when `text` is a decimal number of its kind, else what is wrong with it. It does not look at the range.
inline std::string CheckDecimal(const std::string& text, bool integer) {
  absl::string_view digits = text;
  if (!digits.empty() && (digits[0] == '-' || digits[0] == '+')) digits.remove_prefix(1);
  bool good = !digits.empty() && (absl::ascii_isdigit(digits[0]) || (!integer && digits[0] == '.'));
  if (integer && digits.size() > 1 && digits[0] == '0') good = false;
  for (const char c : digits) {
    good = good && (absl::ascii_isdigit(c) || (!integer && (c == '.' || c == 'e' || c == 'E' || c == '-' || c == '+')));
  }
  if (good) return "";
  return absl::StrCat("\"", text, "\" is not a decimal ", integer ? "integer; write it as in 1024" : "number");
}

// `app` is a CLI::App. Adds the check to every option of it and of its subcommands that takes a number.
template <class App>
void DecimalNumbersOnly(App& app) {
  for (auto* option : app.get_options()) {
    const std::string type = option->get_type_name();
    const bool integer = absl::StartsWith(type, "INT") || absl::StartsWith(type, "UINT") || type == "N" || type == "M" ||
                         type == "STEP";  // the last three: names that our programs give to integers
    const bool real = absl::StartsWith(type, "FLOAT");
    if (!integer && !real) continue;
    option->check([integer](const std::string& text) { return CheckDecimal(text, integer); });
  }
  for (auto* command : app.get_subcommands([](const App*) { return true; })) DecimalNumbersOnly(*command);
}

}  // namespace shardmesh
