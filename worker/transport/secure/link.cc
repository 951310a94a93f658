#include "worker/transport/secure/link.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/plain_text.h"
#include "core/base/status.h"

namespace shardmesh {
namespace {

constexpr size_t kStagedBytes = 16 << 10;  // of frames and the bytes behind them: one record of TLS
constexpr size_t kBufferBytes = 16 << 10;
constexpr int64_t kTurn = int64_t{1} << 20;  // bytes each way, before other peers have their turn
static_assert(kBufferBytes >= kFrameBytes + kMostNews, "news must fit as a whole");

}  // namespace

Link::Link(int self, int peer, std::unique_ptr<Stream> stream)
    : self_(self), peer_(peer), stream_(std::move(stream)), buffer_(kBufferBytes) {
  staged_.reserve(kStagedBytes + kFrameBytes);
}

void Link::Begin(const CallHeader& call, std::vector<Piece> out, std::vector<Piece> in) {
  call_ = call;
  out_ = std::move(out);
  in_ = std::move(in);
  out_at_ = in_at_ = 0;
  called_ = ahead_ = false;
  readable_ = !closed_;
  AppendFrame({FrameType::kCall, 0, call_}, news_);
}

absl::Status Link::Advance() {
  if (closed_ || (left_ && !done())) return Closed();
  Send(kTurn);
  const bool called = called_;
  if (readable_) RETURN_IF_ERROR(Receive(kTurn));
  if (called_ && !called) Send(kTurn);
  return absl::OkStatus();
}

pollfd Link::Wanted() const {
  const bool write = (!writable_ && !write_ended_ && HasOutput()) || stream_->WantsToWrite();
  // A peer that is ahead has nothing to say that this call needs.
  if (closed_ || (ahead_ && !write)) return {-1, 0, 0};
  return {stream_->fd(), static_cast<int16_t>((ahead_ ? 0 : POLLIN) | (write ? POLLOUT : 0)), 0};
}

void Link::Polled(int16_t events) {
  if ((events & (POLLOUT | POLLERR | POLLHUP)) != 0) writable_ = true;
  if ((events & (POLLIN | POLLERR | POLLHUP)) != 0) readable_ = true;
}

// ---- What goes. ----

// Before the peer is known to be at this call, only what fits beside the frame.
bool Link::MayStage() const {
  return called_ || out_[out_at_].bytes <= static_cast<int64_t>(kStagedBytes - 3 * kFrameBytes);
}

bool Link::Stage() {
  staged_.clear();
  staged_at_ = 0;
  std::swap(staged_, news_);
  while (out_at_ < out_.size() && staged_.size() + kFrameBytes < kStagedBytes && MayStage()) {
    Piece& piece = out_[out_at_];
    const int64_t chunk = std::min(piece.bytes, kMostChunk);
    const int64_t room = static_cast<int64_t>(kStagedBytes - staged_.size() - kFrameBytes);
    if (!called_ && chunk > room) break;
    AppendFrame({FrameType::kData, static_cast<uint32_t>(chunk), call_}, staged_);
    const int64_t copied = std::min(chunk, room);
    staged_.append(piece.memory, static_cast<size_t>(copied));
    direct_ = {piece.memory + copied, chunk - copied};
    piece.memory += chunk;
    piece.bytes -= chunk;
    if (piece.bytes == 0) ++out_at_;
    if (direct_.bytes > 0) break;
  }
  return !staged_.empty();
}

void Link::Send(int64_t budget) {
  if (!writable_ || write_ended_) return;
  Write(budget);
  if (!writable_ || write_ended_ || stream_->Flush()) return;
  writable_ = false;
  write_ended_ = stream_->end() != Stream::End::kNone;
}

void Link::Write(int64_t budget) {
  while (budget > 0 && writable_ && !write_ended_) {
    if (!HasStaged() && !Stage()) return;
    const bool staged = staged_at_ < staged_.size();
    const int64_t sent = staged
                             ? stream_->Write(&staged_[staged_at_], static_cast<int64_t>(staged_.size() - staged_at_))
                             : stream_->Write(direct_.memory, direct_.bytes);
    writable_ = sent != 0;
    write_ended_ = sent < 0;
    if (sent <= 0) return;
    budget -= sent;
    if (staged) {
      staged_at_ += static_cast<size_t>(sent);
    } else {
      direct_.memory += sent;
      direct_.bytes -= sent;
    }
  }
}

void Link::Tell(FrameType type, const CallHeader& call, absl::string_view news) {
  AppendFrame({type, static_cast<uint32_t>(news.size()), call}, news_);
  news_.append(news.data(), news.size());
  if (type != FrameType::kLate) out_at_ = out_.size();
}

bool Link::Flush() {
  if (!closed_) Send(kTurn);
  return write_ended_ || closed_ || sent();
}

void Link::FinishWriting() {
  shutdown(stream_->fd(), SHUT_WR);
  write_ended_ = true;
}

bool Link::Drain() {
  char some[16 << 10];
  ssize_t got = 0;
  for (int i = 0; i < 64 && (got = recv(stream_->fd(), some, sizeof(some), MSG_DONTWAIT)) > 0; ++i) {
  }
  int waiting = 0;
  return got == 0 || ioctl(stream_->fd(), SIOCOUTQ, &waiting) != 0 || waiting == 0;
}

// ---- What comes. ----

absl::Status Link::Receive(int64_t budget) {
  while (budget > 0) {
    int64_t got = 0;
    if (chunk_ > 0) {
      got = TakeChunk();
    } else {
      ASSIGN_OR_RETURN(const bool taken, TakeFrame());
      if (taken) continue;
      if (ahead_) {
        readable_ = false;
        return absl::OkStatus();
      }
      got = FillBuffer();
    }
    readable_ = got > 0;
    if (got < 0) return Closed();
    if (got == 0) return absl::OkStatus();
    budget -= got;
  }
  return absl::OkStatus();
}

int64_t Link::TakeChunk() {
  Piece& piece = in_[in_at_];
  int64_t got = std::min(chunk_, static_cast<int64_t>(buffered()));
  if (got > 0) {
    std::memcpy(piece.memory, &buffer_[buffer_begin_], static_cast<size_t>(got));
    buffer_begin_ += static_cast<size_t>(got);
  } else {
    got = stream_->Read(piece.memory, chunk_);
  }
  if (got <= 0) return got;
  chunk_ -= got;
  piece.memory += got;
  piece.bytes -= got;
  if (piece.bytes == 0) ++in_at_;
  return got;
}

int64_t Link::FillBuffer() {
  std::memmove(buffer_.data(), buffer_.data() + buffer_begin_, buffered());
  buffer_end_ = buffered();
  buffer_begin_ = 0;
  const int64_t got = stream_->Read(&buffer_[buffer_end_], static_cast<int64_t>(buffer_.size() - buffer_end_));
  if (got > 0) buffer_end_ += static_cast<size_t>(got);
  return got;
}

absl::StatusOr<bool> Link::TakeFrame() {
  if (buffered() < kFrameBytes) return false;
  const absl::StatusOr<Frame> frame = ParseFrame({&buffer_[buffer_begin_], kFrameBytes});
  if (!frame.ok()) return Wrong(frame.status().message());
  if (left_) return Wrong("sent a frame after it had left");
  if (frame->type == FrameType::kCall) {
    ahead_ = received();
    if (ahead_) return false;
    if (called_)
      return Wrong(absl::StrCat("is at ", DescribeCall(frame->call), " before its bytes of ", DescribeCall(call_),
                                " have come"));
    RETURN_IF_ERROR(CheckHeader(call_, frame->call, self_, peer_));
    called_ = true;
    buffer_begin_ += kFrameBytes;
    return true;
  }
  if (frame->type == FrameType::kData) {
    RETURN_IF_ERROR(CheckData(*frame));
    chunk_ = frame->length;
    buffer_begin_ += kFrameBytes;
    return true;
  }
  if (buffered() < kFrameBytes + frame->length) return false;
  const absl::string_view news(&buffer_[buffer_begin_ + kFrameBytes], frame->length);
  buffer_begin_ += kFrameBytes + frame->length;
  return TakeNews(*frame, news);
}

absl::StatusOr<bool> Link::TakeNews(const Frame& frame, absl::string_view news) {
  if (frame.type == FrameType::kEnd) return absl::AbortedError(PlainText(news, kMostNews));
  if (frame.type == FrameType::kLate) {
    late_ = std::string(news);
    return true;
  }
  left_ = true;
  last_call_ = frame.call.number;
  if (!done()) RETURN_IF_ERROR(Closed());
  return true;
}

absl::Status Link::CheckData(const Frame& frame) const {
  const int64_t most = called_ && in_at_ < in_.size() ? in_[in_at_].bytes : 0;
  const bool same = CheckHeader(call_, frame.call, self_, peer_).ok();
  if (same && frame.length >= 1 && frame.length <= most) return absl::OkStatus();
  return Wrong(absl::StrCat("sent ", frame.length, " bytes of ", DescribeCall(frame.call), " where ", most,
                            " at most were due of ", DescribeCall(call_)));
}

absl::Status Link::Closed() {
  closed_ = !left_ || stream_->end() != Stream::End::kNone;
  if (done()) return absl::OkStatus();
  if (left_) {
    return absl::UnavailableError(absl::StrCat("rank ", peer_, " left the group after call ", last_call_,
                                               "; it does not come to call ", call_.number));
  }
  if (stream_->end() == Stream::End::kRefused)
    return Wrong(absl::StrCat("sent what TLS does not accept: ", stream_->why()));
  return absl::UnavailableError(
      absl::StrCat("rank ", peer_, " is gone; it did not come to ", DescribeCall(call_), " (", stream_->why(), ")"));
}

absl::Status Link::Wrong(absl::string_view what) const {
  return absl::DataLossError(absl::StrCat("rank ", peer_, " ", what));
}

}  // namespace shardmesh
