// One suite for every store; then what only a file can do.
#include "server/store/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <memory>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string NewPath() {
  static int count = 0;
  return absl::StrCat(::testing::TempDir(), "/store_", getpid(), "_", ++count, ".db");
}

WorkerRecord MakeWorker(const std::string& name, int64_t incarnation) {
  return {{name, incarnation, "a:1", std::string("h\0\"'\n", 5), "/s", 7}, WorkerState::kDead, std::string("\0s\xff", 3)};
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
  job.secret = std::string("secret\0\xfe", 8);
  job.checkpoints = {{"/data/step-12", 12, 0xfedcba9876543210}, {"/data/it's", 8, 3}};
  job.gone_back = {3, {"/old/step-8", 8, 4}, 11, "worker \"w1\" ended"};
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
  MemberRecord member = second.put_jobs[0].members[0];
  member.worker = MakeWorker("w0", 9).identity;
  second.put_jobs[0].members = {member};
  second.put_jobs[0].published_steps.clear();
  second.epoch_floor = 4;
  ASSERT_OK(store_->Write(second));
  const StoreContents contents = Load();
  EXPECT_EQ(contents.workers.at("w0").identity.incarnation, 9);
  EXPECT_EQ(contents.jobs.at("j"), second.put_jobs[0]);
  EXPECT_EQ(contents.specs.at("j"), "s");
  EXPECT_EQ(contents.epoch_floor, 5) << "it never falls";
}

// Stores write what changed; what is there is what was said last.
TEST_P(StoreConformance, MembersChange_ExactlyTheNewOnesAreThere) {
  const auto member = [](int worker, bool ready, int32_t was = -1) {
    return MemberRecord{MakeWorker(absl::StrCat("w", worker), 1).identity, ready, was};
  };
  using List = SharedList<MemberRecord>;
  const std::vector<std::pair<List, List>> lists = {
      {{member(0, false), member(1, false), member(2, false)}, {}},
      {{member(0, false), member(1, true), member(2, false)}, {}},
      {{member(0, true), member(1, true), member(7, true)}, {}},
      {{member(0, false, 0), member(7, false, 2)}, {member(1, false, 1)}},
      {{member(0, false, 0), member(8, false, -1)}, {member(1, false, 1), member(7, false, 2)}},
      {{member(0, false, 0), member(8, false, -1)}, {member(7, false, 2)}},
      {{member(0, true), member(8, true), member(9, true), member(1, true)}, {}},
      {{}, {}},
      {{member(3, false)}, {}},
  };
  for (const bool reopened : {false, true}) {
    StoreBatch batch;
    batch.put_specs["j"] = batch.put_specs["k"] = "s";
    batch.put_jobs = {FullJob("j"), FullJob("k")};
    for (const auto& [members, others] : lists) {
      batch.put_jobs[0].members = members;
      batch.put_jobs[0].others = others;
      ASSERT_OK(store_->Write(batch));
      if (!reopened) continue;
      const StoreContents contents = Load();
      EXPECT_EQ(contents.jobs.at("j"), batch.put_jobs[0]);
      EXPECT_EQ(contents.jobs.at("k"), batch.put_jobs[1]);
    }
    EXPECT_EQ(Load().jobs.at("j"), batch.put_jobs[0]);
    StoreBatch remove;
    remove.delete_jobs = {"j"};
    ASSERT_OK(store_->Write(remove));
    ASSERT_OK(store_->Write(batch));
    EXPECT_EQ(Load().jobs.at("j"), batch.put_jobs[0]) << "made again";
  }
}

