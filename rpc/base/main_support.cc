#include "rpc/base/main_support.h"

#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/base/thread.h"
#include "local/descriptor/descriptor_error.h"

namespace shardmesh {

void TuneAllocator() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);  // mallopt takes an int: 2 GiB - 1, the most it can be told
  mallopt(M_TOP_PAD, 64 << 20);
}

absl::Status RaiseDescriptorLimit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return absl::InternalError(absl::StrCat("getrlimit(RLIMIT_NOFILE): ", std::strerror(errno)));
  }
  if (limit.rlim_cur == limit.rlim_max) return absl::OkStatus();
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return absl::InternalError(absl::StrCat("setrlimit(RLIMIT_NOFILE, ", limit.rlim_cur, "): ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

absl::Status CheckDescriptorLimit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= rlim_t{kMinDescriptors}) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("a process of this service needs ", kMinDescriptors,
                                                    " descriptors, and more with every job and connection; ",
                                                    DescriptorLimit()));
}

absl::Status SetUpLog(absl::string_view level) {
  static constexpr absl::string_view kNames[] = {"trace", "debug", "info", "warn", "error", "off"};
  static constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::trace, spdlog::level::debug,
                                                          spdlog::level::info,  spdlog::level::warn,
                                                          spdlog::level::err,   spdlog::level::off};
  const auto* found = std::find(std::begin(kNames), std::end(kNames), level);
  if (found == std::end(kNames)) {
    return absl::InvalidArgumentError(
        absl::StrCat("log level ", Quoted(level), " is unknown; one of trace, debug, info, warn, error, off"));
  }
  auto logger = std::make_shared<spdlog::logger>(kLogName, std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern("ts=%Y-%m-%dT%H:%M:%S.%fZ level=%l %v", spdlog::pattern_time_type::utc);
  logger->set_level(kLevels[found - std::begin(kNames)]);
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(std::move(logger));
  return absl::OkStatus();
}

absl::Status CheckAddressSpace() {
  rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur >= rlim_t{kMinAddressSpace}) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("a process of this service needs ", kMinAddressSpace,
                   " bytes of address space, and more with every job; RLIMIT_AS is ", limit.rlim_cur,
                   "; raise it (ulimit -v unlimited)"));
}

std::string Quoted(absl::string_view value) {
  constexpr size_t kMaxBytes = 500;
  if (value.size() <= kMaxBytes) return absl::StrCat("\"", absl::CHexEscape(value), "\"");
  return absl::StrCat("\"", absl::CHexEscape(value.substr(0, kMaxBytes)), "...\"");
}

absl::Status PrepareProcess(const ProcessOptions& options) {
  TuneAllocator();
  signal(SIGPIPE, SIG_IGN);
  // The distribution builds Abseil and gRPC for debugging: each lock would be looked up in a graph of all locks.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  RETURN_IF_ERROR(SetUpLog(options.log_level));
  if (options.threads > 0) {
    RETURN_IF_ERROR(CheckAddressSpace());
    RETURN_IF_ERROR(CheckThreads(options.threads));
  }
  if (!options.raise_descriptor_limit) return absl::OkStatus();
  if (const absl::Status raised = RaiseDescriptorLimit(); !raised.ok()) {
    spdlog::warn("event=descriptor_limit_not_raised error={}", Quoted(raised.message()));
  }
  return CheckDescriptorLimit();
}

StopSignal::StopSignal() {
  sigset_t mask;
  sigemptyset(&mask);
  sigaddset(&mask, SIGTERM);
  sigaddset(&mask, SIGINT);
  pthread_sigmask(SIG_BLOCK, &mask, &old_mask_);
  signal_fd_ = signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC);
  event_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
}

StopSignal::~StopSignal() {
  close(signal_fd_);
  close(event_fd_);
  pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
}

bool StopSignal::WaitFor(absl::Duration timeout) {
  const absl::Time until = MonotonicNow() + timeout;
  while (!stopped_.load()) {
    const int64_t left_ms = std::clamp<int64_t>(absl::ToInt64Milliseconds(until - MonotonicNow()) + 1, 0, INT_MAX);
    pollfd fds[2] = {{signal_fd_, POLLIN, 0}, {event_fd_, POLLIN, 0}};
    const int ready = poll(fds, 2, static_cast<int>(left_ms));
    if (ready > 0) {
      // The event stays readable, so that every waiter sees it; the signal is one waiter's, who tells the others.
      signalfd_siginfo info;
      if (fds[0].revents != 0 && read(signal_fd_, &info, sizeof(info)) == sizeof(info)) Trigger();
    } else if (MonotonicNow() >= until) {
      break;
    }
  }
  return stopped_.load();
}

void StopSignal::Trigger() {
  stopped_.store(true);
  const uint64_t one = 1;
  if (write(event_fd_, &one, sizeof(one)) < 0) return;  // full: already readable
}

}  // namespace shardmesh
