// MeetingPlace: where the leads of a job's hosts find each other, on the worker of rank 0: values of the first meeting,
// and of the newest one in which they met again.
//
// To meet again each lead comes with a number that it takes once. When all have come the meeting has a key, under which
// they connect (host_meeting.h). A lead that comes with another number was killed meanwhile, or lost a connection: that
// meeting is over, the others are told, and come anew. If rank 0's own worker was killed its next incarnation has a new
// place, and all come to that.
//
// Thread-safe.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/sync.h"
#include "worker/transport/rendezvous.h"

namespace shardmesh {

class MeetingPlace {
 public:
  // The meeting of a new job, to which nobody has to come.
  static constexpr char kFirst[] = "first";

  struct Meeting {
    std::string key;   // empty: not all have come
    int missing = -1;  // then: a host whose lead has not
  };
  // The lead of `host`, of so many, comes with its number. Aborted: the meeting that it came to with that number is
  // over. InvalidArgument: no such host, or the number is empty or longer than kMaxNumber.
  absl::StatusOr<Meeting> Come(int host, int num_hosts, const std::string& number);
  static constexpr size_t kMaxNumber = 64;

  // A value of a meeting. Aborted: that one is over. Otherwise as MemoryRendezvous's.
  absl::Status Set(const std::string& meeting, const std::string& key, absl::string_view value);
  absl::StatusOr<std::string> Get(const std::string& meeting, const std::string& key, absl::Duration timeout);

  // Why the leads cannot meet. The first cause stays.
  void TellNotMet(absl::string_view cause);
  // OK, or FailedPrecondition with that cause.
  absl::Status Check();

 private:
  absl::StatusOr<std::shared_ptr<MemoryRendezvous>> ValuesOf(const std::string& meeting);

  Mutex mu_;
  std::string not_met_ ABSL_GUARDED_BY(mu_);
  std::map<int, std::string> there_ ABSL_GUARDED_BY(mu_);  // the numbers of who has come, by host
  std::string key_ ABSL_GUARDED_BY(mu_);                   // of the meeting of all those; empty: not all have come
  std::deque<std::string> over_ ABSL_GUARDED_BY(mu_);      // numbers of meetings that are over, the newest last
  const std::shared_ptr<MemoryRendezvous> first_ = NewValues();
  std::shared_ptr<MemoryRendezvous> values_ ABSL_GUARDED_BY(mu_);  // of key_

  static std::shared_ptr<MemoryRendezvous> NewValues();
};

}  // namespace shardmesh
