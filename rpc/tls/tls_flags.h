// The flags --tls-* of programs. For any command line parser that has CLI11's add_option: this folder does not have it.
#pragma once

#include <string>

#include "rpc/tls/tls.h"

namespace shardmesh {

// Adds --tls-cert, --tls-key and --tls-ca, whose defaults are the variables SHARDMESH_TLS_CERT and so on of the
// environment as it is now. `tls` must outlive the parsing.
template <typename App>
void AddTlsFileFlags(App& app, TlsOptions& tls) {
  tls = WithTlsEnvironment(std::move(tls));
  const auto add = [&](const char* flag, std::string& value, TlsPart part, const char* help) {
    app.add_option(flag, value, help)->each([&tls, part](const std::string&) {
      tls.from_environment &= ~unsigned{part};
    });
  };
  add("--tls-cert", tls.cert_file, kTlsCert,
      "Own certificate chain (PEM); TLS needs all three files; unset: SHARDMESH_TLS_CERT");
  add("--tls-key", tls.key_file, kTlsKey, "Its private key (PEM); unset: SHARDMESH_TLS_KEY");
  add("--tls-ca", tls.ca_file, kTlsCa, "Authority that signed every peer's certificate (PEM); unset: SHARDMESH_TLS_CA");
}

// Adds --tls-name too: for programs that dial others.
template <typename App>
void AddTlsFlags(App& app, TlsOptions& tls) {
  AddTlsFileFlags(app, tls);
  app.add_option(
         "--tls-name", tls.override_target_name,
         "Name in the servers' certificates, where it is not the one that is dialled; unset: SHARDMESH_TLS_NAME")
      ->each([&tls](const std::string&) { tls.from_environment &= ~unsigned{kTlsName}; });
}

}  // namespace shardmesh
