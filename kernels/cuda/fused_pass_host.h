// The blocks of a fused pass (kernels/cuda/fused_pass_body.h) walked on the CPU, thread by thread: forwards in one
// phase, backwards in the next, so that what depends on their order shows. Memory that threads share begins with
// anything. Tests only. A walk can be stopped, as a killed worker's is, after a number of tiles. One thread.
#pragma once

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/cpu/fp_environment.h"
#include "kernels/cuda/fused_pass_body.h"
#include "kernels/cuda/pass_gate.h"
#include "kernels/cuda/row_step_body.h"
#include "kernels/cuda/warp_step_body.h"

namespace shardmesh {

struct HostMachine {
  uint64_t LoadAcquire(const uint64_t* word) const { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  void StoreRelease(uint64_t* word, uint64_t value) const { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
  uint64_t Nanos() const {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
  }
  void Pause() const { std::this_thread::yield(); }
};

class HostBlock : public HostMachine {
 public:
  static constexpr int kTeller = 32;

  // `tiles_left`: how many more are stepped before the walk stops; counted down. Null: no end.
  HostBlock(int num_threads, int64_t* tiles_left) : num_threads_(num_threads), tiles_left_(tiles_left) {}

  bool Opened(const PassArgs& args) const {
    return args.verdict == nullptr || LoadAcquire(args.verdict) == args.opened;
  }
  static void Ask(const void*) {}
  bool GoesOn() const { return tiles_left_ == nullptr || *tiles_left_ > 0; }
  template <class Body>
  void Each(const Body& body) {
    ForThreads(num_threads_, [&](int thread) { body(thread, num_threads_); });
  }
  template <class Body>
  void Threads(const Body& body) {
    Each(body);
  }
  template <class Body>
  void OneWarp(const Body& body) {
    ForThreads(32, body);
  }

 protected:
  template <class Phase>
  static void WalkPhases(int64_t begin, int64_t end, int num_threads, const Phase& phase) {
    for (int64_t p = begin; p < end; ++p) {
      for (int i = 0; i < num_threads; ++i) phase(p, p % 2 == 0 ? i : num_threads - 1 - i);
    }
  }
  void EndTile() {
    if (tiles_left_ != nullptr) --*tiles_left_;
  }
  template <class Phase>
  void WalkTile(int64_t num_phases, int num_threads, const Phase& phase) {
    WalkPhases(0, num_phases, num_threads, phase);
    EndTile();
  }

 private:
  template <class Body>
  void ForThreads(int num_threads, const Body& body) {
    if (!GoesOn()) return;  // what was begun is not finished
    for (int i = 0; i < num_threads; ++i) body(backwards_ ? num_threads - 1 - i : i);
    backwards_ = !backwards_;
  }

  const int num_threads_;
  int64_t* const tiles_left_;
  bool backwards_ = false;
};

template <class Body>
class HostWarpBlock : public HostBlock {
 public:
  explicit HostWarpBlock(int64_t* tiles_left = nullptr)
      : HostBlock(kWarps * Body::kLanes, tiles_left), warps_(std::make_unique<typename Body::Memory[]>(kWarps)) {}
  template <class Tell, class Next>
  void StepRun(PassMemory* memory, const Tell& tell, const Next& next) {
    const int64_t tiles = (memory->run.num_elements + kTileElements - 1) / kTileElements;
    for (int64_t first = 0; first < tiles; first += kWarps) {
      std::vector<Body> lanes;
      for (int warp = 0; warp < kWarps; ++warp) {
        std::memset(static_cast<void*>(&warps_[warp]), 0xFF, sizeof(warps_[warp]));
        for (int lane = 0; lane < Body::kLanes; ++lane) {
          lanes.emplace_back(memory->context, memory->run, memory->plan, first + warp, &warps_[warp], lane);
        }
      }
      const auto walk = [&](int warp, int begin, int end) {
        if (!GoesOn()) return;
        WalkPhases(begin, end, Body::kLanes,
                   [&](int64_t phase, int lane) { lanes[warp * Body::kLanes + lane].Phase(static_cast<int>(phase)); });
      };
      for (int warp = kWarps - 1; warp >= 0; --warp) walk(warp, 0, 1);
      if (first == 0) {
        tell();
        next();
      }
      for (int warp = kWarps - 1; warp >= 0; --warp) walk(warp, 1, Body::kStorePhase);
      for (int warp = kWarps - 1; warp >= 0; --warp) {
        if (first + warp >= tiles || !GoesOn()) continue;
        walk(warp, Body::kStorePhase, Body::kPhases);
        EndTile();
      }
    }
  }

 private:
  static constexpr int kWarps = 4;
  const std::unique_ptr<typename Body::Memory[]> warps_;
};

class HostTileBlock : public HostBlock {
 public:
  explicit HostTileBlock(int64_t* tiles_left = nullptr)
      : HostBlock(kTileElements, tiles_left), rows_(std::make_unique<RowMemory>()) {
    std::memset(static_cast<void*>(rows_.get()), 0xFF, sizeof(*rows_));
  }
  template <class Tell, class Next>
  void StepRun(PassMemory* memory, const Tell& tell, const Next& next) {
    tell();
    next();
    if (memory->context.weights == WeightFormat::kInt8Row) {
      for (int64_t unit = 0; unit < RowUnits(memory->run) && GoesOn(); ++unit) {
        RowBody body(memory->context, memory->run, memory->plan, unit, rows_.get());
        WalkTile(body.num_phases(), kTileElements, [&](int64_t phase, int thread) { body.Phase(phase, thread); });
      }
      return;
    }
    const int64_t tiles = (memory->run.num_elements + kTileElements - 1) / kTileElements;
    for (int64_t tile = 0; tile < tiles && GoesOn(); ++tile) {
      WalkTile(StepBody::kPhases, kTileElements, [&](int64_t phase, int thread) {
        StepBody(memory->plan, tile, &rows_->tile).Phase(static_cast<int>(phase), thread);
      });
    }
  }

 private:
  const std::unique_ptr<RowMemory> rows_;
};

// A whole launch, block after block, the last one first.
template <class Walk>
void ForEachPassBlock(const PassArgs& args, const Walk& walk) {
  const ScopedFpEnvironment environment;
  struct Memories {
    PassMemory memories[2];
  };
  const auto memories = std::make_unique<Memories>();
  for (int block = args.num_ranges - 1; block >= 0; --block) {
    std::memset(static_cast<void*>(memories.get()), 0xFF, sizeof(*memories));
    walk(block, memories->memories);
  }
}

inline void StepPassOnHost(const PassArgs& args, const OptimizerContext* warp, int64_t* tiles_left = nullptr) {
  ForEachPassBlock(args, [&](int index, PassMemory(&memories)[2]) {
    if (warp == nullptr) {
      HostTileBlock block(tiles_left);
      return StepPassRange(args, index, memories, block);
    }
    WithWarpBody(*warp, [&](auto tag) {
      HostWarpBlock<typename decltype(tag)::Type> block(tiles_left);
      StepPassRange(args, index, memories, block);
    });
  });
}

inline void SquarePassOnHost(const PassArgs& args) {
  ForEachPassBlock(args, [&](int index, PassMemory(&memories)[2]) {
    HostWarpBlock<SquaresBody> block;
    SquarePassRange(args, index, &memories[0], block);
  });
}

}  // namespace shardmesh
