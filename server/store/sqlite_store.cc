// The store in one SQLite file. Who writes: this process alone, held by an exclusive lock from open to close.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "core/base/file_error.h"
#include "core/base/status.h"
#include "server/store/sqlite.h"
#include "server/store/state_file.h"
#include "server/store/store.h"
#include "server/store/stored_records.h"

namespace shardmesh {
namespace {

constexpr char kInMemory[] = ":memory:";  // a path that is no file, to SQLite

constexpr int64_t kSchemaVersion = 7;  // PRAGMA user_version

// Text is stored as blobs: what a peer sent is kept byte for byte. Lists of numbers and ids are joined by ",".
// Of version 1; a new file is made of it and of all upgrades.
constexpr char kSchema[] = R"(
CREATE TABLE workers(name BLOB PRIMARY KEY, incarnation INTEGER, address BLOB, host_id BLOB, local_socket BLOB,
                     pid INTEGER, state INTEGER) WITHOUT ROWID;
CREATE TABLE specs(job BLOB PRIMARY KEY, spec BLOB);
CREATE TABLE jobs(name BLOB PRIMARY KEY, state INTEGER, epoch INTEGER, excluded BLOB, error BLOB,
                  committed_step INTEGER, published_steps BLOB) WITHOUT ROWID;
CREATE TABLE members(job BLOB, rank INTEGER, name BLOB, incarnation INTEGER, address BLOB, host_id BLOB,
                     local_socket BLOB, pid INTEGER, ready INTEGER, PRIMARY KEY(job, rank)) WITHOUT ROWID;
CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;
)";

// Version 1 to 2: jobs that re-form.
constexpr char kUpgradeTo2[] = R"(
ALTER TABLE jobs ADD COLUMN mesh BLOB NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN from_epoch INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN from_mesh BLOB NOT NULL DEFAULT '';
ALTER TABLE members ADD COLUMN was INTEGER NOT NULL DEFAULT -1;
)";

// Version 2 to 3: jobs that are resharded.
constexpr char kUpgradeTo3[] = R"(
ALTER TABLE jobs ADD COLUMN wanted_mesh BLOB NOT NULL DEFAULT '';
)";

// Version 3 to 4: jobs that are told from others of their name.
constexpr char kUpgradeTo4[] = R"(
ALTER TABLE jobs ADD COLUMN uid INTEGER NOT NULL DEFAULT 0;
UPDATE jobs SET uid = (random() & 0x7ffffffffffffffe) + 1;
)";

// Version 4 to 5: secrets of workers' incarnations and of jobs.
constexpr char kUpgradeTo5[] = R"(
ALTER TABLE workers ADD COLUMN secret BLOB NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN secret BLOB NOT NULL DEFAULT '';
)";

// Version 5 to 6: jobs that go back to a checkpoint. Place 0 of a job is its newest one, place -1 the one that it went
// back to last.
constexpr char kUpgradeTo6[] = R"(
CREATE TABLE checkpoints(job BLOB, place INTEGER, folder BLOB, step INTEGER, digest INTEGER,
                         PRIMARY KEY(job, place)) WITHOUT ROWID;
ALTER TABLE jobs ADD COLUMN goes_back INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN back_epoch INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN lost_step INTEGER NOT NULL DEFAULT -1;
ALTER TABLE jobs ADD COLUMN back_cause BLOB NOT NULL DEFAULT '';
)";

// Version 6 to 7: jobs that go back to copies of their shards.
constexpr char kUpgradeTo7[] = R"(
ALTER TABLE checkpoints ADD COLUMN copied_at INTEGER NOT NULL DEFAULT 0;
)";

// Of version 7, and the types of their columns (SqliteStatement::HasTypes).
struct Table {
  const char* name;
  const char* columns;
  const char* types;
};
constexpr Table kWorkers = {"workers", "name,incarnation,address,host_id,local_socket,pid,state,secret",
                            "titttiit"};
