// OneHost: the transport of a lead whose job has no other host. It moves nothing and waits for nobody; facts are those
// of the control block.
#pragma once

#include <utility>

#include "worker/lead/lead.h"
#include "worker/lead/lead_transport.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

class OneHost final : public LeadTransport {
 public:
  // Borrowed arguments outlive the object.
  OneHost(const StepProtocol& protocol, const Plan& plan) : protocol_(protocol), plan_(plan) {}

  bool alone() const override { return true; }
  bool Exchange(const LeadState&) override { return protocol_.control()->abort.load() == 0; }
  bool AllDone(uint64_t) const override { return true; }
  int CommonPublication(int mine) const override { return mine; }
  void ReadFacts(Facts& facts) const override {
    facts = shardmesh::ReadFacts(*protocol_.control(), protocol_.job(), plan_, protocol_.local());
  }
  void BringGradients(const Command&) override {}
  void BringEarly(uint64_t) override {}
  bool MayRunAhead(const Command&) const override { return true; }
  void Ready(const Command&) override {}
  void BeforeIssue(const Command&) override {}
  void SendResults(const Command&) override {}
  bool HasGradients() override { return true; }
  bool IsIdle() override { return true; }
  void BeforeCommit(const Command&) override {}
  void AfterCommit(bool) override {}
  absl::Duration PatienceToCollect() override { return kSlice; }
  absl::Duration PatienceToRun() const override { return kSlice; }
  void Leave(absl::string_view) override {}

 private:
  static constexpr absl::Duration kSlice = absl::Milliseconds(100);  // waits end and begin again this often

  const StepProtocol& protocol_;
  const Plan& plan_;
};

// The lead of such a job, for the engine of its first rank.
struct OneHostLead {
  // Arguments as Lead's.
  OneHostLead(StepProtocol& protocol, StepPass& pass, const JobSpec& job, const Plan& plan, LeadOptions options)
      : transport(protocol, plan), lead(protocol, pass, job, plan, transport, std::move(options)) {}

  OneHost transport;
  Lead lead;
};

}  // namespace shardmesh
