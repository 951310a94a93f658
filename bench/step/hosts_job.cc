#include "bench/step/hosts_job.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "bench/collectives/host_groups_job.h"
#include "bench/harness/harness.h"
#include "core/base/status.h"
#include "local/memory/futex.h"
#include "worker/transport/rendezvous.h"
#include "worker/transport/secure/secure_group.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr int64_t kTensorElements = int64_t{1} << 20;

JobSpec SpecOf(int64_t elements) {
  JobSpec spec;
  spec.name = "bench-hosts";
  spec.mesh = ParseMeshSpec("fsdp=2").value();
  spec.num_slots = 2;
  spec.bucket_elements = int64_t{4} << 20;
  for (int64_t i = 0; i < elements / kTensorElements; ++i) {
    spec.parameters.push_back({absl::StrCat("layers.", i), {kTensorElements}, WeightFormat::kBf16Sr});
  }
  return spec;
}

// Of bf16 gradients: of either sign, of a few hundredths.
uint16_t GradientBits(int slot, int64_t element) {
  return static_cast<uint16_t>(0x3c00 + (element * 7 + slot * 131 + element / 977) % 128 +
                               ((element ^ slot) & 1) * 0x8000);
}

using Interval = std::pair<int64_t, int64_t>;

// Sorted, and none overlaps another.
std::vector<Interval> Union(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end());
  std::vector<Interval> joined;
  for (const Interval& interval : intervals) {
    if (joined.empty() || interval.first > joined.back().second) {
      joined.push_back(interval);
    } else {
      joined.back().second = std::max(joined.back().second, interval.second);
    }
  }
  return joined;
}

double Seconds(const std::vector<Interval>& intervals) {
  int64_t nanos = 0;
  for (const Interval& interval : intervals) nanos += interval.second - interval.first;
  return 1e-9 * static_cast<double>(nanos);
}

double Overlap(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  std::vector<Interval> both;
  for (const Interval& x : a) {
    for (const Interval& y : b) {
      const int64_t begin = std::max(x.first, y.first), end = std::min(x.second, y.second);
      if (begin < end) both.emplace_back(begin, end);
    }
  }
  return Seconds(both);
}

}  // namespace

HostsJob::HostsJob(const HostsJobOptions& options)
    : options_(options), job_(SpecOf(options.elements)), memory_(NewProcessMemory()) {}

HostsJob::~HostsJob() {
  lead_.reset();
  engines_.clear();
}

absl::StatusOr<std::unique_ptr<HostsJob>> HostsJob::Start(const HostsJobOptions& options) {
  std::unique_ptr<HostsJob> job(new HostsJob(options));
  RETURN_IF_ERROR(job->Open());
  if (options.num_hosts > 1) {
    RETURN_IF_ERROR(job->ConnectStream());
    RETURN_IF_ERROR(job->StartLead());
  }
  RETURN_IF_ERROR(job->PlaceWeights());
  return job;
}

absl::Status HostsJob::Open() {
  ASSIGN_OR_RETURN(Plan plan, Plan::Create(job_));
  plan_ = std::make_unique<Plan>(std::move(plan));
  ASSIGN_OR_RETURN(HostMemory host, HostMemory::Create(*memory_, job_.name, job_, *plan_));
  host_ = std::make_unique<HostMemory>(std::move(host));
  const HostRanks ranks{options_.host, options_.num_hosts, plan_->num_ranks() / options_.num_hosts};
  protocol_ = std::make_unique<StepProtocol>(host_->control(), &host_->notifier(), &job_, plan_.get(),
                                             std::vector<std::string>{"worker-0", "worker-1"}, ranks);
  for (int rank = ranks.first(); rank < ranks.end(); ++rank) {
    const ShardPlace place = plan_->PlaceOf(Rank(rank));
    ASSIGN_OR_RETURN(ShardStorage storage,
                     ShardStorage::Open(*memory_, absl::StrCat("shard-", rank), *plan_, place.shard));
    storages_.push_back(std::make_unique<ShardStorage>(std::move(storage)));
    passes_.push_back(
        std::make_unique<Pass>(job_, *plan_, place, *host_, *storages_.back(), 1, &trace_, nullptr, ranks));
    EngineOptions options;
    options.step_timeout = kPatience;
    if (rank == 0 && options_.num_hosts == 1) {
      options.lead =
          &one_host_lead_.emplace(*protocol_, *passes_.back(), job_, *plan_, LeadOptions{kPatience, nullptr, {}}).lead;
    }
    engines_.push_back(std::make_unique<Engine>(*protocol_, *passes_.back(), Rank(rank), std::move(options)));
  }
  for (int slot = 0; slot < job_.num_slots; ++slot) {
    auto* to = reinterpret_cast<uint16_t*>(host_->slot(slot).data());
    for (int64_t e = 0; HasSlot(slot) && e < plan_->gradient_window_bytes() / 2; ++e) to[e] = GradientBits(slot, e);
  }
  return absl::OkStatus();
}

