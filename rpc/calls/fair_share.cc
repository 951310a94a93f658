#include "rpc/calls/fair_share.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace shardmesh {

absl::Status CheckShare(absl::string_view caller, const Share& share, absl::string_view what,
                        absl::string_view remedy) {
  const int64_t quarter = share.room / 4;
  const bool scarce = share.room - share.used < quarter, large = share.own >= quarter;
  if (caller.empty() || !scarce || !large) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("caller \"", absl::CHexEscape(caller.substr(0, 128)), "\" has ", share.own, " of ", share.room, " ",
                   what, ", and ", share.used, " are taken: the last quarter is for callers who have less; ", remedy));
}

}  // namespace shardmesh
