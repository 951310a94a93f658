// shardmesh-worker that comes to harm at a fault point, as the environment says: fault_plan.h, under its --name.
#include <cstring>
#include <iostream>
#include <string>

#include "tests/testing/fault_plan.h"
#include "worker/run_worker_main.h"

int main(int argc, char** argv) {
  std::string name;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--name") == 0 && i + 1 < argc) name = argv[i + 1];
  }
  if (const absl::Status planned = shardmesh::testing::PlanFault(name); !planned.ok()) {
    std::cerr << planned.message() << "\n";
    return 2;
  }
  return shardmesh::RunWorkerMain(argc, argv, {});
}
