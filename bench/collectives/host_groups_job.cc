#include "bench/collectives/host_groups_job.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/harness/two_namespaces.h"
#include "core/base/status.h"
#include "local/descriptor/fd.h"
#include "worker/transport/gloo_group.h"
#include "worker/transport/rendezvous.h"
#include "worker/transport/secure/secure_group.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(60);
constexpr int kTasks = 4;

char ByteOf(int rank, int64_t i) { return static_cast<char>(rank * 31 + i * 7 + i / 251); }

// One connection of the two ranks, without any frames.
absl::StatusOr<UniqueFd> ConnectRaw(Rendezvous& rendezvous, int rank, const std::string& first) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  inet_pton(AF_INET, first.c_str(), &address.sin_addr);
  auto* const at = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof(address);
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (rank == 0) {
    if (bind(fd.get(), at, length) != 0 || listen(fd.get(), 1) != 0 || getsockname(fd.get(), at, &length) != 0) {
      return absl::UnavailableError(absl::StrCat("cannot listen: ", std::strerror(errno)));
    }
    RETURN_IF_ERROR(rendezvous.Set("raw", absl::StrCat(ntohs(address.sin_port))));
    fd = UniqueFd(accept(fd.get(), nullptr, nullptr));
  } else {
    ASSIGN_OR_RETURN(const std::string port, rendezvous.Get("raw", kTimeout));
    address.sin_port = htons(static_cast<uint16_t>(std::stoi(port)));
    if (connect(fd.get(), at, length) != 0) return absl::UnavailableError(std::strerror(errno));
  }
  const int on = 1;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return fd;
}

