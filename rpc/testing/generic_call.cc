#include "rpc/testing/generic_call.h"

#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>

#include "absl/time/clock.h"
#include "rpc/base/status.h"

namespace shardmesh::testing {
namespace {

bool NextOk(grpc::CompletionQueue& queue) {
  void* tag = nullptr;
  bool ok = false;
  return queue.Next(&tag, &ok) && ok;  // ends with the call's deadline
}

}  // namespace

absl::StatusOr<std::string> GenericCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                                        const std::string& request) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(nullptr);
  bool ok = NextOk(queue);
  if (ok) {
    const grpc::Slice slice(request);
    call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
    ok = NextOk(queue);
  }
  std::string reply;
  if (ok) {
    grpc::ByteBuffer buffer;
    call->Read(&buffer, nullptr);
    grpc::Slice slice;
    if (NextOk(queue) && buffer.DumpToSingleSlice(&slice).ok()) {
      reply.assign(reinterpret_cast<const char*>(slice.begin()), slice.size());
    }
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  NextOk(queue);
  if (!status.ok()) return FromGrpc(status, method);
  return reply;
}

}  // namespace shardmesh::testing