constexpr Table kSpecs = {"specs", "job,spec", "tt"};
constexpr Table kJobs = {"jobs",
                         "name,state,epoch,excluded,error,committed_step,published_steps,mesh,from_epoch,from_mesh,"
                         "wanted_mesh,uid,secret,goes_back,back_epoch,lost_step,back_cause",
                         "tiittittittitiiit"};
constexpr Table kMembers = {"members", "job,rank,name,incarnation,address,host_id,local_socket,pid,ready,was",
                            "tititttiii"};
constexpr Table kCheckpoints = {"checkpoints", "job,place,folder,step,digest,copied_at", "titiii"};

WorkerIdentity IdentityAt(const SqliteStatement& row, int column) {
  WorkerIdentity identity;
  identity.name = row.Text(column);
  identity.incarnation = row.Integer(column + 1);
  identity.address = row.Text(column + 2);
  identity.host_id = row.Text(column + 3);
  identity.local_socket = row.Text(column + 4);
  identity.pid = row.Integer(column + 5);
  return identity;
}

SqliteStatement& BindIdentity(SqliteStatement& statement, const WorkerIdentity& identity) {
  return statement.Bind(identity.name)
      .Bind(identity.incarnation)
      .Bind(identity.address)
      .Bind(identity.host_id)
      .Bind(identity.local_socket)
      .Bind(identity.pid);
}

class SqliteStore final : public Store {
 public:
  explicit SqliteStore(std::string path) : path_(std::move(path)) {}

  absl::Status Open() {
    bool exists = false;
    RETURN_IF_ERROR(LookAtStateFile(path_, &exists));
    if (!exists && path_ != kInMemory) MakeHiddenFile(path_);
    const absl::Status opened = OpenDatabase();
    struct stat info = {};
    if (!opened.ok() && !exists && stat(path_.c_str(), &info) == 0 && info.st_size == 0) unlink(path_.c_str());
    return opened;
  }

  absl::Status Write(const StoreBatch& batch) override {
    RETURN_IF_ERROR(NotStored(CheckFile()));
    absl::Status status = db_->Execute("BEGIN IMMEDIATE");
    if (status.ok()) status = WriteAll(batch);
    if (status.ok()) status = db_->Execute("COMMIT");
    if (status.ok()) {
      for (const JobRecord& job : batch.put_jobs) stored_[job.name] = StoredOf(job);
      for (const std::string& job : batch.delete_jobs) stored_.erase(job);
      return status;
    }
    (void)db_->Execute("ROLLBACK");
    return NotStored(status);
  }

  absl::StatusOr<std::string> Check() override {
    const absl::Status there = CheckFile();
    if (there.ok()) return std::string();
    if (!absl::IsNotFound(there)) return there;
    RETURN_IF_ERROR(WriteAgain());
    return absl::StrCat("event=state_file_written_again path=\"", absl::CHexEscape(path_),
                        "\" because=\"it was removed while this coordinator ran\"");
  }

  absl::StatusOr<StoreContents> Load() override {
    stored_.clear();
    StoreContents contents;
    RETURN_IF_ERROR(LoadWorkers(contents));
    RETURN_IF_ERROR(LoadSpecs(contents));
    RETURN_IF_ERROR(LoadJobs(contents));
    RETURN_IF_ERROR(LoadMembers(contents));
    RETURN_IF_ERROR(LoadCheckpoints(contents));
    for (const auto& [name, job] : contents.jobs) {
      if (const absl::Status good = CheckStored(job); !good.ok()) {
        return Damaged(absl::StrCat("job ", name, ": ", good.message()));
      }
    }
    ASSIGN_OR_RETURN(const int64_t others,
                     db_->Integer("SELECT count(*) FROM meta WHERE typeof(value)!='integer' OR value<0"));
    if (others > 0) return Damaged("table meta has a value that is no number from 0 on");
    ASSIGN_OR_RETURN(contents.epoch_floor, db_->Integer("SELECT value FROM meta WHERE key='epoch_floor'"));
    for (const auto& [name, job] : contents.jobs) stored_[name] = StoredOf(job);
    return contents;
  }