// Both ways at once, on one thread.
absl::Status ExchangeRaw(int fd, const char* mine, char* theirs, int64_t bytes) {
  int64_t sent = 0, got = 0;
  while (sent < bytes || got < bytes) {
    pollfd waited = {fd, static_cast<int16_t>((sent < bytes ? POLLOUT : 0) | (got < bytes ? POLLIN : 0)), 0};
    if (poll(&waited, 1, 60'000) != 1) return absl::UnavailableError("the other rank does not come");
    if ((waited.revents & POLLOUT) != 0) {
      const ssize_t more = send(fd, mine + sent, static_cast<size_t>(bytes - sent), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (more < 0 && errno != EAGAIN) return absl::UnavailableError(std::strerror(errno));
      sent += more > 0 ? more : 0;
    }
    if ((waited.revents & (POLLIN | POLLHUP)) != 0) {
      const ssize_t more = recv(fd, theirs + got, static_cast<size_t>(bytes - got), MSG_DONTWAIT);
      if (more == 0 || (more < 0 && errno != EAGAIN)) return absl::UnavailableError("the other rank is gone");
      got += more > 0 ? more : 0;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status MakeCertificates(const std::string& folder) {
  const std::string key = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes ";
  const std::string command =
      absl::StrCat("cd ", folder, " && (", key, "-subj /CN=authority -x509 -days 2 -keyout ca.key -out ca.pem && ", key,
                   "-subj /CN=rank -keyout rank.key -out rank.csr && openssl x509 -req -days 2 -in rank.csr -CA ca.pem "
                   "-CAkey ca.key ",
                   "-CAcreateserial -out rank.pem) >openssl.log 2>&1");
  if (std::system(command.c_str()) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError("the openssl program could not make certificates; install openssl");
}

TlsOptions BenchCertificate(const std::string& folder) {
  TlsOptions tls;
  tls.cert_file = folder + "/rank.pem";
  tls.key_file = folder + "/rank.key";
  tls.ca_file = folder + "/ca.pem";
  return tls;
}

// One of the two, in its own process.
class HostGroupsJob::Rank {
 public:
  static absl::StatusOr<std::unique_ptr<Rank>> Connect(const HostGroupsJob& job, int rank) {
    spdlog::set_level(spdlog::level::warn);
    std::unique_ptr<Rank> made(new Rank(rank, job.bytes_));
    const auto rendezvous = std::make_shared<FolderRendezvous>(job.folder_);
    const Place& place = job.places_[rank];
    if (!place.net_namespace.empty()) RETURN_IF_ERROR(EnterNamespace(place.net_namespace));
    ASSIGN_OR_RETURN(made->raw_, ConnectRaw(*rendezvous, rank, job.places_[0].address));
    GlooOptions gloo;
    gloo.rank = rank;
    gloo.size = 2;
    gloo.key = "gloo";
    gloo.host = place.address;
    ASSIGN_OR_RETURN(made->groups_[static_cast<int>(HostWay::kGloo)], GlooGroup::Connect(rendezvous, gloo));
    SecureOptions secure;
    secure.rank = rank;
    secure.size = 2;
    secure.key = "clear";
    secure.secret = "bench";
    secure.host = place.address;
    ASSIGN_OR_RETURN(made->groups_[static_cast<int>(HostWay::kClear)], SecureGroup::Connect(rendezvous, secure));
    secure.key = "tls";
    secure.tls = BenchCertificate(job.folder_);
    ASSIGN_OR_RETURN(made->groups_[static_cast<int>(HostWay::kTls)], SecureGroup::Connect(rendezvous, secure));
    return made;
  }

  absl::Status Do(int task, HostWay way) {
    switch (task) {
      case kBulk:
        return Exchange(way, bytes_);
      case kCheck:
        std::fill(theirs_.begin(), theirs_.end(), '\0');
        RETURN_IF_ERROR(Exchange(way, bytes_));
        return Check();
      case kBarrier:
        return Repeat([&] {
          return way == HostWay::kRaw ? Exchange(way, 1) : groups_[static_cast<int>(way)]->Barrier(kTimeout);
        });
      default:
        return Repeat([&] { return Exchange(way, kGatherBytes); });
    }
  }

 private:
  Rank(int rank, int64_t bytes)
      : rank_(rank), bytes_(bytes), mine_(static_cast<size_t>(bytes)), theirs_(static_cast<size_t>(bytes)) {
    for (int64_t i = 0; i < bytes; ++i) mine_[static_cast<size_t>(i)] = ByteOf(rank, i);
  }

  absl::Status Exchange(HostWay way, int64_t bytes) {
    if (way == HostWay::kRaw) return ExchangeRaw(raw_.get(), mine_.data(), theirs_.data(), bytes);
    const PeerTransfer transfers[] = {{rank_, 1 - rank_, mine_.data(), bytes},
                                      {1 - rank_, rank_, theirs_.data(), bytes}};
    const PeerTransfer turned[] = {transfers[1], transfers[0]};
    return groups_[static_cast<int>(way)]->Exchange(rank_ == 0 ? transfers : turned, kTimeout);
  }
  absl::Status Check() const {
    for (int64_t i = 0; i < bytes_; ++i) {
      if (theirs_[static_cast<size_t>(i)] != ByteOf(1 - rank_, i)) {
        return absl::DataLossError(absl::StrCat("byte ", i, " is not the other rank's"));
      }
    }
    return absl::OkStatus();
  }
  template <class Once>
  static absl::Status Repeat(const Once& once) {
    for (int i = 0; i < kCalls; ++i) RETURN_IF_ERROR(once());
    return absl::OkStatus();
  }

  const int rank_;
  const int64_t bytes_;
  std::vector<char> mine_, theirs_;
  UniqueFd raw_;
  std::unique_ptr<ExchangeGroup> groups_[kHostWays];
};

absl::StatusOr<std::unique_ptr<HostGroupsJob>> HostGroupsJob::Create(int64_t bytes, Place first, Place second) {
  std::string folder = std::filesystem::temp_directory_path().string() + "/host-groups-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) {
    return absl::PermissionDeniedError(absl::StrCat("cannot make ", folder, ": ", std::strerror(errno)));
  }
  std::unique_ptr<HostGroupsJob> job(new HostGroupsJob(bytes, folder, std::move(first), std::move(second)));
  RETURN_IF_ERROR(MakeCertificates(folder));
  RETURN_IF_ERROR(job->Start());
  return job;
}

HostGroupsJob::~HostGroupsJob() {
  team_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

absl::Status HostGroupsJob::Start() {
  ASSIGN_OR_RETURN(team_, WorkerTeam::Start(2, [this](WorkerTeam::Member& member) -> WorkerTeam::Work {
                     auto connected = Rank::Connect(*this, member.rank());
                     const absl::Status status = connected.status();
                     std::shared_ptr<Rank> rank = connected.ok() ? *std::move(connected) : nullptr;
                     return [status, rank, number = member.rank()](int task) {
                       const absl::Status done =
                           rank != nullptr ? rank->Do(task / kHostWays % kTasks, static_cast<HostWay>(task % kHostWays))
                                           : status;
                       if (!done.ok()) std::fprintf(stderr, "rank %d: %s\n", number, done.ToString().c_str());
                       return done.ok();
                     };
                   }));
  return absl::OkStatus();
}

}  // namespace shardmesh::bench
