#include "worker/move/reshard.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "core/format/stream_digest.h"

namespace shardmesh {
namespace {

struct Place {
  int range;
  const ChunkRun* run;
};

// By tensor: its runs, ascending.
std::map<int, std::vector<Place>> RunsByTensor(const ShardStorage& storage) {
  std::map<int, std::vector<Place>> runs;
  for (int range = 0; range < static_cast<int>(storage.ranges().size()); ++range) {
    for (const ChunkRun& run : storage.runs(range)) runs[run.tensor].push_back({range, &run});
  }
  for (auto& [tensor, places] : runs) {
    std::sort(places.begin(), places.end(),
              [](const Place& a, const Place& b) { return a.run->first_element < b.run->first_element; });
  }
  return runs;
}

int64_t EndOf(const ChunkRun& run) { return run.first_element + run.num_elements; }

void AddPieces(const std::vector<Place>& from, int to_range, const ChunkRun& to, std::vector<ReshardPiece>& pieces) {
  auto it = std::partition_point(from.begin(), from.end(),
                                 [&](const Place& place) { return EndOf(*place.run) <= to.first_element; });
  for (; it != from.end() && it->run->first_element < EndOf(to); ++it) {
    const ChunkRun& run = *it->run;
    const int64_t begin = std::max(run.first_element, to.first_element), end = std::min(EndOf(run), EndOf(to));
    pieces.push_back({to.tensor, begin, end - begin, it->range, to_range, run.offset + (begin - run.first_element),
                      to.offset + (begin - to.first_element)});
  }
}

}  // namespace

std::vector<ReshardPiece> PiecesOf(const ShardStorage& from, const ShardStorage& to) {
  const std::map<int, std::vector<Place>> sources = RunsByTensor(from);
  std::vector<ReshardPiece> pieces;
  for (int range = 0; range < static_cast<int>(to.ranges().size()); ++range) {
    for (const ChunkRun& run : to.runs(range)) {
      if (const auto found = sources.find(run.tensor); found != sources.end()) {
        AddPieces(found->second, range, run, pieces);
      }
    }
  }
  return pieces;
}

int SourceOf(const Plan& before, const Holders& holders, int shard, int rank) {
  const int now = static_cast<int>(holders.was.size());
  const auto held = [&](int32_t was) {
    return was >= 0 && was < before.num_ranks() && before.PlaceOf(Rank(was)).shard == shard;
  };
  std::vector<int> sources;
  for (int r = 0; r < now; ++r) {
    if (!held(holders.was[r])) continue;
    if (r == rank) return rank;
    sources.push_back(r);
  }
  for (int i = 0; sources.empty() && i < static_cast<int>(holders.departing.size()); ++i) {
    if (held(holders.departing[i])) return now + i;
  }
  return sources.empty() ? -1 : sources[rank % sources.size()];
}

std::vector<Rank> GiversOf(const Plan& before, const Holders& holders) {
  std::vector<Rank> givers;
  for (const int32_t was : holders.was) {
    if (was >= 0 && was < before.num_ranks()) givers.push_back(Rank(was));
  }
  for (int shard = 0; shard < before.num_shards(); ++shard) {
    const int departing = SourceOf(before, holders, shard, /*rank=*/0) - static_cast<int>(holders.was.size());
    if (departing >= 0) givers.push_back(Rank(holders.departing[departing]));
  }
  return givers;
}

bool IsAnyLost(const Plan& before, const Holders& holders) {
  const auto is_one = [](int32_t was) { return was >= 0; };
  return std::count_if(holders.was.begin(), holders.was.end(), is_one) +
             std::count_if(holders.departing.begin(), holders.departing.end(), is_one) <
         before.num_ranks();
}

ReshardBytes::ReshardBytes(const ShardStorage& storage, int parity, Side side, absl::Span<const ReshardPiece> pieces)
    : storage_(storage), parity_(parity), side_(side), pieces_(pieces) {
  for (const ReshardPiece& piece : pieces) {
    const StorageRange& range = storage.ranges()[side == Side::kFrom ? piece.from_range : piece.to_range];
    for (const PartLayout& layout : range.parts) num_bytes_ += layout.BytesOf(piece.num_elements);
  }
}

ReshardBytes::Part ReshardBytes::PartOf(const ReshardPiece& piece, int stream) const {
  const bool from = side_ == Side::kFrom, extra = stream > kStates;
  const int range = from ? piece.from_range : piece.to_range, state = stream % (1 + kStates) - 1;
  const int64_t offset = from ? piece.from_offset : piece.to_offset;
  const StoredRun run =
      state < 0 ? storage_.weights(range, parity_, offset) : storage_.state(state, range, parity_, offset);
  const PartLayout& layout = storage_.ranges()[range].parts[stream];
  return {static_cast<char*>(extra ? run.extra : run.codes), layout, layout.BytesOf(piece.num_elements)};
}

// The part at which it is.
void ReshardBytes::Complete() {
  const ReshardPiece& piece = pieces_[piece_];
  const Part part = PartOf(piece, stream_);
  if (part.bytes > 0) {
    const uint64_t key = DigestKey(static_cast<uint32_t>(piece.tensor), stream_ % (1 + kStates), stream_ > kStates);
    digest_ += DigestPart(key, part.layout, static_cast<uint64_t>(piece.first_element), part.data, piece.num_elements);
  }
  in_part_ = 0;
  if (++stream_ < kStreams) return;
  stream_ = 0;
  ++piece_;
}

absl::Span<char> ReshardBytes::Next(int64_t most) {
  while (piece_ < pieces_.size()) {
    const Part part = PartOf(pieces_[piece_], stream_);
    if (in_part_ == part.bytes) {
      Complete();
      continue;
    }
    const int64_t take = std::min(most, part.bytes - in_part_);
    in_part_ += take;
    return {part.data + in_part_ - take, static_cast<size_t>(take)};
  }
  return {};
}

uint64_t ReshardBytes::digest() {
  while (piece_ < pieces_.size() && in_part_ == PartOf(pieces_[piece_], stream_).bytes) Complete();
  return digest_;
}

void CopyPieces(const ShardStorage& from, int from_parity, const ShardStorage& to, int to_parity,
                absl::Span<const ReshardPiece> pieces) {
  for (const ReshardPiece& piece : pieces) {
    ReshardBytes source(from, from_parity, ReshardBytes::Side::kFrom, {&piece, 1});
    ReshardBytes target(to, to_parity, ReshardBytes::Side::kTo, {&piece, 1});
    for (absl::Span<char> bytes = source.Next(source.num_bytes()); !bytes.empty();
         bytes = source.Next(source.num_bytes())) {
      std::memcpy(target.Next(static_cast<int64_t>(bytes.size())).data(), bytes.data(), bytes.size());
    }
  }
}

}  // namespace shardmesh
