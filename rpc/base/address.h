// Address: where a server listens or a client dials, as people write it. A value; pure functions, thread-safe.
//
//   "127.0.0.1:7000"  "localhost:7000"  "[::1]:7000"  "trainer-3.example:7000"  "unix:/run/shardmesh/worker.sock"
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

struct Address {
  std::string unix_path;  // not empty: a UNIX socket, and the rest is unused
  std::string host;       // without brackets
  int port = 0;           // 0..65535; 0 only makes sense for listening

  bool is_unix() const { return !unix_path.empty(); }
  // True for what never leaves the machine: UNIX sockets, "localhost", 127.0.0.0/8 and ::1. Names are not looked up.
  bool is_local() const;
  // The form above; ParseAddress(ToString()) gives the same value.
  std::string ToString() const;
};

// OK: others can dial it. InvalidArgument: it is every address of a machine (0.0.0.0, [::]).
absl::Status CheckDialable(const Address& address);

// OK: `host`, the value of `option`, is a name or IP address that others can dial. InvalidArgument.
absl::Status CheckHost(absl::string_view option, absl::string_view host);

// What others dial of a server that listens on `listening`: the same, at the host `advertise` if that is not empty.
// InvalidArgument: as CheckDialable, CheckHost, or either is malformed.
absl::StatusOr<std::string> AdvertisedAddress(absl::string_view listening, const std::string& advertise);

// InvalidArgument: not of one of the forms above, a port outside 0..65535, or a UNIX path longer than 107 bytes (the
// kernel's sun_path limit).
absl::StatusOr<Address> ParseAddress(absl::string_view text);

}  // namespace shardmesh
