#include "worker/transport/nccl/nccl_group.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "core/base/status.h"
#include "local/memory/futex.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kLong = absl::Milliseconds(50);  // a call that lasts longer looks for signs
constexpr absl::Duration kBetweenLooks = absl::Seconds(1);
constexpr absl::Duration kFarewell = absl::Seconds(10);
constexpr int64_t kLeastStaging = 1 << 16, kMostStaging = int64_t{1} << 40;

// Between two looks at the device: at first nothing, then an eighth of what was waited, at most half a millisecond.
void PauseAfter(int64_t waited_nanos) {
  if (waited_nanos < 200000) return std::this_thread::yield();
  absl::SleepFor(absl::Nanoseconds(std::min<int64_t>(waited_nanos / 8, 500000)));
}

absl::Status CheckOptions(const NcclGroup::Options& options) {
  if (options.size < 1 || options.size > kMaxGroupRanks || options.rank < 0 || options.rank >= options.size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", options.rank, " of ", options.size, "; a group has 1 to ",
                                                   kMaxGroupRanks, ", which begin at 0"));
  }
  if (options.staging_bytes < kLeastStaging || options.staging_bytes > kMostStaging) {
    return absl::InvalidArgumentError(
        absl::StrCat("staging of ", options.staging_bytes, " bytes; it has ", kLeastStaging, " to 2^40"));
  }
  if (!options.set || !options.get || options.name.empty()) {
    return absl::InvalidArgumentError("a group of NCCL needs a rendezvous (set, get) and a name there");
  }
  return absl::OkStatus();
}

}  // namespace

// ---- Joining and leaving. ----

NcclGroup::NcclGroup(const NcclLibrary& nccl, std::unique_ptr<DeviceRuntime> device, Options options)
    : Group(options.rank, options.size, options.epoch),
      nccl_(nccl.api()),
      options_(std::move(options)),
      device_(std::move(device)),
      signs_(options_.name, rank(), size(), options_.set, options_.get) {}

absl::StatusOr<std::unique_ptr<NcclGroup>> NcclGroup::Join(const NcclLibrary& nccl,
                                                           std::unique_ptr<DeviceRuntime> device, Options options,
                                                           absl::Duration timeout) {
  RETURN_IF_ERROR(CheckOptions(options));
  std::unique_ptr<NcclGroup> group(new NcclGroup(nccl, std::move(device), std::move(options)));
  CallHeader joining;
  joining.epoch = group->epoch();
  RETURN_IF_ERROR(group->Make(joining, timeout, [&](Call& call) { return group->Connect(call); }));
  return group;
}

absl::Status NcclGroup::Connect(Call& call) {
  ASSIGN_OR_RETURN(staging_, device_->Allocate(options_.staging_bytes + size() * sizeof(Ticket)));
  signs_.Show(call.point());
  const std::string key = absl::StrCat(options_.name, "/id");
  NcclUniqueId id;
  if (rank() == 0) {
    const NcclResult made = nccl_.GetUniqueId(&id);
    if (made != kNcclSuccess) return Failed(call, made);
    RETURN_IF_ERROR(options_.set(key, absl::string_view(id.internal, sizeof(id.internal))));
  } else {
    const auto given = options_.get(key, call.timeout);
    if (absl::IsDeadlineExceeded(given.status())) return Late(call);
    RETURN_IF_ERROR(given.status());
    if (given->size() != sizeof(id.internal)) {
      return absl::FailedPreconditionError(absl::StrCat("'", key, "' in the rendezvous has ", given->size(),
                                                        " bytes; an id of NCCL has ", sizeof(id.internal)));
    }
    std::memcpy(id.internal, given->data(), sizeof(id.internal));
  }
  NcclConfig config;
  config.blocking = 0;
  return Run(call, nccl_.CommInitRankConfig(&comm_, size(), id, rank(), &config));
}

void NcclGroup::AbortCommunicator() {
  if (comm_ == nullptr) return;
  nccl_.CommAbort(comm_);  // in the background, where it lasts
  comm_ = nullptr;
}

bool NcclGroup::Drain(int64_t until) {
  const int64_t begin = MonotonicNanos();
  absl::StatusOr<bool> idle = device_->Idle();
  while (idle.ok() && !*idle && MonotonicNanos() < until) {
    PauseAfter(MonotonicNanos() - begin);
    idle = device_->Idle();
  }
  return !idle.ok() || *idle;
}

