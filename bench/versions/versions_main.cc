// bench/versions: how soon a committed version can be read, what going to the next one takes, and what many readers
// cost: readers that map publications, against readers that pull them over gRPC.
//
//   bazel run -c opt //bench:versions -- --quick
#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/service.h"
#include "bench/versions/version_rounds.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

struct Flags : CommonFlags {
  int readers = 64;
};

absl::Status Run(const Flags& flags) {
  Report report("bench/versions: readers of one host, a worker, fp32 weights");
  report.Note(absl::StrCat("Machine at the start: ", MachineNow(), "."));
  ASSIGN_OR_RETURN(const std::unique_ptr<Folder> folder, Folder::Make());
  ASSIGN_OR_RETURN(const std::unique_ptr<Service> service,
                   Service::Start(folder->path(), "127.0.0.1:0", Process::kEveryCore));
  VersionRounds rounds;
  rounds.rounds = flags.quick ? 3 : flags.rounds;
  if (flags.quick) rounds.steps = 300;
  RETURN_IF_ERROR(Annotate(AddCommitToVisible(*service, rounds, report), "commit to visible"));
  const std::vector<int64_t> sizes = flags.quick ? std::vector<int64_t>{1, 64, 256} : std::vector<int64_t>{1, 64, 1024};
  for (const int64_t mebibytes : sizes) {
    RETURN_IF_ERROR(Annotate(AddSwap(*service, rounds, mebibytes, report), "swap"));
  }
  RETURN_IF_ERROR(Annotate(AddReaders(*service, rounds, flags.readers, flags.quick ? 16 : 64, report), "readers"));
  report.Note("Verified: every version that was taken is whole.");
  report.Note(absl::StrCat("Machine at the end: ", MachineNow(), "."));
  return report.Publish(flags.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/versions: how soon a committed version can be read, what going to the next one takes, and what many\n"
      "readers cost: readers that map publications, against readers that pull them over gRPC, in turns inside one\n"
      "run. Checks that every version is whole."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "3 rounds, versions up to 256 MiB: less than a minute on two cores", flags);
  app.add_option("--readers", flags.readers, "processes that keep one version")
      ->capture_default_str()
      ->check(CLI::Range(1, 64));
  app.footer(
      "Examples:\n"
      "  bazel run -c opt //bench:versions -- --quick\n"
      "  bazel run -c opt //bench:versions -- --json $PWD/versions.json      5 minutes; 10 GB of memory");
  CLI11_PARSE(app, argc, argv);
  return shardmesh::bench::ExitStatus("versions", shardmesh::bench::Run(flags));
}
