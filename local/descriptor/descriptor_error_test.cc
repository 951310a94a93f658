#include "local/descriptor/descriptor_error.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "core/base/matchers.h"
#include "local/descriptor/fd.h"
#include "local/memory/segment.h"
#include "local/socket/socket.h"
#include "local/testing/temp_folder.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Code = absl::StatusCode;

// This process may open `more` descriptors while there is one.
class FewDescriptors {
 public:
  explicit FewDescriptors(int more) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const UniqueFd next(dup(0));
    limit_ = next.get() + more;
    const rlimit few = {static_cast<rlim_t>(limit_), before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &few);
  }
  ~FewDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }
  std::string named() const { return "RLIMIT_NOFILE is " + std::to_string(limit_) + "; raise it (ulimit -n 4096)"; }

 private:
  rlimit before_;
  int limit_;
};

TEST(DescriptorErrorTest, NamesTheLimit_WhereThatIsWhy) {
  EXPECT_THAT(DescriptorError(EMFILE), HasSubstr("Too many open files: RLIMIT_NOFILE is "));
  EXPECT_THAT(DescriptorError(ENOENT), Not(HasSubstr("RLIMIT")));
}

TEST(DescriptorErrorTest, SegmentsAndSockets_NameIt) {
  const FewDescriptors few(0);
  EXPECT_THAT(Segment::Create("s", 4096, 0), StatusIs(Code::kResourceExhausted, HasSubstr(few.named())));
  EXPECT_THAT(LocalSocket::Connect("/nowhere"), StatusIs(Code::kResourceExhausted, HasSubstr(few.named())));
}

// The kernel leaves out the descriptors of a message that do not fit.
TEST(DescriptorErrorTest, DescriptorsThatDoNotFit_AreNamed) {
  const testing::TempFolder folder;
  const std::string path = folder.path() + "/socket";
  ASSERT_OK_AND_ASSIGN(LocalListener listener, LocalListener::Listen(path));
  ASSERT_OK_AND_ASSIGN(LocalSocket client, LocalSocket::Connect(path));
  ASSERT_OK_AND_ASSIGN(LocalSocket server, listener.Accept(absl::Seconds(5)));
  ASSERT_OK(client.Send("many", std::vector<int>(5, 0), absl::Seconds(5)));
  const FewDescriptors few(2);
  EXPECT_THAT(server.Receive(absl::Seconds(5)), StatusIs(Code::kResourceExhausted, HasSubstr(few.named())));
}

}  // namespace
}  // namespace shardmesh
