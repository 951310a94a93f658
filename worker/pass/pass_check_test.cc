// The search for silent corruption: memory that changes between two steps, arithmetic that errs once, and nothing else.
#include <gmock/gmock.h>

#include <atomic>
#include <cstring>

#include "worker/control/damage.h"
#include "worker/pass/pass.h"
#include "worker/testing/numerics_oracle.h"
#include "worker/testing/pass_group.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

JobSpec CheckedJob(const std::string& mesh, int check_every) {
  JobSpec job = MixedJob(mesh, 2);
  job.check_every = check_every;
  return job;
}

Damage DamageOf(const PassGroup& group, int rank) {
  return Damage::Of(group.host.control()->members[rank].damage.load());
}

// A bit of what a run holds now: of its weights (0), or a state's; of codes, or of the scales or remainders beside
// them. False: there are none.
bool FlipBit(PassGroup& group, int rank, int range, const ChunkRun& run, int stream, bool extra = false) {
  const ShardStorage& storage = *group.storages[rank];
  const StoredRun stored = stream == 0 ? storage.weights(range, group.parity, run.offset)
                                       : storage.state(stream - 1, range, group.parity, run.offset);
  auto* const bytes = static_cast<uint8_t*>(extra ? stored.extra : stored.codes);
  if (bytes != nullptr) bytes[1] ^= 4;
  return bytes != nullptr;
}

TEST(PassCheck, Damage_IsOneWord) {
  const Damage last{Damage::kArithmetic, kMaxParameters - 1, kMaxJobElements - 64};
  EXPECT_EQ(Damage::Of(last.Word()).what, last.what);
  EXPECT_EQ(Damage::Of(last.Word()).tensor, last.tensor);
  EXPECT_EQ(Damage::Of(last.Word()).element, last.element);
  EXPECT_EQ(Damage::Of(0).what, Damage::kNone);
  EXPECT_THAT((Damage{Damage::kMemory, 999, 0}).ToString(MixedJob("fsdp=1", 1)), HasSubstr("parameter \"?\""));
}

TEST(PassCheck, UndamagedJob_HasTheSameBits_AndNothingIsFound) {
  for (const int check_every : {1, 3, 1000}) {
    JobSpec job = CheckedJob("ddp=2,fsdp=2", check_every);
    job.clip_norm = 0.01;
    PassGroup checked(job, 2);
    job.check_every = 0;
    PassGroup plain(job, 1);
    checked.PlaceWeights();
    plain.PlaceWeights();
    for (int64_t step = 1; step <= 6; ++step) {
      checked.RunStep(step);
      plain.RunStep(step);
    }
    EXPECT_EQ(checked.Window(), plain.Window()) << check_every;
    EXPECT_EQ(checked.Digest(), plain.Digest()) << check_every;
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(DamageOf(checked, r).what, Damage::kNone) << check_every;
      EXPECT_EQ(checked.passes[r]->gathered_bytes(), plain.passes[r]->gathered_bytes());
    }
  }
}

// Every run of a shard, its weights and every state in turn: with check_every of 1 the next step finds it.
TEST(PassCheck, FlippedBit_IsFoundAndNamed) {
  const JobSpec job = CheckedJob("fsdp=2", 1);
  const PassGroup shape(job, 1);
  int found = 0;
  for (int range = 0; range < static_cast<int>(shape.storages[1]->ranges().size()); ++range) {
    const int streams = 1 + shape.plan.buckets()[shape.storages[1]->ranges()[range].bucket].num_states;
    for (size_t i = 0; i < shape.storages[1]->runs(range).size(); ++i) {
      PassGroup group(job, 1);
      group.PlaceWeights();
      const int steps = found % 2;  // placed by either parity
      for (int64_t step = 1; step <= steps; ++step) group.RunStep(step);
      const ChunkRun run = group.storages[1]->runs(range)[i];
      FlipBit(group, 1, range, run, found % streams);
      group.WriteGradients(1 + steps);
      const absl::Status status =
          group.passes[1]->Run(group.StepCommand(1 + steps), ++group.seq, nullptr, nullptr).status();
      ASSERT_EQ(status.code(), Code::kDataLoss) << status;
      EXPECT_EQ(DamageOf(group, 1).what, Damage::kMemory);
      EXPECT_LE(DamageOf(group, 1).tensor, run.tensor) << "the chunk's first";
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("changed between two steps"), HasSubstr("parameter"), HasSubstr("found in step")));
      EXPECT_EQ(DamageOf(group, 0).what, Damage::kNone);
      ++found;
    }
  }
  EXPECT_GT(found, 10);
}

// Formats with a second part: scales of rows and of states, remainders.
TEST(PassCheck, FlippedBitOfAScaleOrRemainder_IsFound) {
  JobSpec job = CheckedJob("fsdp=1", 1);
  job.parameters = {{"rows", {40, 512}, WeightFormat::kInt8Row},
                    {"split", {9000}, WeightFormat::kBf16Plus8Sr, "", StateFormat::kDyn8},
                    {"exact", {5000}, WeightFormat::kBf16Plus16, "", StateFormat::kFp8x32}};
  const PassGroup shape(job, 1);
  int found = 0;
  for (int range = 0; range < static_cast<int>(shape.storages[0]->ranges().size()); ++range) {
    for (int stream = 0; stream < 3; ++stream) {
      PassGroup group(job, 1);
      group.PlaceWeights();
      group.RunStep(1);
      if (!FlipBit(group, 0, range, group.storages[0]->runs(range)[0], stream, /*extra=*/true)) continue;
      group.WriteGradients(2);
      EXPECT_EQ(group.passes[0]->Run(group.StepCommand(2), ++group.seq, nullptr, nullptr).status().code(),
                Code::kDataLoss)
          << "range " << range << " stream " << stream;
      ++found;
    }
  }
  EXPECT_GE(found, 5);
}

