// JobOnHosts: a job on one or several hosts inside one process: each host with memory of its own, its members as
// engines, and, where there are several, its lead, which meets the others in groups of threads. Tests only.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "local/memory/futex.h"
#include "worker/lead/engine.h"
#include "worker/lead/hosts/host_lead.h"
#include "worker/lead/one_host.h"
#include "worker/pass/pass.h"
#include "worker/testing/small_job.h"
#include "worker/transport/local_group.h"

namespace shardmesh {

inline constexpr absl::Duration kLongWait = absl::Seconds(60);

// How gradients come to the workers.
enum class GradientWay { kAttached, kPushed };

// One host's part of it.
struct OneOfHosts {
  OneOfHosts(const JobSpec& job, const Plan& plan, HostRanks ranks)
      : job(job),
        plan(plan),
        ranks(ranks),
        memory(NewProcessMemory()),
        host(*HostMemory::Create(*memory, job.name, job, plan)),
        protocol(NewProtocol()) {
    for (int r = ranks.first(); r < ranks.end(); ++r) {
      storages.push_back(
          std::make_unique<ShardStorage>(*ShardStorage::Open(*memory, "shard", plan, plan.PlaceOf(Rank(r)).shard)));
      sums.push_back(std::make_unique<GradientSums>(
          *GradientSums::Open(*memory, absl::StrCat("sums", r), plan, plan.PlaceOf(Rank(r)).shard)));
      passes.push_back(std::make_unique<Pass>(job, plan, plan.PlaceOf(Rank(r)), host, *storages.back(), 2, nullptr,
                                              GradientSums::Has(plan) ? sums.back().get() : nullptr, ranks));
      protocols.push_back(NewProtocol());
    }
    for (int r = 0; r < ranks.per_host; ++r) StartEngine(r);
  }

  std::unique_ptr<StepProtocol> NewProtocol() {
    return std::make_unique<StepProtocol>(host.control(), &host.notifier(), &job, &plan, MemberNames(plan.num_ranks()),
                                          ranks);
  }
  void StartEngine(int local) {
    if (engines.size() <= static_cast<size_t>(local)) engines.resize(local + 1);
    EngineOptions options;
    options.step_timeout = kLongWait;
    if (local == 0 && ranks.num_hosts == 1) {
      alone.emplace(*protocols[0], *passes[0], job, plan, LeadOptions{kLongWait, nullptr, {}});
      options.lead = &alone->lead;
    }
    engines[local] =
        std::make_unique<Engine>(*protocols[local], *passes[local], Rank(ranks.first() + local), std::move(options));
  }

  const JobSpec& job;
  const Plan& plan;
  const HostRanks ranks;
  const std::unique_ptr<Memory> memory;
  HostMemory host;
  std::unique_ptr<StepProtocol> protocol;
  std::vector<std::unique_ptr<ShardStorage>> storages;
  std::vector<std::unique_ptr<GradientSums>> sums;
  std::vector<std::unique_ptr<Pass>> passes;
  std::vector<std::unique_ptr<StepProtocol>> protocols;
  std::optional<OneHostLead> alone;  // of a job on one host
  std::vector<std::unique_ptr<Engine>> engines;
  Trace trace;
  std::unique_ptr<HostLead> lead;  // last: it uses the others
};

struct JobOnHosts {
  // How a host's lead is connected.
  struct Connected {
    HostLeadOptions options;
    HostGroups groups;
  };
  JobOnHosts(const JobSpec& spec, int num_hosts, const std::function<Connected(int host)>& connect)
      : job(spec), plan(*Plan::Create(job)) {
    const int per_host = plan.num_ranks() / num_hosts;
    for (int h = 0; h < num_hosts; ++h) {
      hosts.push_back(std::make_unique<OneOfHosts>(job, plan, HostRanks{h, num_hosts, per_host}));
    }
    for (int h = 0; h < num_hosts; ++h) StartLead(h, connect(h));
  }
  // `connected`: the groups of each host; empty: groups of threads.
  JobOnHosts(const JobSpec& spec, int num_hosts, HostLeadOptions options = {kLongWait, kLongWait},
             std::vector<HostGroups> connected = {})
      : job(spec), plan(*Plan::Create(job)) {
    const RankNames names{0, plan.num_ranks() / num_hosts};
    rounds = std::make_shared<LocalHub>(num_hosts, names);
    gradients = std::make_shared<LocalHub>(num_hosts, names);
    results = std::make_shared<LocalHub>(num_hosts, names);
    for (int h = 0; h < num_hosts; ++h) {
      hosts.push_back(std::make_unique<OneOfHosts>(job, plan, HostRanks{h, num_hosts, plan.num_ranks() / num_hosts}));
    }
    for (int h = 0; h < num_hosts && num_hosts > 1; ++h) {
      HostGroups groups{std::make_unique<LocalGroup>(rounds, h, 1), std::make_unique<LocalGroup>(gradients, h, 1),
                        std::make_unique<LocalGroup>(results, h, 1)};
      if (!connected.empty()) groups = std::move(connected[h]);
      StartLead(h, {options, std::move(groups)});
    }
  }
  void StartLead(int h, Connected connected) {
    hosts[h]->lead =
        std::make_unique<HostLead>(*hosts[h]->protocol, hosts[h]->host, *hosts[h]->passes[0], job, plan,
                                   std::move(connected.groups), std::move(connected.options), &hosts[h]->trace);
  }
  ~JobOnHosts() {
    for (auto& host : hosts) host->lead.reset();
  }

