// What every subcommand of shardctl shares: its result, its exit codes, and how it reports an error.
// A subcommand is one pair of files with `void AddXCommand(CLI::App& app, CommandResult& result)`: it adds itself to
// `app` with a callback that writes `result`, and prints nothing itself (but for progress, and for `up` and `top`,
// which run until they are stopped). Both must outlive the parsing.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

inline constexpr int kExitOk = 0;
inline constexpr int kExitError = 1;  // the command was understood and failed
inline constexpr int kExitUsage = 2;  // the command line itself is wrong

struct CommandResult {
  std::string out;  // for standard output
  std::string err;  // for standard error
  int code = kExitOk;
};

// Sets exit code kExitError and the message of `status`, as one line. REQUIRES: not OK.
void Fail(const absl::Status& status, CommandResult& result);

// Takes the text for standard output, or its error as above.
void Finish(absl::StatusOr<std::string> out, CommandResult& result);

// Sets exit code kExitUsage and the message, with a hint at --help.
void FailUsage(absl::string_view message, CommandResult& result);

// Writes it to standard error and output; the exit code of the process.
int PrintResult(const CommandResult& result);

// One line with a newline. Bytes that are not UTF-8 become U+FFFD: it never throws.
std::string JsonLine(const nlohmann::ordered_json& value);

}  // namespace shardmesh
