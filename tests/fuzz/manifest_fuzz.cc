// libFuzzer's entry: see targets.h.
#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  shardmesh::fuzz::Manifests({reinterpret_cast<const char*>(data), size});
  return 0;
}
