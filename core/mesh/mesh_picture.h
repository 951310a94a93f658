// Picture: a mesh as text for people. Tables of ranks with the dimensions' names on their axes; a mesh of more than two
// dimensions is a table for each choice of the others, a slice has the tables of each instance:
//
//   mesh ddp=2 x fsdp=2: 2 instances of 4 ranks
//
//   instance 0  fsdp=0  fsdp=1
//   ddp=0            0       2
//   ddp=1            4       6
//   ...
//
// One dimension is drawn as a single table with a row for each instance.
#pragma once

#include <cstdint>
#include <string>

#include "core/mesh/mesh.h"

namespace shardmesh {

// What Picture draws at most; what is left out is said, as "... 48 more columns" and the like.
inline constexpr int64_t kMaxPictureColumns = 16;  // of a table
inline constexpr int64_t kMaxPictureRows = 32;     // of a table
inline constexpr int64_t kMaxPictureTables = 16;

// Lines that end with a newline, without spaces at their ends. Pure and thread-safe.
std::string Picture(const Mesh& mesh);

}  // namespace shardmesh