  int num_hosts() const { return static_cast<int>(hosts.size()); }
  OneOfHosts& HostOf(int rank) { return *hosts[rank / hosts[0]->ranks.per_host]; }

  absl::Status PlaceWeights() {
    for (int r = 0; r < plan.num_ranks(); ++r) {
      InitialShard initial(plan.InitialShardBytes(plan.PlaceOf(Rank(r)).shard) / 4);
      for (size_t i = 0; i < initial.size(); ++i) initial[i] = RandomValue(7, plan.PlaceOf(Rank(r)).shard, i);
      OneOfHosts& host = HostOf(r);
      RETURN_IF_ERROR(host.engines[r - host.ranks.first()]->StageInitial(std::move(initial), 5));
    }
    return AwaitStep(0);
  }
  absl::Status AwaitStep(int64_t step) {
    for (auto& host : hosts) RETURN_IF_ERROR(host->protocol->outcomes().AwaitCommit(Step(step), kLongWait).status());
    return absl::OkStatus();
  }

  // Of fp32 gradients: element e of a slot's window.
  static float Gradient(int64_t step, int slot, int64_t e) { return RandomValue(step, 100 + slot, e); }
  void WriteGradients(OneOfHosts& host, int slot, int64_t step, int64_t begin, int64_t end) const {
    auto* to = reinterpret_cast<float*>(host.host.slot(slot).data());
    for (int64_t e = begin; e < end; ++e) to[e] = Gradient(step, slot, e);
  }

  // A trainer attached to a host writes there; a connected one writes each gradient shard on the host that takes it,
  // and declares on another.
  absl::Status GiveSlot(int slot, int64_t step, GradientWay way, std::vector<std::pair<Slot, int>> bad = {}) {
    OneOfHosts& home = *hosts[slot % hosts.size()];
    Declaration declaration{{Slot(slot)}, Step(step), {0.125 * static_cast<double>(step)}, std::move(bad)};
    declaration.loss_scale = static_cast<double>(1 << step % 3);
    if (job.token_weights) declaration.tokens = {TokensOf(slot, step)};
    if (plan.bucketed()) return GiveBuckets(home, slot, step, way, std::move(declaration));
    if (way == GradientWay::kAttached) {
      WriteGradients(home, slot, step, 0, plan.gradient_window_bytes() / 4);
      declaration.in_place = true;
      return home.protocol->declarations().Declare(declaration).status();
    }
    for (int p = 0; p < plan.num_shards(); ++p) {
      OneOfHosts& host = HostOf(plan.RankOf({p, slot % plan.num_replicas()}).value());
      for (const Bucket& b : plan.buckets()) {
        const int64_t begin = b.gradient_offset / 4 + b.begin(p);
        if (!b.frozen) WriteGradients(host, slot, step, begin, begin + b.size(p));
      }
      RETURN_IF_ERROR(host.protocol->declarations().GradientShardReady(Slot(slot), p, Step(step)));
    }
    return home.protocol->declarations().Declare(declaration).status();
  }

