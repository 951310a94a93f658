#include "bench/harness/rival.h"

#include <cstdlib>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh::bench {

absl::StatusOr<std::unique_ptr<Rival>> Rival::Start(std::string python, const std::vector<std::string>& arguments) {
  const char* root = std::getenv("BUILD_WORKSPACE_DIRECTORY");
  if (python.empty() && root != nullptr) python = absl::StrCat(root, "/.cache/parity/bin/python");
  if (python.empty() || !std::filesystem::exists(python)) {
    return absl::NotFoundError(absl::StrCat("no Python at \"", python, "\"; name one with --python"));
  }
  std::vector<std::string> command = {python};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::unique_ptr<Rival> rival(new Rival);
  ASSIGN_OR_RETURN(rival->process_, Process::Start(command, Process::kEveryCore));
  return rival;
}

absl::StatusOr<std::string> Rival::Ask(absl::string_view question) {
  RETURN_IF_ERROR(process_->WriteLine(question));
  ASSIGN_OR_RETURN(const std::string answer, process_->ReadLine(absl::Minutes(20)));
  if (!absl::StartsWith(answer, "error")) return answer;
  return absl::InternalError(absl::StrCat("\"", question.substr(0, 60), "\": ", answer));
}

absl::StatusOr<double> Rival::AskSeconds(absl::string_view question) {
  ASSIGN_OR_RETURN(const std::string answer, Ask(question));
  double seconds = 0;
  if (absl::SimpleAtod(answer, &seconds)) return seconds;
  return absl::InternalError(absl::StrCat("\"", question, "\": no number but ", answer));
}

}  // namespace shardmesh::bench
