// What every group promises, of ranks whose bytes cross over TLS.
#include "worker/transport/secure/testing/secure_ranks.h"
#include "worker/transport/testing/exchange_suite.h"
#include "worker/transport/testing/group_suite.h"

namespace shardmesh {
namespace {

Groups Make(const std::vector<uint64_t>& epochs) { return MakeSecureGroups(epochs, /*tls=*/true); }

INSTANTIATE_TEST_SUITE_P(Tls, GroupSuite, testing::Values(GroupFamily{"tls", Make}));
INSTANTIATE_TEST_SUITE_P(Tls, ExchangeSuite, testing::Values(GroupFamily{"tls", Make}));

}  // namespace
}  // namespace shardmesh
