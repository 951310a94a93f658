// NcclGroup over the stand-in passes what every group passes: with memory of the host, of the device, and of both.
#include "worker/transport/nccl/nccl_group.h"

#include "worker/transport/testing/group_suite.h"
#include "worker/transport/nccl/testing/nccl_fixture.h"

namespace shardmesh {
namespace {

GroupFamily Family(const std::string& name, StandIn::Memory memory, DeviceSum sum) {
  return {name, [=](const std::vector<uint64_t>& epochs) {
            TheStandIn().SetMemory(memory);
            Groups groups;
            for (auto& group : MakeNcclGroups(static_cast<int>(epochs.size()), [&](NcclGroup::Options& options) {
                   options.epoch = epochs[options.rank];
                   options.staging_bytes = 1 << 16;  // so that calls are made in parts
                   options.sum = sum;
                 })) {
              groups.push_back(std::move(group));
            }
            return groups;
          }};
}

INSTANTIATE_TEST_SUITE_P(Nccl, GroupSuite,
                         testing::Values(Family("host", StandIn::Memory::kAllocated, nullptr),
                                         Family("device", StandIn::Memory::kAll, nullptr),
                                         Family("host_and_device", StandIn::Memory::kAllOnOdd, SumOnStandIn)),
                         [](const auto& info) { return info.param.name; });

// After every test: nothing was undefined, nothing is left.
class StrictStandIn final : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { TheStandIn().Reset(); }
  void OnTestEnd(const testing::TestInfo&) override {
    EXPECT_THAT(TheStandIn().Misuses(), testing::IsEmpty());
    EXPECT_EQ(TheStandIn().Allocations(), 0);
  }
};
const bool kListens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new StrictStandIn);
  return true;
}();

}  // namespace
}  // namespace shardmesh
