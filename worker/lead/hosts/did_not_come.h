// Why leads that wanted to meet again did not: one is gone for good. Of errors of MeetAgain (host_lead.h), whoever told
// it; others are FailedPrecondition for what is wrong with a host.
#pragma once

namespace shardmesh {

inline constexpr char kDidNotCome[] = "did not come to meet the others again";

}  // namespace shardmesh
