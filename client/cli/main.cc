// shardctl, the command line of shardmesh. Example: shardctl mesh --shape 2,2 --names ddp,fsdp --slice fsdp
#include <cstdio>

#include "client/cli/shardctl.h"

int main(int argc, char** argv) {
  const shardmesh::CommandResult result = shardmesh::RunShardctl({argv + (argc > 0 ? 1 : 0), argv + argc});
  std::fputs(result.err.c_str(), stderr);
  const bool written = std::fwrite(result.out.data(), 1, result.out.size(), stdout) == result.out.size();
  if (std::fflush(stdout) == 0 && written) return result.code;
  std::perror("shardctl: writing to standard output");
  return shardmesh::kExitError;
}
