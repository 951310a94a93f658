// HelpReconnect: lets a broken channel get on with connecting before the next call on it.
//
// gRPC moves a connection attempt on only while some thread polls. A call on a channel in TRANSIENT_FAILURE ends at
// once and polls nothing, so in a process without a server a channel whose peer came back is connected by gRPC's own
// backup poller alone, which looks every 5 s and needs several looks (measured: 15 s). Waiting for the channel polls.
// The pause that gRPC makes before its next attempt, a second and more, is dropped: who calls again knows its own
// limit.
//
// The wait does not use gRPC's timers. gRPC 1.51 measures them by the wall clock, so Channel::WaitForConnected(0.2 s)
// lasted a minute when somebody had set that back by one.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/completion_queue.h>

#include <algorithm>

#include "absl/time/time.h"
#include "core/base/clock.h"
#include "rpc/base/deadline.h"

namespace shardmesh {

// Returns at once unless the channel is broken; then when it is connected, or after at most 0.2 s and half of
// `timeout`, the time that the call itself will have. Thread-safe.
inline void HelpReconnect(grpc::Channel& channel, absl::Duration timeout) {
  if (channel.GetState(/*try_to_connect=*/false) != GRPC_CHANNEL_TRANSIENT_FAILURE) return;
  grpc::experimental::ChannelResetConnectionBackoff(&channel);
  grpc::CompletionQueue none;  // who waits for an event of it polls for all of gRPC meanwhile
  void* tag = nullptr;
  bool ok = false;
  const absl::Time until = MonotonicNow() + std::min(timeout / 2, absl::Milliseconds(200));
  while (channel.GetState(/*try_to_connect=*/true) != GRPC_CHANNEL_READY && MonotonicNow() < until) {
    none.AsyncNext(&tag, &ok, DeadlineIn(absl::Milliseconds(5)));
  }
  none.Shutdown();
  while (none.Next(&tag, &ok)) {
  }
}

}  // namespace shardmesh
