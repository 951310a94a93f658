// A thin owner of a SQLite connection and of its statements: every result code becomes a Status, nothing throws.
// Not thread-safe. Used by sqlite_store.cc alone.
#pragma once

#include <sqlite3.h>

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace shardmesh {

class SqliteStatement;

class SqliteDatabase {
 public:
  SqliteDatabase() = default;
  ~SqliteDatabase();
  SqliteDatabase(const SqliteDatabase&) = delete;
  SqliteDatabase& operator=(const SqliteDatabase&) = delete;

  // Opens or makes the file. Errors: see Error().
  absl::Status Open(const std::string& path);
  // Runs statements that need no values and give none.
  absl::Status Execute(const char* sql);
  // The first column of the first row of a statement; 0 when it gives no row.
  absl::StatusOr<int64_t> Integer(const char* sql);

  // The same, as text; "" when it gives no row.
  absl::StatusOr<std::string> Text(const char* sql);
  // Leaves a write-ahead log as it is when this closes.
  void KeepLog();

  // The last failure as a Status, named by the file: AlreadyExists (locked), DataLoss (no database, damaged),
  // ResourceExhausted (no space left), Unavailable (all others).
  absl::Status Error(absl::string_view doing) const;

 private:
  friend class SqliteStatement;
  sqlite3* db_ = nullptr;
  std::string path_;
};

// One prepared statement. Values are bound in order with Bind(); then Run() or Next().
class SqliteStatement {
 public:
  SqliteStatement(SqliteDatabase& db, const char* sql);
  ~SqliteStatement();
  SqliteStatement(const SqliteStatement&) = delete;
  SqliteStatement& operator=(const SqliteStatement&) = delete;

  SqliteStatement& Bind(int64_t value);
  SqliteStatement& Bind(absl::string_view value);  // as a blob; must live until Run() returns

  // To the end; the statement can be bound and run again.
  absl::Status Run();
  // To the next row. False: there is none left.
  absl::StatusOr<bool> Next();

  // Columns of the current row. REQUIRES: Next() gave true.
  int64_t Integer(int column) const;
  // Whether the columns have the types given, one letter each: i an integer, t a text or a blob.
  bool HasTypes(absl::string_view types) const;
  std::string Text(int column) const;

 private:
  SqliteDatabase& db_;
  sqlite3_stmt* statement_ = nullptr;
  int bound_ = 0;
  bool failed_ = false;
};

}  // namespace shardmesh