void NcclGroup::Leave() {
  const int64_t begin = MonotonicNanos(), until = begin + absl::ToInt64Nanoseconds(kFarewell);
  NcclResult left = kNcclInternalError;
  if (comm_ != nullptr && !signs_.ended()) {
    for (Block& block : blocks_) {
      if (block.window != nullptr) nccl_.CommWindowDeregister(comm_, std::exchange(block.window, nullptr));
    }
  }
  // Peers may still need what this rank's communicator sends in the background; an end in good order waits for it.
  if (comm_ != nullptr && !signs_.ended()) left = nccl_.CommFinalize(comm_);
  while (left == kNcclInProgress && MonotonicNanos() < until) {
    PauseAfter(MonotonicNanos() - begin);
    if (nccl_.CommGetAsyncError(comm_, &left) != kNcclSuccess) left = kNcclInternalError;
  }
  if (left == kNcclSuccess) nccl_.CommDestroy(std::exchange(comm_, nullptr));
  AbortCommunicator();
  // A device that is still busy may write there; to free the memory would wait for it, without a time limit.
  if (!Drain(until)) return static_cast<void>(device_.release());
  device_->Free(staging_);
  FreeBlocks();
}

void NcclGroup::FreeBlocks() {
  for (const Block& block : blocks_) nccl_.MemFree(block.memory);
  blocks_.clear();
}

NcclGroup::~NcclGroup() {
  DeviceRuntime::Scope scope(*device_);
  Leave();
}

absl::Status NcclGroup::End(const absl::Status& status) {
  const bool first = signs_.End(status.message());
  AbortCommunicator();
  Drain(MonotonicNanos() + absl::ToInt64Nanoseconds(kFarewell));  // copies of the caller's memory may be under way
  return first ? status : GroupEnded(signs_.reason());
}

absl::Status NcclGroup::Make(const CallHeader& header, absl::Duration timeout,
                             absl::FunctionRef<absl::Status(Call&)> body) {
  DeviceRuntime::Scope scope(*device_);
  if (signs_.ended()) {
    AbortCommunicator();
    return GroupEnded(signs_.reason());
  }
  Call call = {header, timeout, MonotonicNanos() + absl::ToInt64Nanoseconds(timeout)};
  const absl::Status status = body(call);
  return status.ok() ? status : End(status);
}

// ---- Waiting. ----

absl::Status NcclGroup::Failed(const Call& call, NcclResult result) const {
  const char* last = nccl_.GetLastError(comm_);
  return absl::UnavailableError(
      absl::StrCat("NCCL failed on rank ", rank(), call.header.number == 0 ? " while it joined" : " in ",
                   call.header.number == 0 ? "" : DescribeCall(call.header), ": ", nccl_.GetErrorString(result),
                   last != nullptr && last[0] != '\0' ? absl::StrCat(" (", last, ")") : ""));
}

absl::Status NcclGroup::Late(const Call& call) const {
  const std::vector<int> missing = signs_.Missing(call.point());
  if (call.header.number > 0 && !call.agreed && !missing.empty()) {
    return MissingRanks(missing, call.header, call.timeout);
  }
  const std::string ranks = absl::StrCat(missing.size() == 1 ? "rank " : "ranks ", absl::StrJoin(missing, ", "));
  return absl::UnavailableError(absl::StrCat(
      call.header.number == 0 ? absl::StrCat("group '", options_.name, "' was not formed")
                              : absl::StrCat("NCCL did not end ", DescribeCall(call.header)),
      " within ", absl::FormatDuration(call.timeout), "; ",
      missing.empty() ? "every rank is there, and waits for NCCL"
                      : absl::StrCat(ranks, call.header.number == 0 ? " did not join" : " gave no sign of waiting")));
}

absl::Status NcclGroup::Await(const Call& call) {
  const int64_t begin = MonotonicNanos();
  int64_t between = absl::ToInt64Nanoseconds(std::min(kLong, call.timeout / 4)), look = begin + between;
  bool shown = false;
  while (true) {
    NcclResult state = kNcclSuccess;
    const NcclResult asked = nccl_.CommGetAsyncError(comm_, &state);
    if (asked != kNcclSuccess) state = asked;
    if (state != kNcclSuccess && state != kNcclInProgress) return Failed(call, state);
    if (state == kNcclSuccess) {
      // Only now is everything in the stream.
      ASSIGN_OR_RETURN(const bool idle, device_->Idle());
      if (idle) return absl::OkStatus();
    }
    if (signs_.ended()) return GroupEnded(signs_.reason());
    const int64_t now = MonotonicNanos();
    if (now >= call.until_nanos) return Late(call);
    if (now >= look) {
      if (!std::exchange(shown, true)) signs_.Show(call.point());
      signs_.Look();
      between = std::min(2 * between, absl::ToInt64Nanoseconds(kBetweenLooks));
      look = now + between;
    }
    PauseAfter(now - begin);
  }
}

