// One suite for every store; then what only a file can do.
#include "server/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <memory>

#include "absl/strings/str_cat.h"
#include "core/matchers.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string NewPath() {
  static int count = 0;
  return absl::StrCat(::testing::TempDir(), "/store_", getpid(), "_", ++count, ".db");
}

WorkerRecord MakeWorker(const std::string& name, int64_t incarnation) {
  return {{name, incarnation, "a:1", std::string("h\0\"'\n", 5), "/s", 7}, WorkerState::kDead};
}

JobRecord FullJob(const std::string& name) {
  JobRecord job;
  job.name = name;
  job.state = JobState::kFailed;
  job.epoch = 3;
  job.members = {{MakeWorker("w0", 1).identity, true, 3}, {MakeWorker("w1", 2).identity, false, -1}};
  job.excluded = {"w9@1", "w8@2"};
  job.error = "it's \"broken\"";
  job.committed_step = 12;
  job.published_steps = {0, 11, 12};
  job.mesh = "ddp=2,fsdp=1";
  job.from_epoch = 2;
  job.from_mesh = "ddp=2,fsdp=2";
  job.wanted_mesh = "ddp=4";
  return job;
}

struct Backend {
  const char* name;
  std::function<std::unique_ptr<Store>(const std::string& path)> open;
  bool persistent;
};

class StoreConformance : public ::testing::TestWithParam<Backend> {
 protected:
  void Reopen() {
    if (!GetParam().persistent) return;
    store_ = nullptr;
    store_ = GetParam().open(path_);
  }
  StoreContents Load() {
    Reopen();
    absl::StatusOr<StoreContents> contents = store_->Load();
    EXPECT_OK(contents);
    return contents.ok() ? *contents : StoreContents();
  }
  const std::string path_ = NewPath();
  std::unique_ptr<Store> store_ = GetParam().open(path_);
};

TEST_P(StoreConformance, New_IsEmpty) {
  const StoreContents contents = Load();
  EXPECT_TRUE(contents.jobs.empty() && contents.workers.empty() && contents.specs.empty());
  EXPECT_EQ(contents.epoch_floor, 0);
}

TEST_P(StoreConformance, EveryFieldOfEveryRecord_ComesBack) {
  StoreBatch batch;
  batch.put_workers = {MakeWorker("w0", 1), MakeWorker("w1", 2)};
  batch.put_specs["j"] = std::string("\0\x01spec", 6);
  batch.put_jobs = {FullJob("j")};
  batch.epoch_floor = 5;
  ASSERT_OK(store_->Write(batch));
  const StoreContents contents = Load();
  EXPECT_EQ(contents.workers,
            (std::map<std::string, WorkerRecord>{{"w0", MakeWorker("w0", 1)}, {"w1", MakeWorker("w1", 2)}}));
  EXPECT_EQ(contents.jobs, (std::map<std::string, JobRecord>{{"j", FullJob("j")}}));
  EXPECT_EQ(contents.specs, batch.put_specs);
  EXPECT_EQ(contents.epoch_floor, 5);
}

TEST_P(StoreConformance, Records_ReplaceThoseOfTheSameName) {
  StoreBatch batch;
  batch.put_workers = {MakeWorker("w0", 1)};
  batch.put_specs["j"] = "s";
  batch.put_jobs = {FullJob("j")};
  batch.epoch_floor = 5;
  ASSERT_OK(store_->Write(batch));
  StoreBatch second;
  second.put_workers = {MakeWorker("w0", 9)};
  second.put_jobs = {FullJob("j")};
  second.put_jobs[0].members.pop_back();
  second.put_jobs[0].members[0].worker = MakeWorker("w0", 9).identity;
  second.put_jobs[0].published_steps.clear();
  second.epoch_floor = 4;
  ASSERT_OK(store_->Write(second));
  const StoreContents contents = Load();
  EXPECT_EQ(contents.workers.at("w0").identity.incarnation, 9);
  EXPECT_EQ(contents.jobs.at("j"), second.put_jobs[0]);
  EXPECT_EQ(contents.specs.at("j"), "s");
  EXPECT_EQ(contents.epoch_floor, 5) << "it never falls";
}

