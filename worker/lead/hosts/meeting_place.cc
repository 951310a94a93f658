#include "worker/lead/hosts/meeting_place.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "core/base/plain_text.h"
#include "core/base/secret.h"
#include "core/base/status.h"
#include "worker/control/control_block.h"

namespace shardmesh {
namespace {

constexpr size_t kMostKeys = 6 * kMaxHostRanks;  // for each of three groups two keys a host
constexpr size_t kMostOver = 4 * kMaxHostRanks;  // numbers: leads ask with theirs every few milliseconds

absl::Status Over() { return absl::AbortedError("that meeting is over: a lead has come anew; come again"); }

}  // namespace

std::shared_ptr<MemoryRendezvous> MeetingPlace::NewValues() { return std::make_shared<MemoryRendezvous>(kMostKeys); }

absl::StatusOr<MeetingPlace::Meeting> MeetingPlace::Come(int host, int num_hosts, const std::string& number) {
  if (host < 0 || host >= num_hosts || number.empty() || number.size() > kMaxNumber) {
    return absl::InvalidArgumentError(absl::StrCat("the lead of host ", host, " of ", num_hosts, " comes with ",
                                                   number.size(), " bytes; 1 to ", kMaxNumber, " are a number"));
  }
  MutexLock lock(mu_);
  if (std::find(over_.begin(), over_.end(), number) != over_.end()) return Over();
  const auto there = there_.find(host);
  const bool anew = there == there_.end() || there->second != number;
  if (anew && !key_.empty()) {
    for (auto& [other, of_other] : there_) over_.push_back(std::move(of_other));
    while (over_.size() > kMostOver) over_.pop_front();
    there_.clear();
    key_.clear();
    values_.reset();
  }
  there_[host] = number;
  if (key_.empty() && static_cast<int>(there_.size()) == num_hosts) {
    key_ = absl::StrCat("again-", absl::BytesToHexString(RandomBytes(8)));
    values_ = NewValues();
  }
  Meeting meeting{key_, -1};
  for (int h = 0; h < num_hosts && key_.empty() && meeting.missing < 0; ++h) {
    if (there_.count(h) == 0) meeting.missing = h;
  }
  return meeting;
}

absl::StatusOr<std::shared_ptr<MemoryRendezvous>> MeetingPlace::ValuesOf(const std::string& meeting) {
  if (meeting == kFirst) return first_;
  MutexLock lock(mu_);
  if (key_.empty() || meeting != key_) return Over();
  return values_;
}

absl::Status MeetingPlace::Set(const std::string& meeting, const std::string& key, absl::string_view value) {
  ASSIGN_OR_RETURN(const auto values, ValuesOf(meeting));
  return values->Set(key, value);
}

absl::StatusOr<std::string> MeetingPlace::Get(const std::string& meeting, const std::string& key,
                                              absl::Duration timeout) {
  ASSIGN_OR_RETURN(const auto values, ValuesOf(meeting));
  return values->Get(key, timeout);
}

void MeetingPlace::TellNotMet(absl::string_view cause) {
  MutexLock lock(mu_);
  if (not_met_.empty()) not_met_ = PlainText(cause, kMaxCause);
}

absl::Status MeetingPlace::Check() {
  MutexLock lock(mu_);
  return not_met_.empty() ? absl::OkStatus() : absl::FailedPreconditionError(not_met_);
}

}  // namespace shardmesh
