// One rank's part of 50,000 tensors on 16,384 ranks. Times are printed, for people; what is checked are results.
#include <chrono>
#include <cstdio>
#include <functional>

#include "core/base/matchers.h"
#include "core/view/reshard.h"

namespace shardmesh {
namespace {

using P = DimPlacement;

constexpr int kTensors = 50000;
constexpr int64_t kGranule = 256;

double Seconds(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Projections, expert weights and norms, over and over.
Dims ShapeOf(int tensor) {
  switch (tensor % 4) {
    case 0:
      return {16384, 5120};
    case 1:
      return {5120, 16384};
    case 2:
      return {128, 2048, 5120};
    default:
      return {5120};
  }
}

using Place = std::function<std::vector<P>(int)>;

std::vector<TensorView> Views(const Mesh& mesh, const Place& place) {
  std::vector<TensorView> views;
  views.reserve(kTensors);
  for (int t = 0; t < kTensors; ++t) {
    auto view = TensorView::Placed(ShapeOf(t), mesh, place(t));
    EXPECT_OK(view);
    views.push_back(*std::move(view));
  }
  return views;
}

Mesh DataAndTensor(int64_t ranks) { return Mesh::Create({ranks / 8, 8}, {"dp", "tp"}).value(); }

// FSDP over tensor parallelism: rows, columns or experts by tp, rows by dp.
std::vector<P> FsdpOverTp(int tensor) {
  if (tensor % 4 == 1) return {P::Shard(0), P::Shard(1)};
  return {P::StridedShard(0, 8), P::Shard(0)};
}

std::vector<P> Flat(int tensor) { return {P::Flat(kGranule), P::Flat(kGranule)}; }

// 50,000 tensors held in one way by two meshes.
struct Scene {
  std::vector<TensorView> few, many;  // over 4,096 and 16,384 ranks
};

Scene MakeScene(const char* what, const Place& place) {
  Scene scene;
  const double seconds = Seconds([&] {
    scene.few = Views(DataAndTensor(4096), place);
    scene.many = Views(DataAndTensor(16384), place);
  });
  std::printf("%-14s 2 x %d views made in %.1f ms\n", what, kTensors, seconds * 1e3);
  return scene;
}

int64_t TimedBoxes(const char* what, const std::vector<TensorView>& views, Rank rank) {
  int64_t elements = 0;
  const double seconds = Seconds([&] {
    for (const TensorView& view : views) {
      const auto boxes = view.BoxesOf(rank);
      for (const LocalBox& local : boxes.value()) elements += local.box.NumElements();
    }
  });
  std::printf("%-31s boxes of rank %d in %.1f ms\n", what, rank.value(), seconds * 1e3);
  return elements;
}

ReshardPlan TimedPlan(const char* what, const std::vector<TensorView>& source,
                      const std::vector<TensorView>& destination, Rank rank) {
  absl::StatusOr<ReshardPlan> plan;
  const double seconds = Seconds([&] { plan = PlanReshard(source, destination, rank); });
  EXPECT_OK(plan);
  std::printf("%-31s plan of rank %d in %.1f ms: %zu copies from %zu ranks, %ld elements\n", what, rank.value(),
              seconds * 1e3, plan->copies.size(), plan->sources.size(), static_cast<long>(plan->num_elements));
  return *std::move(plan);
}

TEST(ReshardScaleTest, OneRankOf16384_BoxesAndPlanAreItsShare) {
  const Scene fsdp = MakeScene("FSDP over TP", FsdpOverTp), flat = MakeScene("flat", Flat);
  int64_t all = 0;
  for (int t = 0; t < kTensors; ++t) all += Box::Whole(ShapeOf(t)).NumElements();
  // Granules are small: no rank has much more than its share of a flat tensor, nor this one less.
  for (const auto& [views, ranks] : {std::pair(&flat.few, 4096), std::pair(&flat.many, 16384)}) {
    const int64_t elements = TimedBoxes(ranks == 4096 ? "flat, 4096" : "flat, 16384", *views, Rank(3001));
    EXPECT_NEAR(static_cast<double>(elements), static_cast<double>(all) / ranks, kTensors * kGranule);
  }
  TimedBoxes("FSDP over TP, 4096", fsdp.few, Rank(3001));
  const int64_t rows = TimedBoxes("FSDP over TP, 16384", fsdp.many, Rank(3001));

  // A rank's new rows, or flat shard, lie in one or two of the old ones.
  const ReshardPlan to_rows = TimedPlan("FSDP over TP, 4096 -> 16384", fsdp.few, fsdp.many, Rank(3001));
  EXPECT_EQ(to_rows.num_elements, rows);
  EXPECT_LE(to_rows.copies.size(), 2u * kTensors);
  EXPECT_LE(TimedPlan("flat, 4096 -> 16384", flat.few, flat.many, Rank(3001)).copies.size(), 2u * kTensors);
  TimedPlan("FSDP 4096 -> flat 16384", fsdp.few, flat.many, Rank(3001));
}

TEST(ReshardScaleTest, OneFlatSpace_IsOneInterval) {
  const int64_t space = int64_t{1} << 42;
  const auto bucket = [&](int64_t ranks) {
    return std::vector<TensorView>{TensorView::Placed({space}, DataAndTensor(ranks), Flat(0)).value()};
  };
  const ReshardPlan plan = TimedPlan("one flat space, 4096 -> 16384", bucket(4096), bucket(16384), Rank(3001));
  ASSERT_EQ(plan.copies.size(), 1u);
  EXPECT_EQ(plan.copies[0], (Copy{Rank(750), Rank(3001), 0, space >> 14, 0, space >> 14}));
}

}  // namespace
}  // namespace shardmesh
