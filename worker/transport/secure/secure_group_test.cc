// What every group promises, of ranks whose bytes cross in the clear.
#include "worker/transport/secure/testing/secure_ranks.h"
#include "worker/transport/testing/exchange_suite.h"
#include "worker/transport/testing/group_suite.h"

namespace shardmesh {
namespace {

Groups Make(const std::vector<uint64_t>& epochs) { return MakeSecureGroups(epochs, /*tls=*/false); }

INSTANTIATE_TEST_SUITE_P(Clear, GroupSuite, testing::Values(GroupFamily{"clear", Make}));
INSTANTIATE_TEST_SUITE_P(Clear, ExchangeSuite, testing::Values(GroupFamily{"clear", Make}));

}  // namespace
}  // namespace shardmesh
