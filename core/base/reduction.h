// The sum over gradient slots: one fixed binary tree, whoever holds which slot.
//
// The tree spans the next power of two of the number of slots; a leaf that does not exist is skipped, never added
// (adding zero would turn -0 into +0). Five slots: ((s0 + s1) + (s2 + s3)) + s4. Equivalently: the left subtree of n
// slots is the largest power of two below n. An aligned subtree's root can be computed elsewhere and used in its place.
//
// Templates over the number type: float, or a SIMD vector with operator+; every type walks the same tree. Two walks,
// one result: TreeSum takes the number of slots at run time, TreeSumFixed unrolls it. Pure functions, thread-safe.
#pragma once

#include "core/base/host_device.h"

namespace shardmesh {

// The size of the left subtree of a tree over n leaves: the largest power of two below n. REQUIRES: n >= 2.
SHARDMESH_HOST_DEVICE constexpr int LeftLeaves(int n) {
  int left = 1;
  while (left < n - left) left *= 2;
  return left;
}

// leaf(i) gives slot i's number. REQUIRES: kLeaves >= 1.
template <int kLeaves, int kFirst = 0, class Leaf>
SHARDMESH_HOST_DEVICE inline auto TreeSumFixed(const Leaf& leaf) {
  static_assert(kLeaves >= 1, "a sum needs a slot");
  if constexpr (kLeaves == 1) {
    return leaf(kFirst);
  } else {
    constexpr int kLeft = LeftLeaves(kLeaves);
    return TreeSumFixed<kLeft, kFirst>(leaf) + TreeSumFixed<kLeaves - kLeft, kFirst + kLeft>(leaf);
  }
}

// The same for a number of slots known at run time. REQUIRES: num_leaves >= 1.
// Keeps the roots of complete subtrees, largest first, as a binary counter keeps its ones.
template <class Number, class Leaf>
SHARDMESH_HOST_DEVICE inline Number TreeSum(int num_leaves, const Leaf& leaf) {
  Number roots[32];
  int num_roots = 0;
  for (int i = 0; i < num_leaves; ++i) {
    Number sum = leaf(i);
    for (int carry = i; carry & 1; carry >>= 1) sum = roots[--num_roots] + sum;
    roots[num_roots++] = sum;
  }
  Number sum = roots[--num_roots];
  while (num_roots > 0) sum = roots[--num_roots] + sum;
  return sum;
}

}  // namespace shardmesh
