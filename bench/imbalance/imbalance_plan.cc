#include "bench/imbalance/imbalance_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <random>
#include <tuple>

namespace shardmesh::bench {
namespace {

constexpr double kMedian = 12'700, kSigma = 1;
constexpr double kQuadratic = 1.982, kLinear = 2.612, kUnit = 32'000;

struct Part {
  double cost = 0;
  std::vector<int> samples;
};

bool Heavier(const Part& a, const Part& b) {
  return std::tie(a.cost, b.samples) > std::tie(b.cost, a.samples);  // equal ones: any order, but always the same
}

// A solution for some of the samples: all parts, the heaviest first.
struct Partial {
  std::vector<Part> parts;
  double spread() const { return parts.front().cost - parts.back().cost; }
};

struct SmallerSpread {
  bool operator()(const Partial& a, const Partial& b) const {
    return std::make_tuple(a.spread(), a.parts.front().cost, a.parts.front().samples) <
           std::make_tuple(b.spread(), b.parts.front().cost, b.parts.front().samples);
  }
};

// The heaviest part of one with the lightest of the other, and so on.
Partial Combine(Partial a, const Partial& b) {
  for (size_t i = 0; i < a.parts.size(); ++i) {
    const Part& other = b.parts[b.parts.size() - 1 - i];
    a.parts[i].cost += other.cost;
    a.parts[i].samples.insert(a.parts[i].samples.end(), other.samples.begin(), other.samples.end());
  }
  std::sort(a.parts.begin(), a.parts.end(), Heavier);
  return a;
}

// Swaps a sample of `heavy` with a cheaper one of `light`, where that makes the heavier of the two lighter.
bool SwapOne(const std::vector<double>& costs, Part& heavy, Part& light) {
  for (int& a : heavy.samples) {
    for (int& b : light.samples) {
      const double moved = costs[a] - costs[b];
      if (moved <= 0 || std::max(heavy.cost - moved, light.cost + moved) >= heavy.cost * (1 - 1e-9)) continue;
      std::swap(a, b);
      heavy.cost -= moved;
      light.cost += moved;
      return true;
    }
  }
  return false;
}

// Until no swap with the heaviest part helps.
void Improve(const std::vector<double>& costs, std::vector<Part>& parts) {
  for (bool swapped = true; swapped;) {
    std::sort(parts.begin(), parts.end(), Heavier);
    swapped = false;
    for (size_t i = parts.size() - 1; i > 0 && !swapped; --i) swapped = SwapOne(costs, parts[0], parts[i]);
  }
}

std::vector<Part> Divide(const std::vector<double>& costs, int num_parts, bool equal_counts) {
  std::vector<int> order(costs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return costs[a] > costs[b]; });
  std::priority_queue<Partial, std::vector<Partial>, SmallerSpread> open;
  const size_t at_once = equal_counts ? num_parts : 1;
  for (size_t i = 0; i < order.size(); i += at_once) {
    Partial partial{std::vector<Part>(num_parts)};
    for (size_t k = 0; k < at_once; ++k) partial.parts[k] = {costs[order[i + k]], {order[i + k]}};
    open.push(std::move(partial));
  }
  if (open.empty()) return std::vector<Part>(num_parts);
  while (open.size() > 1) {
    Partial first = open.top();
    open.pop();
    Partial both = Combine(std::move(first), open.top());
    open.pop();
    open.push(std::move(both));
  }
  std::vector<Part> parts = open.top().parts;
  Improve(costs, parts);
  return parts;
}

double SumOf(const std::vector<int>& samples, const std::vector<double>& costs) {
  double sum = 0;
  for (const int s : samples) sum += costs[s];
  return sum;
}

template <typename T>
std::vector<T> Select(const std::vector<T>& from, const std::vector<int>& samples) {
  std::vector<T> selected;
  for (const int s : samples) selected.push_back(from[s]);
  return selected;
}

// A rank's samples in `count` microbatches, the heaviest first.
Parts Microbatches(const std::vector<double>& costs, const std::vector<int>& samples, int count) {
  Parts parts;
  for (const Part& part : Divide(Select(costs, samples), count, false)) {
    parts.push_back(Select(samples, part.samples));
  }
  return parts;
}

bool Fits(const Parts& microbatches, const std::vector<int64_t>& lengths) {
  return std::all_of(microbatches.begin(), microbatches.end(), [&](const std::vector<int>& samples) {
    int64_t tokens = 0;
    for (const int s : samples) tokens += lengths[s];
    return tokens <= kLongestSample;
  });
}

}  // namespace

