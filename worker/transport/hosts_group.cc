#include "worker/transport/hosts_group.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr absl::Duration kStep = absl::Seconds(1);  // that a wait may last longer than the one before

// to[b][a] = from[a][b], pieces of `bytes`.
void Turn(const char* from, char* to, int a_size, int b_size, int64_t bytes) {
  for (int64_t a = 0; a < a_size && bytes > 0; ++a) {
    for (int64_t b = 0; b < b_size; ++b) {
      std::memcpy(to + (b * a_size + a) * bytes, from + (a * b_size + b) * bytes, static_cast<size_t>(bytes));
    }
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostsGroup>> HostsGroup::Join(std::unique_ptr<Group> within,
                                                             std::unique_ptr<Group> between) {
  if (within->epoch() != between->epoch()) {
    return absl::InvalidArgumentError(absl::StrCat("a host's group is of epoch ", within->epoch(),
                                                   ", that between hosts of ", between->epoch(),
                                                   "; give them the same"));
  }
  if (within->size() > kMaxGroupRanks / between->size()) {
    return absl::InvalidArgumentError(absl::StrCat(within->size(), " ranks on each of ", between->size(),
                                                   " hosts; a group has 1 to ", kMaxGroupRanks));
  }
  return std::unique_ptr<HostsGroup>(new HostsGroup(std::move(within), std::move(between)));
}

HostsGroup::HostsGroup(std::unique_ptr<Group> within, std::unique_ptr<Group> between)
    : Group(between->rank() * within->size() + within->rank(), between->size() * within->size(), within->epoch()),
      within_(std::move(within)),
      between_(std::move(between)) {}

void HostsGroup::Abort(absl::string_view reason) {
  within_->Abort(reason);
  between_->Abort(reason);
}

absl::Status HostsGroup::Agree(const CallHeader& header, const TimeLeft& left) {
  std::vector<CallHeader> of_host(places()), all(size());
  RETURN_IF_ERROR(within_->AllGather(&header, of_host.data(), sizeof(header), left(0)));
  RETURN_IF_ERROR(between_->AllGather(of_host.data(), all.data(), places() * sizeof(header), left(1)));
  for (int peer = 0; peer < size(); ++peer) RETURN_IF_ERROR(CheckHeader(header, all[peer], rank(), peer));
  return absl::OkStatus();
}

absl::Status HostsGroup::Call(const CallHeader& header, absl::Duration timeout,
                              const std::function<absl::Status(const TimeLeft&)>& rest) {
  const absl::Time until = MonotonicNow() + timeout;
  const TimeLeft left = [=](int number) { return until - MonotonicNow() + number * kStep; };
  absl::Status status = Agree(header, left);
  if (status.ok()) status = rest(left);
  if (status.ok()) return status;
  if (absl::IsUnavailable(status)) status = Annotate(status, DescribeCall(header));
  Abort(status.message());
  return status;
}

absl::Status HostsGroup::DoBarrier(const CallHeader& header, absl::Duration timeout) {
  return Call(header, timeout, [](const TimeLeft&) { return absl::OkStatus(); });
}

absl::Status HostsGroup::DoAllGather(const CallHeader& header, const char* mine, char* all, absl::Duration timeout) {
  return Call(header, timeout, [&](const TimeLeft& left) {
    crossed_.resize(static_cast<size_t>(header.bytes * hosts()));
    shared_.resize(static_cast<size_t>(header.bytes * size()));
    RETURN_IF_ERROR(between_->AllGather(mine, crossed_.data(), header.bytes, left(2)));
    RETURN_IF_ERROR(within_->AllGather(crossed_.data(), shared_.data(), header.bytes * hosts(), left(3)));
    Turn(shared_.data(), all, places(), hosts(), header.bytes);
    return absl::OkStatus();
  });
}

absl::Status HostsGroup::DoAllToAll(const CallHeader& header, const char* mine, char* theirs, absl::Duration timeout) {
  return Call(header, timeout, [&](const TimeLeft& left) {
    for (auto* memory : {&crossed_, &turned_, &shared_}) memory->resize(static_cast<size_t>(header.bytes * size()));
    // What all places of a host get from this rank goes to its own place there, and on from there.
    RETURN_IF_ERROR(between_->AllToAll(mine, crossed_.data(), header.bytes * places(), left(2)));
    Turn(crossed_.data(), turned_.data(), hosts(), places(), header.bytes);
    RETURN_IF_ERROR(within_->AllToAll(turned_.data(), shared_.data(), header.bytes * hosts(), left(3)));
    Turn(shared_.data(), theirs, places(), hosts(), header.bytes);
    return absl::OkStatus();
  });
}

absl::Status HostsGroup::DoBroadcast(const CallHeader& header, char* memory, int root, absl::Duration timeout) {
  return Call(header, timeout, [&](const TimeLeft& left) {
    const int host = root / places(), place = root % places();
    if (within_->rank() == place) RETURN_IF_ERROR(between_->Broadcast(memory, header.bytes, host, left(2)));
    return within_->Broadcast(memory, header.bytes, place, left(3));
  });
}

}  // namespace shardmesh
