#include "proto/bulk.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

constexpr uint32_t kHeaderTag = 1 << 3 | 2;  // field 1, length-delimited
constexpr uint32_t kDataTag = 2 << 3 | 2;    // field 2, length-delimited
constexpr uint32_t kMaxHeaderBytes = 64 << 10;

void AppendVarint(std::string& out, uint64_t value) {
  for (; value >= 128; value >>= 7) out.push_back(static_cast<char>(value | 128));
  out.push_back(static_cast<char>(value));
}

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("a bulk message is malformed: ", what));
}

// Hands the next `length` bytes on, part by part, without copying.
absl::Status PassOn(CodedInputStream& in, uint32_t length, const std::function<absl::Status(absl::string_view)>& data) {
  while (length > 0) {
    const void* part;
    int size;
    if (!in.GetDirectBufferPointer(&part, &size) || size == 0) return Malformed("its data is cut off");
    const uint32_t take = std::min<uint32_t>(length, static_cast<uint32_t>(size));
    RETURN_IF_ERROR(data(absl::string_view(static_cast<const char*>(part), take)));
    in.Skip(static_cast<int>(take));
    length -= take;
  }
  return absl::OkStatus();
}

}  // namespace

grpc::ByteBuffer EncodeChunk(absl::string_view header, const grpc::Slice& data) {
  std::string prefix;
  if (!header.empty()) {
    AppendVarint(prefix, kHeaderTag);
    AppendVarint(prefix, header.size());
    prefix.append(header.data(), header.size());
  }
  if (data.size() == 0) {
    const grpc::Slice only(prefix);
    return grpc::ByteBuffer(&only, 1);
  }
  AppendVarint(prefix, kDataTag);
  AppendVarint(prefix, data.size());
  const grpc::Slice slices[2] = {grpc::Slice(prefix), data};
  return grpc::ByteBuffer(slices, 2);
}

absl::Status DecodeChunk(grpc::ByteBuffer& buffer, std::string& header, bool& has_header,
                         const std::function<absl::Status(absl::string_view)>& data) {
  has_header = false;
  grpc::ProtoBufferReader reader(&buffer);
  if (!reader.status().ok()) return Malformed("it cannot be read");
  CodedInputStream in(&reader);
  while (const uint32_t tag = in.ReadTag()) {
    uint32_t length = 0;
    if (tag == kHeaderTag) {
      if (!in.ReadVarint32(&length) || length > kMaxHeaderBytes || !in.ReadString(&header, static_cast<int>(length))) {
        return Malformed("its header is cut off or over 64 KiB");
      }
      has_header = true;
    } else if (tag == kDataTag) {
      if (!in.ReadVarint32(&length)) return Malformed("its length is cut off");
      RETURN_IF_ERROR(PassOn(in, length, data));
    } else if (!WireFormatLite::SkipField(&in, tag)) {
      return Malformed(absl::StrCat("field with tag ", tag));
    }
  }
  return in.ConsumedEntireMessage() ? absl::OkStatus() : Malformed("it does not end at a field");
}

absl::Status ReadAll(const grpc::ByteBuffer& buffer, std::string& bytes) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return Malformed("it cannot be read");
  bytes.clear();
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return absl::OkStatus();
}

}  // namespace shardmesh
