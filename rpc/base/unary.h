// Unary: the thin adapter between a callback-API unary method and a plain function that returns a status.
// It decides nothing but two things: a call needs a deadline, and an exception of the standard library is not a crash.
//
//   grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* context, const JoinRequest* request,
//                                  JoinResponse* response) override {
//     return Unary(context, request, response,
//                  [this](const JoinRequest& q, JoinResponse* r) { return coordinator_.Join(q, r); });
//   }
//
// `fn` runs on a thread of gRPC, which few calls share: it must not block for long. Thread-safe as `fn` is.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <exception>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "rpc/base/status.h"

namespace shardmesh {

// InvalidArgument: the caller set no deadline. `what` names the call in the message. Use it first in every stream
// reactor.
inline absl::Status RequireDeadline(const grpc::ServerContextBase& context, absl::string_view what = "this call") {
  const gpr_timespec deadline = context.raw_deadline();
  if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) < 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("no deadline set on ", what, "; set one, e.g. 10 s"));
}

// Runs `fn`, a callable without arguments that returns absl::Status. An exception becomes a status: std::bad_alloc
// kResourceExhausted, any other std::exception kInternal with its text.
template <typename Fn>
absl::Status CallWithoutThrowing(Fn&& fn) {
  try {
    return std::forward<Fn>(fn)();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory in this call; ask for less, or give the process more memory");
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat("unexpected exception: ", e.what()));
  }
}

namespace unary_internal {

template <typename Request, typename = void>
struct Name {
  static std::string Of(const Request&) { return "this call"; }
};
template <typename Request>
struct Name<Request, std::void_t<decltype(std::declval<const Request&>().GetTypeName())>> {
  static std::string Of(const Request& request) { return absl::StrCat("the call that takes ", request.GetTypeName()); }
};

}  // namespace unary_internal

// `fn(const Request&, Response*)` returns absl::Status, or anything with a .status(). The response is sent only on OK.
//   InvalidArgument: no deadline (see above); fn is not called. Else: what fn returned.
template <typename Request, typename Response, typename Fn>
grpc::ServerUnaryReactor* Unary(grpc::CallbackServerContext* context, const Request* request, Response* response,
                                Fn&& fn) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  absl::Status status = RequireDeadline(*context, unary_internal::Name<Request>::Of(*request));
  if (status.ok()) {
    status = CallWithoutThrowing([&]() -> absl::Status {
      if constexpr (std::is_convertible_v<decltype(fn(*request, response)), absl::Status>) {
        return fn(*request, response);
      } else {
        return fn(*request, response).status();
      }
    });
  }
  reactor->Finish(ToGrpc(status));
  return reactor;
}

}  // namespace shardmesh
