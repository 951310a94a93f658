#include "core/base/secret.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdlib>

namespace shardmesh {

std::string RandomBytes(size_t bytes) {
  std::string secret(bytes, '\0');
  ssize_t got = 0;  // so few bytes come as a whole
  do {
    got = getrandom(secret.data(), secret.size(), 0);
  } while (got < 0 && errno == EINTR);
  if (got != static_cast<ssize_t>(secret.size())) std::abort();
  return secret;
}

std::string RandomSecret() { return RandomBytes(16); }

bool SameSecret(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char differs = 0;
  for (size_t i = 0; i < a.size(); ++i) differs = differs | static_cast<unsigned char>(a[i] ^ b[i]);
  return differs == 0;
}

}  // namespace shardmesh
