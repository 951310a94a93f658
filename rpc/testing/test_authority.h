// TestAuthority: a certificate authority of a test, by the openssl program. Failures are the test's. For one thread.
#pragma once

#include <string>
#include <utility>

#include "rpc/tls/tls.h"

namespace shardmesh::testing {

class TestAuthority {
 public:
  // Makes its certificate, FOLDER/NAME.pem.
  TestAuthority(std::string folder, std::string name);

  // FOLDER/NAME.pem and .key, for localhost and 127.0.0.1, with the authority's file. `days` -1: it has expired.
  TlsOptions Issue(const std::string& name, int days = 2);
  // Takes a certificate back: it is in the lists that are made from now on.
  void Revoke(const std::string& name);
  // A file with the authority's certificate and its list. `over`: of a time that is past.
  std::string FileWithList(bool over = false);

  std::string file() const { return File(name_ + ".pem"); }
  // A file with the certificates of both.
  std::string FileWith(const TestAuthority& other);

 private:
  std::string File(const std::string& name) const { return folder_ + "/" + name; }
  void Run(const std::string& command) const;
  std::string Ca() const;

  const std::string folder_, name_;
};

}  // namespace shardmesh::testing
