// Mail: what trainers have sent to the lead of a host, which takes and answers it on its own thread.
#pragma once

namespace shardmesh {

class Mail {
 public:
  virtual ~Mail() = default;
  // Takes what has come, and answers what is done. Called whenever the lead was notified, and after each commit and an
  // abort. For the lead's thread.
  virtual void Poll() = 0;
};

}  // namespace shardmesh
