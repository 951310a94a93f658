// bench/bulk: bulk bytes between two processes of one host: attached, pulled and pushed, against a stock gRPC stream.
//
//   bazel run -c opt //bench:bulk -- --quick --json bulk.json
#include <signal.h>
#include <time.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/bulk/bulk_job.h"
#include "bench/harness/flags.h"
#include "bench/harness/harness.h"
#include "bench/harness/memory_speed.h"
#include "bench/harness/process.h"
#include "bench/harness/service.h"
#include "core/base/status.h"
#include "rpc/base/main_support.h"

namespace shardmesh::bench {
namespace {

constexpr int kClientCore = 0, kServerCore = 1;
constexpr int64_t kSmallChunk = 64 << 10, kLargeChunk = 1 << 20;
constexpr double kAttached = 10, kOfMemcpy = 0.85, kPull = 3, kPush = 1.7;  // goals

struct Flags : CommonFlags {
  int mebibytes = 256;
  bool default_allocator = false;
  bool processor_time = false;
};

// The rival: a stock server and a stock client, processes of their own.
class Stock {
 public:
  static absl::StatusOr<std::unique_ptr<Stock>> Start(const std::string& listen, int64_t num_bytes) {
    std::unique_ptr<Stock> stock(new Stock);
    const std::string program = ProgramPath("bench/bulk/stock"), bytes = absl::StrCat(num_bytes);
    ASSIGN_OR_RETURN(stock->server_,
                     Process::Start({program, "server", "--listen", listen, "--bytes", bytes}, kServerCore));
    ASSIGN_OR_RETURN(const std::string address, stock->server_->ReadLine(absl::Seconds(30)));
    ASSIGN_OR_RETURN(stock->client_,
                     Process::Start({program, "client", "--connect", address, "--bytes", bytes}, kClientCore));
    RETURN_IF_ERROR(stock->client_->ReadLine(absl::Seconds(30)).status());
    return stock;
  }
  absl::StatusOr<double> Move(absl::string_view verb, int64_t chunk_bytes) {
    RETURN_IF_ERROR(client_->WriteLine(absl::StrCat(verb, " ", chunk_bytes)));
    ASSIGN_OR_RETURN(const std::string line, client_->ReadLine(absl::Seconds(120)));
    double seconds = 0;
    if (absl::SimpleAtod(line, &seconds)) return seconds;
    return absl::InternalError(absl::StrCat("the stock client's ", verb, " failed"));
  }
  double ClientSeconds() const { return client_->ProcessorSeconds(); }
  double ServerSeconds() const { return server_->ProcessorSeconds(); }
  absl::Status Verify() {
    RETURN_IF_ERROR(Move("pull", kSmallChunk).status());
    RETURN_IF_ERROR(Move("push", kSmallChunk).status());
    RETURN_IF_ERROR(client_->WriteLine("check"));
    ASSIGN_OR_RETURN(const std::string line, client_->ReadLine(absl::Seconds(60)));
    return line == "ok" ? absl::OkStatus() : absl::InternalError("the stock stream moved wrong bytes");
  }

 private:
  Stock() = default;
  std::unique_ptr<Process> server_, client_;
};

// Processor time of this process so far.
double OwnSeconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// One transport: both sides started, verified, measured.
class Transport {
 public:
  // `name` is "tcp" or "unix".
  Transport(std::string name, const Flags& flags) : name_(std::move(name)), flags_(flags) {}

  absl::Status Start() {
    ASSIGN_OR_RETURN(folder_, Folder::Make());
    const auto listen = [&](absl::string_view who) {
      return name_ == "tcp" ? std::string("127.0.0.1:0") : absl::StrCat("unix:", folder_->path(), "/", who, ".sock");
    };
    const int64_t num_bytes = int64_t{flags_.mebibytes} << 20;
    ASSIGN_OR_RETURN(bulk_, BulkJob::Start(folder_->path(), listen("worker"), num_bytes, kServerCore));
    ASSIGN_OR_RETURN(stock_, Stock::Start(listen("stock"), num_bytes));
    RETURN_IF_ERROR(Annotate(bulk_->Verify(), "verifying"));
    return Annotate(stock_->Verify(), "verifying");
  }

