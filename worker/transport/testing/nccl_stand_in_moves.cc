// How the stand-in's communicators move bytes.
#include <algorithm>
#include <cstring>

#include "core/format/format.h"
#include "worker/transport/testing/stand_in_nccl.h"

namespace shardmesh {

void StandInNccl::Reduce(const std::vector<StandInOp*>& ops) {
  // From the last rank to the first: another order than the tree's.
  std::vector<std::vector<char>> results;
  for (size_t rank = 0; rank < ops.size(); ++rank) {
    const size_t bytes = ops[rank]->bytes(), width = bytes / std::max<size_t>(ops[rank]->count, 1);
    results.emplace_back(bytes);
    for (size_t i = 0; i < ops[rank]->count; ++i) {
      float sum = 0;
      for (size_t from = ops.size(); from-- > 0;) {
        const char* at = ops[from]->from + rank * bytes + i * width;
        float number = 0;
        uint16_t half = 0;
        std::memcpy(width == 4 ? static_cast<void*>(&number) : &half, at, width);
        sum += width == 4 ? number : Bf16ToFloat(half);
        if (width == 2) sum = Bf16ToFloat(FloatToBf16Rne(sum));
      }
      const uint16_t half = FloatToBf16Rne(sum);
      std::memcpy(&results.back()[i * width], width == 4 ? static_cast<const void*>(&sum) : &half, width);
    }
  }
  for (size_t rank = 0; rank < ops.size(); ++rank)
    std::memcpy(ops[rank]->to, results[rank].data(), results[rank].size());
}

void StandInNccl::Perform(const std::vector<StandInOp*>& ops) {
  if (ops[0]->name == "ReduceScatter") return Reduce(ops);
  for (StandInOp* to : ops) {
    for (size_t rank = 0; rank < ops.size(); ++rank) {
      const StandInOp& from = *ops[rank];
      const bool gather = from.name == "AllGather";
      if (!gather && static_cast<int>(rank) != from.peer) continue;
      std::memmove(to->to + (gather ? rank * from.bytes() : 0), from.from, from.bytes());
    }
  }
}

bool StandInNccl::RunCollective(StandInClique& clique) {
  machine_.mu.AssertHeld();
  std::vector<StandInOp*> ops;
  for (NcclComm* comm : clique.ranks) {
    if (comm == nullptr || comm->gone || !comm->running || !comm->running->started) return false;
    for (StandInOp& op : comm->running->ops) {
      if (op.done || !op.collective()) continue;
      ops.push_back(&op);
      break;
    }
  }
  if (ops.size() != clique.ranks.size()) return false;
  if (std::any_of(ops.begin(), ops.end(), [](const StandInOp* op) { return op->stuck; })) return false;
  if (!std::all_of(ops.begin(), ops.end(), [&](const StandInOp* op) { return op->Fits(*ops[0]); })) {
    machine_.MisuseLocked("ranks make different calls of NCCL");
    for (StandInOp* op : ops) op->stuck = true;
    return false;
  }
  Perform(ops);
  for (StandInOp* op : ops) op->done = true;
  return true;
}

bool StandInNccl::RunSends(NcclComm& comm) {
  machine_.mu.AssertHeld();
  bool moved = false;
  for (StandInOp& sent : comm.running->ops) {
    if (sent.name != "Send" || sent.done || sent.stuck) continue;
    NcclComm* peer = comm.clique->ranks[sent.peer];
    if (peer == nullptr || peer->gone || !peer->running || !peer->running->started) continue;
    for (StandInOp& received : peer->running->ops) {
      if (received.name != "Recv" || received.done || received.peer != comm.rank) continue;
      if (received.stuck) break;
      if (received.bytes() != sent.bytes()) {
        machine_.MisuseLocked("a rank sends " + std::to_string(sent.bytes()) + " bytes where " +
                              std::to_string(received.bytes()) + " are received");
        received.stuck = true;
        break;
      }
      std::memcpy(received.to, sent.from, sent.bytes());
      sent.done = received.done = moved = true;
      break;
    }
  }
  return moved;
}

bool StandInNccl::Progress() {
  bool moved = false;
  for (auto& [id, clique] : cliques_) {
    moved = RunCollective(clique) || moved;
    for (NcclComm* comm : clique.ranks) {
      if (comm == nullptr || comm->gone || !comm->running || !comm->running->started || comm->running->done) continue;
      moved = RunSends(*comm) || moved;
    }
    for (NcclComm* comm : clique.ranks) {
      if (comm == nullptr || !comm->running) continue;
      const auto& ops = comm->running->ops;
      if (std::all_of(ops.begin(), ops.end(), [](const StandInOp& op) { return op.done; })) comm->running->done = true;
    }
  }
  return moved;
}

}  // namespace shardmesh
