// shardctl, the command line of shardmesh. Example: shardctl mesh --shape 2,2 --names ddp,fsdp --slice fsdp
#include "client/cli/shardctl.h"

int main(int argc, char** argv) {
  return shardmesh::PrintResult(shardmesh::RunShardctl({argv + (argc > 0 ? 1 : 0), argv + argc}));
}
