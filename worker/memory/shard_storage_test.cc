#include "worker/memory/shard_storage.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>

#include "core/base/matchers.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

// A bucket of more than one range, one with short chunks, and one that is empty.
JobSpec WideJob(const std::string& mesh) {
  JobSpec job = SmallJob(mesh, 1);
  job.bucket_elements = kMinBucketElements;
  job.parameters = {{"big", {2'300'017}, WeightFormat::kBf16},
                    {"a", {70}, WeightFormat::kFp32},
                    {"none", {0}, WeightFormat::kBf16Sr}};
  return job;
}

struct Open {
  explicit Open(const JobSpec& job, int shard = 0)
      : plan(*Plan::Create(job)), storage(*ShardStorage::Open(*memory, "test", plan, shard)) {}
  const std::unique_ptr<Memory> memory = NewProcessMemory();
  const Plan plan;
  ShardStorage storage;
};

TEST(ShardStorageTest, RangesCoverTheShardOnce) {
  for (const char* mesh : {"fsdp=1", "fsdp=2", "fsdp=3"}) {
    const int shards = Plan::Create(WideJob(mesh))->num_shards();
    for (int shard = 0; shard < shards; ++shard) {
      Open open(WideJob(mesh), shard);
      std::map<int, int64_t> next;  // by bucket
      for (const StorageRange& range : open.storage.ranges()) {
        const Bucket& bucket = open.plan.buckets()[range.bucket];
        const auto [it, fresh] = next.emplace(range.bucket, shard * bucket.shard_elements);
        EXPECT_EQ(range.bucket_begin, it->second);
        EXPECT_GT(range.num_elements, 0);
        EXPECT_LE(range.num_elements, kRangeElements);
        EXPECT_EQ(range.num_elements % kGroupElements, 0);
        it->second += range.num_elements;
      }
      for (const auto& [b, end] : next) EXPECT_EQ(end, (shard + 1) * open.plan.buckets()[b].shard_elements);
    }
  }
}

TEST(ShardStorageTest, ChunkRuns_AreThePlansRunsCutAtChunks) {
  Open open(MixedJob("fsdp=2", 1), 1);
  for (size_t r = 0; r < open.storage.ranges().size(); ++r) {
    const StorageRange& range = open.storage.ranges()[r];
    int64_t covered = 0;
    for (int64_t chunk = 0; chunk < range.num_chunks(); ++chunk) {
      for (int i = open.storage.first_run(r, chunk); i < open.storage.first_run(r, chunk + 1); ++i) {
        const ChunkRun& run = open.storage.runs(r)[i];
        EXPECT_GE(run.offset, chunk * kChunkElements);
        EXPECT_LE(run.offset + run.num_elements, (chunk + 1) * kChunkElements);
        const Placement& place = open.plan.placements()[run.tensor];
        EXPECT_EQ(place.bucket, range.bucket);
        EXPECT_EQ(place.offset + run.first_element, range.bucket_begin + run.offset);
        covered += run.num_elements;
      }
    }
    int64_t expected = 0;
    for (const auto& run :
         open.plan.RunsIn(range.bucket, range.bucket_begin, range.bucket_begin + range.num_elements)) {
      expected += run.num_elements;
    }
    EXPECT_EQ(covered, expected);
  }
}

// Every place of every stream, spares included, belongs to one range; both parities stay inside.
TEST(ShardStorageTest, StreamsAreDisjoint) {
  Open open(WideJob("fsdp=1"));
  std::vector<std::pair<char*, char*>> spans;
  int64_t spares = 0;
  const auto add = [&](void* at, int64_t bytes) {
    spans.emplace_back(static_cast<char*>(at), static_cast<char*>(at) + bytes);
  };
  for (size_t r = 0; r < open.storage.ranges().size(); ++r) {
    const StorageRange& range = open.storage.ranges()[r];
    const int64_t longest = std::min(kChunkElements, range.num_elements);  // of its chunks
    for (int stream = 0; stream < kStreams; ++stream) {
      const int64_t bytes = open.storage.StreamBytes(r, stream);
      EXPECT_EQ(bytes, range.parts[stream].BytesOf(range.num_elements + longest));
      if (bytes == 0) continue;
      add(open.storage.StreamBegin(r, stream), bytes);
      std::memset(open.storage.StreamBegin(r, stream), 1, bytes);  // all of it is mapped
      spares += range.parts[stream].BytesOf(longest);
    }
    const auto between = [&](const void* a, const void* b) {
      return static_cast<const char*>(b) - static_cast<const char*>(a);
    };
    for (int k = 0; k <= open.plan.buckets()[range.bucket].num_states; ++k) {
      const auto at = [&](int parity, int64_t offset) {
        return k == 0 ? open.storage.weights(r, parity, offset) : open.storage.state(k - 1, r, parity, offset);
      };
      const PartLayout codes = range.parts[StreamOf(k, false)], extra = range.parts[StreamOf(k, true)];
      EXPECT_EQ(at(1, 0).codes, open.storage.StreamBegin(r, StreamOf(k, false)));  // at the range's first place
      EXPECT_EQ(between(at(1, 256).codes, at(0, 256).codes), codes.BytesOf(longest));
      EXPECT_EQ(between(at(0, 0).codes, at(0, 256).codes), codes.BytesOf(256));
      EXPECT_EQ(at(0, 0).extra == nullptr, extra.bytes == 0);
      EXPECT_EQ(between(at(1, 256).extra, at(0, 256).extra), extra.BytesOf(longest));
    }
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) EXPECT_LE(spans[i - 1].second, spans[i].first);
  for (size_t r = 0; r < open.storage.ranges().size(); ++r) EXPECT_EQ(open.storage.Progress(r, 1), 0);
  EXPECT_LE(spans.back().second - spans.front().first, open.storage.num_bytes());
  EXPECT_EQ(open.storage.spare_bytes(), spares);
}

