// The phases of the step, the reference, and the choice between the implementations; compiled for any processor.
#include "kernels/muon/muon.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/reduction.h"
#include "core/base/status.h"
#include "kernels/cpu/processor.h"
#include "kernels/muon/blas.h"
#include "kernels/muon/muon_simd.h"
#include "kernels/muon/newton_schulz.h"
#include "kernels/tile/walk.h"

namespace shardmesh {
namespace {

struct MuonKernels {
  MuonGatherFn gather;
  MuonScatterFn scatter;
  GemmBlockFn gemm_block;  // null: `blas` multiplies
  const Blas* blas = nullptr;
};

constexpr MuonKernels kReference = {MuonTile<float>::Gather, MuonTile<float>::Scatter, GemmBlockReference};

#if defined(__x86_64__)
constexpr MuonKernels kSimd = {simd8::MuonGather, simd8::MuonScatter, GemmBlockSimd};
MuonKernels BestKernels() { return SimdSupported() ? kSimd : kReference; }
#else
MuonKernels BestKernels() { return kReference; }
#endif

int64_t NumTiles(int64_t elements) { return (elements + kTileElements - 1) / kTileElements; }

// The first `elements` of a tile, from memory of its own to where they belong.
void CopyBack(const StoredTile& from, const StoredTile& to, const StoredLayout& layout, int64_t elements) {
  std::memcpy(to.codes, from.codes, layout.codes.BytesOf(elements));
  if (layout.extra.bytes > 0) std::memcpy(to.extra, from.extra, layout.extra.BytesOf(elements));
}

// The norm of an update, at least eps, from the sums of its tiles' squares. NaN when they are.
__attribute__((noinline)) float Norm(const float* sums, int64_t num_tiles, float eps) {
  const float squares = TreeSum<float>(static_cast<int>(num_tiles), [&](int tile) { return sums[tile]; });
  return Max(Sqrt(squares), eps);
}

__attribute__((noinline)) void DivideBy(float norm, float* begin, float* end) {
  for (float* x = begin; x < end; ++x) *x = Divide(*x, norm);
}

// Columns [begin, end) of a matrix become rows of its transpose. In bands of 16, so that every cache line that is
// fetched is used up.
void TransposeColumns(const float* from, int64_t rows, int64_t columns, int64_t begin, int64_t end, float* to) {
  constexpr int64_t kBand = 16;
  for (int64_t first = begin; first < end; first += kBand) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = first; j < std::min(first + kBand, end); ++j) to[j * rows + i] = from[i * columns + j];
    }
  }
}

}  // namespace

// The tiles of a run.
class MuonTiles {
 public:
  MuonTiles(const MuonKernels& kernels, const OptimizerContext& context, const MuonScalars& scalars,
            const OptimizerRun& run)
      : kernels_(kernels), scalars_(scalars), run_(run), plan_(PlanStep(context, run)) {}

  int64_t size() const { return NumTiles(run_.num_elements); }

  // Writes the tile's update, and the new momentum if `store`; returns the sum of its squares.
  float Gather(int64_t i, float* update, bool store) const {
    TileRun tile = TileAt(plan_, i);
    alignas(64) uint8_t codes[4 * kTileElements], extra[2 * kTileElements];
    if (IsWhole(i)) {
      if (!store) tile.states_out[0] = {codes, extra};
      return kernels_.gather(plan_, scalars_, tile, FirstElement(i), kTileElements, update);
    }
    const ShortTile last(plan_, i);
    const int64_t elements = run_.num_elements - i * kTileElements;
    const float squares = kernels_.gather(plan_, scalars_, last.tile(), FirstElement(i), elements, update);
    if (store) CopyBack(last.tile().states_out[0], tile.states_out[0], plan_.states, elements);
    return squares;
  }

  void Scatter(int64_t i, const float* update) const {
    const TileRun tile = TileAt(plan_, i);
    if (IsWhole(i)) return kernels_.scatter(plan_, scalars_, tile, FirstElement(i), kTileElements, update);
    const ShortTile last(plan_, i);
    const int64_t elements = run_.num_elements - i * kTileElements;
    kernels_.scatter(plan_, scalars_, last.tile(), FirstElement(i), elements, update);
    CopyBack(last.tile().weights_out, tile.weights_out, plan_.weights, elements);
    for (int copy = 0; copy < run_.num_copies; ++copy) {
      std::memcpy(tile.copies[copy], last.tile().copies[copy], plan_.weights.codes.BytesOf(elements));
    }
  }

