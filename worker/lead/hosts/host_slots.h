// Who may write a slot, of a job on several hosts: each host's control block has its own words of a slot, and says in
// rounds what they are (host_words.h). These functions are what a lead does with a slot between two rounds.
//
// An attached trainer writes its slot's window on its host; a connected one brings gradient shards, each to the host
// that the gradient shard is pushed to, and declares on any. Two of them must never write a window that a step reads or
// that gradient shards cross into, and what is declared must not be forgotten while others may still be told that it is
// committed. So:
//
//   * A trainer that attaches on host A asks for the slot (kAsking) and may not write. At the end of that round every
//     host knows it, and refuses: to attach, to push, to declare. What a host began before it knew is in its words of
//     the next round (`busy`, read after the first round's were stored). The slot is given by the words of a round
//     before which it was asked for in the last one, too, when no host is busy with it, no other host's trainer has it,
//     and it is not declared for the open step; of several that ask, to the first host's. All leads see the same words,
//     so all know it.
//   * Giving it takes gradient shards of the open step back, on all hosts: they are another trainer's, and were not
//     declared.
//   * Only what lies on the host of an attached trainer that has the slot counts. One that asks does not count yet.
//   * When a trainer has left, every host knows with it which gradient shards it left there (MirrorSlots), and drops a
//     push of those, which a step may be made of at any moment.
//
// A slot, seen from host A; "there": on any other host; FP: FailedPrecondition, naming the trainer that has it:
//
//   the slot is      | a trainer attaches on A      | gradients are pushed to A    | a connected one declares on A
//   -----------------+------------------------------+------------------------------+------------------------------
//   free             | asks; has it after 2 rounds  | written                      | declared
//   asked for on A   | FP                           | FP                           | FP
//   asked for there  | FP; both, until it is known: | FP; until it is known, it is | FP; until it is known, as
//                    | the first host's has it      | given when the push is over  | declared on A
//   taken on A       | FP                           | FP                           | FP
//   taken there      | FP                           | FP, unless it leaves soon    | FP, unless it leaves soon
//   pushed to, on A  | Aborted                      | Aborted (of the same shard)  | FP: lacks the shard
//   pushed to, there | has it when that is over     | written (another shard)      | declared; waits for the shard
//   declared on A    | has it after the commit      | dropped where the shard lies | no effect
//   declared there   | has it after the commit      | on any host, else written    | declared; what lies counts
//   decided          | has it after the commit      | dropped                      | no effect
//   (all decide by the same words, so it makes no difference where)
//
// "After the commit": within the time that an attach waits, or Unavailable.
#pragma once

#include "worker/lead/hosts/host_words.h"
#include "worker/step/step_protocol.h"

namespace shardmesh {

// What other hosts said of their slots, onto this host's control block. `host`: which of the words are its own.
void MirrorSlots(StepProtocol& protocol, AllHostWords words, int host, int num_slots);
// With bucket residency: which buckets of a slot are declared on whichever host, and which slots' trainers wait.
void MirrorBuckets(StepProtocol& protocol, AllHostWords words, int host, const Plan& plan);

// Gives slots to who asked for them, or refuses them. Between steps: when nothing is agreed on that is not committed.
void SettleSlots(StepProtocol& protocol, AllHostWords before, AllHostWords words, int host, int num_slots);

// Whether the next round may tell somebody what he waits for: a slot that is asked for.
bool AnyAsks(AllHostWords words, int num_slots);

}  // namespace shardmesh
