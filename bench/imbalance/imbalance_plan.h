// What bench/imbalance trains on and who computes what: samples of unequal lengths, ranks of unequal speeds, and plans
// of a minibatch. Pure functions, thread-safe.
//
// Planners know lengths and costs, not speeds. LB-Micro and LB-Mini are the plans of ODC (arXiv 2601.19362;
// github.com/sail-sg/odc, examples/llm_training/packing.py), lengths a fit to LongAlign's as that paper trains on them,
// costs that paper's fit to a model of 1.5B parameters.
#pragma once

#include <cstdint>
#include <vector>

namespace shardmesh::bench {

inline constexpr int64_t kShortestSample = 256, kLongestSample = 65'536;  // tokens

// Lognormal, median 12.7k and sigma 1, of which only what lies between the shortest and the longest is drawn.
std::vector<int64_t> SampleLengths(int count, uint64_t seed);
// 1 + spread * |normal|, one for each rank.
std::vector<double> RankSpeeds(int ranks, double spread, uint64_t seed);

// Forward and backward of one sample: 1.982 s^2 + 2.612 s of s * 32,000 tokens.
double CostOf(int64_t tokens);
std::vector<double> CostsOf(const std::vector<int64_t>& lengths);

using Parts = std::vector<std::vector<int>>;  // samples, by rank or microbatch

// Parts of about equal cost, after Karmarkar and Karp, "The Differencing Method of Set Partitioning" (1982); then
// samples of the heaviest part are swapped with others as long as that helps. `equal_counts`: parts of equally many
// samples. REQUIRES: parts >= 1; with equal counts, a multiple of `parts` costs.
Parts Partition(const std::vector<double>& costs, int parts, bool equal_counts);

// LB-Micro: equally many samples for each rank, and as many microbatches on each, none of more than kLongestSample
// tokens: by rank, then microbatch, the heaviest first. What collectives in every layer need.
// REQUIRES: a multiple of `ranks` lengths, none above kLongestSample.
std::vector<Parts> PlanMicro(const std::vector<int64_t>& lengths, int ranks);
// LB-Mini: by rank, unequal counts.
Parts PlanMini(const std::vector<int64_t>& lengths, int ranks);
// Samples by descending length: in which order they are pulled.
std::vector<int> PullOrder(const std::vector<int64_t>& lengths);

// What a minibatch takes where nothing but samples takes time. Costs and speeds as above.
double TimeOfMicro(const std::vector<Parts>& plan, const std::vector<double>& costs, const std::vector<double>& speeds);
double TimeOfMini(const Parts& plan, const std::vector<double>& costs, const std::vector<double>& speeds);
double TimeOfPulling(const std::vector<int>& order, const std::vector<double>& costs,
                     const std::vector<double>& speeds);
// What no plan of whole samples can be below: all work at all ranks' speed, or the longest sample at the highest.
double TimeOfIdeal(const std::vector<double>& costs, const std::vector<double>& speeds);

}  // namespace shardmesh::bench