 private:
  uint64_t FirstElement(int64_t tile) const { return run_.first_element + tile * kTileElements; }
  bool IsWhole(int64_t tile) const { return (tile + 1) * kTileElements <= run_.num_elements; }

  const MuonKernels& kernels_;
  const MuonScalars& scalars_;
  const OptimizerRun& run_;
  const StepPlan plan_;
};

// One step.
class MuonRun {
 public:
  MuonRun(const MuonKernels& kernels, const OptimizerContext& context, const MuonMatrix& matrix,
          const OptimizerRun& run, MuonScratch& scratch, const Parallel& parallel)
      : kernels_(kernels),
        scalars_(matrix.scalars),
        run_(run),
        tiles_(kernels_, context, matrix.scalars, run),
        rows_(matrix.rows),
        columns_(matrix.columns),
        scratch_(scratch),
        parallel_(parallel) {}

  void Step() {
    Update(/*store=*/true);
    Scatter(scratch_.update(scalars_));
  }

  // The update, at scratch.update(); the new momentum if `store`.
  void Update(bool store) {
    float *update = scratch_.matrices_[0], *other = scratch_.matrices_[1];
    Gather(update, store);
    Normalize(update);
    if (rows_ > columns_) {
      Transpose(update, rows_, columns_, other);
      std::swap(update, other);
    }
    const int64_t low = std::min(rows_, columns_), high = std::max(rows_, columns_);
    const NewtonSchulzMemory memory = {update, other, scratch_.squares_[0], scratch_.squares_[1],
                                       scratch_.gemm_.data()};
    float* result = Orthogonalize(low, high, memory);
    if (rows_ > columns_) {
      other = result == update ? other : update;
      Transpose(result, low, high, other);
    }
  }

 private:
  float* Orthogonalize(int64_t low, int64_t high, const NewtonSchulzMemory& memory) {
    if (kernels_.gemm_block != nullptr) {
      return NewtonSchulz(scalars_, low, high, memory, kernels_.gemm_block, parallel_);
    }
    const Parallel here;  // sets the floating-point environment of this thread; the library has threads of its own
    return NewtonSchulz(scalars_, low, high, memory, [&](const Gemm& gemm) {
      here.ForRanges(1, [&](int, int64_t, int64_t) { kernels_.blas->Multiply(gemm); });
    });
  }

  void Gather(float* update, bool store) {
    parallel_.ForRanges(tiles_.size(), [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) scratch_.sums_[i] = tiles_.Gather(i, update + i * kTileElements, store);
    });
  }

  void Scatter(const float* update) {
    parallel_.ForRanges(tiles_.size(), [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) tiles_.Scatter(i, update + i * kTileElements);
    });
  }

  void Normalize(float* update) {
    float norm = 0;
    const Parallel here;
    here.ForRanges(1, [&](int, int64_t, int64_t) { norm = Norm(scratch_.sums_, tiles_.size(), scalars_.eps); });
    parallel_.ForRanges(run_.num_elements,
                        [&](int, int64_t begin, int64_t end) { DivideBy(norm, update + begin, update + end); });
  }

  void Transpose(const float* from, int64_t rows, int64_t columns, float* to) {
    parallel_.ForRanges(
        columns, [&](int, int64_t begin, int64_t end) { TransposeColumns(from, rows, columns, begin, end, to); });
  }

  const MuonKernels kernels_;
  const MuonScalars& scalars_;
  const OptimizerRun& run_;
  const MuonTiles tiles_;
  const int64_t rows_, columns_;
  MuonScratch& scratch_;
  const Parallel& parallel_;
};

void MuonSpace::Include(int64_t rows, int64_t columns) {
  const int64_t low = std::min(rows, columns);
  elements = std::max(elements, NumTiles(rows * columns) * kTileElements);
  square = std::max(square, low * low);
}

int64_t MuonSpace::num_bytes() const {
  return static_cast<int64_t>(sizeof(float)) * (2 * elements + 2 * square + elements / kTileElements);
}

void MuonScratch::PlaceIn(float* memory) {
  for (float*& matrix : matrices_) memory = (matrix = memory) + space_.elements;
  for (float*& square : squares_) memory = (square = memory) + space_.square;
  sums_ = memory;
}

