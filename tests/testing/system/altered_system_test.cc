// altered_system_preload.cc in a program: this test starts itself again, below the library, as the program that the
// system refuses threads to.
#include "tests/testing/system/altered_system.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "core/base/matchers.h"
#include "local/testing/temp_folder.h"
#include "tests/testing/system/process.h"

namespace shardmesh {
namespace {

using ::shardmesh::testing::AlteredSystem;
using ::shardmesh::testing::kSystemChangesVariable;
using ::shardmesh::testing::Process;
using ::shardmesh::testing::TempFolder;

constexpr int kMost = 3;

// Threads that live until the object ends.
class Waiting {
 public:
  Waiting() { pthread_mutex_lock(&mu_); }
  ~Waiting() {
    pthread_mutex_unlock(&mu_);
    for (const pthread_t thread : threads_) pthread_join(thread, nullptr);
  }
  int Add() {
    pthread_t thread;
    const int error = pthread_create(&thread, nullptr, Await, &mu_);
    if (error == 0) threads_.push_back(thread);
    return error;
  }

 private:
  static void* Await(void* mu) {
    pthread_mutex_lock(static_cast<pthread_mutex_t*>(mu));
    pthread_mutex_unlock(static_cast<pthread_mutex_t*>(mu));
    return nullptr;
  }
  pthread_mutex_t mu_ = PTHREAD_MUTEX_INITIALIZER;
  std::vector<pthread_t> threads_;
};

// As many as are allowed are given, and not one more.
void ExpectMostAtATime() {
  Waiting waiting;
  for (int i = 0; i < kMost; ++i) EXPECT_EQ(waiting.Add(), 0) << i;
  for (int i = 0; i < 2; ++i) EXPECT_EQ(waiting.Add(), EAGAIN) << i;
}

void ExpectStartedAndEnded(void* (*start)(void*)) {
  for (int i = 0; i < 2 * kMost; ++i) {
    pthread_t thread;
    ASSERT_EQ(pthread_create(&thread, nullptr, start, nullptr), 0) << i;
    ASSERT_EQ(pthread_join(thread, nullptr), 0);
  }
}

void* ForkAndCount(void*) {
  const pid_t child = fork();
  if (child == 0) {
    ExpectMostAtATime();
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  return nullptr;
}

struct UnderTheLibrary : ::testing::Test {
  void SetUp() override {
    if (getenv(kSystemChangesVariable) == nullptr) GTEST_SKIP() << "run by AlteredSystemTest";
  }
};

TEST_F(UnderTheLibrary, AsManyThreadsLiveAtATimeAsAreAllowed) { ExpectMostAtATime(); }

TEST_F(UnderTheLibrary, WhatEndedMakesRoom) {
  ExpectStartedAndEnded([](void*) -> void* { return nullptr; });
  ExpectStartedAndEnded([](void*) -> void* { pthread_exit(nullptr); });
  ExpectMostAtATime();
}

TEST_F(UnderTheLibrary, AForkedChildCountsItsOwn) {
  {
    Waiting waiting;
    for (int i = 1; i < kMost; ++i) EXPECT_EQ(waiting.Add(), 0);
    ExpectStartedAndEnded(ForkAndCount);
  }
  ExpectMostAtATime();
}

TEST(AlteredSystemTest, ThreadsOfAProgram) {
  if (getenv(kSystemChangesVariable) != nullptr) GTEST_SKIP() << "is the program";
  TempFolder folder;
  ASSERT_OK_AND_ASSIGN(const auto system, AlteredSystem::Make(folder.File("system")));
  system->AllowThreads(kMost);
  const std::string own = std::filesystem::read_symlink("/proc/self/exe").string();
  ASSERT_OK_AND_ASSIGN(const auto program, Process::Start({{own, "--gtest_filter=UnderTheLibrary.*"},
                                                           folder.File("log"),
                                                           0,
                                                           system->Environment()}));
  ASSERT_OK_AND_ASSIGN(const int status, program->Wait(absl::Seconds(60)));
  EXPECT_EQ(status, 0) << program->Log();
  EXPECT_THAT(program->Log(), ::testing::HasSubstr("[  PASSED  ] 3 tests."));
}

}  // namespace
}  // namespace shardmesh
