#include "core/base/file_error.h"

#include <gtest/gtest.h>

namespace shardmesh {
namespace {

using Code = absl::StatusCode;

TEST(FileErrorTest, TheCodeSaysWhatToDoNext_AndTheMessageWhatWasWrong) {
  const std::pair<int, Code> cases[] = {
      {ENOSPC, Code::kResourceExhausted}, {EDQUOT, Code::kResourceExhausted},  {EFBIG, Code::kResourceExhausted},
      {EACCES, Code::kPermissionDenied},  {EROFS, Code::kPermissionDenied},    {ENOENT, Code::kNotFound},
      {ENOTDIR, Code::kNotFound},         {EEXIST, Code::kAlreadyExists},      {EIO, Code::kUnavailable},
  };
  for (const auto& [error, code] : cases) EXPECT_EQ(FailedTo("write", "/a", error).code(), code) << error;
  EXPECT_EQ(FailedTo("write", "/a", ENOSPC).message(), "cannot write /a: No space left on device");
}

}  // namespace
}  // namespace shardmesh
