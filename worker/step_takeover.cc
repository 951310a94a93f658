// Of StepProtocol: what the next life of a member finds on the page, and goes on with.
#include "worker/step_protocol.h"

namespace shardmesh {
namespace {

// A word that is odd while it is worked on.
template <typename Word>
void MakeEven(std::atomic<Word>& word) {
  if (word.load() % 2 == 1) word.fetch_add(1);
}

}  // namespace

void StepProtocol::TakeOver() {
  const int self = self_.value();
  for (int s = 0; s < job_->num_slots; ++s) {
    page_->slots[s].declaring[self].store(0);
    for (int p = 0; p < plan_->num_shards(); ++p) {
      int32_t mine = self + 1;
      page_->pushes[s][p].compare_exchange_strong(mine, 0);
    }
  }
  for (PublicationWords& publication : page_->publications) publication.pins[self].store(0);
  MemberWords& words = page_->members[self];
  // Pieces of initial weights were in the process. If they are decided on, nobody else has this one.
  const bool placed = words.done.load() > 0;
  if (!placed && decided() > 0) return Abort(AbortReason::kGone, self, self_);
  if (!placed) words.initial_id.store(0);
  if (self != local_.first()) return;
  MakeEven(page_->taking_letters);
  MakeEven(page_->digest_writing);
}

std::map<uint64_t, std::vector<int>> StepProtocol::SessionsHere() const {
  std::map<uint64_t, std::vector<int>> sessions;
  for (int s = 0; s < job_->num_slots; ++s) {
    const uint64_t holder = page_->slots[s].holder.load() & ~kLeaving;
    if (holder != 0 && AttachedTo(holder) == self_.value()) sessions[holder].push_back(s);
  }
  return sessions;
}

}  // namespace shardmesh