TEST_P(StoreConformance, Delete_RemovesJobWithItsSpecAndMembers) {
  StoreBatch batch;
  batch.put_workers = {MakeWorker("w0", 1)};
  batch.put_specs = {{"j", "s"}, {"k", "t"}};
  batch.put_jobs = {FullJob("j"), FullJob("k")};
  ASSERT_OK(store_->Write(batch));
  StoreBatch removal;
  removal.delete_jobs = {"j", "never there"};
  removal.delete_workers = {"w0", "never there"};
  ASSERT_OK(store_->Write(removal));
  const StoreContents contents = Load();
  EXPECT_TRUE(contents.workers.empty());
  EXPECT_EQ(contents.jobs.size(), 1u);
  EXPECT_EQ(contents.specs, (std::map<std::string, std::string>{{"k", "t"}}));
  EXPECT_EQ(contents.jobs.at("k").members.size(), 2u);
}

std::unique_ptr<Store> OpenOrDie(const std::string& path) {
  absl::StatusOr<std::unique_ptr<Store>> store = NewSqliteStore(path);
  EXPECT_OK(store);
  return store.ok() ? *std::move(store) : nullptr;
}

INSTANTIATE_TEST_SUITE_P(All, StoreConformance,
                         ::testing::Values(Backend{"memory", [](const std::string&) { return NewMemoryStore(); },
                                                   false},
                                           Backend{"sqlite", OpenOrDie, true}),
                         [](const auto& info) { return info.param.name; });

void RunSql(const std::string& path, const std::string& sql) {
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path.c_str(), &db), SQLITE_OK);
  EXPECT_EQ(sqlite3_exec(db, sql.c_str(), nullptr, nullptr, nullptr), SQLITE_OK) << sqlite3_errmsg(db);
  sqlite3_close(db);
}

TEST(SqliteStore, NewerSchemaVersion_FailedPreconditionNamingBoth) {
  const std::string path = NewPath();
  OpenOrDie(path);
  RunSql(path, "PRAGMA user_version=17");
  EXPECT_THAT(NewSqliteStore(path),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(path), HasSubstr("schema version 17"), HasSubstr("reads version 4"))));
}

// As version 1 made its files, with one job.
constexpr char kVersion1[] = R"(
CREATE TABLE workers(name BLOB PRIMARY KEY, incarnation INTEGER, address BLOB, host_id BLOB, local_socket BLOB,
                     pid INTEGER, state INTEGER) WITHOUT ROWID;
CREATE TABLE specs(job BLOB PRIMARY KEY, spec BLOB);
CREATE TABLE jobs(name BLOB PRIMARY KEY, state INTEGER, epoch INTEGER, excluded BLOB, error BLOB,
                  committed_step INTEGER, published_steps BLOB) WITHOUT ROWID;
CREATE TABLE members(job BLOB, rank INTEGER, name BLOB, incarnation INTEGER, address BLOB, host_id BLOB,
                     local_socket BLOB, pid INTEGER, ready INTEGER, PRIMARY KEY(job, rank)) WITHOUT ROWID;
CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;
PRAGMA application_id=1936223537;
PRAGMA user_version=1;
INSERT INTO workers VALUES(x'7730',1,x'61',x'68',x'73',7,1);
INSERT INTO specs VALUES(x'6a',x'00');
INSERT INTO jobs VALUES(x'6a',3,4,x'',x'',12,x'31312c3132');
INSERT INTO members VALUES(x'6a',0,x'7730',1,x'61',x'68',x'73',7,1);
INSERT INTO meta VALUES('epoch_floor',3);
)";

TEST(SqliteStore, FileOfVersion1_IsUpgradedWithAllThatItHas) {
  const std::string path = NewPath();
  RunSql(path, kVersion1);
  JobRecord job;
  job.name = "j";
  job.state = JobState::kReady;
  job.epoch = 4;
  job.members = {{{"w0", 1, "a", "h", "s", 7}, true}};
  job.committed_step = 12;
  job.published_steps = {11, 12};
  for (int time = 0; time < 2; ++time) {  // the second one is of this version
    ASSERT_OK_AND_ASSIGN(const StoreContents contents, OpenOrDie(path)->Load());
    if (time == 0) job.uid = contents.jobs.at("j").uid;  // the upgrade gives it one
    EXPECT_GT(job.uid, 0);
    EXPECT_EQ(contents.jobs, (std::map<std::string, JobRecord>{{"j", job}}));
    EXPECT_EQ(contents.workers.size(), 1u);
    EXPECT_EQ(contents.specs.at("j"), std::string(1, '\0'));
    EXPECT_EQ(contents.epoch_floor, 3);
  }
  StoreBatch batch;
  batch.put_jobs = {FullJob("j")};
  ASSERT_OK(OpenOrDie(path)->Write(batch));
  ASSERT_OK_AND_ASSIGN(const StoreContents contents, OpenOrDie(path)->Load());
  EXPECT_EQ(contents.jobs.at("j"), FullJob("j"));
}