 private:
  static absl::Status NotStored(const absl::Status& status) {
    if (status.ok()) return status;
    const auto code = absl::IsResourceExhausted(status) ? status.code() : absl::StatusCode::kUnavailable;
    return {code, absl::StrCat("nothing was changed, since it could not be stored: ", status.message())};
  }

  absl::Status OpenDatabase() {
    db_ = std::make_unique<SqliteDatabase>();
    RETURN_IF_ERROR(db_->Open(path_));
    RETURN_IF_ERROR(db_->Execute("PRAGMA busy_timeout=200; PRAGMA locking_mode=EXCLUSIVE"));
    db_->KeepLog();  // of another program
    // A rollback journal: all that is committed lies in the one file. The lock, from BEGIN on, is kept: a second
    // coordinator is refused at its start.
    RETURN_IF_ERROR(CheckApplication());
    RETURN_IF_ERROR(
        db_->Execute("PRAGMA journal_mode=TRUNCATE; PRAGMA synchronous=FULL; PRAGMA cell_size_check=ON; "
                     "BEGIN EXCLUSIVE"));
    const absl::Status prepared = PrepareSchema();
    if (!prepared.ok()) {
      (void)db_->Execute("ROLLBACK");
      return prepared;
    }
    RETURN_IF_ERROR(db_->Execute("COMMIT"));
    RETURN_IF_ERROR(CheckWhole());
    ASSIGN_OR_RETURN(file_, FileIdOf(path_));
    return absl::OkStatus();
  }

  // The file is the one that is open. NotFound: there is none at its path. Unavailable: another one.
  absl::Status CheckFile() const {
    const absl::StatusOr<FileId> now = FileIdOf(path_);
    if (now.ok() && *now == file_) return absl::OkStatus();
    if (absl::IsNotFound(now.status())) {
      return absl::NotFoundError(absl::StrCat("state file ", path_, " was removed while this coordinator ran"));
    }
    RETURN_IF_ERROR(now.status());
    return absl::UnavailableError(
        absl::StrCat("state file ", path_,
                     " was replaced by another file while this coordinator ran; nothing is written any more. "
                     "Move that file away, and this one is written there again"));
  }

  // A copy of what is open becomes the file, and is open from then on.
  absl::Status WriteAgain() {
    const std::string copy = path_ + ".new";
    unlink(copy.c_str());
    MakeHiddenFile(copy);
    absl::Status written =
        db_->Execute(absl::StrCat("VACUUM INTO '", absl::StrReplaceAll(copy, {{"'", "''"}}), "'").c_str());
    if (written.ok()) written = SyncFile(copy);
    if (written.ok() && link(copy.c_str(), path_.c_str()) != 0) {  // nothing that is there by now is lost
      written = FailedTo("make", path_, errno);
    }
    unlink(copy.c_str());
    if (!written.ok()) {
      const bool full = absl::IsResourceExhausted(written);
      return absl::Status(
          full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnavailable,
          absl::StrCat("state file ", path_, " was removed while this coordinator ran, and could not be written again: ",
                       written.message(), "; nothing is stored until it can: see that its folder is there",
                       full ? ", and that its disk has room" : ""));
    }
    std::unique_ptr<SqliteDatabase> removed = std::move(db_);
    const absl::Status opened = OpenDatabase();
    if (!opened.ok()) db_ = std::move(removed);
    return opened;
  }