TEST_P(StoreConformance, CheckpointsChange_ExactlyTheNewOnesAreThere) {
  const CheckpointRecord one{"/1", 1, 11}, two{"/2", 2, 22}, copies{"", 3, 33, 2}, none;
  StoreBatch batch;
  batch.put_specs["j"] = "s";
  batch.put_jobs = {FullJob("j")};
  JobRecord& job = batch.put_jobs[0];
  using List = std::vector<CheckpointRecord>;
  for (const auto& [checkpoints, gone_back] : std::vector<std::pair<List, CheckpointRecord>>{{{}, none},
                                                                                             {{one}, none},
                                                                                             {{two, one}, none},
                                                                                             {{two}, two},
                                                                                             {{two}, one},
                                                                                             {{}, one},
                                                                                             {{one, two}, none},
                                                                                             {{}, copies}}) {
    job.checkpoints = checkpoints;
    job.gone_back.checkpoint = gone_back;
    ASSERT_OK(store_->Write(batch));
    EXPECT_EQ(Load().jobs.at("j"), job);
  }
  job.state = JobState::kWaiting;
  job.from_epoch = 0;
  job.members = {};
  job.goes_back = true;
  ASSERT_OK(store_->Write(batch));
  EXPECT_EQ(Load().jobs.at("j"), job);
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

// Bytes that this process gave to the kernel so far.
int64_t WrittenBytes() {
  std::ifstream io("/proc/self/io");
  std::string key;
  int64_t value = 0;
  while (io >> key >> value) {
    if (key == "wchar:") return value;
  }
  return -1;
}

// The progress of a large job is written several times a second.
TEST(SqliteStore, MembersThatStay_AreNotWrittenAgain) {
  constexpr int kMembers = 2000;
  const auto store = NewSqliteStore(NewPath()).value();
  StoreBatch batch;
  batch.put_specs["j"] = "s";
  batch.put_jobs = {FullJob("j")};
  std::vector<MemberRecord> members;
  for (int i = 0; i < kMembers; ++i) members.push_back({MakeWorker(absl::StrCat("w", i), 1).identity, true, -1});
  batch.put_jobs[0].members = members;
  const int64_t start = WrittenBytes();
  ASSERT_OK(store->Write(batch));
  const int64_t all = WrittenBytes();
  if (start < 0) GTEST_SKIP() << "the kernel does not say what is written";
  ASSERT_GT(all - start, 50 * kMembers);
  batch.put_specs.clear();
  batch.put_jobs[0].committed_step += 1;
  ASSERT_OK(store->Write(batch));
  const int64_t progress = WrittenBytes();
  members[7].worker.incarnation += 1;
  batch.put_jobs[0].members = members;
  ASSERT_OK(store->Write(batch));
  EXPECT_LT(progress - all, (all - start) / 5) << "one row";
  EXPECT_LT(WrittenBytes() - progress, (all - start) / 5) << "two rows";
  EXPECT_EQ(store->Load()->jobs.at("j"), batch.put_jobs[0]);
}

TEST(SqliteStore, NewerSchemaVersion_FailedPreconditionNamingBoth) {
  const std::string path = NewPath();
  OpenOrDie(path);
  RunSql(path, "PRAGMA user_version=17");
  EXPECT_THAT(NewSqliteStore(path),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(path), HasSubstr("schema version 17"), HasSubstr("reads version 7"))));
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

// What versions 2 to 4 added to it.
constexpr char kVersion4[] = R"(
ALTER TABLE jobs ADD COLUMN mesh BLOB NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN from_epoch INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN from_mesh BLOB NOT NULL DEFAULT '';
ALTER TABLE members ADD COLUMN was INTEGER NOT NULL DEFAULT -1;
ALTER TABLE jobs ADD COLUMN wanted_mesh BLOB NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN uid INTEGER NOT NULL DEFAULT 0;
UPDATE jobs SET uid=77, wanted_mesh=x'6d';
PRAGMA user_version=4;
)";

