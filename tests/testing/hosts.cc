#include "tests/testing/hosts.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "core/base/status.h"
#include "tests/testing/system/process.h"

namespace shardmesh::testing {
namespace {

constexpr char kNet[] = "10.213.79.";
constexpr int kFirst = 11;
// Not on the PATH of a test.
constexpr char kTc[] = "/usr/sbin/tc", kTables[] = "/usr/sbin/iptables";
constexpr int kNames = 100'000;  // names of interfaces have at most 15 characters

// Words are separated by single blanks.
absl::Status RunLine(const std::string& command) { return RunCommand(absl::StrSplit(command, ' ')).status(); }

}  // namespace

Hosts::Hosts(int count) : bridge_(absl::StrCat("smbr", getpid() % kNames)) {
  for (int h = 0; h < count; ++h) {
    names_.push_back(absl::StrCat("shardmesh-", h, "-", getpid()));
    links_.push_back(absl::StrCat("smve", getpid() % kNames, "-", h));
  }
}

Hosts::~Hosts() {
  for (const std::string& name : names_) RunLine("ip netns del " + name).IgnoreError();
  RunLine("ip link del " + bridge_).IgnoreError();
}

std::string Hosts::address(int host) const { return absl::StrCat(kNet, kFirst + host); }

std::vector<std::string> Hosts::addresses() const {
  std::vector<std::string> all = {kHere};
  for (int h = 0; h < count(); ++h) all.push_back(address(h));
  return all;
}

absl::Status Hosts::Create() {
  if (geteuid() != 0) return absl::PermissionDeniedError("this user is not root");
  RETURN_IF_ERROR(RunLine(absl::StrCat("ip link add ", bridge_, " type bridge")));
  RETURN_IF_ERROR(RunLine(absl::StrCat("ip addr add ", kHere, "/24 dev ", bridge_)));
  RETURN_IF_ERROR(RunLine(absl::StrCat("ip link set ", bridge_, " up")));
  for (int h = 0; h < count(); ++h) {
    const std::string& host = names_[h];
    RETURN_IF_ERROR(RunLine("ip netns add " + host));
    RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", host, " link set lo up")));
    RETURN_IF_ERROR(RunLine(absl::StrCat("ip link add ", links_[h], " type veth peer name veth0 netns ", host)));
    RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", host, " addr add ", address(h), "/24 dev veth0")));
    RETURN_IF_ERROR(RunLine(absl::StrCat("ip -n ", host, " link set veth0 up")));
    RETURN_IF_ERROR(RunLine(absl::StrCat("ip link set ", links_[h], " master ", bridge_, " up")));
  }
  return absl::OkStatus();
}

absl::Status Hosts::Cut(int host) {
  undo_.push_back(absl::StrCat("ip link set ", links_[host], " up"));
  return RunLine(absl::StrCat("ip link set ", links_[host], " down"));
}

absl::Status Hosts::Drop(int host, const std::string& rule) {
  const std::string tables = absl::StrCat("ip netns exec ", names_[host], " ", kTables, " ");
  undo_.push_back(absl::StrCat(tables, "-D ", rule, " -j DROP"));
  return RunLine(absl::StrCat(tables, "-A ", rule, " -j DROP"));
}

absl::Status Hosts::CutOneWay(int from, int to) { return Drop(to, absl::StrCat("INPUT -s ", address(from))); }

absl::Status Hosts::Lose(int host, int percent) {
  const std::string random =
      absl::StrFormat(" -i veth0 -m statistic --mode random --probability 0.%02d", percent);
  RETURN_IF_ERROR(Drop(host, "INPUT" + random));
  return Drop(host, absl::StrReplaceAll("OUTPUT" + random, {{"-i", "-o"}}));
}

absl::Status Hosts::Slow(int host, int kilobytes) {
  const std::string outside = absl::StrCat(kTc, " qdisc ");
  const std::string inside = absl::StrCat("ip netns exec ", names_[host], " ", outside);
  const std::string rate = absl::StrCat(" root tbf rate ", 8 * kilobytes, "kbit burst 32kb latency 50ms");
  undo_.push_back(absl::StrCat(inside, "del dev veth0 root"));
  RETURN_IF_ERROR(RunLine(absl::StrCat(inside, "replace dev veth0", rate)));
  undo_.push_back(absl::StrCat(outside, "del dev ", links_[host], " root"));
  return RunLine(absl::StrCat(outside, "replace dev ", links_[host], rate));
}

absl::Status Hosts::Heal() {
  absl::Status first;
  for (const std::string& command : std::exchange(undo_, {})) first.Update(RunLine(command));
  return first;
}

}  // namespace shardmesh::testing