// Of three chunks about one is looked at in a step, drawn anew: also where every second step is skipped.
TEST(PassCheck, OneOfSeveral_EveryChunkHasItsTurn) {
  PassGroup group(CheckedJob("fsdp=1", 3), 1);
  group.PlaceWeights();
  const ShardStorage& storage = *group.storages[0];
  std::vector<std::vector<int>> turns(storage.ranges().size());
  int chunks = 0, all = 0;
  for (size_t range = 0; range < turns.size(); ++range) {
    turns[range].resize(storage.ranges()[range].num_chunks());
    chunks += static_cast<int>(turns[range].size());
  }
  constexpr int kSteps = 40;
  for (int64_t step = 2; step <= 2 * kSteps; step += 2) {
    group.RunStep(step);
    for (size_t range = 0; range < turns.size(); ++range) {
      for (size_t chunk = 0; chunk < turns[range].size(); ++chunk) {
        const bool guarded = storage.Guard(static_cast<int>(range), group.parity, chunk) != 0;
        turns[range][chunk] += guarded;
        all += guarded;
      }
    }
  }
  for (const std::vector<int>& of_range : turns) EXPECT_THAT(of_range, ::testing::Each(::testing::Ge(1)));
  EXPECT_NEAR(all, chunks * kSteps / 3, chunks * kSteps / 12);
  EXPECT_EQ(DamageOf(group, 0).what, Damage::kNone);
}

std::atomic<int> calls{0}, errs_at{0};

// Errs once, in the lowest bit of a weight.
void ErringStep(const OptimizerContext& context, const OptimizerRun& run) {
  BestOptimizerStep()(context, run);
  if (calls.fetch_add(1) == errs_at.load()) static_cast<uint8_t*>(run.weights_out.codes)[0] ^= 1;
}

TEST(PassCheck, ArithmeticThatErrsOnce_IsFound) {
  const JobSpec job = CheckedJob("fsdp=1", 1);
  for (const int call : {0, 1, 7}) {  // the first and the second time that a chunk is stepped
    PassGroup group(job, 1);
    group.PlaceWeights();
    group.passes[0]->UseKernel(ErringStep);
    calls = 0;
    errs_at = call;
    group.WriteGradients(1);
    const absl::Status status = group.passes[0]->Run(group.StepCommand(1), ++group.seq, nullptr, nullptr).status();
    ASSERT_EQ(status.code(), Code::kDataLoss) << status;
    EXPECT_EQ(DamageOf(group, 0).what, Damage::kArithmetic);
    EXPECT_THAT(std::string(status.message()), HasSubstr("gave two results"));
  }
}

// Gradients that a process writes behind the declaration: whatever reads them, the step is not committed, and says why.
TEST(PassCheck, GradientsThatAreNotFiniteAnyMore_AreFoundInEveryWayToReadThem) {
  for (const Format format : {Format::kFp32, Format::kBf16}) {
    for (const bool clips : {false, true}) {
      for (const uint32_t bits : {0x7fc00000u, 0x7f800000u, 0xff800000u}) {
        JobSpec job = MixedJob("fsdp=2", 2);
        job.gradient_format = format;
        if (clips) job.clip_norm = 0.01;
        PassGroup group(job, 2);
        group.PlaceWeights();
        group.RunStep(1);
        group.WriteGradients(2);
        const Placement& place = group.plan.placements()[0];
        const int64_t bytes = BytesPerElement(format);
        char* const window = group.host.slot(1).data() + group.plan.buckets()[place.bucket].gradient_offset;
        const auto half = static_cast<uint16_t>(bits >> 16);
        std::memcpy(window + (place.offset + 3) * bytes, bytes == 4 ? static_cast<const void*>(&bits) : &half, bytes);
        Command step = group.StepCommand(2);
        if (clips) step.kind = CommandKind::kNorm;  // which asks for squares in any case
        group.host.control()->looks_again.store(clips ? 0 : 1);
        absl::Status found;
        for (auto& pass : group.passes) found.Update(pass->Run(step, ++group.seq, nullptr, nullptr).status());
        EXPECT_EQ(found.code(), Code::kDataLoss) << found;
        EXPECT_THAT(std::string(found.message()),
                    AllOf(HasSubstr("finite when they were declared"), HasSubstr(job.parameters[0].name)));
      }
    }
  }
}

// As large as may be declared: their squares are infinite, and they are none the less numbers.
TEST(PassCheck, LargeGradients_AreNoDamage) {
  JobSpec job = MixedJob("fsdp=1", 2);
  PassGroup group(job, 1);
  group.PlaceWeights();
  group.WriteGradients(1);
  group.host.control()->looks_again.store(1);
  const Placement& place = group.plan.placements()[0];
  const float large = 1e37F;
  std::memcpy(group.host.slot(0).data() + group.plan.buckets()[place.bucket].gradient_offset + place.offset * 4, &large, 4);
  EXPECT_EQ(group.passes[0]->Run(group.StepCommand(1), ++group.seq, nullptr, nullptr).status(), absl::OkStatus());
  EXPECT_EQ(DamageOf(group, 0).what, Damage::kNone);
}

}  // namespace
}  // namespace shardmesh
