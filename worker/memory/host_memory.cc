#include "worker/memory/host_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/keep_forever.h"
#include "core/base/status.h"
#include "worker/control/group_table.h"

namespace shardmesh {
namespace {

// Stream numbers of a pass: 0 to 2 are the shard's own (shard_storage.cc).
constexpr int kWindowStream = 3;
constexpr int kPublicationStream = 4;
constexpr int kSlotStream = kPublicationStream + kMaxPublications;

int64_t ControlBytes(const Plan& plan) {
  return static_cast<int64_t>(sizeof(ControlBlock) + sizeof(float) * (plan.norm_blocks() + plan.scales().num_maxima)) +
         ResidencyTable::NumBytes(plan) + GroupTable::NumBytes(plan);
}

static_assert(sizeof(VersionBoard) <= kPageBytes && kBoardPublications == kMaxPublications);

constexpr absl::Duration kCopyTimeout = absl::Seconds(30);

// What window and slots hold that lie in memory of the host.
int64_t WindowBytes(const Plan& plan, bool on_device) { return on_device ? 0 : plan.window_bytes(); }
int64_t GradientBytes(const Plan& plan, bool on_device) {
  return on_device ? 0 : plan.slots().windows_each() * plan.gradient_window_bytes();
}
int64_t SlotBytes(const Plan& plan, bool on_device = false) {
  return GradientBytes(plan, on_device) + static_cast<int64_t>(sizeof(Mailbox));
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

HostMemory::Sizes HostMemory::SizesOf(const Plan& plan, HostShape shape) {
  Sizes sizes;
  sizes.control = Sized(ControlBytes(plan), 0) + 2 * kPageBytes;
  sizes.window = Sized(plan.window_bytes(), kWindowStream);
  for (int i = 0; i < shape.num_publications; ++i)
    sizes.publications += Sized(plan.window_bytes(), kPublicationStream + i);
  for (int s = 0; s < shape.num_writers; ++s) sizes.slots += Sized(SlotBytes(plan), kSlotStream + s);
  return sizes;
}

absl::Status DeviceWindows::Copy(void* to, const void* from, int64_t bytes) const {
  DeviceRuntime::Scope scope(*device);
  RETURN_IF_ERROR(device->Copy(to, from, bytes));
  return device->AwaitIdle(kCopyTimeout);
}

std::vector<int> DeviceWindows::DescribeTo(v1::LocalWelcome& welcome,
                                           const std::vector<const DeviceSegment*>& segments) const {
  std::vector<int> descriptors;
  for (const DeviceSegment* const segment : segments) {
    welcome.add_device_segments()->set_num_bytes(segment->num_bytes());
    descriptors.push_back(segment->fd());
  }
  welcome.set_device_uuid(device->uuid());
  welcome.set_device(device->device());
  return descriptors;
}

absl::StatusOr<HostMemory> HostMemory::Create(Memory& memory, const std::string& job, HostShape shape, const Plan& plan,
                                              std::shared_ptr<DeviceRuntime> device) {
  if (plan.num_ranks() > kMaxHostRanks) {
    return absl::ResourceExhaustedError(
        absl::StrCat("job ", job, " has ", plan.num_ranks(), " ranks on one host; at most ", kMaxHostRanks));
  }
  const auto open = [&](absl::string_view what, int64_t bytes, int stream) {
    return memory.Open(absl::StrCat("shardmesh-", job, "-", what), Sized(bytes, stream), StreamOffset(stream));
  };
  HostMemory host;
  const bool on_device = device != nullptr;
  host.bucketed_ = plan.bucketed();
  ASSIGN_OR_RETURN(host.control_, open("control", ControlBytes(plan), 0));
  ASSIGN_OR_RETURN(host.window_, open("window", WindowBytes(plan, on_device), kWindowStream));
  for (int i = 0; i < shape.num_publications; ++i) {
    ASSIGN_OR_RETURN(Segment segment,
                     open(absl::StrCat("publication-", i), WindowBytes(plan, on_device), kPublicationStream + i));
    host.publications_.push_back(std::move(segment));
  }
  for (int s = 0; s < shape.num_writers; ++s) {
    ASSIGN_OR_RETURN(Segment segment, open(absl::StrCat("slot-", s), SlotBytes(plan, on_device), kSlotStream + s));
    host.slots_.push_back(std::move(segment));
  }
  ASSIGN_OR_RETURN(host.notifier_, open("notifier", kPageBytes, 0));
  ASSIGN_OR_RETURN(host.board_, open("board", kPageBytes, 0));
  host.gradient_window_bytes_ = GradientBytes(plan, on_device);
  host.one_window_bytes_ = plan.gradient_window_bytes();
  if (!on_device) return host;
  DeviceWindows& windows = host.device_.emplace();
  windows.device = std::move(device);
  ASSIGN_OR_RETURN(windows.window, DeviceSegment::Create(windows.device, plan.window_bytes()));
  for (int i = 0; i < shape.num_publications; ++i) {
    ASSIGN_OR_RETURN(DeviceSegment segment, DeviceSegment::Create(windows.device, plan.window_bytes()));
    windows.publications.push_back(std::move(segment));
  }
  for (int s = 0; s < shape.num_writers; ++s) {
    ASSIGN_OR_RETURN(DeviceSegment segment, DeviceSegment::Create(windows.device, plan.gradient_window_bytes()));
    windows.slots.push_back(std::move(segment));
  }
  RETURN_IF_ERROR(host.PinControl(plan));
  return host;
}

HostMemory::~HostMemory() {
  if (!retained_for_device_ || !device_.has_value()) return;
  KeepForever(std::make_pair(std::move(control_), *std::move(device_)));
}

absl::Status HostMemory::PinControl(const Plan& plan) {
  const int64_t bytes = (ControlBytes(plan) + kPageBytes - 1) / kPageBytes * kPageBytes;
  ASSIGN_OR_RETURN(device_->control, PinnedMemory::Register(device_->device, control_.data(), bytes));
  return absl::OkStatus();
}

absl::Status HostMemory::MapOnDevice(const v1::LocalWelcome& welcome, std::vector<UniqueFd> descriptors,
                                     HostShape shape, const Plan& plan, DeviceWindows& windows) {
  const size_t first_slot = 1 + shape.num_publications;
  for (size_t i = 0; i < first_slot + shape.num_writers; ++i) {
    const int64_t needed = i < first_slot ? plan.window_bytes() : plan.gradient_window_bytes();
    const int64_t said = welcome.device_segments(static_cast<int>(i)).num_bytes();
    if (said != needed) {
      return absl::InvalidArgumentError(
          absl::StrCat("segment ", i, " of the device has ", said, " bytes; the plan says ", needed));
    }
    ASSIGN_OR_RETURN(DeviceSegment segment, DeviceSegment::Map(windows.device, std::move(descriptors[i]), said,
                                                               DeviceSegment::Access::kReadWrite));
    if (i == 0) {
      windows.window = std::move(segment);
    } else {
      (i < first_slot ? windows.publications : windows.slots).push_back(std::move(segment));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<HostMemory> HostMemory::Map(const v1::LocalWelcome& welcome, std::vector<UniqueFd> descriptors,
                                           HostShape shape, const Plan& plan, std::shared_ptr<DeviceRuntime> device) {
  const bool on_device = device != nullptr;
  if ((welcome.device_segments_size() > 0) != on_device) {
    return absl::FailedPreconditionError(
        on_device ? absl::StrCat("the lead has the job's windows in memory of the host, and this worker a CUDA device; "
                                 "start all workers of a job with the same --device")
                  : absl::StrCat("the lead has the job's windows in memory of its CUDA device ", welcome.device(),
                                 "; start this worker with --device cuda:N too"));
  }
  const size_t first_slot = 2 + shape.num_publications, expected = first_slot + shape.num_writers + 2;
  const size_t there = on_device ? expected + 1 + shape.num_publications + shape.num_writers : expected;
  std::vector<UniqueFd> of_device;
  if (descriptors.size() == there && welcome.device_segments_size() == static_cast<int>(there - expected)) {
    for (size_t i = expected; i < there; ++i) of_device.push_back(std::move(descriptors[i]));
    descriptors.resize(expected);
  }
  if (descriptors.size() != expected || welcome.segments_size() != static_cast<int>(expected)) {
    return absl::InvalidArgumentError(absl::StrCat("the lead sent ", descriptors.size(), " descriptors and ",
                                                   welcome.segments_size(), " sizes; ", expected, " expected"));
  }
  std::vector<Segment> segments;
  for (size_t i = 0; i < expected; ++i) {
    const v1::Segment& said = welcome.segments(static_cast<int>(i));
    const int64_t needed = i == 0             ? ControlBytes(plan)
                           : i < first_slot   ? WindowBytes(plan, on_device)
                           : i + 2 < expected ? SlotBytes(plan, on_device)
                                              : kPageBytes;
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
  host.bucketed_ = plan.bucketed();
  host.control_ = std::move(segments[0]);
  host.window_ = std::move(segments[1]);
  for (size_t i = 2; i + 2 < expected; ++i) {
    (i < first_slot ? host.publications_ : host.slots_).push_back(std::move(segments[i]));
  }
  host.notifier_ = std::move(segments[expected - 2]);
  host.board_ = std::move(segments[expected - 1]);
  host.gradient_window_bytes_ = GradientBytes(plan, on_device);
  host.one_window_bytes_ = plan.gradient_window_bytes();
  if (!on_device) return host;
  host.device_.emplace().device = std::move(device);
  if (const absl::Status mapped = MapOnDevice(welcome, std::move(of_device), shape, plan, *host.device_);
      !mapped.ok()) {
    if (welcome.device_uuid() == host.device_->device->uuid()) return mapped;
    return Annotate(mapped, absl::StrCat("CUDA device ", host.device_->device->device(),
                                         " of this worker must reach memory of the lead's device ", welcome.device(),
                                         " (peer access), or start both workers with the same --device"));
  }
  RETURN_IF_ERROR(host.PinControl(plan));
  return host;
}

std::vector<const Segment*> HostMemory::All() const {
  std::vector<const Segment*> all = {&control_, &window_};
  for (const Segment& segment : publications_) all.push_back(&segment);
  for (const Segment& segment : slots_) all.push_back(&segment);
  all.push_back(&notifier_);
  all.push_back(&board_);
  return all;
}

std::vector<const DeviceSegment*> HostMemory::AllOnDevice() const {
  std::vector<const DeviceSegment*> all;
  if (!device_.has_value()) return all;
  all.push_back(&device_->window);
  for (const DeviceSegment& segment : device_->publications) all.push_back(&segment);
  for (const DeviceSegment& segment : device_->slots) all.push_back(&segment);
  return all;
}

std::vector<int> HostMemory::PeerDescriptors() const {
  std::vector<int> descriptors;
  for (const Segment* segment : All()) descriptors.push_back(segment->fd());
  for (const DeviceSegment* segment : AllOnDevice()) descriptors.push_back(segment->fd());
  return descriptors;
}

void HostMemory::DescribeTo(v1::LocalWelcome& welcome) const {
  for (const Segment* segment : All()) *welcome.add_segments() = Describe(*segment);
  if (device_.has_value()) device_->DescribeTo(welcome, AllOnDevice());
}

absl::Status HostMemory::Seal(bool retained) {
  RETURN_IF_ERROR(bucketed_ || retained ? window_.RefuseNewWriters(bucketed_) : window_.SealFutureWrites());
  std::vector<Segment*> read = {&board_};
  for (Segment& segment : publications_) read.push_back(&segment);
  for (Segment* const segment : read) {
    RETURN_IF_ERROR(retained ? segment->RefuseNewWriters(/*punched=*/false) : segment->SealFutureWrites());
  }
  return absl::OkStatus();
}

namespace {

int64_t BytesOf(const std::vector<Segment>& segments, int64_t (Segment::*bytes)() const) {
  int64_t sum = 0;
  for (const Segment& segment : segments) sum += (segment.*bytes)();
  return sum;
}

}  // namespace

HostMemory::Sizes HostMemory::Allocated() const {
  if (device_.has_value()) {
    return {0, device_->window.allocated_bytes(), device_->publication_bytes(), device_->slot_bytes()};
  }
  return {0, window_.num_bytes(), BytesOf(publications_, &Segment::num_bytes), BytesOf(slots_, &Segment::num_bytes)};
}

HostMemory::Sizes HostMemory::Resident() const {
  if (device_.has_value()) return Allocated();
  return {0, window_.ResidentBytes(), BytesOf(publications_, &Segment::ResidentBytes),
          BytesOf(slots_, &Segment::ResidentBytes)};
}

}  // namespace shardmesh