// Weights alone, in one place, without a spare.
TEST(ShardStorageTest, FrozenRange_DoesNotRotate_AndHasNoStates) {
  JobSpec job = SmallJob("fsdp=1", 1);
  job.parameters = {{"stepped", {5000}, WeightFormat::kFp32}, {"frozen", {5000}, WeightFormat::kBf16Plus8Sr}};
  const int64_t all = ShardStorage::NumBytes(*Plan::Create(job), 0);
  job.parameters[1].frozen = true;
  Open open(job);
  ASSERT_EQ(open.storage.ranges().size(), 2u);
  const StorageRange& range = open.storage.ranges()[1];
  ASSERT_TRUE(range.frozen);
  EXPECT_EQ(range.spare(), 0);
  EXPECT_EQ(open.storage.StreamBytes(1, StreamOf(0, false)), 5120 * 2);
  EXPECT_EQ(open.storage.StreamBytes(1, StreamOf(0, true)), 5120);
  for (int parity : {0, 1}) {
    EXPECT_EQ(open.storage.weights(1, parity, 0).codes, open.storage.StreamBegin(1, StreamOf(0, false)));
    EXPECT_EQ(open.storage.weights(1, parity, 0).extra, open.storage.StreamBegin(1, StreamOf(0, true)));
    EXPECT_EQ(open.storage.state(0, 1, parity, 0).codes, nullptr);
  }
  EXPECT_EQ(open.storage.spare_bytes(), kChunkElements * (4 + 8));
  EXPECT_LE(open.storage.num_bytes(), all - (5120 + kChunkElements) * 8 - kChunkElements * 3 + 6 * kPageBytes);
  EXPECT_EQ(ShardStorage::NumBytes(open.plan, 0), open.storage.num_bytes());
}

// Chunks of int8_row weights are whole rows and whole blocks; so a chunk, and the spare, may be longer than others.
TEST(ShardStorageTest, Int8Rows_ChunksAreWholeRows) {
  JobSpec job = SmallJob("fsdp=2", 1);
  const auto chunk_of = [&](std::vector<int64_t> shape) {
    job.parameters = {{"w", std::move(shape), WeightFormat::kInt8Row}};
    Open open(job);
    const StorageRange& range = open.storage.ranges()[0];
    EXPECT_EQ(range.parts[StreamOf(0, true)].elements, job.parameters[0].shape.back());
    EXPECT_EQ(range.spare(), std::min(range.chunk_elements, range.num_elements));
    return range.chunk_elements;
  };
  EXPECT_EQ(chunk_of({300, 64}), 4096);
  EXPECT_EQ(chunk_of({300, 96}), 768 * 5);
  EXPECT_EQ(chunk_of({300, 4608}), 4608);
  EXPECT_EQ(chunk_of({600, 33}), 33 * 256);
  EXPECT_EQ(chunk_of({30, 33}), 1024 * 4) << "a tensor of fewer rows is never cut";
  EXPECT_EQ(chunk_of({9001}), 9216) << "one row";
}

TEST(ShardStorageTest, Progress_BelongsToItsCommand) {
  Open open(WideJob("fsdp=1"));
  ASSERT_GE(open.storage.ranges().size(), 3u);
  open.storage.SetProgress(1, 7, 200);
  EXPECT_EQ(open.storage.Progress(1, 7), 200);
  EXPECT_EQ(open.storage.Progress(1, 8), 0);
  EXPECT_EQ(open.storage.Progress(1, 6), 0);
  EXPECT_EQ(open.storage.Progress(0, 7), 0);
  EXPECT_EQ(open.storage.Progress(2, 7), 0);
  const uint64_t late = (uint64_t{1} << 43) + 5;
  open.storage.SetProgress(1, late, 256);
  EXPECT_EQ(open.storage.Progress(1, late), 256);
}

TEST(ShardStorageTest, NothingToHold_IsFine) {
  JobSpec job = SmallJob("fsdp=2", 1);
  job.parameters = {{"none", {0}, WeightFormat::kFp32}};
  Open open(job);
  EXPECT_TRUE(open.storage.ranges().empty());
  EXPECT_EQ(open.storage.spare_bytes(), 0);
}

// Memory that is not there is an error, not a crash.
TEST(ShardStorageTest, NoMemory_IsResourceExhausted) {
  struct NoMemory final : Memory {
    absl::StatusOr<Segment> Open(const std::string&, int64_t, int64_t) override {
      return absl::ResourceExhaustedError("full");
    }
  };
  NoMemory memory;
  const Plan plan = *Plan::Create(SmallJob("fsdp=1", 1));
  EXPECT_THAT(ShardStorage::Open(memory, "x", plan, 0), StatusIs(absl::StatusCode::kResourceExhausted, "full"));
}

TEST(ShardStorageTest, Cancelled_OpensNothing) {
  struct Untouched final : Memory {
    absl::StatusOr<Segment> Open(const std::string&, int64_t, int64_t) override {
      return absl::InternalError("memory was asked for");
    }
  };
  Untouched memory;
  const Plan plan = *Plan::Create(WideJob("fsdp=1"));
  const std::atomic<bool> cancelled{true};
  EXPECT_THAT(ShardStorage::Open(memory, "x", plan, 0, &cancelled),
              StatusIs(absl::StatusCode::kCancelled, "the storage is not wanted any more"));
}

}  // namespace
}  // namespace shardmesh
