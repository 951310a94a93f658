#include "client/cli/command.h"

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

std::string JsonLine(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace shardmesh
