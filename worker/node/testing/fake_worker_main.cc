// fake_worker: what a worker does with its node, and nothing else. For tests of the node.
//
//   fake_worker --name W --node SOCKET --local-dir DIR [--crash-before-serving] [--close-link] [--leave] [other
//   flags]
//
// Finds or makes the segment "memory-W" of the job "job" (epoch 1, rank 5, plan "plan"), kFakeBytes with data from
// kFakeOffset: an int that counts the incarnations, then bytes that all are 'A'. Serves at "address-of-W" and
// "socket-of-W", adds a line to DIR/W.incarnations and waits:
//   PID INCARNATION LAST_INCARNATION LAST_ADDRESS ARGUMENTS
// SIGTERM, or --leave: it ends with status 0; --crash-before-serving: with 1, before it serves but after the line.
// --stubborn: SIGTERM does nothing. --close-link: it closes its link and waits. It ends by itself after some minutes,
// whatever becomes of its test.
#include <poll.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "core/base/clock.h"
#include "core/base/incarnation.h"
#include "core/base/status.h"
#include "rpc/base/main_support.h"
#include "worker/node/node_link.h"
#include "worker/node/retained_memory.h"
#include "worker/node/testing/fake_worker.h"

namespace shardmesh {
namespace {

constexpr int kLongestRunSeconds = 300;

absl::StatusOr<Segment> OpenMemory(NodeLink& link, const std::string& name) {
  const bool resume = !link.left().jobs.empty();
  RetainedMemory memory(link, "job", 1, resume);
  ASSIGN_OR_RETURN(Segment segment, memory.Open("memory-" + name, kFakeBytes, kFakeOffset));
  char* const bytes = segment.data() + sizeof(int);
  const int64_t count = segment.data_bytes() - sizeof(int);
  if (!resume) std::memset(bytes, 'A', count);
  if (std::string(bytes, count) != std::string(count, 'A'))
    return absl::DataLossError("the bytes are not as they were");
  ++*reinterpret_cast<int*>(segment.data());
  RETURN_IF_ERROR(link.Whole({"job", 1, 5, "plan"}));
  return segment;
}

absl::Status Live(std::map<std::string, std::string>& flags, const std::string& words) {
  StopSignal stop;
  const std::string name = flags["--name"];
  ASSIGN_OR_RETURN(auto link, NodeLink::Connect(flags["--node"], name, NextIncarnation(absl::Now(), 0), nullptr));
  ASSIGN_OR_RETURN(const Segment segment, OpenMemory(*link, name));
  const bool crash = flags.count("--crash-before-serving") != 0;
  if (!crash) RETURN_IF_ERROR(link->Serve("address-of-" + name, "socket-of-" + name));
  const NodeLink::Left left = link->left();
  if (flags.count("--close-link") != 0) link.reset();
  std::ofstream(absl::StrCat(flags["--local-dir"], "/", name, ".incarnations"), std::ios::app)
      << absl::StrCat(getpid(), " ", *reinterpret_cast<int*>(segment.data()), " ", left.incarnation, " ",
                      left.address.empty() ? "-" : left.address, " ", words, "\n")
      << std::flush;
  if (crash) return absl::InternalError("as asked");
  const absl::Time end = MonotonicNow() + absl::Seconds(kLongestRunSeconds);
  const bool stubborn = flags.count("--stubborn") != 0;
  while (flags.count("--leave") == 0 && MonotonicNow() < end) {
    if (!stubborn && stop.WaitFor(end - MonotonicNow())) break;
    poll(nullptr, 0, 100);
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  std::map<std::string, std::string> flags;
  std::string words;
  for (int i = 1; i < argc; ++i) {
    absl::StrAppend(&words, i == 1 ? "" : ",", argv[i]);
    flags[argv[i]] = i + 1 < argc ? argv[i + 1] : "";
  }
  absl::Status status = SetUpLog("info");
  if (status.ok()) status = Live(flags, words);
  if (!status.ok()) std::fprintf(stderr, "fake_worker: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace shardmesh

int main(int argc, char** argv) { return shardmesh::Main(argc, argv); }