  // Of a file that is not new.
  absl::Status CheckApplication() {
    ASSIGN_OR_RETURN(const int64_t application, db_->Integer("PRAGMA application_id"));
    ASSIGN_OR_RETURN(const int64_t pages, db_->Integer("PRAGMA page_count"));
    if (pages == 0 || application == kStateApplicationId) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("state file ", path_, " belongs to another program; give --state another file"));
  }

  absl::Status CheckWhole() {
    ASSIGN_OR_RETURN(const std::string mode, db_->Text("PRAGMA journal_mode"));
    if (mode != "truncate") {
      return absl::UnavailableError(
          absl::StrCat("state file ", path_, " stays in journal mode ", mode, "; is its folder writable?"));
    }
    ASSIGN_OR_RETURN(const std::string check, db_->Text("PRAGMA quick_check(1)"));
    if (check != "ok") return Damaged(check);
    for (const Table& table : {kWorkers, kSpecs, kJobs, kMembers, kCheckpoints}) {
      const std::string sql = absl::StrCat("SELECT group_concat(name) FROM pragma_table_info('", table.name, "')");
      ASSIGN_OR_RETURN(const std::string columns, db_->Text(sql.c_str()));
      if (columns == table.columns) continue;
      return Damaged(absl::StrCat("table ", table.name, " has columns ", columns, " and should have ", table.columns));
    }
    return absl::OkStatus();
  }

  absl::Status PrepareSchema() {
    ASSIGN_OR_RETURN(const int64_t version, db_->Integer("PRAGMA user_version"));
    ASSIGN_OR_RETURN(const int64_t application, db_->Integer("PRAGMA application_id"));
    ASSIGN_OR_RETURN(const int64_t tables, db_->Integer("SELECT count(*) FROM sqlite_master"));
    if (version == 0 && tables == 0) {
      RETURN_IF_ERROR(db_->Execute(kSchema));
      RETURN_IF_ERROR(db_->Execute(absl::StrCat("PRAGMA application_id=", kStateApplicationId).c_str()));
      return UpgradeFrom(1);
    }
    if (application != kStateApplicationId) return CheckApplication();
    if (version == kSchemaVersion) return absl::OkStatus();
    if (version >= 1 && version < kSchemaVersion) return UpgradeFrom(version);
    return absl::FailedPreconditionError(
        absl::StrCat("state file ", path_, " has schema version ", version, ", and this coordinator reads version ",
                     kSchemaVersion, "; run the version of shardmesh that wrote it, or give --state another file"));
  }

  absl::Status UpgradeFrom(int64_t version) {
    if (path_ != kInMemory) HideFile(path_);  // before SQLite makes a journal, whose mode is the file's
    if (version == 1) RETURN_IF_ERROR(db_->Execute(kUpgradeTo2));
    if (version <= 2) RETURN_IF_ERROR(db_->Execute(kUpgradeTo3));
    if (version <= 3) RETURN_IF_ERROR(db_->Execute(kUpgradeTo4));
    if (version <= 4) RETURN_IF_ERROR(db_->Execute(kUpgradeTo5));
    if (version <= 5) RETURN_IF_ERROR(db_->Execute(kUpgradeTo6));
    RETURN_IF_ERROR(db_->Execute(kUpgradeTo7));
    return db_->Execute(absl::StrCat("PRAGMA user_version=", kSchemaVersion).c_str());
  }

  absl::Status WriteAll(const StoreBatch& batch) {
    RETURN_IF_ERROR(WriteWorkers(batch));
    SqliteStatement spec(*db_, "INSERT OR REPLACE INTO specs VALUES(?,?)");
    for (const auto& [job, bytes] : batch.put_specs) RETURN_IF_ERROR(spec.Bind(job).Bind(bytes).Run());
    for (const JobRecord& job : batch.put_jobs) RETURN_IF_ERROR(WriteJob(job));
    for (const std::string& job : batch.delete_jobs) {
      for (const char* sql : {"DELETE FROM jobs WHERE name=?", "DELETE FROM specs WHERE job=?",
                              "DELETE FROM members WHERE job=?", "DELETE FROM checkpoints WHERE job=?"}) {
        RETURN_IF_ERROR(SqliteStatement(*db_, sql).Bind(job).Run());
      }
    }
    if (batch.epoch_floor == 0) return absl::OkStatus();
    return SqliteStatement(*db_,
                           "INSERT INTO meta VALUES('epoch_floor',?1) "
                           "ON CONFLICT(key) DO UPDATE SET value=max(value,?1)")
        .Bind(batch.epoch_floor)
        .Run();
  }

  absl::Status WriteWorkers(const StoreBatch& batch) {
    SqliteStatement put(*db_, "INSERT OR REPLACE INTO workers VALUES(?,?,?,?,?,?,?,?)");
    for (const WorkerRecord& worker : batch.put_workers) {
      BindIdentity(put, worker.identity).Bind(static_cast<int64_t>(worker.state));
      RETURN_IF_ERROR(put.Bind(worker.secret).Run());
    }
    SqliteStatement remove(*db_, "DELETE FROM workers WHERE name=?");
    for (const std::string& name : batch.delete_workers) RETURN_IF_ERROR(remove.Bind(name).Run());
    return absl::OkStatus();
  }

  absl::Status WriteJob(const JobRecord& job) {
    const std::string excluded = absl::StrJoin(job.excluded, ",");
    const std::string published = absl::StrJoin(job.published_steps, ",");
    SqliteStatement put(*db_, "INSERT OR REPLACE INTO jobs VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)");
    put.Bind(job.name).Bind(static_cast<int64_t>(job.state)).Bind(job.epoch).Bind(excluded).Bind(job.error);
    put.Bind(job.committed_step).Bind(published).Bind(job.mesh).Bind(job.from_epoch).Bind(job.from_mesh);
    put.Bind(job.wanted_mesh).Bind(job.uid).Bind(job.secret);
    put.Bind(int64_t{job.goes_back}).Bind(job.gone_back.epoch).Bind(job.gone_back.lost_step).Bind(job.gone_back.cause);
    RETURN_IF_ERROR(put.Run());
    RETURN_IF_ERROR(WriteCheckpoints(job));
    return WriteMembers(job);
  }

  absl::Status WriteCheckpoints(const JobRecord& job) {
    const auto found = stored_.find(job.name);
    const bool none = job.checkpoints.empty() && !job.gone_back.checkpoint.is_set();
    if (found == stored_.end()
            ? none
            : found->second.checkpoints == job.checkpoints && found->second.gone_back == job.gone_back.checkpoint) {
      return absl::OkStatus();
    }
    RETURN_IF_ERROR(SqliteStatement(*db_, "DELETE FROM checkpoints WHERE job=?").Bind(job.name).Run());
    SqliteStatement row(*db_, "INSERT INTO checkpoints VALUES(?,?,?,?,?,?)");
    const auto write = [&](int64_t place, const CheckpointRecord& checkpoint) {
      row.Bind(job.name).Bind(place).Bind(checkpoint.folder).Bind(checkpoint.step);
      return row.Bind(static_cast<int64_t>(checkpoint.digest)).Bind(checkpoint.copied_at).Run();
    };
    for (size_t place = 0; place < job.checkpoints.size(); ++place) {
      RETURN_IF_ERROR(write(static_cast<int64_t>(place), job.checkpoints[place]));
    }
    return job.gone_back.checkpoint.is_set() ? write(-1, job.gone_back.checkpoint) : absl::OkStatus();
  }

  // The rows that differ from those that are there.
  absl::Status WriteMembers(const JobRecord& job) {
    const auto found = stored_.find(job.name);
    if (found != stored_.end() && found->second.members == job.members && found->second.others == job.others) {
      return absl::OkStatus();
    }
    SharedList<MemberRecord> there;
    if (found != stored_.end()) there = found->second.members;
    const int64_t kept = std::min(there.size(), job.members.size());
    RETURN_IF_ERROR(SqliteStatement(*db_, "DELETE FROM members WHERE job=? AND (rank<0 OR rank>=?)")
                        .Bind(job.name)
                        .Bind(kept)
                        .Run());
    SqliteStatement row(*db_, "INSERT OR REPLACE INTO members VALUES(?,?,?,?,?,?,?,?,?,?)");
    for (size_t rank = 0; rank < job.members.size(); ++rank) {
      if (rank < there.size() && there[rank] == job.members[rank]) continue;
      RETURN_IF_ERROR(WriteMember(row, job.name, static_cast<int64_t>(rank), job.members[rank]));
    }
    for (const MemberRecord& other : job.others) {  // at ranks below 0
      RETURN_IF_ERROR(WriteMember(row, job.name, -1 - int64_t{other.was}, other));
    }
    return absl::OkStatus();
  }

  static absl::Status WriteMember(SqliteStatement& row, const std::string& job, int64_t rank,
                                  const MemberRecord& member) {
    row.Bind(job).Bind(rank);
    return BindIdentity(row, member.worker).Bind(int64_t{member.ready}).Bind(int64_t{member.was}).Run();
  }

  absl::Status Damaged(absl::string_view what) const {
    return absl::DataLossError(absl::StrCat("state file ", path_, " is damaged: ", what,
                                            "; keep it, restore a copy, or start with another file"));
  }

  absl::Status CheckTypes(const SqliteStatement& row, const Table& table) const {
    if (row.HasTypes(table.types)) return absl::OkStatus();
    return Damaged(
        absl::StrCat("a row of table ", table.name, " has a text where there should be a number, or nothing"));
  }

  absl::Status LoadWorkers(StoreContents& contents) {
    SqliteStatement row(*db_, "SELECT * FROM workers");
    while (true) {
      ASSIGN_OR_RETURN(const bool found, row.Next());
      if (!found) return absl::OkStatus();
      RETURN_IF_ERROR(CheckTypes(row, kWorkers));
      const WorkerRecord worker{IdentityAt(row, 0), static_cast<WorkerState>(row.Integer(6)), row.Text(7)};
      if (WorkerStateName(worker.state) == "unknown") {
        return Damaged(absl::StrCat("worker ", worker.identity.name, " has state ", row.Integer(6)));
      }
      if (const absl::Status good = CheckStored(worker); !good.ok()) return Damaged(good.message());
      contents.workers[worker.identity.name] = worker;
    }
  }

  absl::Status LoadSpecs(StoreContents& contents) {
    SqliteStatement row(*db_, "SELECT * FROM specs");
    while (true) {
      ASSIGN_OR_RETURN(const bool found, row.Next());
      if (!found) return absl::OkStatus();
      RETURN_IF_ERROR(CheckTypes(row, kSpecs));
      contents.specs[row.Text(0)] = row.Text(1);
    }
  }

  absl::Status LoadJobs(StoreContents& contents) {
    SqliteStatement row(*db_, "SELECT * FROM jobs");
    while (true) {
      ASSIGN_OR_RETURN(const bool found, row.Next());
      if (!found) return absl::OkStatus();
      RETURN_IF_ERROR(CheckTypes(row, kJobs));
      JobRecord job;
      job.name = row.Text(0);
      job.state = static_cast<JobState>(row.Integer(1));
      job.epoch = row.Integer(2);
      job.excluded = absl::StrSplit(row.Text(3), ',', absl::SkipEmpty());
      job.error = row.Text(4);
      job.committed_step = row.Integer(5);
      const std::string published = row.Text(6);
      for (absl::string_view text : absl::StrSplit(published, ',', absl::SkipEmpty())) {
        int64_t step = 0;
        if (!absl::SimpleAtoi(text, &step)) return Damaged(absl::StrCat("job ", job.name, " published ", text));
        job.published_steps.push_back(step);
      }
      job.mesh = row.Text(7);
      job.from_epoch = row.Integer(8);
      job.from_mesh = row.Text(9);
      job.wanted_mesh = row.Text(10);
      job.uid = row.Integer(11);
      job.secret = row.Text(12);
      job.goes_back = row.Integer(13) == 1;
      if (row.Integer(13) != 0 && !job.goes_back) {
        return Damaged(absl::StrCat("job ", job.name, " has goes_back ", row.Integer(13), "; it is 0 or 1"));
      }
      job.gone_back.epoch = row.Integer(14);
      job.gone_back.lost_step = row.Integer(15);
      job.gone_back.cause = row.Text(16);
      if (JobStateName(job.state) == "unknown" || contents.specs.count(job.name) == 0) {
        return Damaged(absl::StrCat("job ", job.name, " has state ", row.Integer(1), ", or no specification"));
      }
      contents.jobs[job.name] = std::move(job);
    }
  }

  struct Members {
    std::vector<MemberRecord> members, others;
  };

  absl::Status LoadMembers(StoreContents& contents) {
    std::map<std::string, Members> lists;
    RETURN_IF_ERROR(LoadMembers(contents, lists));
    for (auto& [name, list] : lists) {
      contents.jobs.at(name).members = std::move(list.members);
      contents.jobs.at(name).others = std::move(list.others);
    }
    return absl::OkStatus();
  }

  absl::Status LoadMembers(const StoreContents& contents, std::map<std::string, Members>& lists) {
    SqliteStatement row(*db_, "SELECT * FROM members ORDER BY job, rank");
    while (true) {
      ASSIGN_OR_RETURN(const bool found, row.Next());
      if (!found) return absl::OkStatus();
      RETURN_IF_ERROR(CheckTypes(row, kMembers));
      const bool has_job = contents.jobs.count(row.Text(0)) > 0;
      Members& list = lists[has_job ? row.Text(0) : ""];
      if (row.Integer(8) != 0 && row.Integer(8) != 1) {
        return Damaged(absl::StrCat("rank ", row.Integer(1), " of job ", row.Text(0), " has ready ", row.Integer(8),
                                    "; it is 0 or 1"));
      }
      const MemberRecord member{IdentityAt(row, 2), row.Integer(8) != 0, static_cast<int32_t>(row.Integer(9))};
      if (has_job && row.Integer(1) < 0) {
        list.others.insert(list.others.begin(), member);  // the last comes first
        continue;
      }
      if (!has_job || row.Integer(1) != static_cast<int64_t>(list.members.size())) {
        return Damaged(absl::StrCat("rank ", row.Integer(1), " of job ", row.Text(0), " has no place"));
      }
      list.members.push_back(member);
    }
  }

  absl::Status LoadCheckpoints(StoreContents& contents) {
    SqliteStatement row(*db_, "SELECT * FROM checkpoints ORDER BY job, place");
    while (true) {
      ASSIGN_OR_RETURN(const bool found, row.Next());
      if (!found) return absl::OkStatus();
      RETURN_IF_ERROR(CheckTypes(row, kCheckpoints));
      const auto job = contents.jobs.find(row.Text(0));
      const int64_t place = row.Integer(1);
      const int64_t next = job == contents.jobs.end() ? 0 : static_cast<int64_t>(job->second.checkpoints.size());
      if (job == contents.jobs.end() || (place != -1 && place != next)) {
        return Damaged(absl::StrCat("checkpoint ", place, " of job ", row.Text(0), " has no place"));
      }
      const CheckpointRecord checkpoint{row.Text(2), row.Integer(3), static_cast<uint64_t>(row.Integer(4)),
                                        row.Integer(5)};
      if (place == -1) {
        job->second.gone_back.checkpoint = checkpoint;
      } else {
        job->second.checkpoints.push_back(checkpoint);
      }
    }
  }

  // What the file has of a job in other tables; of a job that is not here nothing is known.
  struct Stored {
    SharedList<MemberRecord> members, others;
    std::vector<CheckpointRecord> checkpoints;
    CheckpointRecord gone_back;
  };
  static Stored StoredOf(const JobRecord& job) {
    return {job.members, job.others, job.checkpoints, job.gone_back.checkpoint};
  }

  const std::string path_;
  std::map<std::string, Stored> stored_;
  std::unique_ptr<SqliteDatabase> db_;
  FileId file_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> NewSqliteStore(const std::string& path) {
  if (path.empty()) return absl::InvalidArgumentError("the path of the state file is empty; give one, or \":memory:\"");
  auto store = std::make_unique<SqliteStore>(path);
  RETURN_IF_ERROR(store->Open());
  return store;
}

}  // namespace shardmesh
