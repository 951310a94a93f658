// Rendezvous: where ranks that do not share memory find each other: one writes a value under a key, others wait for it.
// Thread-safe.
#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/base/sync.h"

namespace shardmesh {

class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  // Unavailable: it cannot be written now.
  virtual absl::Status Set(const std::string& key, absl::string_view value) = 0;
  // Waits until there is a value. DeadlineExceeded: there was none in time.
  virtual absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) = 0;
};

// For ranks that are threads of one process.
class MemoryRendezvous final : public Rendezvous {
 public:
  // At most so many keys: one more is ResourceExhausted.
  explicit MemoryRendezvous(size_t most_keys = 1 << 20) : most_keys_(most_keys) {}
  absl::Status Set(const std::string& key, absl::string_view value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override;

 private:
  Mutex mu_;
  const size_t most_keys_;
  CondVar changed_;
  std::map<std::string, std::string> values_ ABSL_GUARDED_BY(mu_);
};

// A folder that all ranks see. Keys may have letters, digits, '.', '-', '_' and '/'.
class FolderRendezvous final : public Rendezvous {
 public:
  explicit FolderRendezvous(std::string folder) : folder_(std::move(folder)) {}
  absl::Status Set(const std::string& key, absl::string_view value) override;
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override;

 private:
  std::string PathOf(const std::string& key) const;

  const std::string folder_;
};

}  // namespace shardmesh
