#include "rpc/calls/caller.h"

#include <grpcpp/security/auth_context.h>

#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"

namespace shardmesh {

std::string CertificateNameOf(const grpc::ServerContextBase& context) {
  const std::shared_ptr<const grpc::AuthContext> identity = context.auth_context();
  const std::vector<grpc::string_ref> names =
      identity == nullptr ? std::vector<grpc::string_ref>() : identity->FindPropertyValues("x509_common_name");
  return names.empty() ? "" : absl::StrCat("CN=", std::string(names[0].data(), names[0].size()));
}

std::string CallerOf(const grpc::ServerContextBase& context) {
  const std::string name = CertificateNameOf(context);
  return name.empty() ? context.peer() : absl::StrCat(name, " at ", context.peer());
}

}  // namespace shardmesh
