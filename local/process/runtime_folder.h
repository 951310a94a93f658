// Where sockets of this user lie if nobody says where.
#pragma once

#include <string>

namespace shardmesh {

// The first of these that this user can have:
//   /run/shardmesh-UID           where this user may write /run: root, and in many containers
//   $XDG_RUNTIME_DIR/shardmesh   if the system keeps that folder when the user has logged out (loginctl enable-linger)
//   /tmp/shardmesh-UID
// The first two are not cleaned while the system runs. Programs of one user must agree: give all the same environment,
// or --local-dir. Makes nothing.
std::string RuntimeFolder();

}  // namespace shardmesh