TEST(SqliteStore, FileOfVersion4_IsUpgraded_AndHasNoSecretsYet) {
  const std::string path = NewPath();
  RunSql(path, kVersion1);
  RunSql(path, kVersion4);
  for (int time = 0; time < 2; ++time) {  // the second one is of this version
    ASSERT_OK_AND_ASSIGN(const StoreContents contents, OpenOrDie(path)->Load());
    EXPECT_EQ(contents.jobs.at("j").uid, 77);
    EXPECT_EQ(contents.jobs.at("j").wanted_mesh, "m");
    EXPECT_EQ(contents.jobs.at("j").secret, "");
    EXPECT_EQ(contents.workers.at("w0"), (WorkerRecord{{"w0", 1, "a", "h", "s", 7}, WorkerState::kAlive, ""}));
  }
  StoreBatch batch;
  batch.put_workers = {MakeWorker("w0", 2)};
  batch.put_jobs = {FullJob("j")};
  ASSERT_OK(OpenOrDie(path)->Write(batch));
  ASSERT_OK_AND_ASSIGN(const StoreContents contents, OpenOrDie(path)->Load());
  EXPECT_EQ(contents.workers.at("w0"), MakeWorker("w0", 2));
  EXPECT_EQ(contents.jobs.at("j"), FullJob("j"));
}

constexpr char kVersion5[] = R"(
ALTER TABLE workers ADD COLUMN secret BLOB NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN secret BLOB NOT NULL DEFAULT '';
UPDATE jobs SET secret=x'73';
PRAGMA user_version=5;
)";

TEST(SqliteStore, FileOfVersion5_IsUpgraded_AndHasNoCheckpointsYet) {
  const std::string path = NewPath();
  for (const char* sql : {kVersion1, kVersion4, kVersion5}) RunSql(path, sql);
  for (int time = 0; time < 2; ++time) {
    ASSERT_OK_AND_ASSIGN(const StoreContents contents, OpenOrDie(path)->Load());
    EXPECT_EQ(contents.jobs.at("j").secret, "s");
    EXPECT_TRUE(contents.jobs.at("j").checkpoints.empty());
    EXPECT_EQ(contents.jobs.at("j").gone_back, GoneBackRecord());
    EXPECT_FALSE(contents.jobs.at("j").goes_back);
  }
  StoreBatch batch;
  batch.put_jobs = {FullJob("j")};
  ASSERT_OK(OpenOrDie(path)->Write(batch));
  ASSERT_OK_AND_ASSIGN(const StoreContents contents, OpenOrDie(path)->Load());
  EXPECT_EQ(contents.jobs.at("j"), FullJob("j"));
}

// It has secrets in it.
// Version 6 differs from 5 by what jobs go back to; one is on its way.
constexpr char kVersion6[] = R"(
CREATE TABLE checkpoints(job BLOB, place INTEGER, folder BLOB, step INTEGER, digest INTEGER,
                         PRIMARY KEY(job, place)) WITHOUT ROWID;
ALTER TABLE jobs ADD COLUMN goes_back INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN back_epoch INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN lost_step INTEGER NOT NULL DEFAULT -1;
ALTER TABLE jobs ADD COLUMN back_cause BLOB NOT NULL DEFAULT '';
INSERT INTO checkpoints VALUES(x'6a', 0, x'2f31', 1, 11);
INSERT INTO checkpoints VALUES(x'6a', -1, x'2f31', 1, 11);
PRAGMA user_version=6;
)";

TEST(SqliteStore, FileOfVersion6_IsUpgraded_WithItsCheckpoints) {
  const std::string path = NewPath();
  for (const char* sql : {kVersion1, kVersion4, kVersion5, kVersion6}) RunSql(path, sql);
  for (int time = 0; time < 2; ++time) {
    ASSERT_OK_AND_ASSIGN(const StoreContents contents, OpenOrDie(path)->Load());
    EXPECT_THAT(contents.jobs.at("j").checkpoints, ElementsAre(CheckpointRecord{"/1", 1, 11}));
    EXPECT_EQ(contents.jobs.at("j").gone_back.checkpoint, (CheckpointRecord{"/1", 1, 11}));
  }
}