absl::Status HostsJob::StartLead() {
  HostGroups groups;
  const auto rendezvous = std::make_shared<FolderRendezvous>(options_.folder);
  for (auto& [name, group] :
       {std::pair("gradients", &groups.gradients), {"results", &groups.results}, {"rounds", &groups.rounds}}) {
    SecureOptions secure;
    secure.rank = options_.host;
    secure.size = options_.num_hosts;
    secure.epoch = 1;
    secure.key = name;
    secure.secret = "bench";
    secure.host = options_.address;
    secure.tls = BenchCertificate(options_.folder);
    ASSIGN_OR_RETURN(*group, SecureGroup::Connect(rendezvous, secure));
  }
  HostLeadOptions options;
  options.round_timeout = kPatience;  // a loaded machine is not a dead host
  lead_ = std::make_unique<HostLead>(*protocol_, *host_, *passes_.front(), job_, *plan_, std::move(groups), options, &trace_);
  return absl::OkStatus();
}

absl::Status HostsJob::PlaceWeights() {
  for (size_t i = 0; i < engines_.size(); ++i) {
    const int shard = plan_->PlaceOf(Rank(protocol_->local().first() + static_cast<int>(i))).shard;
    InitialShard piece(plan_->InitialShardBytes(shard) / 4);
    for (size_t e = 0; e < piece.size(); ++e) piece[e] = static_cast<float>((e * 7919 + shard) % 65521) * 0x1p-20f;
    RETURN_IF_ERROR(engines_[i]->StageInitial(std::move(piece), 1));
  }
  return protocol_->outcomes().AwaitCommit(shardmesh::Step(0), kPatience).status();
}

absl::StatusOr<HostsStep> HostsJob::Step() {
  const double start = MonotonicSeconds();
  Declaration declaration;
  declaration.step = shardmesh::Step(++step_);
  declaration.in_place = true;
  for (int slot = 0; slot < job_.num_slots; ++slot) {
    if (HasSlot(slot)) declaration.slots.push_back(Slot(slot));
  }
  RETURN_IF_ERROR(protocol_->declarations().Declare(declaration).status());
  RETURN_IF_ERROR(protocol_->outcomes().AwaitCommit(declaration.step, kPatience).status());
  return Measured(MonotonicSeconds() - start, step_);
}

HostsStep HostsJob::Measured(double seconds, int64_t step) const {
  std::vector<Interval> crossing, stepped;
  for (const TraceSpan& span : trace_.Spans()) {
    if (span.step != step) continue;
    const absl::string_view name = span.name;
    if (name == "gradients" || name == "weights") crossing.emplace_back(span.begin_nanos, span.end_nanos);
    if (name == "range") stepped.emplace_back(span.begin_nanos, span.end_nanos);
  }
  crossing = Union(std::move(crossing));
  return {seconds, Seconds(crossing), Overlap(crossing, Union(std::move(stepped)))};
}

absl::StatusOr<uint64_t> HostsJob::Digest() {
  const uint64_t ticket = protocol_->tickets().AskForDigest();
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(kPatience);
  while (MonotonicNanos() < deadline) {
    const uint32_t word = protocol_->control()->finished.load();
    ASSIGN_OR_RETURN(const auto digest, protocol_->tickets().DigestOf(ticket));
    if (digest.has_value()) return digest->second;
    FutexWait(protocol_->control()->finished, word, absl::Seconds(1));
  }
  return absl::DeadlineExceededError("no digest came");
}

int64_t HostsJob::BytesEachWay() const {
  return plan_->GradientShardBytes(0) + plan_->total_elements() / 2 * BytesPerElement(Format::kBf16);
}

absl::Status HostsJob::ConnectStream() {
  FolderRendezvous rendezvous(options_.folder);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  UniqueFd socket_fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto failed = [](const char* what) {
    return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
  };
  if (options_.host == 0) {
    inet_pton(AF_INET, options_.address.c_str(), &address.sin_addr);
    socklen_t size = sizeof(address);
    if (bind(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return failed("bind");
    if (listen(socket_fd.get(), 1) != 0) return failed("listen");
    getsockname(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
    RETURN_IF_ERROR(rendezvous.Set("stream", std::string(reinterpret_cast<char*>(&address), sizeof(address))));
    stream_ = UniqueFd(accept4(socket_fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
    return stream_.get() < 0 ? failed("accept") : absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::string peer, rendezvous.Get("stream", kPatience));
  std::memcpy(&address, peer.data(), sizeof(address));
  if (connect(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return failed("connect");
  stream_ = std::move(socket_fd);
  return absl::OkStatus();
}

absl::StatusOr<double> HostsJob::Stream(int64_t bytes) {
  sent_.resize(bytes, 1);
  received_.resize(bytes);
  const double start = MonotonicSeconds();
  bool sent = true, received = true;
  std::thread sender([&] {
    for (int64_t at = 0, n = 0; at < bytes && sent; at += n) {
      n = send(stream_.get(), &sent_[at], bytes - at, MSG_NOSIGNAL);
      sent = n > 0;
    }
  });
  for (int64_t at = 0, n = 0; at < bytes && received; at += n) {
    n = recv(stream_.get(), &received_[at], bytes - at, 0);
    received = n > 0;
  }
  sender.join();
  if (!sent || !received) return absl::UnavailableError("the stream broke");
  return MonotonicSeconds() - start;
}

}  // namespace shardmesh::bench
