#include "bench/collectives/collectives_job.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/harness/memory_speed.h"
#include "core/base/reduction.h"
#include "core/base/status.h"
#include "core/format/format.h"
#include "worker/transport/symmetric_group.h"

namespace shardmesh::bench {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(60), kSpin = absl::Microseconds(50);
constexpr uint64_t kEpoch = 1;
constexpr int64_t kSlack = 4 << 20;  // of a heap: its buffers' offsets

// Numbers in [-1, 1) whose sums depend on the order in which they are added.
float InputOf(int rank, int64_t i) {
  const auto mixed = static_cast<uint32_t>((i + 1) * 2654435761 + (rank + 1) * 2246822519);
  return static_cast<float>(static_cast<int32_t>(mixed)) * 0x1p-31f;
}

float* NewVector(int64_t elements) {
  return static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(elements) * sizeof(float)));
}

}  // namespace

struct CollectivesJob::Words {
  std::atomic<int64_t> result, slots[kMaxSymmetricRanks];  // their places
};

// One rank, in its own process.
class CollectivesJob::Worker {
 public:
  static absl::StatusOr<std::unique_ptr<Worker>> Create(const CollectivesJob& job, int rank) {
    std::unique_ptr<Worker> worker(new Worker(job, rank));
    // Polling is worth it where every rank has a core.
    const absl::Duration spin = job.ranks_ <= sysconf(_SC_NPROCESSORS_ONLN) ? kSpin : absl::ZeroDuration();
    ASSIGN_OR_RETURN(worker->bulk_, SymmetricGroup::Join(job.bulk_, rank, kEpoch, spin));
    ASSIGN_OR_RETURN(worker->spinning_, SymmetricGroup::Join(job.spinning_, rank, kEpoch, kSpin));
    ASSIGN_OR_RETURN(worker->sleeping_, SymmetricGroup::Join(job.sleeping_, rank, kEpoch));
    RETURN_IF_ERROR(worker->Allocate());
    return worker;
  }

  absl::Status Do(int task) {
    switch (task) {
      case kReady:
        return absl::OkStatus();
      case kCopy:
        StreamingCopy(private_result_, slot_, job_.bytes());
        return absl::OkStatus();
      case kShared:
        return ReduceAndGather(slot_, shared_ + rank_ * PieceElements(), shared_);
      case kPrivate:
        return ReduceAndGather(slot_, piece_, private_result_);
      case kStaged:
        return ReduceAndGather(private_slot_, piece_, private_result_);
      case kCheckShared:
        return Check(shared_);
      case kCheckPrivate: {
        RETURN_IF_ERROR(Check(private_result_));
        std::fill(private_result_, private_result_ + job_.elements_, 0.0f);  // what comes next cannot rest on it
        return absl::OkStatus();
      }
      case kSpinningBarrier:
        return Repeat([&] { return spinning_->Barrier(kTimeout); });
      case kSleepingBarrier:
        return Repeat([&] { return sleeping_->Barrier(kTimeout); });
      case kSpinningGather:
        return Repeat([&] { return spinning_->AllGather(piece_, private_result_, kGatherBytes, kTimeout); });
      case kSleepingGather:
        return Repeat([&] { return sleeping_->AllGather(piece_, private_result_, kGatherBytes, kTimeout); });
    }
    return absl::InvalidArgumentError(absl::StrCat("task ", task, " is none"));
  }

 private:
  Worker(const CollectivesJob& job, int rank) : job_(job), rank_(rank), holders_(job.ranks_) {
    std::iota(holders_.begin(), holders_.end(), 0);
  }

  int64_t PieceElements() const { return job_.elements_ / job_.ranks_; }

  // Every page is touched here, before anything is timed.
  absl::Status Allocate() {
    ASSIGN_OR_RETURN(char* const slot, job_.bulk_->Allocate(rank_, job_.bytes()));
    ASSIGN_OR_RETURN(char* const piece, job_.bulk_->Allocate(rank_, PieceElements() * 4));
    ASSIGN_OR_RETURN(char* const shared, job_.bulk_->AllocateShared(job_.bytes()));
    slot_ = reinterpret_cast<float*>(slot);
    piece_ = reinterpret_cast<float*>(piece);
    shared_ = reinterpret_cast<float*>(shared);
    private_slot_ = NewVector(job_.elements_);
    private_result_ = NewVector(job_.elements_);
    if (private_slot_ == nullptr || private_result_ == nullptr) {
      return absl::ResourceExhaustedError(absl::StrCat("no memory for two vectors of ", job_.bytes(), " bytes"));
    }
    for (int64_t i = 0; i < job_.elements_; ++i) slot_[i] = InputOf(rank_, i);
    std::copy(slot_, slot_ + job_.elements_, private_slot_);
    std::fill(private_result_, private_result_ + job_.elements_, 0.0f);
    job_.words_->slots[rank_] = job_.bulk_->PlaceOf(slot_, job_.bytes());
    job_.words_->result = job_.bulk_->PlaceOf(shared_, job_.bytes());
    return absl::OkStatus();
  }