TEST(SqliteStore, NewOrUpgradedOrWrittenAgain_ItsUserAloneReadsTheFile) {
  const auto mode_of = [](const std::string& path) {
    struct stat info = {};
    return stat(path.c_str(), &info) == 0 ? info.st_mode & 0777 : 0;
  };
  const mode_t before = umask(0022);
  const std::string made = NewPath(), upgraded = NewPath();
  {
    const auto store = OpenOrDie(made);
    EXPECT_EQ(mode_of(made), 0600u);
    unlink(made.c_str());
    ASSERT_OK(store->Check());
    EXPECT_EQ(mode_of(made), 0600u);
  }
  RunSql(upgraded, kVersion1);
  EXPECT_EQ(mode_of(upgraded), 0644u);
  OpenOrDie(upgraded);
  EXPECT_EQ(mode_of(upgraded), 0600u);
  umask(before);
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

std::string BytesOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

TEST(SqliteStore, FilesOfOthers_AreNotTouched) {
  for (const char* sql : {"CREATE TABLE t(x)", "PRAGMA journal_mode=WAL; CREATE TABLE t(x)",
                          "PRAGMA application_id=7; CREATE TABLE workers(name)"}) {
    const std::string path = NewPath();
    RunSql(path, sql);
    const std::string before = BytesOf(path);
    EXPECT_THAT(NewSqliteStore(path), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("another program")));
    EXPECT_EQ(BytesOf(path), before) << sql;
  }
}

TEST(SqliteStore, EmptyFile_DataLossAndItStaysEmpty) {
  const std::string path = NewPath();
  std::ofstream file(path);
  EXPECT_THAT(NewSqliteStore(path), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("is empty")));
  EXPECT_EQ(BytesOf(path), "");
}

std::string Checked(Store& store) {
  const absl::StatusOr<std::string> found = store.Check();
  return found.ok() ? *found : found.status().ToString();
}

StoreBatch OneJob(JobState state = JobState::kFailed) {
  StoreBatch batch;
  batch.put_workers = {MakeWorker("w0", 1)};
  batch.put_specs = {{"j", std::string(30'000, 's')}};
  batch.put_jobs = {FullJob("j")};
  batch.put_jobs[0].state = state;
  return batch;
}

// Nothing is beside the file that belongs to it, while it is open and after a kill.
TEST(SqliteStore, ACopyOfTheFileAlone_HasEverything) {
  const std::string path = NewPath(), copy = NewPath();
  const std::unique_ptr<Store> store = OpenOrDie(path);
  ASSERT_OK(store->Write(OneJob()));
  std::ofstream(copy, std::ios::binary) << BytesOf(path);
  ASSERT_OK_AND_ASSIGN(const StoreContents contents, OpenOrDie(copy)->Load());
  EXPECT_EQ(contents.jobs.at("j"), FullJob("j"));
}

// As older versions left it when they were killed: everything is in the log.
TEST(SqliteStore, FileWithALog_IsReadWithIt_AndRefusedWithoutIt) {
  const std::string path = NewPath(), copy = NewPath(), alone = NewPath();
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path.c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db, absl::StrCat("PRAGMA journal_mode=WAL;", kVersion1).c_str(), nullptr, nullptr, nullptr),
            SQLITE_OK);
  for (const std::string& to : {copy, alone}) std::ofstream(to, std::ios::binary) << BytesOf(path);
  std::ofstream(copy + "-wal", std::ios::binary) << BytesOf(path + "-wal");
  sqlite3_close(db);
  ASSERT_OK_AND_ASSIGN(const StoreContents contents, OpenOrDie(copy)->Load());
  EXPECT_EQ(contents.jobs.count("j"), 1u);
  const std::string before = BytesOf(alone);
  EXPECT_THAT(NewSqliteStore(alone), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("-wal too")));
  EXPECT_EQ(BytesOf(alone), before);
}

