#include "worker/host_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/status.h"

namespace shardmesh {
namespace {

// Stream numbers of a pass: 0 to 2 are the shard's own (shard_storage.cc).
constexpr int kWindowStream = 3;
constexpr int kPublicationStream = 4;
constexpr int kSlotStream = kPublicationStream + kPublicationBuffers;

int64_t ControlBytes(const Plan& plan) {
  return static_cast<int64_t>(sizeof(ControlPage) + sizeof(float) * (plan.norm_blocks() + plan.num_maxima()));
}

// A segment even when it holds nothing: a mapping needs a page.
int64_t Sized(int64_t bytes, int stream) { return std::max(bytes, kPageBytes) + StreamOffset(stream); }

v1::Segment Describe(const Segment& segment) {
  v1::Segment described;
  described.set_num_bytes(segment.num_bytes());
  described.set_data_offset(segment.data_offset());
  return described;
}

}  // namespace

HostMemory::Sizes HostMemory::SizesOf(const Plan& plan, int num_slots) {
  Sizes sizes;
  sizes.control = Sized(ControlBytes(plan), 0);
  sizes.window = Sized(plan.window_bytes(), kWindowStream);
  for (int i = 0; i < kPublicationBuffers; ++i)
    sizes.publications += Sized(plan.window_bytes(), kPublicationStream + i);
  for (int s = 0; s < num_slots; ++s) sizes.slots += Sized(plan.gradient_window_bytes(), kSlotStream + s);
  return sizes;
}

absl::StatusOr<HostMemory> HostMemory::Create(Memory& memory, const std::string& job, int num_slots, const Plan& plan) {
  if (plan.num_ranks() > kMaxHostRanks) {
    return absl::ResourceExhaustedError(
        absl::StrCat("job ", job, " has ", plan.num_ranks(), " ranks on one host; at most ", kMaxHostRanks));
  }
  const auto open = [&](absl::string_view what, int64_t bytes, int stream) {
    return memory.Open(absl::StrCat("shardmesh-", job, "-", what), Sized(bytes, stream), StreamOffset(stream));
  };
  HostMemory host;
  ASSIGN_OR_RETURN(host.control_, open("control", ControlBytes(plan), 0));
  ASSIGN_OR_RETURN(host.window_, open("window", plan.window_bytes(), kWindowStream));
  for (int i = 0; i < kPublicationBuffers; ++i) {
    ASSIGN_OR_RETURN(Segment segment,
                     open(absl::StrCat("publication-", i), plan.window_bytes(), kPublicationStream + i));
    host.publications_.push_back(std::move(segment));
  }
  for (int s = 0; s < num_slots; ++s) {
    ASSIGN_OR_RETURN(Segment segment, open(absl::StrCat("slot-", s), plan.gradient_window_bytes(), kSlotStream + s));
    host.slots_.push_back(std::move(segment));
  }
  return host;
}

absl::StatusOr<HostMemory> HostMemory::Map(const v1::LocalWelcome& welcome, std::vector<UniqueFd> descriptors,
                                           int num_slots, const Plan& plan) {
  const size_t expected = 2 + kPublicationBuffers + num_slots;
  if (descriptors.size() != expected || welcome.segments_size() != static_cast<int>(expected)) {
    return absl::InvalidArgumentError(absl::StrCat("the lead sent ", descriptors.size(), " descriptors and ",
                                                   welcome.segments_size(), " sizes; ", expected, " expected"));
  }
  std::vector<Segment> segments;
  for (size_t i = 0; i < expected; ++i) {
    const v1::Segment& said = welcome.segments(static_cast<int>(i));
    const int64_t needed = i == 0                        ? ControlBytes(plan)
                           : i < 2 + kPublicationBuffers ? plan.window_bytes()
                                                         : plan.gradient_window_bytes();
    if (said.data_offset() < 0 || said.data_offset() % kPageBytes != 0 || said.num_bytes() < said.data_offset() ||
        said.num_bytes() - said.data_offset() < needed) {
      return absl::InvalidArgumentError(absl::StrCat("segment ", i, " has ", said.num_bytes(), " bytes with data from ",
                                                     said.data_offset(), "; the plan needs ", needed,
                                                     " from a multiple of ", kPageBytes));
    }
    ASSIGN_OR_RETURN(Segment segment, Segment::Map(std::move(descriptors[i]), said.num_bytes(), said.data_offset(),
                                                   Segment::Access::kReadWrite));
    segments.push_back(std::move(segment));
  }
  HostMemory host;
  host.control_ = std::move(segments[0]);
  host.window_ = std::move(segments[1]);
  for (size_t i = 2; i < expected; ++i) {
    (i < 2 + kPublicationBuffers ? host.publications_ : host.slots_).push_back(std::move(segments[i]));
  }
  return host;
}

std::vector<const Segment*> HostMemory::All() const {
  std::vector<const Segment*> all = {&control_, &window_};
  for (const Segment& segment : publications_) all.push_back(&segment);
  for (const Segment& segment : slots_) all.push_back(&segment);
  return all;
}

std::vector<int> HostMemory::PeerDescriptors() const {
  std::vector<int> descriptors;
  for (const Segment* segment : All()) descriptors.push_back(segment->fd());
  return descriptors;
}

void HostMemory::DescribeTo(v1::LocalWelcome& welcome) const {
  for (const Segment* segment : All()) *welcome.add_segments() = Describe(*segment);
}

absl::Status HostMemory::Seal() {
  RETURN_IF_ERROR(window_.SealFutureWrites());
  for (Segment& segment : publications_) RETURN_IF_ERROR(segment.SealFutureWrites());
  return absl::OkStatus();
}

int64_t HostMemory::slot_bytes() const {
  int64_t bytes = 0;
  for (const Segment& segment : slots_) bytes += segment.num_bytes();
  return bytes;
}

int64_t HostMemory::publication_bytes() const {
  int64_t bytes = 0;
  for (const Segment& segment : publications_) bytes += segment.num_bytes();
  return bytes;
}

}  // namespace shardmesh
