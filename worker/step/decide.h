// Decide: the next command of a job, from facts alone. Pure: it reads no word of a control block and no clock, so every
// host that has the same facts decides the same, and each kind of command has a script of facts and the command
// expected (testdata/*.txt, decide_test.cc).
#pragma once

#include <optional>

#include "worker/step/facts.h"

namespace shardmesh {

// nullopt: nothing is to be done yet. The command has no publication yet (publish is -1, but of kQuantize, which goes
// on with that of the command before it) and the scalars of its parameter groups are still to be computed.
std::optional<Command> Decide(const Facts& facts, const JobSpec& job, const Plan& plan);

// Which publication a command gets before it is issued.
enum class Publishes {
  kNothing,
  kItsVersion,  // one, if its step is one to be published and a publication is free
  kForSure,     // one, or the command is not issued: somebody asked for it
};
Publishes PublishesOf(const Command& command);

}  // namespace shardmesh