TEST(SqliteStore, RowsThatTheCoordinatorNeverWrites_DataLossNamingThem) {
  for (const auto& [sql, words] : std::vector<std::pair<std::string, std::string>>{
           {"UPDATE jobs SET committed_step=-5", "committed_step is -5"},
           {"UPDATE jobs SET committed_step=1<<62", "committed_step is 4611686018427387904"},
           {"UPDATE jobs SET published_steps=x'3133'", "step 13 is published"},
           {"UPDATE jobs SET published_steps=x'31312c3131'", "step 11 is published behind 11"},
           {"UPDATE jobs SET epoch=-1", "epoch is -1"},
           {"UPDATE jobs SET from_epoch=9", "from_epoch is 9"},
           {"UPDATE jobs SET epoch=9223372036854775807", "it is at most 4611686018427387904"},
           {"UPDATE workers SET pid=-1", "has pid -1"},
           {"UPDATE jobs SET state=3; DELETE FROM members", "a ready job with 0 members"},
           {"UPDATE jobs SET epoch='three'", "a row of table jobs"},
           {"UPDATE jobs SET error=NULL", "a row of table jobs"},
           {"UPDATE members SET incarnation=-3 WHERE rank=0", "incarnation -3"},
           {"UPDATE members SET name='w1'", "is two ranks"},
           {"UPDATE members SET pid='x'", "a row of table members"},
           {"UPDATE members SET address=x'ff'", "is not UTF-8"},
           {"UPDATE members SET ready=5", "has ready 5"},
           {"UPDATE members SET was=-7", "was rank -7"},
           {"UPDATE jobs SET uid=-1", "uid is -1"},
           {"UPDATE workers SET host_id=x'80'", "is not UTF-8"},
           {"UPDATE workers SET local_socket=x'61ed'", "is not UTF-8"},
           {"UPDATE workers SET name='../x'", "../x"},
           {"UPDATE workers SET incarnation=0", "incarnation 0"},
           {"UPDATE workers SET secret=zeroblob(65)", "its secret has 65 bytes; at most 64"},
           {"UPDATE workers SET secret=7", "a row of table workers"},
           {"UPDATE jobs SET secret=zeroblob(65)", "its secret has 65 bytes; at most 64"},
           {"UPDATE jobs SET goes_back=2", "has goes_back 2"},
           {"UPDATE jobs SET goes_back=1, from_epoch=0", "a failed job goes back to a checkpoint with from_epoch 0"},
           {"UPDATE jobs SET back_epoch=4", "for epoch 4; its epoch is 3"},
           {"UPDATE jobs SET lost_step=-2", "from step -2"},
           {"UPDATE jobs SET back_cause=x'ff'", "it went back to a checkpoint"},
           {"UPDATE checkpoints SET step=-1 WHERE place=1", "its checkpoint is of step -1"},
           {"UPDATE checkpoints SET folder=x'64' WHERE place=-1", "in \"d\"; it is an absolute path"},
           {"UPDATE checkpoints SET folder=x'2fff'", "it is an absolute path in UTF-8"},
           {"UPDATE checkpoints SET copied_at=1 WHERE place=-1", "copies have no folder"},
           {"UPDATE checkpoints SET copied_at=-1, folder='' WHERE place=-1", "it has copies of epoch -1"},
           {"UPDATE checkpoints SET digest='x'", "a row of table checkpoints"},
           {"UPDATE checkpoints SET place=5 WHERE place=1", "checkpoint 5 of job j has no place"},
           {"UPDATE checkpoints SET job=x'6b' WHERE place=1", "checkpoint 1 of job k has no place"},
           {"DROP TABLE checkpoints", "table checkpoints has columns"},
           {"ALTER TABLE workers DROP COLUMN secret", "table workers has columns"},
           {"INSERT OR REPLACE INTO meta VALUES('epoch_floor', -1)", "table meta"},
           {"ALTER TABLE jobs DROP COLUMN wanted_mesh", "table jobs has columns"},
           {"ALTER TABLE members RENAME COLUMN was TO is_", "table members has columns"}}) {
    const std::string path = NewPath();
    ASSERT_OK(OpenOrDie(path)->Write(OneJob()));
    RunSql(path, sql);
    const auto store = NewSqliteStore(path);
    const absl::Status status = store.ok() ? (*store)->Load().status() : store.status();
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, AllOf(HasSubstr(words), HasSubstr(path)))) << sql;
  }
}