std::vector<int64_t> SampleLengths(int count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(std::log(kMedian), kSigma);
  std::vector<int64_t> lengths;
  while (static_cast<int>(lengths.size()) < count) {
    const double length = std::round(std::exp(normal(random)));
    if (length >= kShortestSample && length <= kLongestSample) lengths.push_back(static_cast<int64_t>(length));
  }
  return lengths;
}

std::vector<double> RankSpeeds(int ranks, double spread, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> speeds;
  for (int r = 0; r < ranks; ++r) speeds.push_back(1 + spread * std::abs(normal(random)));
  return speeds;
}

double CostOf(int64_t tokens) {
  const double s = static_cast<double>(tokens) / kUnit;
  return kQuadratic * s * s + kLinear * s;
}

std::vector<double> CostsOf(const std::vector<int64_t>& lengths) {
  std::vector<double> costs;
  for (const int64_t tokens : lengths) costs.push_back(CostOf(tokens));
  return costs;
}

Parts Partition(const std::vector<double>& costs, int parts, bool equal_counts) {
  Parts partition;
  for (Part& part : Divide(costs, parts, equal_counts)) partition.push_back(std::move(part.samples));
  return partition;
}

std::vector<Parts> PlanMicro(const std::vector<int64_t>& lengths, int ranks) {
  const std::vector<double> costs = CostsOf(lengths);
  const Parts of_ranks = Partition(costs, ranks, true);
  for (int count = 1;; ++count) {
    std::vector<Parts> plan;
    for (const std::vector<int>& samples : of_ranks) plan.push_back(Microbatches(costs, samples, count));
    if (std::all_of(plan.begin(), plan.end(), [&](const Parts& of_rank) { return Fits(of_rank, lengths); }))
      return plan;
  }
}

Parts PlanMini(const std::vector<int64_t>& lengths, int ranks) {
  const std::vector<double> costs = CostsOf(lengths), even(ranks, 1);
  const Parts free = Partition(costs, ranks, false);
  if (lengths.size() % ranks != 0) return free;
  const Parts equal = Partition(costs, ranks, true);
  return TimeOfMini(equal, costs, even) < TimeOfMini(free, costs, even) ? equal : free;
}

std::vector<int> PullOrder(const std::vector<int64_t>& lengths) {
  std::vector<int> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return lengths[a] > lengths[b]; });
  return order;
}

double TimeOfMicro(const std::vector<Parts>& plan, const std::vector<double>& costs,
                   const std::vector<double>& speeds) {
  double time = 0;
  for (size_t m = 0; m < plan[0].size(); ++m) {
    double slowest = 0;
    for (size_t r = 0; r < plan.size(); ++r) slowest = std::max(slowest, SumOf(plan[r][m], costs) / speeds[r]);
    time += slowest;
  }
  return time;
}

double TimeOfMini(const Parts& plan, const std::vector<double>& costs, const std::vector<double>& speeds) {
  double slowest = 0;
  for (size_t r = 0; r < plan.size(); ++r) slowest = std::max(slowest, SumOf(plan[r], costs) / speeds[r]);
  return slowest;
}

double TimeOfPulling(const std::vector<int>& order, const std::vector<double>& costs,
                     const std::vector<double>& speeds) {
  std::vector<double> until(speeds.size(), 0);
  for (const int sample : order) {
    const size_t rank = std::min_element(until.begin(), until.end()) - until.begin();
    until[rank] += costs[sample] / speeds[rank];
  }
  return *std::max_element(until.begin(), until.end());
}

double TimeOfIdeal(const std::vector<double>& costs, const std::vector<double>& speeds) {
  const double work = std::accumulate(costs.begin(), costs.end(), 0.0);
  const double speed = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  return std::max(work / speed,
                  *std::max_element(costs.begin(), costs.end()) / *std::max_element(speeds.begin(), speeds.end()));
}

}  // namespace shardmesh::bench
