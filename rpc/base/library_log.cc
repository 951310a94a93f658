#include "rpc/base/library_log.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <mutex>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "rpc/base/main_support.h"

namespace shardmesh {
namespace {

void Log(spdlog::level::level_enum level, const char* library, absl::string_view text) {
  const auto logger = spdlog::default_logger();
  if (logger == nullptr || logger->name() != kLogName) return;
  logger->log(level, "event=library_log library={} text={}", library, Quoted(text));
}

// gRPC 1.51 says this where the timer that bounds the wait for a keepalive ping's answer runs though the answer is there
// (chttp2_transport.cc, keepalive_watchdog_fired_locked). The function then does nothing but say so. Each channel pings
// twice in its peer_timeout (rpc/channel.h), so that a busy machine, where timers run late, comes to it again and again.
bool IsHarmless(absl::string_view text) { return absl::StartsWith(text, "keepalive_ping_end state error: "); }

void FromGrpc(gpr_log_func_args* args) {
  const absl::string_view text = args->message;
  const bool error = args->severity == GPR_LOG_SEVERITY_ERROR && !IsHarmless(text);
  Log(error ? spdlog::level::warn : spdlog::level::debug, "grpc", text);
}

void FromProtobuf(google::protobuf::LogLevel level, const char*, int, const std::string& text) {
  Log(level >= google::protobuf::LOGLEVEL_WARNING ? spdlog::level::warn : spdlog::level::debug, "protobuf", text);
}

}  // namespace

void RouteLibraryLogs() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (std::getenv("GRPC_VERBOSITY") != nullptr) return;
    gpr_set_log_function(FromGrpc);
    google::protobuf::SetLogHandler(FromProtobuf);
  });
}

}  // namespace shardmesh
