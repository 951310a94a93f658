#include "proto/bulk.h"

#include <cstdio>
#include <random>
#include <vector>

#include "core/base/matchers.h"
#include "proto/shardmesh/v1/shard.pb.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

struct Decoded {
  absl::Status status;
  std::string header;
  bool has_header = false;
  std::string data;
};

Decoded Decode(grpc::ByteBuffer buffer) {
  Decoded decoded;
  decoded.status = DecodeChunk(buffer, decoded.header, decoded.has_header, [&](absl::string_view part) {
    decoded.data.append(part.data(), part.size());
    return absl::OkStatus();
  });
  return decoded;
}

// The bytes in slices of the given size: as they may come from the network.
grpc::ByteBuffer Sliced(const std::string& bytes, size_t slice_bytes) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += slice_bytes) slices.emplace_back(bytes.substr(at, slice_bytes));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string BytesOf(const grpc::ByteBuffer& buffer) {
  std::string bytes;
  EXPECT_OK(ReadAll(buffer, bytes));
  return bytes;
}

v1::PushChunk Chunk(const std::string& data) {
  v1::PushChunk chunk;
  chunk.mutable_header()->set_job("digits");
  chunk.mutable_header()->set_step(1234567);
  chunk.set_data(data);
  return chunk;
}

TEST(BulkTest, Encoding_IsThatOfTheOrdinaryMessage) {
  const v1::PushChunk chunk = Chunk(std::string(300, 'x'));
  const grpc::ByteBuffer both = EncodeChunk(chunk.header().SerializeAsString(), grpc::Slice(chunk.data()));
  EXPECT_EQ(BytesOf(both), chunk.SerializeAsString());
  v1::PushChunk data_only;
  data_only.set_data("abc");
  EXPECT_EQ(BytesOf(EncodeChunk("", grpc::Slice("abc"))), data_only.SerializeAsString());
  v1::PushChunk header_only;
  *header_only.mutable_header() = chunk.header();
  EXPECT_EQ(BytesOf(EncodeChunk(chunk.header().SerializeAsString(), grpc::Slice())), header_only.SerializeAsString());
  EXPECT_EQ(BytesOf(EncodeChunk("", grpc::Slice())), "");
}

TEST(BulkTest, AnySlicing_DecodesToTheSame) {
  for (size_t size : {0u, 1u, 127u, 128u, 5000u}) {
    const v1::PushChunk chunk = Chunk(std::string(size, 'y'));
    const std::string bytes = chunk.SerializeAsString();
    for (size_t slice : {1u, 2u, 7u, 64u, 100000u}) {
      const Decoded decoded = Decode(Sliced(bytes, slice));
      ASSERT_OK(decoded.status) << size << " in slices of " << slice;
      EXPECT_TRUE(decoded.has_header);
      EXPECT_EQ(decoded.header, chunk.header().SerializeAsString());
      EXPECT_EQ(decoded.data, chunk.data());
    }
  }
}

TEST(BulkTest, EmptyMessage_HasNothing) {
  grpc::Slice empty("");
  const Decoded decoded = Decode(grpc::ByteBuffer(&empty, 1));
  EXPECT_OK(decoded.status);
  EXPECT_FALSE(decoded.has_header);
  EXPECT_EQ(decoded.data, "");
}

TEST(BulkTest, UnknownFields_AreSkipped) {
  v1::StepRequest other;  // fields of other numbers and kinds: 3 packed, 4 varint, 5 a double
  other.add_slots(3);
  other.set_step(9);
  v1::StepReply norm;
  norm.set_gradient_norm(0.5);
  const v1::PushChunk chunk = Chunk("data");
  const Decoded decoded =
      Decode(Sliced(other.SerializeAsString() + norm.SerializeAsString() + chunk.SerializeAsString(), 3));
  ASSERT_OK(decoded.status);
  EXPECT_EQ(decoded.data, "data");
}

TEST(BulkTest, EveryTruncation_IsRefusedOrShorter) {
  const std::string bytes = Chunk(std::string(200, 'z')).SerializeAsString();
  const size_t header_end = bytes.size() - 203;  // tag, two bytes of length, data
  for (size_t length = 1; length < bytes.size(); ++length) {
    const Decoded decoded = Decode(Sliced(bytes.substr(0, length), 16));
    if (length == header_end) {
      EXPECT_OK(decoded.status);  // a message that ends at a field
    } else {
      EXPECT_THAT(decoded.status, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("malformed"))) << length;
    }
  }
}

TEST(BulkTest, HostileBytes_AreTypedErrors) {
  const std::string cases[] = {
      std::string(1, '\0'),        // field 0
      "\x08\x01",                  // field 1 as a number: skipped, or refused
      "\x0b",                      // a group that never ends
      "\x0a\xff\xff\xff\xff\x0f",  // a header of 4 GiB
      "\x12\xff\xff\xff\xff\x0f"
      "abc",                                               // data of 4 GiB
      "\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  // a length that is no number
      "\x0a\x80\x80\x04" + std::string(65536, 'h'),        // 64 KiB: the largest header
      "\x0a\x81\x80\x04" + std::string(65537, 'h'),        // one byte more
      std::string(100, '\x0b'),                            // nested groups
  };
  const bool good[] = {false, true, false, false, false, false, true, false, false};
  for (size_t i = 0; i < std::size(cases); ++i) {
    const Decoded decoded = Decode(Sliced(cases[i], 1000));
    EXPECT_EQ(decoded.status.ok(), good[i]) << i << ": " << decoded.status;
    EXPECT_EQ(absl::IsInvalidArgument(decoded.status), !good[i]) << i << ": " << decoded.status;
  }
}

TEST(BulkTest, RandomBytes_NeverCrash) {
  const unsigned seed = std::random_device()();
  std::printf("seed %u\n", seed);
  std::mt19937 rng(seed);
  const std::string good = Chunk(std::string(100, 'q')).SerializeAsString();
  for (int round = 0; round < 5000; ++round) {
    std::string bytes = round % 2 ? good : std::string(rng() % 60, '\0');
    for (size_t i = 0; i < (round % 2 ? 1 + rng() % 4 : bytes.size()) && !bytes.empty(); ++i) {
      bytes[round % 2 ? rng() % bytes.size() : i] = static_cast<char>(rng());
    }
    if (bytes.empty()) continue;
    const Decoded decoded = Decode(Sliced(bytes, 1 + rng() % 20));
    EXPECT_TRUE(decoded.status.ok() || absl::IsInvalidArgument(decoded.status)) << "seed " << seed;
  }
}

TEST(BulkTest, TheCallbacksError_StopsDecoding) {
  grpc::ByteBuffer buffer = Sliced(Chunk(std::string(100, 'x')).SerializeAsString(), 30);
  std::string header;
  bool has_header;
  int calls = 0;
  const absl::Status status = DecodeChunk(buffer, header, has_header, [&](absl::string_view) {
    ++calls;
    return absl::AbortedError("stop");
  });
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kAborted, "stop"));
  EXPECT_EQ(calls, 1);
}

TEST(BulkTest, Messages_RoundTrip) {
  v1::PushReply reply, back;
  reply.set_applied(true);
  ASSERT_OK(DecodeMessage(EncodeMessage(reply), back));
  EXPECT_TRUE(back.applied());
  EXPECT_THAT(DecodeMessage(Sliced("\xff", 1), back),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("cannot be parsed as shardmesh.v1.PushReply")));
}

}  // namespace
}  // namespace shardmesh
