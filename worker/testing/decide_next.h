// DecideNext: the next command of a job on one host, as a lead decides it (worker/lead/lead.h), for tests of what comes
// before and behind a decision. Tests only.
#pragma once

#include <optional>

#include "worker/step/decide.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

// False: nothing is to be done yet, or the job is over. REQUIRES: the newest command is committed.
inline bool DecideNext(StepProtocol& protocol, const Plan& plan) {
  ControlBlock& control = *protocol.control();
  if (control.abort.load() != 0) return false;
  const Facts facts = ReadFacts(control, protocol.job(), plan, protocol.local());
  const std::optional<Command> command = Decide(facts, protocol.job(), plan);
  if (!command.has_value()) return false;
  Publications& publications = protocol.publications();
  switch (PublishesOf(*command)) {
    case Publishes::kNothing:
      return protocol.commands().Issue(*command, facts, command->publish);
    case Publishes::kItsVersion:
      return protocol.commands().Issue(*command, facts, publications.Reserve(command->first != 0 ? 0 : command->step));
    case Publishes::kForSure:
      break;
  }
  const bool there = publications.Find(Step(command->step)).has_value();
  const int publication = there ? -1 : publications.ReserveAny();
  if (publication >= 0) return protocol.commands().Issue(*command, facts, publication);
  protocol.tickets().AnswerPublish(facts.publish_ticket, there ? command->step : -1);
  return false;
}

}  // namespace shardmesh