  // With token weights: some slots have none.
  static int64_t TokensOf(int slot, int64_t step) { return (slot * 7 + step * 3) % 5 * 100; }

  // Bucket by bucket, in an order of each slot's own that prefetch_buckets allows.
  absl::Status GiveBuckets(OneOfHosts& home, int slot, int64_t step, GradientWay way, Declaration declaration) {
    const bool attached = way == GradientWay::kAttached;
    for (int b = static_cast<int>(plan.buckets().size()) - 1; b >= 0; --b) {
      const Bucket& bucket = plan.buckets()[b];
      if (bucket.frozen) continue;
      for (int p = 0; p < plan.num_shards(); ++p) {
        OneOfHosts& host = attached ? home : HostOf(plan.RankOf({p, slot % plan.num_replicas()}).value());
        const int64_t begin = bucket.gradient_offset / 4 + bucket.begin(p);
        WriteGradients(host, slot, step, begin, begin + bucket.size(p));
        if (!attached) RETURN_IF_ERROR(host.protocol->buckets().ShardReady(Slot(slot), b, p, Step(step)));
      }
      const BucketDeclaration of_bucket{{Slot(slot)}, Step(step), b, {}, attached};
      RETURN_IF_ERROR(home.protocol->buckets().Declare(of_bucket).status());
    }
    declaration.in_place = attached;
    return home.protocol->declarations().Declare(declaration).status();
  }

  // Asked of one host.
  absl::StatusOr<std::pair<Step, uint64_t>> Digest(int h) {
    StepProtocol& protocol = *hosts[h]->protocol;
    const uint64_t ticket = protocol.tickets().AskForDigest();
    while (true) {
      const uint32_t word = protocol.control()->finished.load();
      ASSIGN_OR_RETURN(auto digest, protocol.tickets().DigestOf(ticket));
      if (digest.has_value()) return *digest;
      FutexWait(protocol.control()->finished, word, kLongWait);
    }
  }

  // Hosts publish a moment apart.
  absl::Status AwaitVersion(int h, Step step) {
    const StepProtocol& protocol = *hosts[h]->protocol;
    const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(kLongWait);
    while (true) {
      const uint32_t word = protocol.control()->finished.load();
      if (protocol.publications().Find(step).has_value()) return absl::OkStatus();
      if (MonotonicNanos() > deadline) return absl::DeadlineExceededError("not published on every host");
      FutexWait(protocol.control()->finished, word, absl::Milliseconds(100));
    }
  }
  // A version on demand, asked for at one host: its step, once it is there on all of them.
  absl::StatusOr<Step> Publish(int h) {
    StepProtocol& protocol = *hosts[h]->protocol;
    const uint64_t ticket = protocol.tickets().AskToPublish();
    while (true) {
      const uint32_t word = protocol.control()->finished.load();
      ASSIGN_OR_RETURN(auto step, protocol.tickets().PublishedFor(ticket));
      if (step.has_value()) {
        for (int other = 0; other < num_hosts(); ++other) RETURN_IF_ERROR(AwaitVersion(other, *step));
        return *step;
      }
      RETURN_IF_ERROR(protocol.members().Health());
      FutexWait(protocol.control()->finished, word, kLongWait);
    }
  }

  std::string Window(int h) const { return {hosts[h]->host.window().data(), static_cast<size_t>(plan.window_bytes())}; }
  std::string Published(int h, int64_t step) {
    const std::optional<int> buffer = hosts[h]->protocol->publications().Pin(Step(step));
    if (!buffer.has_value()) return "not published";
    const std::string bytes(hosts[h]->host.publication(*buffer).data(), static_cast<size_t>(plan.window_bytes()));
    hosts[h]->protocol->publications().Unpin(*buffer);
    return bytes;
  }

  const JobSpec job;
  const Plan plan;
  std::shared_ptr<LocalHub> rounds, gradients, results;
  std::vector<std::unique_ptr<OneOfHosts>> hosts;
};

}  // namespace shardmesh
