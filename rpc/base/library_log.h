// RouteLibraryLogs: what gRPC and protobuf have to say goes to this program's log, and no library writes to standard
// error past it.
//
// A program that has set up its log (SetUpLog, rpc/base/main_support.h) gets their warnings and errors as lines
// event=library_log. Others have no log of ours: a Python process, or a program that uses the client. There the
// libraries are silent; every failure that concerns a call is in that call's status anyway. GRPC_VERBOSITY in the
// environment, which people set to look for faults of gRPC itself, leaves everything as gRPC has it.
//
// Called by whoever makes a server or a channel; further calls do nothing. Thread-safe.
#pragma once

namespace shardmesh {

void RouteLibraryLogs();

}  // namespace shardmesh
