// Reflection: answers grpc.reflection.v1alpha (server reflection) for the services of this process, and UNIMPLEMENTED
// to every other unknown method. What is answered comes from protobuf's generated descriptors.
//
// Why our own: the distribution's reflection service is of the synchronous kind, whose waiting calls nothing bounds
// (50,000 reset streams cost it 500 MiB), and it alone would need a thread pool in every server.
// Thread-safe.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server_builder.h>

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace shardmesh {

// The reply to one ServerReflectionRequest, both in wire format. A request that is not understood gets a reply with an
// error (kInvalidArgument), one that asks for what is not there kNotFound, as the protocol has it.
std::string ReflectionReply(absl::string_view request, const std::vector<std::string>& services);

// Register with ServerBuilder::RegisterCallbackGenericService, and let it learn the services by AddTo. Must outlive the
// server.
class ReflectionService final : public grpc::CallbackGenericService {
 public:
  // Call once, before BuildAndStart.
  void AddTo(grpc::ServerBuilder& builder);
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;

 private:
  const std::vector<std::string>* services_ = nullptr;  // the server's own list; set before it serves
};

}  // namespace shardmesh
