#include "worker/job/waiters.h"

#include <algorithm>

namespace shardmesh {

void Waiters::Add(std::shared_ptr<Waiter> waiter) {
  {
    MutexLock lock(mu_);
    waiting_.push_back(waiter);  // before the try: a change between the two is not missed
  }
  if (!waiter->Try()) return;
  MutexLock lock(mu_);
  waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), waiter), waiting_.end());
}

void Waiters::Remove(const Waiter* waiter) {
  std::shared_ptr<Waiter> last;  // destroyed without the lock
  MutexLock lock(mu_);
  const auto it = std::find_if(waiting_.begin(), waiting_.end(),
                               [waiter](const std::shared_ptr<Waiter>& one) { return one.get() == waiter; });
  if (it == waiting_.end()) return;
  last = std::move(*it);
  waiting_.erase(it);
}

void Waiters::Notify() {
  std::vector<std::shared_ptr<Waiter>> waiting;
  {
    MutexLock lock(mu_);
    waiting = waiting_;
  }
  std::vector<std::shared_ptr<Waiter>> answered;
  for (const std::shared_ptr<Waiter>& waiter : waiting) {
    if (waiter->Try()) answered.push_back(waiter);
  }
  if (answered.empty()) return;
  MutexLock lock(mu_);
  waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(),
                                [&](const std::shared_ptr<Waiter>& waiter) {
                                  return std::find(answered.begin(), answered.end(), waiter) != answered.end();
                                }),
                 waiting_.end());
}

}  // namespace shardmesh
