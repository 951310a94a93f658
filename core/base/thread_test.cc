#include "core/base/thread.h"

#include <pthread.h>

#include <cerrno>
#include <new>
#include <stdexcept>
#include <system_error>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Thread, RunsWhatItIsGiven) {
  bool ran = false;
  ASSERT_OK_AND_ASSIGN(std::thread thread, StartThread("a test", [&] { ran = true; }));
  thread.join();
  EXPECT_TRUE(ran);
}

// The system has no room for the stack of one.
TEST(Thread, NoneIsLeft_TheCallerIsTold) {
  pthread_attr_t before, huge;
  ASSERT_EQ(pthread_getattr_default_np(&before), 0);
  ASSERT_EQ(pthread_attr_init(&huge), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&huge, size_t{1} << 47), 0);  // all addresses that a process may have
  ASSERT_EQ(pthread_setattr_default_np(&huge), 0);
  bool ran = false;
  absl::StatusOr<std::thread> thread = StartThread("a test", [&] { ran = true; });
  const absl::Status checked = CheckThreads(1);
  ASSERT_EQ(pthread_setattr_default_np(&before), 0);
  ASSERT_EQ(pthread_attr_destroy(&huge), 0);
  ASSERT_EQ(pthread_attr_destroy(&before), 0);
  if (thread.ok()) thread->join();
  EXPECT_THAT(thread.status(), StatusIs(absl::StatusCode::kResourceExhausted,
                                        AllOf(HasSubstr("no thread is left for a test"), HasSubstr("RLIMIT_NPROC"))));
  EXPECT_FALSE(ran);
  EXPECT_THAT(checked, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("it gets 0:")));
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
