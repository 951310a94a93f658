#include "rpc/calls/call_guard.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"

namespace shardmesh {

std::string ConnectionName(absl::string_view grpc_peer) {
  if (absl::StartsWith(grpc_peer, "unix")) return "";
  return absl::StrReplaceAll(grpc_peer, {{"%5B", "["}, {"%5D", "]"}});
}

void CallGuard::SetAbort(std::function<void(const std::string&)> abort) {
  MutexLock lock(mu_);
  abort_ = std::move(abort);
}

void CallGuard::Created(const void* call) {
  MutexLock lock(mu_);
  connection_of_call_.emplace(call, "");
}

void CallGuard::Started(const void* call, absl::string_view grpc_peer) {
  std::string connection = ConnectionName(grpc_peer);
  if (connection.empty()) return;
  std::function<void(const std::string&)> abort;
  {
    MutexLock lock(mu_);
    const auto it = connection_of_call_.find(call);
    if (it == connection_of_call_.end() || !it->second.empty()) return;
    it->second = connection;
    if (++open_by_connection_[connection] <= max_open_calls_) return;
    abort = abort_;
  }
  if (abort) abort(connection);
}

void CallGuard::Ended(const void* call) {
  MutexLock lock(mu_);
  const auto it = connection_of_call_.find(call);
  if (it == connection_of_call_.end()) return;
  const auto open = open_by_connection_.find(it->second);
  if (open != open_by_connection_.end() && --open->second == 0) {
    ended_.insert(open->first);
    open_by_connection_.erase(open);
  }
  connection_of_call_.erase(it);
}

bool CallGuard::HasCall(const std::string& connection) const {
  MutexLock lock(mu_);
  return open_by_connection_.count(connection) > 0 || ended_.count(connection) > 0;
}

std::unordered_set<std::string> CallGuard::TakeEnded() {
  MutexLock lock(mu_);
  return std::exchange(ended_, {});
}

int CallGuard::open_calls() const {
  MutexLock lock(mu_);
  return static_cast<int>(connection_of_call_.size());
}

}  // namespace shardmesh