  // With `attached`, the ways that do not depend on the transport are measured among them, too.
  absl::Status Measure(bool attached, Report& report) {
    RETURN_IF_ERROR(MeasurePull(attached, report));
    return MeasurePush(report);
  }

 private:
  using Measurement = std::function<absl::StatusOr<double>()>;
  using Seconds = std::function<double()>;

  // With --processor-time the seconds become the processor time of the busier side: what the transfer takes when each
  // side has its core for itself.
  Measurement Timed(Seconds client, Seconds server, Measurement measure) const {
    if (!flags_.processor_time) return measure;
    return [=]() -> absl::StatusOr<double> {
      const double client_before = client(), server_before = server();
      RETURN_IF_ERROR(measure().status());
      return std::max(client() - client_before, server() - server_before);
    };
  }
  Measurement Ours(Measurement measure) const {
    return Timed(
        OwnSeconds, [this] { return bulk_->WorkerSeconds(); }, std::move(measure));
  }
  Measurement StockMove(const char* verb, int64_t chunk_bytes) const {
    return Timed([this] { return stock_->ClientSeconds(); }, [this] { return stock_->ServerSeconds(); },
                 [this, verb, chunk_bytes] { return stock_->Move(verb, chunk_bytes); });
  }
  Measurement Local(std::function<void()> work) const {
    return Ours([work = std::move(work)]() -> absl::StatusOr<double> { return SecondsOf(work); });
  }

  void AddAttached(Rounds& rounds) {
    char* const to = bulk_->destination().data();
    const int64_t size = bulk_->num_bytes();
    rounds.Add("attached", Local([=] { std::memcpy(to, bulk_->window(), size); }));
    rounds.Add("memcpy", Local([=] { std::memcpy(to, private_.data(), size); }));
    rounds.Add("in place", Local([=] { checksum_ = ReadInPlace(bulk_->window(), size); }));
  }

  void ReportAttached(const Rounds& rounds, Report& report) const {
    const auto& stock = rounds.seconds("stock 64K");
    report.Add(Compare("attached copy / stock pull 64K, ms", rounds.seconds("attached"), stock, 1e3,
                       Goal::AtLeast(kAttached)));
    report.Add(
        Compare("attached copy / stock pull 1M, ms", rounds.seconds("attached"), rounds.seconds("stock 1M"), 1e3));
    report.Add(Compare("attached copy / memcpy, ms", rounds.seconds("attached"), rounds.seconds("memcpy"), 1e3,
                       Goal::AtLeast(kOfMemcpy)));
    report.Add(Compare("attached read in place / stock pull 64K, ms", rounds.seconds("in place"), stock, 1e3,
                       Goal::AtLeast(kAttached)));
    report.Note(absl::StrFormat("Physical bound: memcpy in one process %.2f GB/s, in the same rounds; checksum %016x.",
                                GigabytesPerSecond(rounds.seconds("memcpy")), checksum_));
  }

  absl::Status MeasurePull(bool attached, Report& report) {
    Rounds rounds;
    rounds.Add("stock 64K", StockMove("pull", kSmallChunk));
    rounds.Add("ours", Ours([this] { return bulk_->Pull(); }));
    rounds.Add("stock 1M", StockMove("pull", kLargeChunk));
    if (attached) {
      private_.assign(bulk_->num_bytes(), 2);
      RETURN_IF_ERROR(bulk_->Attach());
      AddAttached(rounds);
    }
    RETURN_IF_ERROR(rounds.Measure(1, flags_.rounds));
    bulk_->Detach();
    if (attached) ReportAttached(rounds, report);
    return ReportStream("pull", kPull, rounds, report);
  }

  absl::Status MeasurePush(Report& report) {
    Rounds rounds;
    rounds.Add("stock 64K", StockMove("push", kSmallChunk));
    rounds.Add("ours", [this, push = Ours([this] { return bulk_->Push(); })]() -> absl::StatusOr<double> {
      ASSIGN_OR_RETURN(const double seconds, push());
      RETURN_IF_ERROR(bulk_->StepOnce());
      return seconds;
    });
    rounds.Add("stock 1M", StockMove("push", kLargeChunk));
    RETURN_IF_ERROR(rounds.Measure(1, flags_.rounds));
    return ReportStream("push", kPush, rounds, report);
  }

