// Real processes that are really killed and stopped in the middle of calls: the others end in time, and say who it was.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/clock.h"
#include "core/base/matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "local/testing/temp_folder.h"
#include "worker/transport/gloo_group.h"
#include "worker/transport/secure/testing/secure_ranks.h"
#include "worker/transport/symmetric_group.h"

namespace shardmesh {
namespace {

constexpr int kRanks = 3;
constexpr absl::Duration kLimit = absl::Seconds(15);  // until all others have ended, on a busy machine

using MakeGroup = std::function<absl::StatusOr<std::unique_ptr<Group>>(int rank)>;

// One call after the other, of all kinds, until one fails. `called` hears of the first hundred.
absl::Status CallForever(Group& group, absl::Duration call_time, const std::function<void()>& called) {
  constexpr int64_t kBytes = 200000;
  std::vector<char> mine(kBytes * kRanks), theirs(kBytes * kRanks);
  std::vector<float> piece(kBytes / 4);
  const int holders[] = {0, 1, 2};
  for (int64_t call = 0;; ++call) {
    RETURN_IF_ERROR(group.AllGather(mine.data(), theirs.data(), kBytes, call_time));
    RETURN_IF_ERROR(group.AllToAll(mine.data(), theirs.data(), kBytes, call_time));
    const void* slot[] = {mine.data()};
    RETURN_IF_ERROR(group.ReduceScatter({Format::kFp32, holders, slot, kBytes / 4}, piece.data(), call_time));
    RETURN_IF_ERROR(group.Barrier(call_time));
    if (call < 100) called();
  }
}

// A child process that is one rank, and the pipe on which it tells its calls, and then how they ended.
class Member {
 public:
  Member(const MakeGroup& make, int rank, absl::Duration call_time) {
    int ends[2];
    if (pipe(ends) != 0) return;
    pid_ = fork();
    if (pid_ == 0) {
      close(ends[0]);
      _exit(Run(make, rank, call_time, ends[1]));
    }
    close(ends[1]);
    pipe_ = UniqueFd(ends[0]);
  }
  Member(Member&&) = delete;
  ~Member() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  void Signal(int signal) const { kill(pid_, signal); }

  // Whether it has made `calls` calls in time.
  bool AwaitCalls(int calls, absl::Duration timeout) {
    const absl::Time until = MonotonicNow() + timeout;
    while (CountOf('.') < calls) {
      if (!ReadSome(until - MonotonicNow())) return false;
    }
    return true;
  }
  // What it told at its end; what it told until then, if it did not end in time.
  std::string AwaitEnd(absl::Duration timeout) {
    const absl::Time until = MonotonicNow() + timeout;
    while (ReadSome(until - MonotonicNow())) {
    }
    return told_;
  }

 private:
  static int Run(const MakeGroup& make, int rank, absl::Duration call_time, int to) {
    const auto tell = [&](const std::string& text) { (void)!write(to, text.data(), text.size()); };
    auto group = make(rank);
    if (!group.ok()) {
      tell(group.status().ToString());
      return 1;
    }
    tell(CallForever(**group, call_time, [&] { tell("."); }).ToString());
    return 0;
  }
  int CountOf(char c) const { return static_cast<int>(std::count(told_.begin(), told_.end(), c)); }
  bool ReadSome(absl::Duration timeout) {
    pollfd waited = {pipe_.get(), POLLIN, 0};
    const auto milliseconds = static_cast<int>(std::max<int64_t>(0, absl::ToInt64Milliseconds(timeout)));
    if (poll(&waited, 1, milliseconds) <= 0) return false;
    char some[512];
    const ssize_t length = read(pipe_.get(), some, sizeof(some));
    if (length > 0) told_.append(some, static_cast<size_t>(length));
    return length > 0;
  }

