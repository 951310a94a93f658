// TrackCalls: lets a CallGuard see every call of the callback API on a server being built. gRPC's only hooks are used:
// the allocator of the calls' contexts (created, ended) and an interceptor factory that adds no interceptor (started).
// Calls of unknown methods are seen only when a generic callback service takes them (reflection.h).
//
// It also gives a call whose body is not its method's message INVALID_ARGUMENT with the message's name. gRPC itself
// answers UNIMPLEMENTED without a text, which a client takes for a server of an older version.
#pragma once

#include <grpcpp/server_builder.h>

#include <memory>

#include "rpc/calls/call_guard.h"

namespace shardmesh {

void TrackCalls(std::shared_ptr<CallGuard> guard, grpc::ServerBuilder& builder);

}  // namespace shardmesh
