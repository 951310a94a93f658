#include "client/cli/base/command.h"

#include <cstdio>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {
namespace {

// Messages may carry what a peer sent: one line stays one line.
std::string OneLine(absl::string_view message) {
  std::string line(message);
  for (char& c : line) {
    if (absl::ascii_iscntrl(c)) c = ' ';
  }
  return line;
}

}  // namespace

void Fail(const absl::Status& status, CommandResult& result) {
  result.err =
      absl::StrCat("shardctl: ", absl::StatusCodeToString(status.code()), ": ", OneLine(status.message()), "\n");
  result.code = kExitError;
}

void Finish(absl::StatusOr<std::string> out, CommandResult& result) {
  if (!out.ok()) return Fail(out.status(), result);
  result.out = *std::move(out);
}

void FailUsage(absl::string_view message, CommandResult& result) {
  result.err = absl::StrCat("shardctl: ", message, "\nRun with --help for more information.\n");
  result.code = kExitUsage;
}

int PrintResult(const CommandResult& result) {
  std::fputs(result.err.c_str(), stderr);
  const bool written = std::fwrite(result.out.data(), 1, result.out.size(), stdout) == result.out.size();
  if (std::fflush(stdout) == 0 && written) return result.code;
  std::perror("shardctl: writing to standard output");
  return kExitError;
}

std::string JsonLine(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace shardmesh
