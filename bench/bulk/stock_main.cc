// bench/stock: the rival of bench/bulk. A synchronous gRPC server and client, protobuf messages with a bytes field,
// gRPC's and the allocator's default configuration; one process each.
//
//   stock server --listen 127.0.0.1:0 --bytes 268435456           prints the address it serves
//   stock client --connect 127.0.0.1:7000 --bytes 268435456       reads "pull CHUNK", "push CHUNK", "check" lines from
//                                                                 stdin and answers each with seconds, or "ok" or
//                                                                 "wrong"
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/harness/harness.h"
#include "bench/bulk/stock.grpc.pb.h"

namespace shardmesh::bench {
namespace {

// What each side sends.
std::vector<char> Pattern(int64_t num_bytes, uint64_t seed) {
  std::vector<char> bytes(num_bytes);
  for (int64_t i = 0; i + 8 <= num_bytes; i += 8) {
    const uint64_t word = (seed + static_cast<uint64_t>(i)) * 0x9E3779B97F4A7C15u;
    std::memcpy(bytes.data() + i, &word, 8);
  }
  return bytes;
}
constexpr uint64_t kClientSeed = 1, kServerSeed = 2;

class StockService final : public stock::Stock::Service {
 public:
  explicit StockService(int64_t num_bytes) : source_(Pattern(num_bytes, kServerSeed)), destination_(num_bytes, 1) {}

  grpc::Status Pull(grpc::ServerContext*, const stock::PullRequest* request,
                    grpc::ServerWriter<stock::Chunk>* writer) override {
    stock::Chunk chunk;
    for (int64_t at = 0; at < request->num_bytes(); at += request->chunk_bytes()) {
      chunk.set_offset(at);
      chunk.set_data(source_.data() + at, request->chunk_bytes());
      if (!writer->Write(chunk)) break;
    }
    return grpc::Status::OK;
  }

  grpc::Status Push(grpc::ServerContext*, grpc::ServerReader<stock::Chunk>* reader, stock::PushReply* reply) override {
    stock::Chunk chunk;
    int64_t received = 0;
    while (reader->Read(&chunk)) {
      std::memcpy(destination_.data() + chunk.offset(), chunk.data().data(), chunk.data().size());
      received += static_cast<int64_t>(chunk.data().size());
    }
    reply->set_num_bytes(received);
    return grpc::Status::OK;
  }

  grpc::Status Check(grpc::ServerContext*, const stock::CheckRequest*, stock::CheckReply* reply) override {
    reply->set_same(destination_ == Pattern(static_cast<int64_t>(destination_.size()), kClientSeed));
    return grpc::Status::OK;
  }

 private:
  const std::vector<char> source_;
  std::vector<char> destination_;
};

int Serve(const std::string& listen, int64_t num_bytes) {
  StockService service(num_bytes);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  const bool is_unix = listen.rfind("unix:", 0) == 0;
  std::printf("%s\n", is_unix ? listen.c_str() : absl::StrCat("127.0.0.1:", port).c_str());
  std::fflush(stdout);
  server->Wait();  // until the process is killed
  return 0;
}

class StockClient {
 public:
  StockClient(const std::string& address, int64_t num_bytes)
      : stub_(stock::Stock::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))),
        source_(Pattern(num_bytes, kClientSeed)),
        destination_(num_bytes, 1) {}

  bool Pull(int64_t chunk_bytes) {
    grpc::ClientContext context;
    stock::PullRequest request;
    request.set_num_bytes(static_cast<int64_t>(destination_.size()));
    request.set_chunk_bytes(chunk_bytes);
    const auto reader = stub_->Pull(&context, request);
    stock::Chunk chunk;
    while (reader->Read(&chunk)) {
      std::memcpy(destination_.data() + chunk.offset(), chunk.data().data(), chunk.data().size());
    }
    return reader->Finish().ok();
  }

  bool Push(int64_t chunk_bytes) {
    grpc::ClientContext context;
    stock::PushReply reply;
    const auto writer = stub_->Push(&context, &reply);
    stock::Chunk chunk;
    const int64_t total = static_cast<int64_t>(source_.size());
    for (int64_t at = 0; at < total; at += chunk_bytes) {
      chunk.set_offset(at);
      chunk.set_data(source_.data() + at, chunk_bytes);
      if (!writer->Write(chunk)) break;
    }
    writer->WritesDone();
    return writer->Finish().ok() && reply.num_bytes() == total;
  }

  bool Check() {
    grpc::ClientContext context;
    stock::CheckReply reply;
    return stub_->Check(&context, {}, &reply).ok() && reply.same() &&
           destination_ == Pattern(static_cast<int64_t>(destination_.size()), kServerSeed);
  }

 private:
  const std::unique_ptr<stock::Stock::Stub> stub_;
  const std::vector<char> source_;
  std::vector<char> destination_;
};

int Obey(const std::string& address, int64_t num_bytes) {
  StockClient client(address, num_bytes);
  std::printf("ready\n");
  std::fflush(stdout);
  std::string verb;
  while (std::cin >> verb) {
    if (verb == "check") {
      std::printf("%s\n", client.Check() ? "ok" : "wrong");
    } else {
      int64_t chunk_bytes = 0;
      std::cin >> chunk_bytes;
      bool ok = false;
      const double seconds =
          SecondsOf([&] { ok = verb == "pull" ? client.Pull(chunk_bytes) : client.Push(chunk_bytes); });
      if (ok) std::printf("%.9f\n", seconds);
      if (!ok) std::printf("wrong\n");
    }
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace shardmesh::bench

int main(int argc, char** argv) {
  CLI::App app{"bench/stock: bulk transfer as gRPC's tutorials write it, the rival that bench/bulk starts."};
  app.require_subcommand(1);
  std::string listen = "127.0.0.1:0", address;
  int64_t num_bytes = int64_t{256} << 20;
  CLI::App* server = app.add_subcommand("server", "serve, until killed");
  server->add_option("--listen", listen, "address")->capture_default_str();
  server->add_option("--bytes", num_bytes, "bytes to hold, a multiple of 1 MiB")->capture_default_str();
  CLI::App* client = app.add_subcommand("client", "obey lines of stdin");
  client->add_option("--connect", address, "address of the server")->required();
  client->add_option("--bytes", num_bytes, "as the server's")->capture_default_str();
  app.footer("Example: stock server --listen 127.0.0.1:0 --bytes 67108864");
  CLI11_PARSE(app, argc, argv);
  return server->parsed() ? shardmesh::bench::Serve(listen, num_bytes) : shardmesh::bench::Obey(address, num_bytes);
}