  absl::Status ReduceAndGather(const float* slot, float* piece, float* all) {
    const void* const mine[] = {slot};
    const SlotSum sum = {Format::kFp32, holders_, mine, PieceElements()};
    RETURN_IF_ERROR(bulk_->ReduceScatter(sum, piece, kTimeout));
    return bulk_->AllGather(piece, all, PieceElements() * 4, kTimeout);
  }

  absl::Status Check(const float* result) const {
    for (int64_t i = 0; i < job_.elements_; ++i) {
      const float sum = TreeSum<float>(job_.ranks_, [&](int rank) { return InputOf(rank, i); });
      if (FloatBits(result[i]) != FloatBits(sum)) {
        return absl::InternalError(absl::StrCat("element ", i, " is ", result[i], ", and the tree sum ", sum));
      }
    }
    return absl::OkStatus();
  }

  template <class Call>
  static absl::Status Repeat(const Call& call) {
    for (int i = 0; i < kCalls; ++i) RETURN_IF_ERROR(call());
    return absl::OkStatus();
  }

  const CollectivesJob& job_;
  const int rank_;
  std::vector<int> holders_;
  std::unique_ptr<SymmetricGroup> bulk_, spinning_, sleeping_;
  float *slot_ = nullptr, *piece_ = nullptr, *shared_ = nullptr;  // in the heaps
  float *private_slot_ = nullptr, *private_result_ = nullptr;     // freed with the process
};

absl::StatusOr<std::unique_ptr<CollectivesJob>> CollectivesJob::Create(int ranks, int64_t elements) {
  std::unique_ptr<CollectivesJob> job(new CollectivesJob(ranks, elements));
  RETURN_IF_ERROR(job->Start());
  return job;
}

absl::Status CollectivesJob::Start() {
  const auto make = [&](const SymmetricMemory::Sizes& sizes) -> absl::StatusOr<std::shared_ptr<SymmetricMemory>> {
    ASSIGN_OR_RETURN(SymmetricMemory memory, SymmetricMemory::Create(ranks_, sizes));
    return std::make_shared<SymmetricMemory>(std::move(memory));
  };
  ASSIGN_OR_RETURN(bulk_, make({bytes() + bytes() / ranks_ + kSlack, bytes() + kSlack}));
  ASSIGN_OR_RETURN(spinning_, make({}));
  ASSIGN_OR_RETURN(sleeping_, make({}));
  ASSIGN_OR_RETURN(words_memory_, Segment::Create("bench-words", sizeof(Words), 0));
  words_ = reinterpret_cast<Words*>(words_memory_.data());
  ASSIGN_OR_RETURN(team_, WorkerTeam::Start(ranks_, [this](WorkerTeam::Member& member) -> WorkerTeam::Work {
                     absl::StatusOr<std::unique_ptr<Worker>> made = Worker::Create(*this, member.rank());
                     const absl::Status status = made.status();
                     std::shared_ptr<Worker> worker = made.ok() ? *std::move(made) : nullptr;
                     return [status, worker, rank = member.rank()](int task) {
                       const absl::Status done = worker != nullptr ? worker->Do(task) : status;
                       if (!done.ok()) std::fprintf(stderr, "rank %d: %s\n", rank, done.ToString().c_str());
                       return done.ok();
                     };
                   }));
  return Run(kReady).status();
}

std::string CollectivesJob::MemoryPath() const { return absl::StrCat("/proc/", getpid(), "/fd/", bulk_->fd()); }

std::string CollectivesJob::Places() const {
  std::string places = absl::StrCat(words_->result.load());
  for (int rank = 0; rank < ranks_; ++rank) absl::StrAppend(&places, ",", words_->slots[rank].load());
  return places;
}

}  // namespace shardmesh::bench
