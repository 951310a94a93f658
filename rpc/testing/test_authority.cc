#include "rpc/testing/test_authority.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace shardmesh::testing {
namespace {

constexpr char kNewKey[] = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes ";

}  // namespace

TestAuthority::TestAuthority(std::string folder, std::string name)
    : folder_(std::move(folder)), name_(std::move(name)) {
  Run(absl::StrCat(kNewKey, "-x509 -days 2 -subj /CN=", name_, " -keyout ", name_, ".key -out ", name_, ".pem"));
  Run(absl::StrCat("printf '[ca]\\ndefault_ca=d\\n[d]\\ndatabase=", name_, ".index\\ndefault_md=sha256\\n' >", name_,
                   ".conf && : >", name_, ".index"));
}

void TestAuthority::Run(const std::string& command) const {
  const std::string whole = absl::StrCat("cd ", folder_, " && (", command, ") >>openssl.log 2>&1");
  ASSERT_EQ(std::system(whole.c_str()), 0) << command << "; see " << File("openssl.log");
}

std::string TestAuthority::Ca() const {
  return absl::StrCat("openssl ca -config ", name_, ".conf -keyfile ", name_, ".key -cert ", name_, ".pem ");
}

TlsOptions TestAuthority::Issue(const std::string& name, int days) {
  Run(absl::StrCat(kNewKey, "-subj /CN=", name, " -keyout ", name, ".key -out ", name, ".csr && printf ",
                   "'subjectAltName=DNS:localhost,IP:127.0.0.1' >", name, ".ext && openssl x509 -req -days ", days,
                   " -in ", name, ".csr -CA ", name_, ".pem -CAkey ", name_, ".key -CAcreateserial -extfile ", name,
                   ".ext -out ", name, ".pem"));
  TlsOptions tls;
  tls.cert_file = File(name + ".pem");
  tls.key_file = File(name + ".key");
  tls.ca_file = file();
  return tls;
}

void TestAuthority::Revoke(const std::string& name) { Run(absl::StrCat(Ca(), "-revoke ", name, ".pem")); }

std::string TestAuthority::FileWithList(bool over) {
  const std::string name = absl::StrCat(name_, over ? "-old-list.pem" : "-list.pem");
  Run(absl::StrCat(Ca(), "-gencrl ",
                   over ? "-crl_lastupdate 20200101000000Z -crl_nextupdate 20200102000000Z" : "-crldays 1", " -out ",
                   name_, ".crl && cat ", name_, ".pem ", name_, ".crl >", name));
  return File(name);
}

std::string TestAuthority::FileWith(const TestAuthority& other) {
  const std::string name = absl::StrCat(name_, "-and-", other.name_, ".pem");
  Run(absl::StrCat("cat ", name_, ".pem ", other.file(), " >", name));
  return File(name);
}

}  // namespace shardmesh::testing
