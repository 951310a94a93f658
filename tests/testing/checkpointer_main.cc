// test_checkpointer COORDINATOR save JOB FOLDER KEEP_LAST | restore NAME FOLDER MESH: who saves or restores a
// checkpoint, as a process that may come to harm at a fault point (fault_plan.h), under the name "checkpointer".
//   save      then removes all but the newest KEEP_LAST; 0: none
//   restore   the newest, as job NAME
// Status 1 and the error when there is one.
#include <cstdlib>
#include <iostream>
#include <string>

#include "client/cpp/checkpoint/checkpoint.h"
#include "core/base/status.h"
#include "tests/testing/fault_plan.h"

namespace shardmesh::testing {
namespace {

absl::Status Save(Client& client, const std::string& name, const std::string& folder, int keep_last) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.OpenJob(name));
  RETURN_IF_ERROR(SaveCheckpoint(*job, folder).status());
  return keep_last == 0 ? absl::OkStatus() : Prune(folder, {keep_last, 0}).status();
}

absl::Status Run(char** argv) {
  RETURN_IF_ERROR(PlanFault("checkpointer"));
  ASSIGN_OR_RETURN(Client client, Client::Connect(argv[1], {}));
  const std::string way = argv[2];
  if (way == "save") return Save(client, argv[3], argv[4], std::atoi(argv[5]));
  return RestoreCheckpoint(client, argv[4], {argv[3], argv[5]}).status();
}

}  // namespace
}  // namespace shardmesh::testing

int main(int argc, char** argv) {
  if (argc != 6) {
    std::cerr << "usage: test_checkpointer COORDINATOR save JOB FOLDER KEEP_LAST | restore NAME FOLDER MESH\n";
    return 2;
  }
  const absl::Status status = shardmesh::testing::Run(argv);
  if (!status.ok()) std::cout << status << std::endl;
  return status.ok() ? 0 : 1;
}
