// What a hostile peer does to a gRPC server's port, beyond single frames (http2_client.h). Each function ends within
// about a minute. Tests only. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "rpc/testing/http2_client.h"

namespace shardmesh::testing {

// Opens and resets `streams` calls of `path`, on new connections when the server ends one. How many were opened.
int OpenAndResetStreams(int port, const std::string& path, int streams);

struct LongMessage {
  bool ended_by_server = false;
  int64_t bytes_sent = 0;
};
// Announces a message of 1 GiB to `path` and sends it, as flow control allows, until the server ends the call.
LongMessage SendLongMessage(int port, const std::string& path);

// What a connection sends that holds no request, for ever.
enum class Flood {
  kHeaderWithoutEnd,   // CONTINUATION frames of a header that never ends
  kIntegerWithoutEnd,  // the same with the padding of one HPACK integer
  kPings,
};
struct SentFlood {
  bool ended_by_server = false;
  int64_t bytes_sent = 0;
};
// Sends up to `most_bytes` of it, until the server ends the connection.
SentFlood SendFlood(int port, Flood flood, int64_t most_bytes);

// Opens `streams` calls of server reflection, asks each for the list of services, and keeps them open until the result
// goes. Empty when the server did not answer each within 30 s.
std::vector<std::unique_ptr<RawClient>> OpenReflections(int port, int streams);

}  // namespace shardmesh::testing
