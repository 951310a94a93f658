// What the compiler gave each kernel, for every architecture, against the budget that stands before the kernel:
//
//   // Budget: 160 threads, 6 blocks; 64 registers, 736 bytes of stack, 180 of spills, 12480 of shared memory.
//
// The first two are what runs on a multiprocessor at once, and have to fit with what the compiler took. The others are
// limits. A kernel that takes more than it did is slower, and nothing else says so. The budgets are of nvcc 13; another
// release takes other registers for the same source, and the test is skipped. No device is needed.
#include <cxxabi.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace shardmesh {
namespace {

struct Resources {
  int registers = 0, stack = 0, spills = 0, shared = 0;
};
struct Budget {
  int threads = 0, blocks = 0;
  Resources most;
};
struct Compiled {
  std::string kernel, architecture, whole_name;
  Resources taken;
};

// Of a multiprocessor, from CUDA's programming guide ("Compute capabilities", technical specifications).
constexpr int kRegisters = 65536, kRegistersOfWarp = 256;  // given to warps in such pieces
constexpr int kSharedOfBlock = 1024;                       // that the system takes of each
int SharedMemory(const std::string& architecture) { return (architecture == "sm_80" ? 164 : 228) * 1024; }

std::string Environment(const char* name) {
  const char* const value = std::getenv(name);
  EXPECT_NE(value, nullptr) << name << " is set by kernels/cuda/BUILD";
  return value == nullptr ? "" : value;
}

std::vector<std::string> LinesOf(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path << " is not there";
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

// Of all sources, by kernel.
std::map<std::string, Budget> ReadBudgets() {
  const std::regex budget(
      "// Budget: (\\d+) threads, (\\d+) blocks; (\\d+) registers, (\\d+) bytes of stack, (\\d+) of spills, (\\d+) of "
      "shared memory\\.");
  const std::regex kernel("__global__ void .*?(\\w+Kernel)\\(");
  std::map<std::string, Budget> budgets;
  std::stringstream paths(Environment("KERNEL_SOURCES"));
  for (std::string path; paths >> path;) {
    Budget last;
    for (const std::string& line : LinesOf(path)) {
      std::smatch match;
      if (std::regex_search(line, match, budget)) {
        const auto number = [&](int i) { return std::atoi(match[i].str().c_str()); };
        last = {number(1), number(2), {number(3), number(4), number(5), number(6)}};
      } else if (std::regex_search(line, match, kernel)) {
        budgets[match[1]] = std::exchange(last, Budget());
      }
    }
  }
  return budgets;
}

std::string Demangled(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status),
                                                         std::free);
  return text == nullptr ? name : text.get();
}

// Of ptxas -v: a line for the name, one for its stack, one for the rest.
std::vector<Compiled> ReadReports() {
  const std::regex entry("Compiling entry function '(\\S+)' for '(\\S+)'"), name("(\\w+Kernel)[(<]");
  const std::regex stack("(\\d+) bytes stack frame, (\\d+) bytes spill stores, (\\d+) bytes spill loads");
  const std::regex used("Used (\\d+) registers"), shared("(\\d+) bytes smem");
  std::vector<Compiled> all;
  std::stringstream paths(Environment("KERNEL_REPORTS"));
  for (std::string path; paths >> path;) {
    for (const std::string& line : LinesOf(path)) {
      std::smatch match;
      const auto number = [&](int i) { return std::atoi(match[i].str().c_str()); };
      if (std::regex_search(line, match, entry)) {
        Compiled& compiled = all.emplace_back();
        compiled.whole_name = Demangled(match[1]);
        compiled.architecture = match[2];
        if (std::smatch kernel; std::regex_search(compiled.whole_name, kernel, name)) compiled.kernel = kernel[1];
      } else if (all.empty()) {
        continue;
      } else if (std::regex_search(line, match, stack)) {
        Resources& taken = all.back().taken;  // of the kernel, or of a function that it calls
        taken.stack = std::max(taken.stack, number(1));
        taken.spills = std::max({taken.spills, number(2), number(3)});
      } else if (std::regex_search(line, match, used)) {
        all.back().taken.registers = number(1);
        if (std::regex_search(line, match, shared)) all.back().taken.shared = number(1);
      }
    }
  }
  return all;
}

// The major number of the nvcc that wrote the reports.
std::string Release() {
  std::stringstream paths(Environment("KERNEL_REPORTS"));
  std::string path;
  paths >> path;
  std::smatch match;
  for (const std::string& line : LinesOf(path)) {
    if (std::regex_search(line, match, std::regex("release (\\d+)\\."))) return match[1];
  }
  return "?";
}

TEST(KernelBudgets, EveryKernelIsCompiledForEveryArchitecture_WithinItsBudget) {
  if (const std::string release = Release(); release != "13") {
    GTEST_SKIP() << "nvcc is of release " << release << ", and the budgets are of 13";
  }
  const std::map<std::string, Budget> budgets = ReadBudgets();
  std::map<std::string, std::map<std::string, Resources>> most;  // by kernel and architecture
  for (const Compiled& compiled : ReadReports()) {
    const std::string who = compiled.whole_name + " for " + compiled.architecture;
    ASSERT_GT(compiled.taken.registers, 0) << who << " has no line of registers: the compiler reports in another way";
    const auto budget = budgets.find(compiled.kernel);
    ASSERT_TRUE(budget != budgets.end() && budget->second.threads > 0) << who << ": write a budget before the kernel";
    const Resources& taken = compiled.taken;
    const Resources& limit = budget->second.most;
    EXPECT_LE(taken.registers, limit.registers) << who;
    EXPECT_LE(taken.stack, limit.stack) << who;
    EXPECT_LE(taken.spills, limit.spills) << who;
    EXPECT_LE(taken.shared, limit.shared) << who;
    Resources& worst = most[compiled.kernel][compiled.architecture];
    worst = {std::max(worst.registers, taken.registers), std::max(worst.stack, taken.stack),
             std::max(worst.spills, taken.spills), std::max(worst.shared, taken.shared)};
  }
  std::printf("%-20s %-8s %9s %8s %8s %8s %8s\n", "kernel, the most", "", "registers", "stack", "spills", "shared",
              "blocks");
  for (const auto& [kernel, architectures] : most) {
    const Budget& budget = budgets.at(kernel);
    EXPECT_EQ(architectures.size(), 3u) << kernel;
    for (const auto& [architecture, taken] : architectures) {
      const int of_warp = (32 * taken.registers + kRegistersOfWarp - 1) / kRegistersOfWarp * kRegistersOfWarp;
      const int by_registers = kRegisters / (of_warp * ((budget.threads + 31) / 32));
      const int by_shared = SharedMemory(architecture) / (taken.shared + kSharedOfBlock);
      const int blocks = std::min(by_registers, by_shared);
      std::printf("%-20s %-8s %9d %8d %8d %8d %8d\n", kernel.c_str(), architecture.c_str(), taken.registers,
                  taken.stack, taken.spills, taken.shared, blocks);
      EXPECT_GE(blocks, budget.blocks) << kernel << " for " << architecture;
    }
  }
  for (const auto& [kernel, budget] : budgets) EXPECT_EQ(most.count(kernel), 1u) << kernel << " is in no report";
}

}  // namespace
}  // namespace shardmesh
