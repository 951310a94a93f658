#include "worker/relay/relay_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/incarnation.h"
#include "rpc/base/status.h"
#include "rpc/base/unary.h"

namespace shardmesh {

grpc::ServerUnaryReactor* RelayService::Heartbeat(grpc::CallbackServerContext* context,
                                                  const v1::HeartbeatRequest* request, v1::HeartbeatReply* reply) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  absl::Status status = RequireDeadline(*context, "Heartbeat");
  if (status.ok()) {
    status = CallWithoutThrowing([&]() -> absl::Status {
      relay_.Take(*request, [context, reply, reactor](absl::StatusOr<v1::HeartbeatReply> told) {
        if (told.ok()) {
          *reply = *std::move(told);
        } else if (const auto next = NextIncarnationOf(told.status()); next.has_value()) {
          context->AddTrailingMetadata(kNextIncarnationKey, absl::StrCat(*next));
        }
        reactor->Finish(ToGrpc(told.status()));
      });
      return absl::OkStatus();
    });
  }
  if (!status.ok()) reactor->Finish(ToGrpc(status));
  return reactor;
}

}  // namespace shardmesh
