#include "worker/doors/job_status.h"

#include <unistd.h>

#include <string>

namespace shardmesh {
namespace {

// Of the host's lead: who pulls slots there.
void FillTrainers(const JobShard& shard, v1::GetStatusReply::Job& status) {
  const ControlBlock& control = *shard.protocol().control();
  status.set_slots_reopened(control.pull.reopened.load());
  status.set_slots_differing(control.pull.differing.load());
  for (int seat = 0; seat < shard.spec().num_trainers; ++seat) {
    if (control.slots[seat].holder.load() == 0) continue;
    v1::GetStatusReply::Job::Trainer& trainer = *status.add_trainers();
    trainer.set_seat(seat);
    if (!IsConnected(control, seat)) trainer.set_pid(control.slots[seat].holder_pid.load());
    trainer.set_slots_finished(control.pull.seats[seat].slots_finished.load());
    trainer.set_idle_nanos(control.pull.seats[seat].idle_nanos.load());
  }
}

void FillMemory(const JobShard& shard, v1::GetStatusReply::Job& status) {
  const HostMemory::Sizes allocated = shard.host().Allocated(), resident = shard.host().Resident();
  status.set_shard_bytes(shard.run().pass.shard_bytes());
  status.set_gathered_bytes(shard.run().pass.gathered_bytes());
  status.set_sum_bytes(shard.memory().sum_bytes());
  status.set_window_bytes(allocated.window);
  status.set_publication_bytes(allocated.publications);
  status.set_publication_resident_bytes(resident.publications);
  status.set_slot_bytes(allocated.slots);
  status.set_window_resident_bytes(resident.window);
  status.set_slot_resident_bytes(resident.slots);
}

}  // namespace

void FillStatus(const JobShard& shard, v1::GetStatusReply::Job& status) {
  const StepProtocol& protocol = shard.protocol();
  status.set_name(shard.spec().name);
  status.set_epoch(shard.epoch().value());
  status.set_rank(shard.rank().value());
  status.set_committed_step(protocol.committed_step().value());
  for (Step step : protocol.publications().Published()) status.add_published_steps(step.value());
  status.set_held_publications(protocol.publications().num_held());
  status.set_refused_publications(protocol.publications().refused());
  FillMemory(shard, status);
  const bool lead = shard.rank().value() == protocol.local().first();
  if (shard.plan().pulled() && lead) FillTrainers(shard, status);
  if (const HostLead* const host_lead = shard.run().host_lead; host_lead != nullptr) {
    status.set_transport(host_lead->transport());
    status.set_host_gradient_bytes_in(host_lead->traffic().gradient_bytes_in.load());
    status.set_host_weight_bytes_in(host_lead->traffic().weight_bytes_in.load());
  }
  const MemberWords& member = protocol.control()->members[shard.rank().value()];
  status.set_restarts(static_cast<int32_t>(member.restarts.load()));
  if (const int64_t pause = member.pause_nanos.load(); pause > 0) status.set_last_pause_nanos(pause);
  if (const absl::Status health = protocol.members().Health(); !health.ok()) {
    status.set_error(std::string(health.message()));
  }
}

void FillTrace(const JobShard& shard, v1::GetTraceReply& trace) {
  trace.set_rank(shard.rank().value());
  trace.set_pid(getpid());
  for (const TraceSpan& span : shard.run().trace.Spans()) {
    v1::TraceSpan& to = *trace.add_spans();
    to.set_name(span.name);
    to.set_step(span.step);
    to.set_bucket(span.bucket);
    to.set_item(span.item);
    to.set_thread(span.thread);
    to.set_begin_nanos(span.begin_nanos);
    to.set_end_nanos(span.end_nanos);
  }
}

}  // namespace shardmesh