TEST(SqliteStore, FileOfVersion1_UpgradeFails_StaysAsItWas) {
  const std::string path = NewPath();
  RunSql(path, kVersion1);
  RunSql(path, "ALTER TABLE members ADD COLUMN was INTEGER");  // the last one that the upgrade makes
  EXPECT_FALSE(NewSqliteStore(path).ok());
  RunSql(path, "ALTER TABLE members DROP COLUMN was");
  ASSERT_OK_AND_ASSIGN(const StoreContents contents, OpenOrDie(path)->Load());
  EXPECT_EQ(contents.jobs.at("j").epoch, 4);
}

TEST(SqliteStore, DatabaseOfAnotherProgram_FailedPrecondition) {
  const std::string path = NewPath();
  RunSql(path, "CREATE TABLE t(x)");
  EXPECT_THAT(NewSqliteStore(path), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("another program")));
}

TEST(SqliteStore, NoDatabase_DataLossAndTheFileIsKept) {
  const std::string path = NewPath();
  const std::string text(5000, 'x');
  std::ofstream(path) << text;
  EXPECT_THAT(NewSqliteStore(path), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("not a usable SQLite database")));
  std::ifstream file(path);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), text);
}

TEST(SqliteStore, DamagedRecord_DataLoss) {
  const std::string path = NewPath();
  OpenOrDie(path);
  RunSql(path, "INSERT INTO members VALUES('ghost',0,'w',1,'a','h','s',1,0,-1)");
  EXPECT_THAT(OpenOrDie(path)->Load(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("rank 0 of job ghost")));
}

TEST(SqliteStore, OpenTwice_SecondIsRefused) {
  const std::string path = NewPath();
  const std::unique_ptr<Store> first = OpenOrDie(path);
  EXPECT_THAT(NewSqliteStore(path), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("in use by another process")));
}

TEST(SqliteStore, FolderMissing_UnavailableNamingThePath) {
  EXPECT_THAT(NewSqliteStore("/nonexistent/x.db"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("/nonexistent/x.db")));
  EXPECT_THAT(NewSqliteStore(""), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("empty")));
}

// Batch i puts worker and job "n" with i in every place, and deletes what batch i-1 put beside them: every state
// between two batches satisfies the same sums, no state within one does.
StoreBatch NumberedBatch(int64_t i) {
  StoreBatch batch;
  batch.put_workers = {MakeWorker("n", i), MakeWorker(absl::StrCat("only", i), i)};
  batch.delete_workers = {absl::StrCat("only", i - 1)};
  batch.put_specs["n"] = absl::StrCat(i, std::string(20'000, 's'));
  batch.put_jobs = {FullJob("n")};
  batch.put_jobs[0].committed_step = i;
  batch.epoch_floor = i;
  return batch;
}

TEST(SqliteStore, KilledWhileWriting_HoldsWholeBatchesAndAllThatWereAcknowledged) {
  const std::string path = NewPath();
  int64_t next = 1;
  for (int round = 0; round < 12; ++round) {
    int acknowledged[2];
    ASSERT_EQ(pipe(acknowledged), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      absl::StatusOr<std::unique_ptr<Store>> store = NewSqliteStore(path);
      for (int64_t i = next; store.ok() && (*store)->Write(NumberedBatch(i)).ok(); ++i) {
        if (write(acknowledged[1], &i, sizeof(i)) != sizeof(i)) break;
      }
      _exit(1);
    }
    close(acknowledged[1]);
    int64_t last = 0;
    for (int n = 0; n < 3 + round; ++n) ASSERT_EQ(read(acknowledged[0], &last, sizeof(last)), ssize_t{sizeof(last)});
    ASSERT_EQ(kill(child, SIGKILL), 0);  // while it writes the next one, somewhere
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    for (int64_t i; read(acknowledged[0], &i, sizeof(i)) == sizeof(i);) last = i;
    close(acknowledged[0]);

    ASSERT_OK_AND_ASSIGN(const StoreContents contents, OpenOrDie(path)->Load());
    const int64_t found = contents.epoch_floor;
    EXPECT_GE(found, last) << "an acknowledged batch is missing";
    EXPECT_LE(found, last + 1);
    EXPECT_EQ(contents.workers.size(), 2u);
    EXPECT_EQ(contents.workers.at("n").identity.incarnation, found);
    EXPECT_EQ(contents.workers.count(absl::StrCat("only", found)), 1u);
    EXPECT_EQ(contents.jobs.at("n").committed_step, found);
    EXPECT_EQ(contents.specs.at("n"), NumberedBatch(found).put_specs.at("n"));
    next = found + 1;
  }
}

}  // namespace
}  // namespace shardmesh
