// What every main of the product does first: memory allocator, descriptor limit, signals, log.
//
//   int main(int argc, char** argv) {
//     ... parse flags ...
//     StopSignal stop;                                      // before any thread is started
//     if (auto s = PrepareProcess({log_level}); !s.ok()) ...
//     auto server = Server::Start(...);
//     while (!stop.WaitFor(absl::Seconds(1))) { ... }
//     server->Drain(grace);
//   }
#pragma once

#include <atomic>
#include <csignal>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace shardmesh {

inline constexpr int kMinThreads = 24;  // of a process that serves calls; 16 were seen before its first job

struct ProcessOptions {
  std::string log_level = "info";  // trace, debug, info, warn, error, off
  bool raise_descriptor_limit = true;
  int threads = kMinThreads;  // that the process needs at once; 0: nothing is checked
};

// Sets the allocator up (see TuneAllocator), ignores SIGPIPE, raises the soft descriptor limit to the hard one if
// asked, and makes spdlog's default logger write lines of key=value to stderr. Call once, from main, before threads are
// started. InvalidArgument: unknown log level; choose one of the six. FailedPrecondition: as CheckDescriptorLimit, if
// the limit was to be raised; the threads, or the address space for them, cannot be had.
absl::Status PrepareProcess(const ProcessOptions& options);

// Keeps freed memory of up to 2 GiB for the next message instead of giving it back to the kernel: gRPC's receive slices
// otherwise spend their time in page faults (1.5 to 2.2 times the bulk rate on two cores). The price: resident memory
// stays at its high-water mark.
void TuneAllocator();

// The soft limit of open descriptors becomes the hard one.
// Internal: the kernel refused (errno in the message).
absl::Status RaiseDescriptorLimit();

inline constexpr int kMinDescriptors = 96;  // the least with which a worker has been seen to train a job

// FailedPrecondition: the soft limit is below kMinDescriptors; with fewer, connections wait for ever. Names the limit.
absl::Status CheckDescriptorLimit();

inline constexpr int64_t kMinAddressSpace = int64_t{2} << 30;  // a worker without a job was seen to take half of it

// FailedPrecondition: RLIMIT_AS is below kMinAddressSpace; with less, gRPC ends the process. Names the limit.
absl::Status CheckAddressSpace();

// The name of the logger that SetUpLog makes the default one.
inline constexpr char kLogName[] = "shardmesh";

// Lines look like: ts=2026-01-31T12:00:00.123456Z level=info event=joined worker=3
// The text after the level is what the caller logged; use Quoted for every value that a peer or a file gave.
// InvalidArgument: the level is none of trace, debug, info, warn, error, off.
absl::Status SetUpLog(absl::string_view level);

// `value` in double quotes with control characters, quotes and backslashes escaped, cut after 500 bytes: one log line
// stays one line, whatever a peer sent.
std::string Quoted(absl::string_view value);

// SIGTERM and SIGINT as something to wait for. Construct one, in main, before any thread is started: the signals are
// blocked in the constructing thread and so in all threads it starts (and in child processes, which must unblock them).
// The destructor restores the mask. Thread-safe.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  // True as soon as a stop was asked for, now or earlier; false when `timeout` passed without one.
  bool WaitFor(absl::Duration timeout);
  // Asks for the stop from inside the process.
  void Trigger();

 private:
  sigset_t old_mask_;
  int signal_fd_;
  int event_fd_;
  std::atomic<bool> stopped_{false};
};

}  // namespace shardmesh