absl::Status NcclGroup::Run(const Call& call, NcclResult result) {
  if (result != kNcclSuccess && result != kNcclInProgress) return Failed(call, result);
  return Await(call);
}

absl::Status NcclGroup::ToHost(const Call& call, void* to, const char* from, int64_t bytes) {
  RETURN_IF_ERROR(device_->Copy(to, from, bytes));
  return Await(call);
}

// ---- Agreeing. ----

absl::Status NcclGroup::CheckTicket(const Ticket& mine, const Ticket& theirs, int peer) const {
  RETURN_IF_ERROR(CheckHeader(mine.header, theirs.header, rank(), peer));
  if (mine.staging_bytes == theirs.staging_bytes && mine.fast == theirs.fast) return absl::OkStatus();
  const auto describe = [](const Ticket& ticket) {
    return absl::StrCat(ticket.fast != 0 ? "fast" : "exact", " mode with staging of ", ticket.staging_bytes, " bytes");
  };
  return absl::FailedPreconditionError(absl::StrCat("rank ", peer, " is in ", describe(theirs), ", rank ", rank(),
                                                    " in ", describe(mine), "; both are the same on all ranks"));
}

absl::StatusOr<bool> NcclGroup::Agree(Call& call, bool in_place) {
  constexpr int64_t kBytes = sizeof(Ticket);
  std::vector<Ticket> tickets(size());
  const Ticket mine = {call.header, options_.staging_bytes, options_.fast, in_place};
  char* all = staging_ + options_.staging_bytes;
  char* own = all + rank() * kBytes;
  RETURN_IF_ERROR(device_->Copy(own, &mine, kBytes));
  RETURN_IF_ERROR(Run(call, nccl_.AllGather(own, all, kBytes, kNcclInt8, comm_, device_->stream())));
  RETURN_IF_ERROR(ToHost(call, tickets.data(), all, size() * kBytes));
  for (int peer = 0; peer < size(); ++peer) {
    RETURN_IF_ERROR(CheckTicket(mine, tickets[peer], peer));
    in_place = in_place && tickets[peer].in_place != 0;
  }
  call.agreed = true;
  return in_place;
}

absl::Status NcclGroup::DoBarrier(const CallHeader& header, absl::Duration timeout) {
  return Make(header, timeout, [&](Call& call) { return Agree(call, true).status(); });
}

// ---- Memory. ----

absl::StatusOr<char*> NcclGroup::Allocate(int64_t bytes, absl::Duration timeout) {
  if (bytes < 1 || bytes > kMostStaging) {
    return absl::InvalidArgumentError(absl::StrCat("memory of ", bytes, " bytes; ask for 1 to 2^40"));
  }
  const size_t rounded = (bytes + kNcclWindowAlignment - 1) / kNcclWindowAlignment * kNcclWindowAlignment;
  bool everywhere = false;
  RETURN_IF_ERROR(Make(NextHeader(CallKind::kAllocate, bytes), timeout, [&](Call& call) -> absl::Status {
    Block& block = blocks_.emplace_back();
    const bool here = nccl_.MemAlloc(&block.memory, rounded) == kNcclSuccess;
    if (!here) block.memory = nullptr;
    ASSIGN_OR_RETURN(everywhere, Agree(call, here));
    if (!everywhere) {
      if (here) nccl_.MemFree(block.memory);
      blocks_.pop_back();
      return absl::OkStatus();
    }
    return Run(call, nccl_.CommWindowRegister(comm_, block.memory, rounded, &block.window, kNcclWindowSymmetric));
  }));
  if (everywhere) return static_cast<char*>(blocks_.back().memory);
  return absl::ResourceExhaustedError(
      absl::StrCat("not every rank of group '", options_.name, "' has ", rounded, " bytes of device memory left"));
}

bool NcclGroup::windows() const {
  return std::all_of(blocks_.begin(), blocks_.end(), [](const Block& block) { return block.window != nullptr; });
}

// ---- Moving. ----

