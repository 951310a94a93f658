// DeviceTable: memory for what a launch reads beside its arguments, with plain types. Only in builds with
// --config=cuda.
//
// The bytes go through pinned memory of the table's own, so that a copy neither waits for the stream nor borrows the
// caller's memory. One table serves one launch after the other, in any streams of one device: a new copy waits in its
// stream for the last launch that reads the table, and the calling thread waits only while the last copy has not been
// made, which is when the work given to the stream before that was done. Who gives out more steps than one ahead takes
// two tables in turns. Thread-compatible.
#pragma once

#include <cstdint>

namespace shardmesh {

class DeviceTable {
 public:
  DeviceTable();
  // Waits for the last launch.
  ~DeviceTable();
  DeviceTable(const DeviceTable&) = delete;
  DeviceTable& operator=(const DeviceTable&) = delete;

  // Copies `num_bytes` in stream `stream` (a cudaStream_t) to device memory; `*at` is where, a multiple of 256. Returns
  // null on success, else the CUDA runtime's description of the error (static storage).
  const char* Upload(const void* bytes, int64_t num_bytes, void* stream, const uint8_t** at);
  // What was given to the stream so far may read the table. Call it after each launch that does. Errors as above.
  const char* NoteUse(void* stream);

 private:
  const char* Grow(int64_t num_bytes);
  void Free();

  void *copied_ = nullptr, *used_ = nullptr;  // cudaEvent_t
  void* pinned_ = nullptr;
  uint8_t* device_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace shardmesh
