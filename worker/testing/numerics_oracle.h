// NumericsOracle: training in any formats and with any optimizers of a job, every tensor a single run of the reference
// kernel, Muon's matrices too: no mesh, no buckets, no chunks, no threads.
//
// With a Group, each rank has an oracle of its own, and what they do together is what sharded training is on any
// library of collectives: rank r has the slots s with s mod ranks = r, and steps one piece of every tensor (a matrix of
// Muon is whole at rank 0); gradients are reduce-scattered, sums of squares and new weights all-gathered. Tests only.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "core/base/matchers.h"
#include "core/format/stream_digest.h"
#include "kernels/encode/encode.h"
#include "kernels/muon/muon.h"
#include "kernels/optimizer_step.h"
#include "worker/testing/training_oracle.h"
#include "worker/transport/group.h"

namespace shardmesh {

// What a job is trained with. Gradients are as their format holds them.
struct OracleInput {
  std::function<float(int tensor, int64_t element)> initial = InitialValue;
  std::function<float(Format format, int slot, int64_t step, int tensor, int64_t element)> gradient = GradientValue;
  GroupRates rates;  // unset: the job's
  std::function<int64_t(int slot, int64_t step)> tokens;  // of a job with token weights
};

class NumericsOracle {
 public:
  // `group`: borrowed; null: alone.
  explicit NumericsOracle(const JobSpec& job, OracleInput input = {}, Group* group = nullptr)
      : job_(job), input_(std::move(input)), group_(group), tensors_(job.parameters.size()) {
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const ParameterSpec& p = job_.parameters[t];
      if (!p.tied_to.empty()) continue;
      std::vector<float> values(p.NumElements());
      for (size_t e = 0; e < values.size(); ++e) {
        values[e] = input_.initial(static_cast<int>(t), static_cast<int64_t>(e));
      }
      CodeSpec spec;
      spec.seed = job.seed;
      spec.step = 0;
      spec.tensor = static_cast<uint32_t>(t);
      spec.format = CodeFormatOf(p.format);
      if (p.format == WeightFormat::kNf4) tensors_[t].initial = values;
      tensors_[t].streams.emplace_back(spec, LayoutOf(p.format, RowElements(p)), p.shape, values);
      values.assign(values.size(), 0);
      for (int s = 0; s < job.NumStatesOf(p); ++s) {
        spec.format = CodeFormatOf(p.states);
        spec.is_signed = StateIsSigned(job.group(p.group), s);
        tensors_[t].streams.emplace_back(spec, LayoutOf(p.states), p.shape, values);
      }
    }
  }

