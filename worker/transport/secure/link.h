// Link: what a rank sends to one peer and gets from it, call by call, as frames (frame.h) over a Stream. Nothing here
// waits: who uses it polls.
//
// A call's kCall frame goes at once, with the first bytes behind it where they are few; more goes when the peer's kCall
// frame has come and is the same. Bytes go from the caller's memory and come into it; a frame's first bytes alone are
// copied on the way. What a peer announces is compared with what the call expects of it before a byte is taken.
// Not thread-safe.
#pragma once

#include <poll.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/transport/group.h"
#include "worker/transport/secure/frame.h"
#include "worker/transport/secure/stream.h"

namespace shardmesh {

class Link {
 public:
  struct Piece {
    char* memory = nullptr;
    int64_t bytes = 0;
  };

  // `self`, `peer`: what messages call the two ranks.
  Link(int self, int peer, std::unique_ptr<Stream> stream);

  // `out` goes to the peer and `in` comes from it, in their order, each of at least a byte. Their memory is used until
  // done(), or until Advance fails. REQUIRES: the call before is done.
  void Begin(const CallHeader& call, std::vector<Piece> out, std::vector<Piece> in);

  // Sends and takes what it can without waiting, up to a few chunks. After an error the group is over:
  //   FailedPrecondition: the peer is at another call. DataLoss: it sends what the call does not expect.
  //   Unavailable: it is gone, or left before this call. Aborted: it has ended the group; the message is its reason.
  absl::Status Advance();
  // All has gone and come. What goes wrong later is for the next call.
  bool done() const { return received() && sent(); }
  // More may be possible without waiting.
  bool ready() const { return !closed_ && (readable_ || (writable_ && !write_ended_ && HasOutput())); }

  // What to poll for, and what came of it; the descriptor is -1 where nothing more can come.
  pollfd Wanted() const;
  void Polled(int16_t events);
  // Looks at what has come even where this call expects nothing more.
  void LookAgain() { readable_ = !closed_; }

  // Puts news behind the chunk under way. kEnd and kLeft: the rest of the call does not go any more.
  void Tell(FrameType type, const CallHeader& call, absl::string_view news);
  // Sends what was told; true: nothing is left of it, or it cannot go.
  bool Flush();
  // After this the peer gets what was sent, and then the end of the connection.
  void FinishWriting();
  // Throws away what has come; true: the peer's kernel has all that was sent, or never will.
  bool Drain();

  // The news of kLate: a bit for each rank that the peer waits for; empty: it has said nothing.
  const std::string& late() const { return late_; }
  std::string protection() const { return stream_->Protection(); }

 private:
  bool received() const { return called_ && in_at_ == in_.size() && chunk_ == 0; }
  bool sent() const { return !HasStaged() && news_.empty() && out_at_ == out_.size() && stream_->flushed(); }
  bool HasStaged() const { return staged_at_ < staged_.size() || direct_.bytes > 0; }
  bool HasOutput() const {
    return HasStaged() || !news_.empty() || !stream_->flushed() || (out_at_ < out_.size() && MayStage());
  }
  bool MayStage() const;
  bool Stage();
  void Send(int64_t budget);
  void Write(int64_t budget);
  absl::Status Receive(int64_t budget);
  // Bytes of the chunk that comes; 0: none now, -1: none ever.
  int64_t TakeChunk();
  int64_t FillBuffer();
  // False: it is not here as a whole.
  absl::StatusOr<bool> TakeFrame();
  absl::StatusOr<bool> TakeNews(const Frame& frame, absl::string_view news);
  absl::Status CheckData(const Frame& frame) const;
  absl::Status Closed();
  absl::Status Wrong(absl::string_view what) const;
  size_t buffered() const { return buffer_end_ - buffer_begin_; }

  const int self_, peer_;
  const std::unique_ptr<Stream> stream_;
  CallHeader call_;

  // What goes: the staged bytes, behind them the memory of one chunk, then news, then the next chunk.
  std::string staged_, news_;
  size_t staged_at_ = 0;
  Piece direct_;
  std::vector<Piece> out_;
  size_t out_at_ = 0;
  bool writable_ = true;      // until a write could not be made
  bool write_ended_ = false;  // none can any more

  // What comes.
  std::vector<char> buffer_;
  size_t buffer_begin_ = 0, buffer_end_ = 0;
  std::vector<Piece> in_;
  size_t in_at_ = 0;
  int64_t chunk_ = 0;      // bytes that still belong to the frame that was taken
  bool called_ = false;    // the peer's frame of this call was taken
  bool ahead_ = false;     // its frame of the next one is in the buffer
  bool readable_ = false;  // until nothing was there
  bool closed_ = false;
  bool left_ = false;
  uint64_t last_call_ = 0;  // where left_
  std::string late_;
};

}  // namespace shardmesh
