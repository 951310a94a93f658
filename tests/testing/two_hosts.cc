#include "tests/testing/two_hosts.h"

#include <unistd.h>

#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/base/status.h"

namespace shardmesh::testing {
namespace {

// Words are separated by single blanks.
absl::Status RunLine(const std::string& command) { return RunCommand(absl::StrSplit(command, ' ')).status(); }

}  // namespace

TwoHosts::TwoHosts() : a_(absl::StrCat("shardmesh-a-", getpid())), b_(absl::StrCat("shardmesh-b-", getpid())) {}

TwoHosts::~TwoHosts() {
  for (const std::string& host : {a_, b_}) (void)RunLine("ip netns del " + host);
}

absl::Status TwoHosts::Create() {
  if (geteuid() != 0) return absl::PermissionDeniedError("this user is not root");
  for (const std::string& host : {a_, b_}) {
    RETURN_IF_ERROR(RunLine("ip netns add " + host));
    RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", host, " link set lo up")));
  }
  RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", a_, " link add veth0 type veth peer name veth0 netns ", b_)));
  RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", a_, " addr add ", kAddressA, "/24 dev veth0")));
  RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", b_, " addr add ", kAddressB, "/24 dev veth0")));
  RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", a_, " link set veth0 up")));
  return RunLine(absl::StrCat("ip -n ", b_, " link set veth0 up"));
}

absl::Status TwoHosts::CutLink() { return RunLine(absl::StrCat("ip -n ", a_, " link set veth0 down")); }
absl::Status TwoHosts::JoinLink() {
  RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", a_, " link set veth0 up")));
  // Who was not found while the link was cut is looked for again at once, where connections would be refused for a while.
  for (const std::string& host : {a_, b_}) {
    RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", host, " neigh flush dev veth0")));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Process>> StartOn(const std::string& host, std::vector<std::string> command,
                                                 const std::string& log_file) {
  command.insert(command.begin(), {"ip", "netns", "exec", host});
  return Process::Start({std::move(command), log_file});
}

absl::Status MakeCertificate(const TempFolder& folder, const std::string& name,
                             const std::vector<std::string>& addresses) {
  const auto file = [&](const std::string& suffix) { return folder.File(name + suffix); };
  const std::string key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
  RETURN_IF_ERROR(RunLine(absl::StrCat("openssl req -x509 ", key, " -days 2 -subj /CN=authority -keyout ",
                                       file("-ca.key"), " -out ", file("-ca.pem"))));
  RETURN_IF_ERROR(RunLine(
      absl::StrCat("openssl req ", key, " -subj /CN=", name, " -keyout ", file(".key"), " -out ", file(".csr"))));
  std::ofstream(file(".ext")) << "subjectAltName=IP:" << absl::StrJoin(addresses, ",IP:") << "\n";
  RETURN_IF_ERROR(
      RunLine(absl::StrCat("openssl x509 -req -days 2 -in ", file(".csr"), " -CA ", file("-ca.pem"), " -CAkey ",
                           file("-ca.key"), " -CAcreateserial -extfile ", file(".ext"), " -out ", file(".pem"))));
  return RunLine(absl::StrCat("cp ", folder.File("good-ca.pem"), " ", file(".ca")));
}

std::vector<std::string> TlsFlags(const TempFolder& folder) {
  return {"--tls-cert", folder.File("good.pem"), "--tls-key", folder.File("good.key"),
          "--tls-ca",   folder.File("good.ca")};
}

}  // namespace shardmesh::testing
