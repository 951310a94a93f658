// Who holds up a call whose time is up. A rank sees only who has not come to itself, and that rank may just wait for
// another one; so each rank tells all whom it waits for, and is taken out where it did.
#pragma once

#include <vector>

namespace shardmesh {

// `waits_for[r]`: the ranks that rank r says it waits for; none: it has said nothing. Those that rank `self` waits for,
// and those that these wait for, and so on, without those that said so, in rising order. Where all said so, they wait
// for each other: those that `self` waits for.
std::vector<int> WhoHoldsUp(int self, const std::vector<std::vector<int>>& waits_for);

}  // namespace shardmesh
