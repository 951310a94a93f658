#include "bench/checkpoint/checkpoint_reshard.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/base/status.h"

namespace shardmesh::bench {
namespace {

// torchao chooses 8 or 32 bits by the rank's own part: from 4096 elements on, if they are a multiple of 256.
struct Case {
  std::vector<int64_t> shape;
  int from, to;
};
const Case kCases[] = {
    {{128, 100}, 2, 4}, {{128, 100}, 2, 3}, {{7, 2176}, 2, 4}, {{768, 768}, 2, 4}, {{768, 768}, 2, 3}};

absl::Status ReshardOurs(Service& service, const std::string& folder, const Case& c) {
  const ModelShapes model{"", {{"weight", c.shape}}};
  ASSIGN_OR_RETURN(const auto job, CheckpointJob::Start(service, model, StateFormat::kDyn8, c.from));
  RETURN_IF_ERROR(job->Save(folder).status());
  RETURN_IF_ERROR(job->Load(c.to).status());
  return job->Delete();
}

}  // namespace

absl::Status AddReshards(Service& service, const CheckpointSides& sides, Report& report) {
  int ours = 0, rivals = 0;
  std::string note =
      "8-bit states, saved by some ranks and loaded by others; ours had equal digests in each case. torch:";
  for (const Case& c : kCases) {
    const std::string shape = absl::StrJoin(c.shape, "x");
    const std::string name = absl::StrCat(shape, ", ", c.from, " -> ", c.to);
    RETURN_IF_ERROR(Annotate(ReshardOurs(service, absl::StrCat(sides.folder, "/reshard-", ours), c), name));
    ++ours;
    if (sides.rival == nullptr) continue;
    ASSIGN_OR_RETURN(const std::string answer,
                     sides.rival->Ask(absl::StrCat("reshard ", shape, " ", c.from, " ", c.to)));
    if (answer == "same") ++rivals;
    absl::StrAppend(&note, "\n  ", name, ": ",
                    answer.size() < 200 ? answer : absl::StrCat("fails ...", answer.substr(answer.size() - 190)));
  }
  const std::string name = "reshards of 8-bit states that are what was saved, ours / torchao AdamW8bit with DCP";
  if (sides.rival == nullptr) {
    report.Add({name, 0, 0, {}, {}, sides.missing});
    return absl::OkStatus();
  }
  const double ratio = static_cast<double>(ours) / std::max(rivals, 1);
  report.Add({name, static_cast<double>(ours), static_cast<double>(rivals), {ratio, ratio, ratio}});
  report.Note(note);
  return absl::OkStatus();
}

}  // namespace shardmesh::bench
