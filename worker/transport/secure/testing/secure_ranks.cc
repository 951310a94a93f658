#include "worker/transport/secure/testing/secure_ranks.h"

#include <cstdlib>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

void Run(const std::string& command) {
  const std::string whole = absl::StrCat("cd ", std::getenv("TEST_TMPDIR"), " && ", command, " 2>openssl.log");
  ASSERT_EQ(std::system(whole.c_str()), 0) << command;
}

void MakeAuthority(const std::string& ca) {
  Run(absl::StrCat("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=", ca,
                   " -keyout ", ca, ".key -out ", ca, ".pem"));
}

void MakeCertificate(const std::string& name, const std::string& ca, int days = 2) {
  Run(absl::StrCat("openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=", name, " -keyout ",
                   name, ".key -out ", name, ".csr && openssl x509 -req -days ", days, " -in ", name, ".csr -CA ", ca,
                   ".pem -CAkey ", ca, ".key -CAcreateserial -out ", name, ".pem"));
}

bool MakeAll() {
  MakeAuthority("ca");
  MakeAuthority("other_ca");
  MakeCertificate("first", "ca");
  MakeCertificate("second", "ca");
  MakeCertificate("expired", "ca", -1);
  MakeCertificate("stranger", "other_ca");
  return true;
}

// What a rank has in place of the group that it could not join.
class NoGroup final : public Group {
 public:
  NoGroup(int rank, int size, uint64_t epoch, absl::Status why) : Group(rank, size, epoch), why_(std::move(why)) {}
  absl::string_view name() const override { return "none"; }
  void Abort(absl::string_view) override {}

 protected:
  absl::Status DoBarrier(const CallHeader&, absl::Duration) override { return why_; }
  absl::Status DoAllGather(const CallHeader&, const char*, char*, absl::Duration) override { return why_; }
  absl::Status DoAllToAll(const CallHeader&, const char*, char*, absl::Duration) override { return why_; }
  absl::Status DoBroadcast(const CallHeader&, char*, int, absl::Duration) override { return why_; }

 private:
  const absl::Status why_;
};

}  // namespace

TlsOptions TlsFiles(const std::string& certificate, const std::string& authority) {
  static const bool made = MakeAll();
  EXPECT_TRUE(made);
  const auto file = [](const std::string& name) { return absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name); };
  TlsOptions tls;
  tls.cert_file = file(certificate + ".pem");
  tls.key_file = file(certificate + ".key");
  tls.ca_file = file(authority + ".pem");
  return tls;
}

SecureOptions OptionsOf(int rank, int size, bool tls) {
  SecureOptions options;
  options.rank = rank;
  options.size = size;
  options.epoch = 5;
  options.key = "group";
  options.secret = "what only ranks know";
  options.host = "127.0.0.1";
  if (tls) options.tls = TlsFiles(rank % 2 == 0 ? "first" : "second");
  return options;
}

std::vector<absl::StatusOr<std::unique_ptr<SecureGroup>>> ConnectAll(const std::shared_ptr<Rendezvous>& rendezvous,
                                                                     const std::vector<SecureOptions>& options) {
  std::vector<absl::StatusOr<std::unique_ptr<SecureGroup>>> groups(options.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < options.size(); ++rank) {
    threads.emplace_back([&, rank] { groups[rank] = SecureGroup::Connect(rendezvous, options[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  return groups;
}

Groups MakeSecureGroups(const std::vector<uint64_t>& epochs, bool tls) {
  const auto size = static_cast<int>(epochs.size());
  const bool same = std::set<uint64_t>(epochs.begin(), epochs.end()).size() == 1;
  std::vector<SecureOptions> options;
  for (int rank = 0; rank < size; ++rank) {
    options.push_back(OptionsOf(rank, size, tls));
    options.back().epoch = epochs[static_cast<size_t>(rank)];
    if (!same) options.back().timeout = absl::Seconds(3);
  }
  auto connected = ConnectAll(std::make_shared<MemoryRendezvous>(), options);
  Groups groups;
  for (int rank = 0; rank < size; ++rank) {
    auto& group = connected[static_cast<size_t>(rank)];
    EXPECT_TRUE(group.ok() || !same) << group.status();
    if (group.ok()) {
      groups.push_back(*std::move(group));
    } else {
      groups.push_back(std::make_unique<NoGroup>(rank, size, epochs[static_cast<size_t>(rank)], group.status()));
    }
  }
  return groups;
}

}  // namespace shardmesh