  void RunStep(int64_t step) {
    norm_ = 0;
    clip_ = job_.clip_norm > 0 ? ClipFactor(job_.clip_norm, norm_ = NormOf(step)) : 1;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      if (job_.parameters[t].tied_to.empty() && !job_.parameters[t].frozen) StepTensor(step, static_cast<int>(t));
    }
  }

  // Of the last step's gradients; 0 where the job does not clip them.
  double norm() const { return norm_; }

  // The bytes of a tensor's weights as windows hold them: quantized ones as Encode gives them for the whole tensor,
  // codes and then scales.
  std::vector<char> Stored(int tensor) const {
    const ParameterSpec& p = job_.parameters[tensor];
    const auto* codes = reinterpret_cast<const char*>(tensors_[tensor].streams[0].codes.data());
    const int64_t n = p.NumElements();
    const Format format = GatheredFormat(p.format);
    if (p.format == WeightFormat::kInt8Row && !IsQuantized(p.format, p.gather)) {
      const auto* scales = reinterpret_cast<const char*>(tensors_[tensor].streams[0].extra.data());
      std::vector<char> bytes(codes, codes + n);
      bytes.insert(bytes.end(), scales, scales + n / RowElements(p) * 4);
      return bytes;
    }
    if (n == 0 || !IsQuantized(p.format, p.gather)) return {codes, codes + n * BytesPerElement(format)};
    const std::vector<float> values = Readable(tensor);
    CodeSpec spec;
    spec.format = ParseCodeFormat(GatherFormatName(GatherOf(p.format, p.gather))).value();
    const std::vector<CodePart> parts = PartsOf(spec, p.shape).value();
    std::vector<std::vector<float>> memory;  // aligned
    std::vector<void*> pointers;
    for (const CodePart& part : parts) memory.emplace_back(part.NumElements());
    for (std::vector<float>& part : memory) pointers.push_back(part.data());
    EXPECT_OK(Encode(spec, p.shape, values.data(), pointers));
    std::vector<char> bytes;
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto* begin = static_cast<const char*>(pointers[i]);
      bytes.insert(bytes.end(), begin, begin + parts[i].NumElements() * BytesOf(parts[i].type));
      if (i == 1 && parts.size() > 2) bytes.resize(bytes.size() + (4 - parts[1].NumElements() % 4) % 4);
    }
    return bytes;
  }

  // Of all ranks' pieces: every rank calls it.
  uint64_t Digest() const {
    uint64_t digest = 0;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const Piece piece = PieceOf(static_cast<int>(t));
      for (size_t s = 0; s < tensors_[t].streams.size(); ++s) {
        const Stream& stream = tensors_[t].streams[s];
        digest += DigestStream(static_cast<uint32_t>(t), static_cast<int>(s), stream.layout,
                               static_cast<uint64_t>(piece.begin), stream.CodesAt(piece.begin),
                               stream.ExtraAt(piece.begin), piece.size());
      }
    }
    if (group_ == nullptr) return digest;
    std::vector<uint64_t> all(group_->size());
    EXPECT_OK(group_->AllGather(&digest, all.data(), sizeof(digest), kTimeout));
    return std::accumulate(all.begin(), all.end(), uint64_t{0});
  }

 private:
  struct Stream {
    Stream(const CodeSpec& spec, const StoredLayout& stored, const std::vector<int64_t>& shape,
           const std::vector<float>& values)
        : layout(stored),
          codes(layout.codes.BytesOf(static_cast<int64_t>(values.size())) / 8 + 1),
          extra(layout.extra.BytesOf(static_cast<int64_t>(values.size())) / 8 + 1) {
      if (spec.format == CodeFormat::kNf4) {
        StoreNf4(shape, values);
        return;
      }
      const std::vector<void*> parts = {codes.data(), extra.data()};
      EXPECT_OK(Encode(spec, shape, values.data(), absl::MakeSpan(parts).first(layout.extra.bytes == 0 ? 1 : 2)));
    }
    // The codes of Encode, and the largest magnitude of every 64 elements.
    void StoreNf4(const std::vector<int64_t>& shape, const std::vector<float>& values) {
      CodeSpec spec;
      spec.format = CodeFormat::kNf4;
      std::vector<uint8_t> scales(values.size() / 64 + 1);
      std::vector<float> factors(values.size() / 64 / 256 + 1);
      float mean = 0;
      EXPECT_OK(Encode(spec, shape, values.data(), {codes.data(), scales.data(), factors.data(), &mean}));
      auto* const largest = reinterpret_cast<float*>(extra.data());
      for (size_t e = 0; e < values.size(); ++e) {
        largest[e / 64] = e % 64 == 0 ? std::fabs(values[e]) : std::max(largest[e / 64], std::fabs(values[e]));
      }
    }
    const char* CodesAt(int64_t element) const {
      return reinterpret_cast<const char*>(codes.data()) + layout.codes.BytesOf(element);
    }
    const char* ExtraAt(int64_t element) const {
      return reinterpret_cast<const char*>(extra.data()) + layout.extra.BytesOf(element);
    }
    StoredRun At(int64_t element) {
      return {const_cast<char*>(CodesAt(element)),
              layout.extra.bytes == 0 ? nullptr : const_cast<char*>(ExtraAt(element))};
    }

    StoredLayout layout;
    std::vector<uint64_t> codes, extra;
  };
  struct Tensor {
    std::vector<Stream> streams;  // the weights, then each state
    std::vector<float> initial;   // of nf4
  };

  // A tensor's weights as `stored` would show them, in fp32; of nf4 those that it was made of.
  std::vector<float> Readable(int tensor) const {
    const ParameterSpec& p = job_.parameters[tensor];
    const Stream& weights = tensors_[tensor].streams[0];
    if (p.format == WeightFormat::kNf4) return tensors_[tensor].initial;
    std::vector<float> values(p.NumElements());
    if (p.format == WeightFormat::kInt8Row) {
      CodeSpec spec;
      spec.format = CodeFormat::kInt8Row;
      const std::vector<const void*> parts = {weights.codes.data(), weights.extra.data()};
      EXPECT_OK(Decode(spec, p.shape, parts, values.data()));
      return values;
    }
    const int64_t bytes = BytesPerElement(GatheredFormat(p.format));
    for (size_t e = 0; e < values.size(); ++e) {
      uint32_t bits = 0;
      std::memcpy(reinterpret_cast<char*>(&bits) + 4 - bytes, weights.CodesAt(static_cast<int64_t>(e)), bytes);
      values[e] = FloatOfBits(bits);
    }
    return values;
  }

  // What this rank steps of a tensor. All ranks' pieces are of `elements`, with those that are beyond the tensor.
  struct Piece {
    int64_t elements = 0, begin = 0, end = 0;
    int64_t size() const { return end - begin; }
  };
  Piece PieceOf(int t) const {
    const ParameterSpec& p = job_.parameters[t];
    const int64_t n = p.NumElements();
    if (group_ == nullptr) return {n, 0, n};
    const int64_t granule = job_.IsMuon(p) ? std::max<int64_t>(n, 1) : std::lcm(int64_t{256}, RowElements(p));
    const int64_t granules = (n + granule - 1) / granule;
    const int64_t elements = (granules + group_->size() - 1) / group_->size() * granule;
    return {elements, std::min(n, group_->rank() * elements), std::min(n, (group_->rank() + 1) * elements)};
  }

  // The gradients of a piece of a tensor, by slot or as their sum, and a run that has nothing else yet.
  struct Gradients {
    std::vector<std::vector<float>> values;
    std::vector<const void*> pointers;
    float divide_scale = 1;
    int64_t first_element = 0, elements = 0;

    OptimizerRun run() const {
      OptimizerRun run;
      run.gradients = pointers.data();
      run.num_slots = static_cast<int>(pointers.size());
      run.divide_scale = divide_scale;
      run.first_element = static_cast<uint64_t>(first_element);
      run.num_elements = elements;
      return run;
    }
  };

  Gradients GradientsOf(int64_t step, int t) const {
    const Piece piece = PieceOf(t);
    Gradients gradients;
    double divisor = job_.token_weights ? 0 : job_.num_slots;
    for (int slot = 0; slot < job_.num_slots && job_.token_weights; ++slot) {
      divisor += static_cast<double>(input_.tokens(slot, step));
    }
    gradients.divide_scale = static_cast<float>(1.0 / divisor);
    gradients.first_element = piece.begin;
    gradients.elements = piece.size();
    if (group_ == nullptr) {
      for (int slot = 0; slot < job_.num_slots; ++slot) gradients.values.push_back(Gradient(step, slot, t, piece.end));
    } else {
      gradients.values.push_back(Reduced(step, t, piece));
    }
    for (const std::vector<float>& values : gradients.values) gradients.pointers.push_back(values.data());
    return gradients;
  }

  std::vector<float> Gradient(int64_t step, int slot, int t, int64_t elements) const {
    std::vector<float> values(elements);
    for (int64_t e = 0; e < elements; ++e) values[e] = input_.gradient(job_.gradient_format, slot, step, t, e);
    return values;
  }

  // The sum of a piece over all slots, each in the job's gradient format on its way.
  std::vector<float> Reduced(int64_t step, int t, const Piece& piece) const {
    const int64_t n = job_.parameters[t].NumElements();
    std::vector<int> holders(job_.num_slots);
    std::vector<std::vector<char>> slots;
    std::vector<const void*> mine;
    for (int slot = 0; slot < job_.num_slots; ++slot) {
      holders[slot] = slot % group_->size();
      if (holders[slot] != group_->rank()) continue;
      const int64_t bytes = BytesPerElement(job_.gradient_format);
      slots.emplace_back(group_->size() * piece.elements * bytes);
      const std::vector<float> values = Gradient(step, slot, t, n);
      for (int64_t e = 0; e < n; ++e) {  // the upper bytes are those of the shorter format
        std::memcpy(&slots.back()[e * bytes], reinterpret_cast<const char*>(&values[e]) + 4 - bytes, bytes);
      }
    }
    for (const std::vector<char>& slot : slots) mine.push_back(slot.data());
    SlotSum sum;
    sum.format = job_.gradient_format;
    sum.holders = holders;
    sum.mine = mine;
    sum.elements = piece.elements;
    std::vector<float> reduced(piece.elements);
    EXPECT_OK(group_->ReduceScatter(sum, reduced.data(), kTimeout));
    return reduced;
  }

  double NormOf(int64_t step) const {
    std::vector<float> roots;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const ParameterSpec& p = job_.parameters[t];
      if (!p.tied_to.empty() || p.frozen || p.NumElements() == 0) continue;
      const std::vector<float> sums = SquareSums(step, static_cast<int>(t));
      roots.push_back(TreeSum<float>(static_cast<int>((p.NumElements() + 255) / 256), [&](int i) { return sums[i]; }));
    }
    return std::sqrt(double{TreeSum<float>(static_cast<int>(roots.size()), [&](int i) { return roots[i]; })});
  }

  // Of every 256 elements of a tensor, and zeros behind it.
  std::vector<float> SquareSums(int64_t step, int t) const {
    const Gradients gradients = GradientsOf(step, t);
    std::vector<float> sums((PieceOf(t).elements + 255) / 256);
    OptimizerRun run = gradients.run();
    run.square_sums = sums.data();
    GradientSquaresReference(OptimizerContext(), run);
    if (group_ == nullptr) return sums;
    std::vector<float> all(group_->size() * sums.size());
    EXPECT_OK(group_->AllGather(sums.data(), all.data(), static_cast<int64_t>(4 * sums.size()), kTimeout));
    return all;
  }

  void StepTensor(int64_t step, int t) {
    const ParameterSpec& p = job_.parameters[t];
    OptimizerContext context;
    context.hyper = job_.group(p.group);
    if (input_.rates) context.hyper.lr = input_.rates(p.group, step);
    context.scalars = ComputeStepScalars(context.hyper, step).value();
    context.weights = p.format;
    context.states = p.states;
    context.gradients = Format::kFp32;
    context.seed = job_.seed;
    context.step = step;
    const Gradients gradients = GradientsOf(step, t);
    OptimizerRun run = gradients.run();
    run.clip = clip_;
    std::vector<Stream>& streams = tensors_[t].streams;
    const int64_t begin = gradients.first_element;
    run.weights_in = run.weights_out = streams[0].At(begin);
    for (size_t s = 1; s < streams.size(); ++s) run.states_in[s - 1] = run.states_out[s - 1] = streams[s].At(begin);
    run.tensor = static_cast<uint32_t>(t);
    run.row_elements = RowElements(p);
    if (run.num_elements > 0) {
      if (job_.IsMuon(p)) {
        StepMatrix(context, p, run);
      } else {
        ASSERT_OK(CheckRun(context, run));
        OptimizerStepReference(context, run);
      }
    }
    if (group_ != nullptr) GatherWeights(t);
  }

  void GatherWeights(int t) {
    Stream& weights = tensors_[t].streams[0];
    const StoredRun mine = weights.At(PieceOf(t).begin);
    GatherPart(t, weights.layout.codes, mine.codes, weights.codes.data());
    if (mine.extra != nullptr) GatherPart(t, weights.layout.extra, mine.extra, weights.extra.data());
  }
  void GatherPart(int t, const PartLayout& layout, const void* mine, void* whole) {
    const Piece piece = PieceOf(t);
    std::vector<char> padded(layout.BytesOf(piece.elements)), all(group_->size() * padded.size());
    std::copy_n(static_cast<const char*>(mine), layout.BytesOf(piece.size()), padded.begin());
    EXPECT_OK(group_->AllGather(padded.data(), all.data(), static_cast<int64_t>(padded.size()), kTimeout));
    std::copy_n(all.begin(), layout.BytesOf(job_.parameters[t].NumElements()), static_cast<char*>(whole));
  }

  static void StepMatrix(const OptimizerContext& context, const ParameterSpec& p, const OptimizerRun& run) {
    const MuonMatrix matrix = {p.shape[0], p.shape[1],
                               ComputeMuonScalars(context.hyper, {}, p.shape[0], p.shape[1]).value()};
    MuonScratch scratch(1);
    scratch.Reserve(matrix.rows, matrix.columns);
    ASSERT_OK(CheckMuon(context, matrix, run, scratch, Parallel()));
    MuonStepReference(context, matrix, run, scratch, Parallel());
  }

  static int64_t RowElements(const ParameterSpec& p) {
    return p.format == WeightFormat::kInt8Row && !p.shape.empty() ? std::max<int64_t>(p.shape.back(), 1) : 1;
  }

  static constexpr absl::Duration kTimeout = absl::Seconds(60);

  const JobSpec job_;
  const OracleInput input_;
  Group* const group_;
  std::vector<Tensor> tensors_;
  double norm_ = 0;
  float clip_ = 1;
};

}  // namespace shardmesh
