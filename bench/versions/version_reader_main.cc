// A reader in a process of its own, for bench/versions. Usage: version_reader COORDINATOR JOB attached|pulled.
// Reads commands from standard input and answers each with a line:
//   watch N LAST  takes each version from N on as it comes, up to LAST; "ready", then "STEP:SECONDS ..." (monotonic
//   clock,
//                 at which the version was in hand)
//   hold          takes the latest and keeps it: its step
//   drop          gives it back: "dropped"
// Every version is checked to be whole, after its time was taken. Ends with 1, and says why on standard error, when one
// is not.
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "bench/harness/harness.h"
#include "bench/versions/counting_job.h"
#include "client/cpp/version_reader.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

absl::Status Check(const HeldVersion& version) {
  ASSIGN_OR_RETURN(const ConstTensorView view, version.parameter("w"));
  return CheckWhole(view, version.step());
}

void Answer(const std::string& line) {
  std::puts(line.c_str());
  std::fflush(stdout);
}

absl::Status Watch(VersionReader& reader, int64_t next, int64_t last) {
  Answer("ready");
  std::vector<std::string> seen;
  while (next <= last) {
    ASSIGN_OR_RETURN(const HeldVersion version, reader.Take({VersionChoice::kAtLeast, Step(next)}, kPatience));
    seen.push_back(absl::StrCat(version.step().value(), ":", absl::StrFormat("%.9f", MonotonicSeconds())));
    RETURN_IF_ERROR(Check(version));
    next = version.step().value() + 1;
  }
  Answer(absl::StrJoin(seen, " "));
  return absl::OkStatus();
}

absl::Status Serve(const std::string& coordinator, const std::string& job, bool attached) {
  ASSIGN_OR_RETURN(Client client, Client::Connect(coordinator));
  ReaderOptions options;
  options.way = attached ? ReaderOptions::Way::kAttached : ReaderOptions::Way::kPulled;
  ASSIGN_OR_RETURN(const std::unique_ptr<VersionReader> reader, VersionReader::Open(client, job, options));
  std::vector<HeldVersion> held;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command;
    int64_t next = 0, last = 0;
    words >> command >> next >> last;
    if (command == "watch") {
      RETURN_IF_ERROR(Watch(*reader, next, last));
    } else if (command == "hold") {
      ASSIGN_OR_RETURN(HeldVersion version, reader->Take({}, kPatience));
      RETURN_IF_ERROR(Check(version));
      Answer(absl::StrCat(version.step().value()));
      held.push_back(std::move(version));
    } else {
      held.clear();
      Answer("dropped");
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: version_reader COORDINATOR JOB attached|pulled\n");
    return 2;
  }
  const absl::Status status = shardmesh::bench::Serve(argv[1], argv[2], std::string(argv[3]) == "attached");
  if (status.ok()) return 0;
  std::fprintf(stderr, "version_reader: %s\n", std::string(status.message()).c_str());
  return 1;
}