TEST(SqliteStore, CutOrZeroed_DataLossAndTheFileIsKept) {
  const std::string path = NewPath();
  ASSERT_OK(OpenOrDie(path)->Write(OneJob()));
  const std::string whole = BytesOf(path);
  ASSERT_EQ(whole.size() % 4096, 0u);
  std::vector<std::string> damaged;
  for (const size_t cut : {1, 100, 2400, 4095, 4096, 20'000}) damaged.push_back(whole.substr(0, whole.size() - cut));
  for (size_t page = 1; page < whole.size() / 4096; ++page) {
    // The end of the specification is bytes to SQLite; reading it as a specification finds that.
    if (whole.compare(page * 4096, 5, std::string("\0\0\0\0s", 5)) == 0) continue;
    std::string zeroed = whole;
    zeroed.replace(page * 4096, 4096, std::string(4096, '\0'));
    damaged.push_back(zeroed);
  }
  const std::string header = NewPath();
  std::ofstream(header, std::ios::binary) << whole.substr(0, 100);
  EXPECT_THAT(NewSqliteStore(header), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("was cut: it has 100 bytes")));
  int refused = 0;
  for (const std::string& bytes : damaged) {
    const std::string other = NewPath();
    std::ofstream(other, std::ios::binary) << bytes;
    const auto store = NewSqliteStore(other);
    const absl::Status status = store.ok() ? (*store)->Load().status() : store.status();
    refused += absl::IsDataLoss(status) ? 1 : 0;
    if (!store.ok()) {
      EXPECT_EQ(BytesOf(other), bytes);
    }
  }
  EXPECT_EQ(refused, static_cast<int>(damaged.size()));
}

TEST(SqliteStore, FileRemovedWhileOpen_IsWrittenAgain_WithAllThatItHad) {
  const std::string path = NewPath();
  std::unique_ptr<Store> store = OpenOrDie(path);
  ASSERT_OK(store->Write(OneJob()));
  EXPECT_EQ(Checked(*store), "");
  ASSERT_EQ(unlink(path.c_str()), 0);
  StoreBatch more;
  more.epoch_floor = 9;
  EXPECT_THAT(store->Write(more), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("was removed")));
  EXPECT_THAT(Checked(*store), HasSubstr("event=state_file_written_again"));
  EXPECT_EQ(Checked(*store), "");
  EXPECT_THAT(NewSqliteStore(path), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("in use")));
  ASSERT_OK(store->Write(more));
  store = nullptr;
  ASSERT_OK_AND_ASSIGN(const StoreContents contents, OpenOrDie(path)->Load());
  EXPECT_EQ(contents.jobs.at("j"), FullJob("j"));
  EXPECT_EQ(contents.epoch_floor, 9);
}

TEST(SqliteStore, FileReplacedWhileOpen_NothingIsWritten_AndTheOtherStays) {
  const std::string path = NewPath();
  const std::unique_ptr<Store> store = OpenOrDie(path);
  ASSERT_EQ(rename(path.c_str(), (path + ".old").c_str()), 0);
  std::ofstream(path) << "mine";
  EXPECT_THAT(store->Check(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("was replaced")));
  EXPECT_THAT(store->Write(OneJob()), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("was replaced")));
  EXPECT_EQ(BytesOf(path), "mine");
  ASSERT_EQ(unlink(path.c_str()), 0);
  EXPECT_THAT(Checked(*store), HasSubstr("written_again"));
  EXPECT_OK(store->Write(OneJob()));
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
  batch.put_jobs[0].published_steps = {i};
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
