#include "server/store/sqlite.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "core/base/status.h"

namespace shardmesh {

SqliteDatabase::~SqliteDatabase() { sqlite3_close(db_); }

absl::Status SqliteDatabase::Open(const std::string& path) {
  path_ = path;
  const int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX;
  if (sqlite3_open_v2(path.c_str(), &db_, flags, nullptr) != SQLITE_OK) return Error("opening it");
  sqlite3_extended_result_codes(db_, 1);
  return absl::OkStatus();
}

absl::Status SqliteDatabase::Error(absl::string_view doing) const {
  if (db_ == nullptr) return absl::UnavailableError(absl::StrCat("state file ", path_, ": ", doing, ": out of memory"));
  const int code = sqlite3_extended_errcode(db_) & 0xFF;
  const std::string reason = sqlite3_errmsg(db_);
  switch (code) {
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return absl::AlreadyExistsError(absl::StrCat("state file ", path_, " is in use by another process (", reason,
                                                   "); stop that coordinator, or give this one another file"));
    case SQLITE_NOTADB:
    case SQLITE_CORRUPT:
      return absl::DataLossError(absl::StrCat("state file ", path_, " is not a usable SQLite database (", reason,
                                              "); keep it, restore a copy, or start with another file"));
    case SQLITE_FULL:
      return absl::ResourceExhaustedError(absl::StrCat("state file ", path_, ": ", doing, ": ", reason,
                                                       "; make space on its disk, or raise the quota"));
    default:
      if (const int error = sqlite3_system_errno(db_); error == ENOSPC || error == EDQUOT) {
        return absl::ResourceExhaustedError(absl::StrCat("state file ", path_, ": ", doing, ": ", std::strerror(error),
                                                         "; make space on its disk, or raise the quota"));
      }
      return absl::UnavailableError(absl::StrCat("state file ", path_, ": ", doing, ": ", reason,
                                                 "; check that its folder exists, has space and may be written"));
  }
}

absl::Status SqliteDatabase::Execute(const char* sql) {
  if (sqlite3_exec(db_, sql, nullptr, nullptr, nullptr) == SQLITE_OK) return absl::OkStatus();
  return Error(sql);
}

absl::StatusOr<int64_t> SqliteDatabase::Integer(const char* sql) {
  SqliteStatement statement(*this, sql);
  ASSIGN_OR_RETURN(const bool found, statement.Next());
  return found ? statement.Integer(0) : 0;
}

absl::StatusOr<std::string> SqliteDatabase::Text(const char* sql) {
  SqliteStatement statement(*this, sql);
  ASSIGN_OR_RETURN(const bool found, statement.Next());
  return found ? statement.Text(0) : std::string();
}

void SqliteDatabase::KeepLog() { sqlite3_db_config(db_, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, nullptr); }

SqliteStatement::SqliteStatement(SqliteDatabase& db, const char* sql) : db_(db) {
  failed_ = sqlite3_prepare_v2(db.db_, sql, -1, &statement_, nullptr) != SQLITE_OK;
}

SqliteStatement::~SqliteStatement() { sqlite3_finalize(statement_); }

SqliteStatement& SqliteStatement::Bind(int64_t value) {
  failed_ = failed_ || sqlite3_bind_int64(statement_, ++bound_, value) != SQLITE_OK;
  return *this;
}

SqliteStatement& SqliteStatement::Bind(absl::string_view value) {
  const char* data = value.empty() ? "" : value.data();
  failed_ = failed_ || sqlite3_bind_blob64(statement_, ++bound_, data, value.size(), SQLITE_STATIC) != SQLITE_OK;
  return *this;
}

absl::Status SqliteStatement::Run() {
  ASSIGN_OR_RETURN(const bool row, Next());
  (void)row;
  sqlite3_reset(statement_);
  sqlite3_clear_bindings(statement_);
  bound_ = 0;
  return absl::OkStatus();
}

absl::StatusOr<bool> SqliteStatement::Next() {
  if (failed_) return db_.Error("preparing a statement");
  const int code = sqlite3_step(statement_);
  if (code == SQLITE_ROW) return true;
  if (code == SQLITE_DONE) return false;
  failed_ = true;
  return db_.Error("running a statement");
}

int64_t SqliteStatement::Integer(int column) const { return sqlite3_column_int64(statement_, column); }

bool SqliteStatement::HasTypes(absl::string_view types) const {
  if (sqlite3_column_count(statement_) != static_cast<int>(types.size())) return false;
  for (size_t column = 0; column < types.size(); ++column) {
    const int type = sqlite3_column_type(statement_, static_cast<int>(column));
    if (types[column] == 'i' ? type != SQLITE_INTEGER : type != SQLITE_BLOB && type != SQLITE_TEXT) return false;
  }
  return true;
}

std::string SqliteStatement::Text(int column) const {
  const void* data = sqlite3_column_blob(statement_, column);
  const int size = sqlite3_column_bytes(statement_, column);
  return data == nullptr ? std::string() : std::string(static_cast<const char*>(data), size);
}

}  // namespace shardmesh
