// GroupFamily, GroupSuite: how the conformance suite of groups (group_suite.h) makes and runs the groups that it tests.
#pragma once

#include <atomic>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "worker/transport/group.h"

namespace shardmesh {

using Groups = std::vector<std::unique_ptr<Group>>;

// How to make a group's ranks in one process: rank r with epochs[r].
struct GroupFamily {
  std::string name;
  std::function<Groups(const std::vector<uint64_t>& epochs)> make;
  // Why there is no group of so many ranks; empty: there is.
  std::function<std::string(int size)> lacks = [](int) { return std::string(); };
};
inline void PrintTo(const GroupFamily& family, std::ostream* out) { *out << family.name; }

class GroupSuite : public ::testing::TestWithParam<GroupFamily> {
 protected:
  static constexpr absl::Duration kPlenty = absl::Seconds(60), kShort = absl::Milliseconds(400);

  // The sizes to be tested that the family has; says why it lacks the others.
  static std::vector<int> Sizes(std::initializer_list<int> wanted = {1, 2, 3, 4, 6, 7}) {
    std::vector<int> sizes;
    for (const int size : wanted) {
      const std::string lacks = GetParam().lacks(size);
      if (lacks.empty()) {
        sizes.push_back(size);
      } else {
        std::cout << "not tested: " << GetParam().name << " of " << size << " ranks: " << lacks << "\n";
      }
    }
    return sizes;
  }
  // A group of three ranks, or the next larger one that there is.
  static Groups MakeThree() {
    int size = 3;
    while (!GetParam().lacks(size).empty()) ++size;
    return Make(size);
  }
  static Groups Make(int size, uint64_t epoch = 5) { return GetParam().make(std::vector<uint64_t>(size, epoch)); }

  // Calls body(group) for every rank, each on a thread of its own, all at the same time; `absent` is left out.
  static void OnEveryRank(Groups& groups, const std::function<void(Group&)>& body, int absent = -1) {
    std::vector<std::thread> threads;
    std::atomic<int> to_begin = static_cast<int>(groups.size()) - (absent >= 0);
    for (auto& group : groups) {
      if (group->rank() == absent) continue;
      threads.emplace_back([&body, &group, &to_begin] {
        for (--to_begin; to_begin > 0;) std::this_thread::yield();
        body(*group);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  // The first i in [0, n) for which right(i) does not hold; n: there is none. Many times faster than an assertion each.
  template <class Right>
  static int64_t FirstWrong(int64_t n, const Right& right) {
    int64_t i = 0;
    while (i < n && right(i)) ++i;
    return i;
  }

  // A byte that says where it comes from and where it goes.
  static char ByteOf(int from, int to, int64_t i) { return static_cast<char>(31 * from + 7 * to + 13 * i + i / 251); }
};

}  // namespace shardmesh
