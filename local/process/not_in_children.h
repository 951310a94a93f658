// NotInChildren: a descriptor and a mapping that belong to this process alone: processes that it forks have neither.
//
// Close-on-exec says nothing of a child that only forks. Such a child, a worker of a data loader for instance, would
// keep its parent's connections open when the parent is killed, and could write to memory that is somebody else's by
// then. In the child, before fork() returns there, the descriptor becomes one whose peer has hung up (its number stays
// taken, so what still uses it gets an error), and the mapping becomes zeros of the child's own, for reading and
// writing.
//
// It holds for fork(), not for a bare clone(). Movable; it ends with the object, which goes before the descriptor is
// closed and the memory unmapped. Thread-safe between objects.
#pragma once

#include <cstddef>
#include <memory>

namespace shardmesh {

class NotInChildren {
 public:
  NotInChildren();
  // `fd`: -1: none. `memory`: the mapping's address; null: none.
  NotInChildren(int fd, void* memory, size_t bytes);
  NotInChildren(NotInChildren&& other) noexcept;
  NotInChildren& operator=(NotInChildren&& other) noexcept;
  ~NotInChildren();

 private:
  struct Entry;
  void Forget();

  std::unique_ptr<Entry> entry_;
};

}  // namespace shardmesh
