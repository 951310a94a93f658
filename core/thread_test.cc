#include "core/thread.h"

#include <cerrno>
#include <new>
#include <stdexcept>
#include <system_error>

#include "core/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

TEST(Thread, RunsWhatItIsGiven) {
  bool ran = false;
  ASSERT_OK_AND_ASSIGN(std::thread thread, StartThread("a test", [&] { ran = true; }));
  thread.join();
  EXPECT_TRUE(ran);
}

TEST(Thread, LimitsAreNamed) {
  EXPECT_THAT(ThreadLimits(), HasSubstr("RLIMIT_NPROC is "));
  EXPECT_THAT(ThreadLimits(), HasSubstr("RLIMIT_AS is "));
}

TEST(Thread, Exceptions_AreTold) {
  using Code = absl::StatusCode;
  EXPECT_OK(WithoutThrowing([] { return absl::OkStatus(); }));
  EXPECT_THAT(WithoutThrowing([]() -> absl::Status { throw std::bad_alloc(); }),
              StatusIs(Code::kResourceExhausted, HasSubstr("out of memory")));
  EXPECT_THAT(WithoutThrowing([]() -> absl::Status {
                throw std::system_error(EAGAIN, std::generic_category());
              }),
              StatusIs(Code::kResourceExhausted, HasSubstr("RLIMIT_NPROC")));
  EXPECT_THAT(WithoutThrowing([]() -> absl::Status { throw std::logic_error("odd"); }),
              StatusIs(Code::kInternal, HasSubstr("odd")));
}

TEST(Thread, EnoughThreads_TheCheckSaysSo) {
  EXPECT_OK(CheckThreads(0));
  EXPECT_OK(CheckThreads(8));
}

}  // namespace
}  // namespace shardmesh