  absl::Status ReportStream(absl::string_view verb, double goal, const Rounds& rounds, Report& report) const {
    const auto& ours = rounds.seconds("ours");
    report.Add(Compare(absl::StrCat(name_, " ", verb, " / stock ", verb, " 64K, ms"), ours, rounds.seconds("stock 64K"),
                       1e3, Goal::AtLeast(goal)));
    report.Add(
        Compare(absl::StrCat(name_, " ", verb, " / stock ", verb, " 1M, ms"), ours, rounds.seconds("stock 1M"), 1e3));
    report.Note(absl::StrFormat("%s %s: %.2f GB/s; stock %.2f (64K), %.2f (1M).", name_, verb, GigabytesPerSecond(ours),
                                GigabytesPerSecond(rounds.seconds("stock 64K")),
                                GigabytesPerSecond(rounds.seconds("stock 1M"))));
    return absl::OkStatus();
  }

  double GigabytesPerSecond(const std::vector<double>& seconds) const {
    return static_cast<double>(bulk_->num_bytes()) / SpreadOf(seconds).median * 1e-9;
  }

  const std::string name_;
  const Flags flags_;
  std::unique_ptr<Folder> folder_;
  std::unique_ptr<BulkJob> bulk_;
  std::unique_ptr<Stock> stock_;
  std::vector<char> private_;
  uint64_t checksum_ = 0;
};

absl::Status RunBulk(const Flags& flags) {
  PinTo(kClientCore);
  if (!flags.default_allocator) TuneAllocator();
  signal(SIGPIPE, SIG_IGN);
  Report report(absl::StrCat("bench/bulk: ", flags.mebibytes,
                             " MiB of fp32 weights or gradients, client and server on a core each"));
  report.Note(
      "Verified first, byte by byte: initial weights, weights after a pushed gradient and a step, window, stock "
      "streams.");
  bool first = true;
  for (const char* name : {"tcp", "unix"}) {
    Transport transport(name, flags);
    RETURN_IF_ERROR(transport.Start());
    RETURN_IF_ERROR(transport.Measure(first, report));
    first = false;
  }
  report.Note(absl::StrCat(flags.rounds, " rounds. Our streams: chunks of 1 MiB",
                           flags.default_allocator ? ", client with the default allocator" : "",
                           ". Machine: ", MachineNow(), "."));
  if (flags.processor_time) report.Note("Times are processor time of the busier of client and server.");
  return report.Publish(flags.json);
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{
      "bench/bulk: weights and gradients between two processes of one host: attached (shared memory), Pull and Push "
      "through\n"
      "the C++ client, against a stock synchronous gRPC stream of protobuf messages, in turns inside one run. Checks "
      "the\n"
      "bytes first."};
  shardmesh::bench::Flags flags;
  shardmesh::bench::AddCommonFlags(app, "64 MiB: under a minute on two cores", flags);
  app.add_option("--mebibytes", flags.mebibytes, "MiB of weights, a multiple of 16")
      ->capture_default_str()
      ->check(CLI::Range(16, 4096));
  app.add_flag("--processor-time", flags.processor_time,
               "processor time of the busier side instead of elapsed time, for a machine that others use");
  app.add_flag("--default-allocator", flags.default_allocator,
               "do not tune this process's allocator (rpc/base/main_support.h)");
  app.footer(
      "Examples:\n"
      "  bazel run -c opt //bench:bulk                         full size, about 4 GiB of memory\n"
      "  bazel run -c opt //bench:bulk -- --quick --json $PWD/bulk.json");
  CLI11_PARSE(app, argc, argv);
  if (flags.quick) flags.mebibytes = 64;
  if (flags.mebibytes % 16 != 0) {
    std::fprintf(stderr, "bench/bulk: --mebibytes %d is no multiple of 16\n", flags.mebibytes);
    return 1;
  }
  return shardmesh::bench::ExitStatus("bulk", shardmesh::bench::RunBulk(flags));
}
