// forking_trainer COORDINATOR JOB fork|clone: attaches to slot 0 of the job, steps once and forks a child. "fork": as
// programs do; "clone": by the bare call of the system, so that nothing is closed in the child, which has all
// connections then. Prints "child PID", or the error, and waits to be killed; so does the child, for two minutes.
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>
#include <iostream>
#include <string>

#include "client/cpp/session.h"
#include "core/base/status.h"
#include "tests/testing/training/training.h"

namespace shardmesh::testing {
namespace {

absl::Status Run(const std::string& coordinator, const std::string& name, bool bare) {
  ASSIGN_OR_RETURN(Client client, Client::Connect(coordinator));
  ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, client.OpenJob(name));
  ASSIGN_OR_RETURN(const auto session, job->Attach({Slot(0)}));
  RETURN_IF_ERROR(session->AwaitWeights(absl::Seconds(20)));
  RETURN_IF_ERROR(TrainTo(*session, session->committed_step().value() + 1));
  const pid_t child = bare ? static_cast<pid_t>(syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr)) : fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, 0);
    alarm(120);
    while (true) pause();
  }
  std::cout << "child " << child << std::endl;
  while (true) pause();
}

}  // namespace
}  // namespace shardmesh::testing

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const absl::Status status = shardmesh::testing::Run(argv[1], argv[2], std::string(argv[3]) == "clone");
  std::cout << status << std::endl;
  return 1;
}
