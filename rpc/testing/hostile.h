// What a hostile peer does to a gRPC server's port, beyond single frames (http2_client.h). Each function ends within
// about a minute. Tests only. Thread-safe.
#pragma once

#include <cstdint>
#include <string>

namespace shardmesh::testing {

// Opens and resets `streams` calls of `path`, on new connections when the server ends one. How many were opened.
int OpenAndResetStreams(int port, const std::string& path, int streams);

struct LongMessage {
  bool ended_by_server = false;
  int64_t bytes_sent = 0;
};
// Announces a message of 1 GiB to `path` and sends it, as flow control allows, until the server ends the call.
LongMessage SendLongMessage(int port, const std::string& path);

}  // namespace shardmesh::testing