absl::Status NcclGroup::Exchange(const Call& call, const std::vector<Parcel>& sent, const std::vector<Parcel>& received,
                                 int64_t bytes) {
  NcclResult result = nccl_.GroupStart();
  if (result != kNcclSuccess) return Failed(call, result);
  for (const Parcel& each : sent) {
    if (result != kNcclSuccess) break;
    result = nccl_.Send(each.memory, bytes, kNcclInt8, each.peer, comm_, device_->stream());
  }
  for (const Parcel& each : received) {
    if (result != kNcclSuccess) break;
    result = nccl_.Recv(each.memory, bytes, kNcclInt8, each.peer, comm_, device_->stream());
  }
  const NcclResult ended = nccl_.GroupEnd();  // whatever happened in it
  return Run(call, result == kNcclSuccess ? ended : result);
}

absl::Status NcclGroup::DoAllGather(const CallHeader& header, const char* mine, char* all, absl::Duration timeout) {
  return Make(header, timeout, [&](Call& call) -> absl::Status {
    const int64_t bytes = header.bytes;
    ASSIGN_OR_RETURN(const bool in_place, Agree(call, bytes == 0 || (device_->Owns(mine) && device_->Owns(all))));
    if (in_place && bytes > 0) {
      return Run(call, nccl_.AllGather(mine, all, bytes, kNcclInt8, comm_, device_->stream()));
    }
    const int64_t part = options_.staging_bytes / size();
    for (int64_t begin = 0; begin < bytes; begin += part) {
      const int64_t some = std::min(part, bytes - begin);
      char* own = staging_ + rank() * some;
      RETURN_IF_ERROR(device_->Copy(own, mine + begin, some));
      RETURN_IF_ERROR(Run(call, nccl_.AllGather(own, staging_, some, kNcclInt8, comm_, device_->stream())));
      for (int peer = 0; peer < size(); ++peer) {
        RETURN_IF_ERROR(device_->Copy(all + peer * bytes + begin, staging_ + peer * some, some));
      }
      RETURN_IF_ERROR(Await(call));
    }
    return absl::OkStatus();
  });
}

absl::Status NcclGroup::DoAllToAll(const CallHeader& header, const char* mine, char* theirs, absl::Duration timeout) {
  return Make(header, timeout, [&](Call& call) -> absl::Status {
    const int64_t bytes = header.bytes;
    ASSIGN_OR_RETURN(const bool in_place, Agree(call, bytes == 0 || (device_->Owns(mine) && device_->Owns(theirs))));
    const int64_t part = in_place ? bytes : options_.staging_bytes / 2 / size();
    std::vector<Parcel> sent(size()), received(size());
    for (int64_t begin = 0; begin < bytes; begin += part) {
      const int64_t some = std::min(part, bytes - begin);
      for (int peer = 0; peer < size(); ++peer) {
        // NCCL does not write what is sent.
        sent[peer] = {in_place ? const_cast<char*>(mine) + peer * bytes : staging_ + peer * some, peer};
        received[peer] = {in_place ? theirs + peer * bytes : staging_ + (size() + peer) * some, peer};
        if (!in_place) RETURN_IF_ERROR(device_->Copy(sent[peer].memory, mine + peer * bytes + begin, some));
      }
      RETURN_IF_ERROR(Exchange(call, sent, received, some));
      for (int peer = 0; peer < size() && !in_place; ++peer) {
        RETURN_IF_ERROR(device_->Copy(theirs + peer * bytes + begin, received[peer].memory, some));
      }
      if (!in_place) RETURN_IF_ERROR(Await(call));
    }
    return absl::OkStatus();
  });
}

absl::Status NcclGroup::DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) {
  return Make(header, timeout, [&](Call& call) -> absl::Status {
    const int64_t bytes = header.bytes;
    ASSIGN_OR_RETURN(const bool in_place, Agree(call, bytes == 0 || device_->Owns(memory)));
    const int64_t part = in_place ? bytes : options_.staging_bytes;
    for (int64_t begin = 0; begin < bytes; begin += part) {
      const int64_t some = std::min(part, bytes - begin);
      char* at = in_place ? memory : staging_;
      if (!in_place && rank() == root) RETURN_IF_ERROR(device_->Copy(at, memory + begin, some));
      RETURN_IF_ERROR(Run(call, nccl_.Broadcast(at, at, some, kNcclInt8, root, comm_, device_->stream())));
      if (!in_place && rank() != root) RETURN_IF_ERROR(ToHost(call, memory + begin, at, some));
    }
    return absl::OkStatus();
  });
}

}  // namespace shardmesh
