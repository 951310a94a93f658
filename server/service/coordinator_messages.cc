#include "server/service/coordinator_messages.h"

#include "proto/convert.h"
#include "proto/protocol_version.h"

namespace shardmesh {

v1::JobState ToProto(JobState state) {
  switch (state) {
    case JobState::kWaiting:
      return v1::JOB_STATE_WAITING;
    case JobState::kPreparing:
      return v1::JOB_STATE_PREPARING;
    case JobState::kReady:
      return v1::JOB_STATE_READY;
    case JobState::kFailed:
      return v1::JOB_STATE_FAILED;
  }
  return v1::JOB_STATE_UNSPECIFIED;
}

namespace {

v1::Resharding ToProto(const NextMesh& next) {
  v1::Resharding proto;
  *proto.mutable_mesh() = next.definition->proto().mesh();
  proto.set_epoch(next.epoch);
  for (const MemberRecord& member : next.members) proto.add_workers(member.worker.name);
  for (const MemberRecord& departing : next.departing) proto.add_leavers(departing.worker.name);
  for (const std::vector<MemberRecord>* all : {&next.members, &next.departing}) {
    for (const MemberRecord& member : *all) {
      if (!member.ready) proto.add_preparing(member.worker.name);
    }
  }
  return proto;
}

v1::Peer PeerOf(const WorkerIdentity& worker, int32_t rank) {
  v1::Peer peer;
  peer.set_rank(rank);
  peer.set_worker(worker.name);
  peer.set_incarnation(worker.incarnation);
  peer.set_local_socket(worker.local_socket);
  peer.set_pid(worker.pid);
  peer.set_host_id(worker.host_id);
  peer.set_address(worker.address);
  return peer;
}

v1::StoredCheckpoint ToProto(const CheckpointRecord& checkpoint) {
  v1::StoredCheckpoint proto;
  proto.set_folder(checkpoint.folder);
  proto.set_step(checkpoint.step);
  proto.set_digest(checkpoint.digest);
  proto.set_copied_at(checkpoint.copied_at);
  return proto;
}

MemberReport::State StateOf(v1::MemberState state) {
  switch (state) {
    case v1::MEMBER_STATE_FAILED:
      return MemberReport::State::kFailed;
    case v1::MEMBER_STATE_READY:
      return MemberReport::State::kReady;
    case v1::MEMBER_STATE_PREPARED:
      return MemberReport::State::kPrepared;
    default:
      return MemberReport::State::kPreparing;
  }
}

}  // namespace

v1::JobDescription ToProto(const JobView& view, bool with_parameters) {
  v1::JobDescription proto;
  if (with_parameters) {
    *proto.mutable_spec() = view.definition->proto();
  } else {
    JobSpec spec = view.definition->spec();
    spec.parameters.clear();
    *proto.mutable_spec() = ToProto(spec);
  }
  proto.set_state(ToProto(view.state));
  proto.set_uid(view.uid);
  proto.set_epoch(view.epoch);
  proto.set_from_epoch(view.from_epoch);
  for (size_t rank = 0; rank < view.members.size(); ++rank) {
    const JobView::Member& from = view.members[rank];
    v1::Member* member = proto.add_members();
    member->set_rank(static_cast<int32_t>(rank));
    member->set_worker(from.worker.name);
    member->set_incarnation(from.worker.incarnation);
    member->set_address(from.worker.address);
    member->set_host_id(from.worker.host_id);
    member->set_pid(from.worker.pid);
    member->set_alive(from.alive);
    member->set_ready(from.ready);
    member->set_kept(from.retained);
    const ShardPlace place = view.definition->plan().PlaceOf(Rank(static_cast<int>(rank)));
    member->set_shard(place.shard);
    member->set_replica(place.replica);
  }
  proto.set_plan_hash(view.definition->plan().hash());
  proto.set_committed_step(view.committed_step);
  for (int64_t step : view.published_steps) proto.add_published_steps(step);
  proto.set_error(view.error);
  proto.set_waiting_for(view.waiting_for);
  proto.set_heartbeat_timeout_ms(absl::ToInt64Milliseconds(view.heartbeat_timeout));
  proto.set_reshard_error(view.reshard_error);
  *proto.mutable_protocol() = OwnProtocol();
  if (view.next != nullptr) *proto.mutable_resharding() = ToProto(*view.next);
  for (const CheckpointRecord& checkpoint : view.checkpoints) *proto.add_checkpoints() = ToProto(checkpoint);
  if (const GoneBackRecord& back = view.gone_back; back.checkpoint.is_set()) {
    proto.mutable_gone_back()->set_epoch(back.epoch);
    *proto.mutable_gone_back()->mutable_checkpoint() = ToProto(back.checkpoint);
    proto.mutable_gone_back()->set_lost_step(back.lost_step);
    proto.mutable_gone_back()->set_cause(back.cause);
  }
  if (view.copied.is_set()) *proto.mutable_copied() = ToProto(view.copied);
  return proto;
}

namespace {

// All of them are too much for each of many ranks, which are ordered by host. Who is none of them (Assignment::leaves) has
// no host among them.
void AddPeers(const Assignment& assignment, v1::Assignment& proto) {
  const SharedList<WorkerIdentity>& peers = assignment.peers;
  const auto own = static_cast<size_t>(assignment.rank);
  size_t begin = 0, end = peers.size();
  if (peers.size() > kMaxHostRanks && own < peers.size()) {
    const auto is_here = [&](size_t rank) { return peers[rank].host_id == peers[own].host_id; };
    for (begin = own; begin > 0 && is_here(begin - 1);) --begin;
    for (end = own + 1; end < peers.size() && is_here(end);) ++end;
  }
  if (begin > 0) *proto.add_peers() = PeerOf(peers[0], 0);
  for (size_t rank = begin; rank < end; ++rank) *proto.add_peers() = PeerOf(peers[rank], static_cast<int32_t>(rank));
}

}  // namespace

v1::Assignment ToProto(const Assignment& assignment, bool known) {
  v1::Assignment proto;
  proto.set_epoch(assignment.epoch);
  proto.set_rank(assignment.rank);
  proto.set_staged(assignment.staged);
  proto.set_leaves(assignment.leaves);
  const Origin& from = assignment.from;
  if (from.epoch > 0) proto.mutable_from()->set_epoch(from.epoch);
  if (assignment.back.has_value()) proto.mutable_back()->set_use(assignment.use);
  if (known) {
    proto.mutable_spec()->set_name(assignment.definition->spec().name);
    return proto;
  }
  *proto.mutable_spec() = assignment.definition->proto();
  proto.set_plan_hash(assignment.definition->plan().hash());
  proto.set_secret(assignment.secret);
  if (from.epoch > 0) proto.mutable_from()->set_mesh(from.mesh);
  if (assignment.back.has_value()) {
    *proto.mutable_back()->mutable_checkpoint() = ToProto(*assignment.back);
    proto.mutable_back()->set_mesh(assignment.copies.mesh);
    proto.mutable_back()->set_hosts(assignment.copies.hosts);
    for (const auto& [worker, rank] : assignment.copies.holders) {
      *proto.mutable_back()->add_holders() = PeerOf(worker, rank);
    }
  }
  for (const int32_t was : from.was) proto.mutable_from()->add_was(was);
  for (const MemberRecord& departing : from.departing) {
    *proto.mutable_from()->add_departing() = PeerOf(departing.worker, departing.was);
  }
  AddPeers(assignment, proto);
  return proto;
}

v1::GetPlanReply PlanToProto(const JobDefinition& definition) {
  const Plan& plan = definition.plan();
  v1::GetPlanReply proto;
  proto.set_hash(plan.hash());
  proto.set_shards(plan.num_shards());
  proto.set_replicas(plan.num_replicas());
  for (const Bucket& from : plan.buckets()) {
    v1::GetPlanReply::Bucket* bucket = proto.add_buckets();
    bucket->set_format(ToProto(from.weights));
    bucket->set_states(ToProto(from.states));
    bucket->set_num_elements(from.num_elements);
    bucket->set_shard_elements(from.shard_elements);
    bucket->set_padding(from.padding);
    bucket->set_frozen(from.frozen);
    bucket->set_gather(ToProto(from.gather));
    bucket->set_weight_bytes(from.weight_bytes);
    for (const int64_t begin : from.shard_begins) bucket->add_shard_begins(begin);
    bucket->set_num_states(from.num_states);
    bucket->set_row_elements(from.row_elements);
  }
  for (size_t i = 0; i < plan.placements().size(); ++i) {
    const Placement& from = plan.placements()[i];
    v1::GetPlanReply::Placement* placement = proto.add_placements();
    placement->set_name(definition.spec().parameters[i].name);
    placement->set_bucket(from.bucket);
    placement->set_offset(from.offset);
    placement->set_num_elements(from.num_elements);
    placement->set_num_scales(from.scales.num_blocks);
    placement->set_scale_offset(from.scale_offset);
  }
  return proto;
}

WorkerIdentity IdentityFromProto(const v1::JoinRequest& request) {
  WorkerIdentity worker;
  worker.name = request.name();
  worker.incarnation = request.incarnation();
  worker.address = request.address();
  worker.host_id = request.host_id();
  worker.local_socket = request.local_socket();
  worker.pid = request.pid();
  return worker;
}

LastIncarnation LastIncarnationFromProto(const v1::JoinRequest& request) {
  LastIncarnation last;
  last.dead = request.dead_incarnation();
  last.resumes = request.resumes();
  for (const v1::ResumedJob& from : request.resumed()) {
    last.resumed.push_back({from.job(), from.epoch(), from.rank(), from.secret()});
  }
  return last;
}

std::vector<MemberReport> ReportsFromProto(const v1::HeartbeatRequest& request) {
  std::vector<MemberReport> reports;
  reports.reserve(request.jobs_size());
  for (const v1::MemberStatus& from : request.jobs()) {
    MemberReport report;
    report.job = from.job();
    report.epoch = from.epoch();
    report.rank = from.rank();
    report.state = StateOf(from.state());
    report.plan_hash = from.plan_hash();
    report.committed_step = from.committed_step();
    report.published_steps.assign(from.published_steps().begin(), from.published_steps().end());
    report.error = from.error();
    if (from.has_lost_rank()) report.lost_rank = from.lost_rank();
    if (from.has_loaded_digest()) report.loaded_digest = from.loaded_digest();
    report.unreadable = from.unreadable();
    reports.push_back(std::move(report));
  }
  return reports;
}

std::vector<KeptCopies> CopiesFromProto(const v1::HeartbeatRequest& request) {
  std::vector<KeptCopies> copies;
  copies.reserve(request.copies_size());
  for (const v1::KeptCopies& from : request.copies()) {
    copies.push_back(
        {from.job(), from.epoch(), from.rank(), from.hosts(), from.mesh(), from.step(), from.digest(), from.secret()});
  }
  return copies;
}

}  // namespace shardmesh
