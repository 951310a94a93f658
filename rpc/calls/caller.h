// Who makes a call: the name in its certificate, and a text for a line of the log. Thread-safe.
#pragma once

#include <grpcpp/server_context.h>

#include <string>

namespace shardmesh {

// "CN=reader" of a caller with a certificate, "" of others.
std::string CertificateNameOf(const grpc::ServerContextBase& context);

// `CN=reader at ipv4:10.0.0.1:4711` of a caller with a certificate, `ipv4:127.0.0.1:4711` of others. Quote it in logs:
// the name is whatever the authority signed.
std::string CallerOf(const grpc::ServerContextBase& context);

}  // namespace shardmesh
