#include "local/heap.h"

#include <malloc.h>

namespace shardmesh {

void GiveBackFreedHeap() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // namespace shardmesh