void MuonScratch::Reserve(int64_t rows, int64_t columns) {
  space_.Include(rows, columns);
  own_.resize(space_.num_bytes() / sizeof(float));
  PlaceIn(own_.data());
}

bool MuonScratch::Fits(int64_t rows, int64_t columns, int parts) const {
  MuonSpace space = space_;
  space.Include(rows, columns);
  return space.num_bytes() == space_.num_bytes() && static_cast<int>(gemm_.size()) >= parts;
}

absl::Status CheckMuon(const OptimizerContext& context, const MuonMatrix& matrix, const OptimizerRun& run,
                       const MuonScratch& scratch, const Parallel& parallel) {
  if (context.hyper.kind != OptimizerKind::kMuon) {
    return absl::InvalidArgumentError(
        absl::StrCat("the optimizer is ", OptimizerName(context.hyper.kind), ", not muon"));
  }
  if (context.weights == WeightFormat::kInt8Row || context.weights == WeightFormat::kNf4) {
    return absl::InvalidArgumentError(absl::StrCat("muon steps no ", WeightFormatName(context.weights), " weights"));
  }
  const int64_t rows = matrix.rows, columns = matrix.columns;
  if (rows < 1 || columns < 1 || run.num_elements % rows != 0 || run.num_elements / rows != columns ||
      run.first_element != 0) {
    return absl::InvalidArgumentError(absl::StrCat("muon steps a whole matrix, here of ", rows, " x ", columns,
                                                   " elements; the run has ", run.num_elements, " from element ",
                                                   run.first_element, " on"));
  }
  if (!scratch.Fits(rows, columns, parallel.parts())) {
    return absl::InvalidArgumentError(absl::StrCat("the scratch has no room for ", rows, " x ", columns,
                                                   " elements in ", parallel.parts(), " parts; reserve it"));
  }
  OptimizerContext one_state = context;  // the streams of Muon are those of SGD with momentum
  one_state.hyper = OptimizerHyper::Defaults(OptimizerKind::kSgd);
  one_state.hyper.momentum = 0.5;
  return CheckRun(one_state, run);
}

void MuonStepReference(const OptimizerContext& context, const MuonMatrix& matrix, const OptimizerRun& run,
                       MuonScratch& scratch, const Parallel& parallel) {
  MuonRun(kReference, context, matrix, run, scratch, parallel).Step();
}

void MuonStepSimd(const OptimizerContext& context, const MuonMatrix& matrix, const OptimizerRun& run,
                  MuonScratch& scratch, const Parallel& parallel) {
#if defined(__x86_64__)
  MuonRun(kSimd, context, matrix, run, scratch, parallel).Step();
#else
  MuonStepReference(context, matrix, run, scratch, parallel);
#endif
}

void MuonUpdate(const OptimizerContext& context, const MuonMatrix& matrix, const OptimizerRun& run,
                MuonScratch& scratch, const Parallel& parallel) {
  OptimizerRun reads = run;  // what it tells is told by the second part
  reads.square_sums = nullptr;
  reads.digests = nullptr;
  MuonRun(BestKernels(), context, matrix, reads, scratch, parallel).Update(/*store=*/false);
}

void MuonApply(const OptimizerContext& context, const MuonScalars& scalars, const OptimizerRun& run,
               const float* update) {
  const MuonKernels kernels = BestKernels();
  const MuonTiles tiles(kernels, context, scalars, run);
  Parallel().ForRanges(tiles.size(), [&](int, int64_t begin, int64_t end) {
    alignas(64) float again[kTileElements];
    for (int64_t i = begin; i < end; ++i) {
      tiles.Gather(i, again, /*store=*/true);
      tiles.Scatter(i, update + i * kTileElements);
    }
  });
}

namespace {

void MuonStepFast(const OptimizerContext& context, const MuonMatrix& matrix, const OptimizerRun& run,
                  MuonScratch& scratch, const Parallel& parallel) {
  MuonKernels kernels = BestKernels();
  kernels.gemm_block = nullptr;
  kernels.blas = Blas::Find().value();
  MuonRun(kernels, context, matrix, run, scratch, parallel).Step();
}

}  // namespace

absl::StatusOr<MuonStepFn> FastMuonStep() {
  RETURN_IF_ERROR(Blas::Find().status());
  return MuonStepFast;
}

MuonStepFn BestMuonStep() { return SimdSupported() ? MuonStepSimd : MuonStepReference; }

}  // namespace shardmesh
