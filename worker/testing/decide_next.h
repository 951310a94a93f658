// DecideNext: the next command of a job on one host, as a lead decides it (worker/lead/lead.h), for tests of what comes
// before and behind a decision. Tests only.
#pragma once

#include <optional>

#include "worker/lead/lead.h"
#include "worker/step/decide.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

// False: nothing is to be done yet, or the job is over. REQUIRES: the newest command is committed.
inline bool DecideNext(StepProtocol& protocol, const Plan& plan) {
  ControlBlock& control = *protocol.control();
  if (control.abort.load() != 0) return false;
  const Facts facts = ReadFacts(control, protocol.job(), plan, protocol.local());
  std::optional<Command> command = Decide(facts, protocol.job(), plan);
  if (!command.has_value()) return false;
  Publications& publications = protocol.publications();
  const Publishes publishes = PublishesOf(*command);
  if (publishes == Publishes::kItsVersion) {
    command->publish = publications.Reserve(command->first != 0 ? 0 : command->step);
  } else if (publishes == Publishes::kForSure) {
    const bool there = publications.Find(Step(command->step)).has_value();
    command->publish = there ? -1 : publications.ReserveAny();
    if (command->publish < 0) {
      protocol.tickets().AnswerPublish(facts.publish_ticket, there ? command->step : -1);
      return false;
    }
  }
  return Lead::Issue(protocol, *command, facts);
}

}  // namespace shardmesh
