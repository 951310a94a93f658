#include "rpc/testing/hostile.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "rpc/testing/http2_client.h"

namespace shardmesh::testing {
namespace {

constexpr absl::Duration kGiveUp = absl::Seconds(60);
constexpr int64_t kFirstWindow = 65535;  // of flow control
constexpr int kDataBytes = 16384;        // of one frame

uint32_t BigEndianAt(const std::string& bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = at; i < at + 4 && i < bytes.size(); ++i) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

// Bytes that may be sent. One that is sent beyond them would be why the server ends the stream (RFC 9113, 5.2).
struct FlowControl {
  int64_t connection = kFirstWindow, stream = kFirstWindow;
  int64_t initial = kFirstWindow;  // of a stream, by the server's settings
};

// Does what HTTP/2 asks of a client; true when the server ended the stream or the connection.
bool HandleFrame(const Frame& frame, RawClient& client, FlowControl& flow) {
  if (frame.type == kSettings && (frame.flags & kAck) == 0) {
    for (size_t at = 0; at + 6 <= frame.payload.size(); at += 6) {
      if (frame.payload[at] != 0 || frame.payload[at + 1] != 4) continue;  // INITIAL_WINDOW_SIZE
      flow.stream -= flow.initial;
      flow.initial = BigEndianAt(frame.payload, at + 2);
      flow.stream += flow.initial;
    }
    client.Write(EncodeFrame(kSettings, kAck, 0, ""));
  }
  if (frame.type == kPing && (frame.flags & kAck) == 0) client.Write(EncodeFrame(kPing, kAck, 0, frame.payload));
  if (frame.type == kWindowUpdate) (frame.stream == 0 ? flow.connection : flow.stream) += BigEndianAt(frame.payload, 0);
  return frame.type == kRstStream || frame.type == kGoAway ||
         (frame.type == kHeaders && (frame.flags & kEndStream) != 0);
}

}  // namespace

int OpenAndResetStreams(int port, const std::string& path, int streams) {
  constexpr int kPerWrite = 500;
  const std::string headers = CallHeaders(path);
  const std::string cancel = BigEndian32(8);
  int opened = 0;
  const absl::Time until = MonotonicNow() + kGiveUp;
  while (opened < streams && MonotonicNow() < until) {
    RawClient client(port);
    if (!client.connected() || !client.StartHttp2()) continue;
    bool writable = true;
    for (uint32_t stream = 1; writable && opened < streams; opened += kPerWrite) {
      std::string burst;
      for (int i = 0; i < kPerWrite; ++i, stream += 2) {
        absl::StrAppend(&burst, EncodeFrame(kHeaders, kEndHeaders, stream, headers),
                        EncodeFrame(kRstStream, 0, stream, cancel));
      }
      writable = client.Write(burst);
    }
  }
  return opened;
}

LongMessage SendLongMessage(int port, const std::string& path) {
  LongMessage result;
  RawClient client(port);
  if (!client.connected() || !client.StartHttp2()) return result;
  client.Write(EncodeFrame(kHeaders, kEndHeaders, 1, CallHeaders(path)));
  FlowControl flow;
  const auto send = [&](const std::string& data) {
    flow.connection -= data.size();
    flow.stream -= data.size();
    return client.Write(EncodeFrame(kData, 0, 1, data));
  };
  send(absl::StrCat(absl::string_view("\0", 1), BigEndian32(1u << 30)));
  const std::string zeros(kDataBytes, '\0');
  const absl::Time until = MonotonicNow() + kGiveUp;
  while (!result.ended_by_server && result.bytes_sent < (int64_t{1} << 30) && MonotonicNow() < until) {
    const bool may_send = std::min(flow.connection, flow.stream) >= kDataBytes;
    const Frame frame = client.ReadFrame(may_send ? absl::ZeroDuration() : absl::Seconds(1));
    if (frame.valid()) {
      result.ended_by_server = HandleFrame(frame, client, flow);
    } else if (client.closed()) {
      result.ended_by_server = true;  // also where its window for more is closed, and nothing is sent
    } else if (may_send) {
      result.ended_by_server = !send(zeros);
      result.bytes_sent += kDataBytes;
    }
  }
  return result;
}

SentFlood SendFlood(int port, Flood flood, int64_t most_bytes) {
  RawClient client(port);
  if (!client.connected() || !client.StartHttp2()) return {};
  std::string part;
  if (flood == Flood::kPings) {
    for (int i = 0; i < 100; ++i) part += EncodeFrame(kPing, 0, 0, "12345678");
  } else {
    const bool integer = flood == Flood::kIntegerWithoutEnd;
    const std::string value = integer ? "\x7f" : EncodeInteger(0, 7, 1u << 30);
    client.Write(EncodeFrame(kHeaders, 0, 1,
                             absl::StrCat(absl::string_view("\x10", 1), EncodeInteger(0, 7, 1), "x", value)));
    part = EncodeFrame(kContinuation, 0, 1, std::string(kDataBytes, integer ? '\x80' : 'x'));
  }
  SentFlood flooded;
  const absl::Time until = MonotonicNow() + kGiveUp;
  while (flooded.bytes_sent < most_bytes && MonotonicNow() < until) {
    if (!client.Write(part)) {
      flooded.ended_by_server = client.WaitForClose(absl::Seconds(1));
      break;
    }
    flooded.bytes_sent += static_cast<int64_t>(part.size());
  }
  return flooded;
}

std::vector<std::unique_ptr<RawClient>> OpenReflections(int port, int streams) {
  constexpr int kPerConnection = 100;
  constexpr char kPath[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  const std::string list_services("\0\0\0\0\2\x3a\0", 7);  // of a gRPC message, with its head
  std::vector<std::unique_ptr<RawClient>> clients;
  const absl::Time until = MonotonicNow() + absl::Seconds(30);
  for (int opened = 0; opened < streams;) {
    auto client = std::make_unique<RawClient>(port);
    if (!client->connected() || !client->StartHttp2()) return {};
    int waiting = 0;
    for (; waiting < kPerConnection && opened < streams; ++waiting, ++opened) {
      const uint32_t stream = 1 + 2 * static_cast<uint32_t>(waiting);
      client->Write(absl::StrCat(EncodeFrame(kHeaders, kEndHeaders, stream, CallHeaders(kPath)),
                                 EncodeFrame(kData, 0, stream, list_services)));
    }
    while (waiting > 0) {
      const Frame frame = client->ReadFrame(until - MonotonicNow());
      if (!frame.valid()) return {};
      if (frame.type == kData) --waiting;
    }
    clients.push_back(std::move(client));
  }
  return clients;
}

}  // namespace shardmesh::testing
