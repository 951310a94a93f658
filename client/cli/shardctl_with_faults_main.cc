// shardctl with `faults`, which only programs of tests have.
// Example: bazel run //client/cli:shardctl_with_faults -- faults
#include "client/cli/commands/faults_command.h"
#include "client/cli/shardctl.h"

int main(int argc, char** argv) {
  return shardmesh::PrintResult(
      shardmesh::RunShardctl({argv + (argc > 0 ? 1 : 0), argv + argc}, shardmesh::AddFaultsCommand));
}
