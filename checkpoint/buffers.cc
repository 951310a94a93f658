#include "checkpoint/buffers.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "checkpoint/file_changes.h"
#include "core/base/digest.h"
#include "core/base/fault_point.h"
#include "core/base/status.h"
#include "core/names/names.h"

namespace shardmesh {
namespace {

std::string DigestOfBytes(const std::string& bytes) {
  Hasher hasher;
  hasher.Add(bytes);
  return hasher.Hex();
}

// Shorter than asked: the file ends there.
absl::StatusOr<std::string> ReadAt(const std::string& path, int64_t offset, int64_t bytes) {
  RETURN_IF_ERROR(ErrorAt(FaultPoint::kFileRead));
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid()) return FailedTo("open", path, errno);
  std::string data(static_cast<size_t>(bytes), '\0');
  for (size_t done = 0; done < data.size();) {
    const ssize_t got = pread(fd.get(), data.data() + done, data.size() - done, offset + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FailedTo("read", path, errno);
    if (got == 0) data.resize(done);
    done += static_cast<size_t>(got);
  }
  return data;
}

}  // namespace

absl::StatusOr<std::vector<Manifest::Buffer>> DescribeBuffers(const std::vector<BufferValue>& values) {
  if (values.size() > static_cast<size_t>(kMaxBuffers)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model has ", values.size(), " buffers; a checkpoint holds at most ", kMaxBuffers));
  }
  std::vector<Manifest::Buffer> buffers;
  for (const BufferValue& value : values) {
    if (static_cast<int64_t>(value.bytes.size()) != value.entry.bytes) {
      return absl::InvalidArgumentError(absl::StrCat("buffer ", QuotedName(value.entry.name), " has ",
                                                     value.bytes.size(), " bytes; its dtype and shape take ",
                                                     value.entry.bytes));
    }
    buffers.push_back({value.entry, DigestOfBytes(value.bytes)});
  }
  return buffers;
}

absl::Status WriteBuffers(const StoredFiles& files, const std::vector<BufferValue>& values, NewCheckpoint& checkpoint) {
  size_t next = 0;
  for (const FilePart& part : files.parts()) {
    if (part.tensor != kBufferTensor) continue;
    RETURN_IF_ERROR(checkpoint.Write(files.files()[part.file].name, part.offset, values[next++].bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<BufferValue>> ReadBuffers(const OpenedCheckpoint& opened) {
  std::vector<BufferValue> values;
  if (opened.manifest.buffers.empty()) return values;
  ASSIGN_OR_RETURN(const StoredFiles files,
                   StoredFiles::Create(opened.manifest.spec, opened.manifest.buffer_entries()));
  for (const FilePart& part : files.parts()) {
    if (part.tensor != kBufferTensor) continue;
    const Manifest::Buffer& buffer = opened.manifest.buffers[values.size()];
    const std::string path = absl::StrCat(opened.path, "/", files.files()[part.file].name);
    ASSIGN_OR_RETURN(std::string bytes, ReadAt(path, part.offset, part.bytes));
    if (DigestOfBytes(bytes) != buffer.digest) {
      return absl::DataLossError(absl::StrCat(path, ": buffer ", QuotedName(buffer.entry.name),
                                              " is not what was saved: the file changed since"));
    }
    values.push_back({buffer.entry, std::move(bytes)});
  }
  return values;
}

}  // namespace shardmesh
