// shardmesh-worker: holds one shard of every job it is assigned.
//
//   shardmesh-worker --coordinator 127.0.0.1:7000
//   shardmesh-worker --coordinator 10.0.0.1:7000 --listen 10.0.0.2:7001 --tls-cert w.pem --tls-key w.key --tls-ca
//   ca.pem
#include "worker/run_worker_main.h"

int main(int argc, char** argv) { return shardmesh::RunWorkerMain(argc, argv, {}); }