  pid_t pid_ = -1;
  UniqueFd pipe_;
  std::string told_;
};

enum Kind { kSymmetric, kGloo, kClear, kTls };

struct FaultCase {
  std::string name;
  Kind kind;
  int signal;
  int victim;
  absl::Duration call_time;
};

void PrintTo(const FaultCase& fault, std::ostream* out) { *out << fault.name; }

class GroupFaults : public ::testing::TestWithParam<FaultCase> {};

TEST_P(GroupFaults, OthersEndInTime_AndNameTheVictim) {
  const FaultCase& fault = GetParam();
  const testing::TempFolder folder;
  SymmetricMemory::Sizes sizes;
  sizes.staging = 1 << 16;
  auto memory = std::make_shared<SymmetricMemory>(SymmetricMemory::Create(kRanks, sizes).value());
  const MakeGroup make = [&](int rank) -> absl::StatusOr<std::unique_ptr<Group>> {
    if (fault.kind == kSymmetric) return SymmetricGroup::Join(memory, rank, /*epoch=*/1);
    if (fault.kind != kGloo) {
      return SecureGroup::Connect(std::make_shared<FolderRendezvous>(folder.path()),
                                  OptionsOf(rank, kRanks, fault.kind == kTls));
    }
    GlooOptions options;
    options.rank = rank;
    options.size = kRanks;
    options.key = "faults";
    options.host = "127.0.0.1";
    return GlooGroup::Connect(std::make_shared<FolderRendezvous>(folder.path()), options);
  };
  if (fault.kind == kTls) (void)TlsFiles("first");  // before there are processes that would all make them
  std::vector<std::unique_ptr<Member>> members;
  for (int rank = 0; rank < kRanks; ++rank) members.push_back(std::make_unique<Member>(make, rank, fault.call_time));
  for (auto& member : members) ASSERT_TRUE(member->AwaitCalls(5, absl::Seconds(60))) << member->AwaitEnd({});
  members[fault.victim]->Signal(fault.signal);
  const absl::Time begin = MonotonicNow();
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == fault.victim) continue;
    const std::string told = members[rank]->AwaitEnd(kLimit);
    EXPECT_THAT(told, ::testing::AnyOf(::testing::HasSubstr("UNAVAILABLE"), ::testing::HasSubstr("ABORTED"))) << rank;
    EXPECT_THAT(told, ::testing::HasSubstr(absl::StrCat("rank ", fault.victim))) << rank;
  }
  EXPECT_LT(MonotonicNow() - begin, kLimit);
}

// The dead are seen long before a call's time is up; the stopped when it is.
constexpr absl::Duration kLongCall = absl::Seconds(60), kShortCall = absl::Seconds(2);

INSTANTIATE_TEST_SUITE_P(All, GroupFaults,
                         ::testing::Values(FaultCase{"SymmetricKilled0", kSymmetric, SIGKILL, 0, kLongCall},
                                           FaultCase{"SymmetricKilled2", kSymmetric, SIGKILL, 2, kLongCall},
                                           FaultCase{"SymmetricStopped1", kSymmetric, SIGSTOP, 1, kShortCall},
                                           FaultCase{"GlooKilled0", kGloo, SIGKILL, 0, kLongCall},
                                           FaultCase{"GlooKilled2", kGloo, SIGKILL, 2, kLongCall},
                                           FaultCase{"GlooStopped1", kGloo, SIGSTOP, 1, kShortCall},
                                           FaultCase{"ClearKilled0", kClear, SIGKILL, 0, kLongCall},
                                           FaultCase{"ClearKilled2", kClear, SIGKILL, 2, kLongCall},
                                           FaultCase{"ClearStopped1", kClear, SIGSTOP, 1, kShortCall},
                                           FaultCase{"TlsKilled0", kTls, SIGKILL, 0, kLongCall},
                                           FaultCase{"TlsKilled2", kTls, SIGKILL, 2, kLongCall},
                                           FaultCase{"TlsStopped1", kTls, SIGSTOP, 1, kShortCall}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace shardmesh
