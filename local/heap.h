// The process's heap. A process that tuned its allocator for bulk messages (rpc/main_support.h) keeps what it frees;
// after a message as large as a model that is a model's size for as long as it runs.
#pragma once

namespace shardmesh {

// Gives all pages that were freed back to the system; milliseconds. Thread-safe. Does nothing where malloc is not
// glibc's.
void GiveBackFreedHeap();

}  // namespace shardmesh
