// EmulatedKernels: the kernels of the fused pass walked on the CPU (kernels/cuda/fused_pass_host.h), in streams of the
// stand-in device. Tests only. Thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "kernels/cuda/fused_pass_host.h"
#include "kernels/cuda/fused_pass_kernels.h"
#include "worker/transport/testing/load_stand_in.h"

namespace shardmesh {

class EmulatedKernels final : public PassKernels {
 public:
  // From the next launch of a step on, so many tiles are stepped; then everything stands still, the arrival included,
  // as when the worker is killed. Less than 0: no end.
  void StopAfter(int64_t tiles) {
    tiles_left_ = tiles;
    stops_ = tiles >= 0;
  }
  // Steps from now on wait until Release.
  void Hold() { held_ = true; }
  void Release() { held_ = false; }
  // Called in the stream, behind every launch of a step. REQUIRES: nothing is launched now.
  void BehindSteps(std::function<void(const PassArgs&)> look) { behind_steps_ = std::move(look); }
  int steps_done() const { return steps_done_; }
  int gates_begun() const { return gates_begun_; }
  bool stopped() const { return stops_ && tiles_left_ <= 0; }

  const char* Gate(const PassGate& gate, void* stream) const override {
    TheStandIn().Launch(stream, [this, gate] {
      ++gates_begun_;
      HostMachine machine;
      AwaitGate(gate, machine);
    });
    return nullptr;
  }
  const char* Step(const PassArgs& args, const OptimizerContext* warp, void* stream) const override {
    const auto context = warp == nullptr ? std::nullopt : std::make_optional(*warp);
    TheStandIn().Launch(stream, [this, args, context] {
      while (held_) std::this_thread::yield();
      int64_t left = tiles_left_;
      StepPassOnHost(args, context.has_value() ? &*context : nullptr, stops_ ? &left : nullptr);
      if (stops_) tiles_left_ = left;
      if (behind_steps_) behind_steps_(args);
      ++steps_done_;
    });
    return nullptr;
  }
  const char* Squares(const PassArgs& args, void* stream) const override {
    TheStandIn().Launch(stream, [args] { SquarePassOnHost(args); });
    return nullptr;
  }
  const char* Arrival(const PassArrival& arrival, void* stream) const override {
    TheStandIn().Launch(stream, [this, arrival] {
      HostMachine machine;
      if (!stopped()) Arrive(arrival, machine);
    });
    return nullptr;
  }
  const char* Digests(const StretchDigests& args, void* stream) const override {
    TheStandIn().Launch(stream, [args] {
      for (int32_t i = 0; i < args.num_stretches; ++i) {
        uint64_t digest = 0;
        for (int thread = kStretchThreads - 1; thread >= 0; --thread) {
          digest += ShareOfDigest(args.stretches[i], args.parity, thread, kStretchThreads);
        }
        args.digests[i] = digest;
      }
    });
    return nullptr;
  }
  const char* Copies(const StretchCopies& args, void* stream) const override {
    TheStandIn().Launch(stream, [args] {
      for (int32_t i = 0; i < args.num_copies; ++i) {
        for (int thread = kStretchThreads - 1; thread >= 0; --thread)
          CopyShare(args.copies[i], thread, kStretchThreads);
      }
    });
    return nullptr;
  }

 private:
  std::function<void(const PassArgs&)> behind_steps_;
  mutable std::atomic<int64_t> tiles_left_{0};
  std::atomic<bool> stops_{false}, held_{false};
  mutable std::atomic<int> steps_done_{0}, gates_begun_{0};
};

}  // namespace shardmesh
