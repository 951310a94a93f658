#include "worker/transport/streaming_copy.h"

#include <vector>

#include "gtest/gtest.h"

namespace shardmesh {
namespace {

TEST(StreamingCopy, AnyBytesToAnyPlace_AndNothingBeside) {
  constexpr int kMargin = 70;
  for (const int64_t bytes : {0, 1, 15, 63, 64, 65, 127, 128, 200, 1000, 4096 + 3}) {
    for (int to_offset = 0; to_offset < 66; to_offset += 3) {
      for (const int from_offset : {0, 1, 17, 64}) {
        std::vector<char> from(bytes + kMargin), to(bytes + 2 * kMargin, 77);
        for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(13 * i + i / 251);
        std::vector<char> want = to;
        for (int64_t i = 0; i < bytes; ++i) want[to_offset + i] = from[from_offset + i];
        StreamingCopy(to.data() + to_offset, from.data() + from_offset, bytes);
        ASSERT_EQ(to, want) << bytes << " bytes from " << from_offset << " to " << to_offset;
      }
    }
  }
}

}  // namespace
}  // namespace shardmesh
