#include "client/cli/up/node_workers.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace shardmesh {

NodeWorkers::NodeWorkers(std::string events_file, Events events)
    : events_file_(std::move(events_file)), events_(std::move(events)) {}

bool NodeWorkers::Process::Runs() const {
  pollfd ended = {pidfd.get(), POLLIN, 0};
  return pidfd.valid() && poll(&ended, 1, 0) == 0;
}

void NodeWorkers::Read() {
  std::ifstream file(events_file_);
  file.seekg(static_cast<std::streamoff>(read_));
  std::string line;
  while (std::getline(file, line) && !file.eof()) {  // a line without its end is not yet written
    read_ += line.size() + 1;
    ReadLine(line);
  }
}

// "started NAME pid PID" or "ended NAME pid PID HOW".
void NodeWorkers::ReadLine(absl::string_view line) {
  const std::vector<std::string> words = absl::StrSplit(line, absl::MaxSplits(' ', 4));
  pid_t pid = 0;
  if (words.size() < 4 || !absl::SimpleAtoi(words[3], &pid)) return;
  if (words[0] == "ended" && words.size() == 5) return Ended(words[1], pid, words[4]);
  if (words[0] != "started") return;
  processes_[words[1]] = {pid, UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)))};
  events_.started(words[1], pid);
}

void NodeWorkers::Ended(const std::string& name, pid_t pid, const std::string& how) {
  Process& process = processes_[name];
  if (process.pid == pid && std::exchange(process.told, true)) return;
  if (!first_end_.has_value()) first_end_ = End{name, how, pid};
  events_.ended(name, pid, how);
}

void NodeWorkers::ReportUntold() {
  for (const auto& [name, process] : processes_) {
    if (!process.told && !process.Runs()) Ended(name, process.pid, "status unknown");
  }
}

bool NodeWorkers::AnyRuns() const {
  for (const auto& [name, process] : processes_) {
    if (process.Runs()) return true;
  }
  return false;
}

void NodeWorkers::SignalAll(int signal) const {
  for (const auto& [name, process] : processes_) {
    if (process.Runs()) syscall(SYS_pidfd_send_signal, process.pidfd.get(), signal, nullptr, 0);
  }
}

}  // namespace shardmesh
