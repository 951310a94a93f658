// Runs the scripts of testdata/decide.txt, and compares what one host reads from its control block with what a lead
// merges.
#include "worker/step/decide.h"

#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "core/base/matchers.h"
#include "worker/testing/small_job.h"

namespace shardmesh {
namespace {

using Values = std::map<std::string, std::string>;

// KEY=VALUE of a line's words, but for the first `skip`.
Values ValuesOf(const std::string& line, int skip) {
  std::istringstream words(line);
  std::string word;
  Values values;
  for (int i = 0; words >> word; ++i) {
    if (i < skip) continue;
    const std::vector<std::string> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
    EXPECT_EQ(parts.size(), 2u) << word;
    if (parts.size() == 2) values[parts[0]] = parts[1];
  }
  return values;
}

double Number(const std::string& text) {
  double number = 0;
  EXPECT_TRUE(absl::SimpleAtod(text, &number)) << text;
  return number;
}

const std::map<std::string, CommandKind>& Kinds() {
  static const auto* const kinds = new std::map<std::string, CommandKind>{
      {"init", CommandKind::kInit},
      {"step", CommandKind::kStep},
      {"digest", CommandKind::kDigest},
      {"norm", CommandKind::kNorm},
      {"quantize", CommandKind::kQuantize},
      {"reduce_bucket", CommandKind::kReduceBucket},
      {"gather_bucket", CommandKind::kGatherBucket},
      {"merge", CommandKind::kMerge},
      {"restore", CommandKind::kRestore},
      {"publish", CommandKind::kPublish},
  };
  return *kinds;
}

JobSpec JobOf(const Values& values) {
  JobSpec job = SmallJob(values.count("mesh") > 0 ? values.at("mesh") : "ddp=2,fsdp=2", 3);
  for (const auto& [key, value] : values) {
    if (key == "mesh") continue;
    if (key == "token_weights") {
      job.token_weights = true;
    } else if (key == "clip_norm") {
      job.clip_norm = Number(value);
    } else if (key == "check_every") {
      job.check_every = static_cast<int>(Number(value));
    } else if (key == "residency") {
      job.residency = Residency::kBucket;
    } else if (key == "gather") {
      job.parameters[0].gather = GatherFormat::kFp8Row;
    } else if (key == "trainers") {
      job.slot_mode = SlotMode::kPulled;
      job.num_trainers = static_cast<int>(Number(value));
    } else {
      ADD_FAILURE() << "a job has no " << key;
    }
  }
  return job;
}

// Sets what `key` names; false: there is no such fact.
bool Set(Facts& facts, const std::string& key, const std::string& value) {
  const std::map<std::string, bool*> flags = {{"all_restored", &facts.all_restored},
                                              {"slots_complete", &facts.slots_complete},
                                              {"digest_wanted", &facts.digest_wanted},
                                              {"publish_wanted", &facts.publish_wanted}};
  const std::map<std::string, int64_t*> steps = {
      {"committed", &facts.committed}, {"norm_step", &facts.norm_step},     {"digest_step", &facts.digest_step},
      {"restored", &facts.restored},   {"loaded_step", &facts.loaded_step}, {"tokens", &facts.tokens},
      {"last_step", &facts.last.step}};
  const std::map<std::string, int32_t*> numbers = {
      {"parity", &facts.parity},
      {"bucket_to_sum", &facts.bucket_to_sum},
      {"bucket_to_gather", &facts.bucket_to_gather},
      {"first_to_merge", &facts.first_to_merge},
      {"slots_to_merge", &facts.slots_to_merge},
      {"free_partial", &facts.free_partial},
      {"root", &facts.root},
      {"last_first", &facts.last.first},
      {"last_apply", &facts.last.apply},
      {"last_publish", &facts.last.publish}};
  const std::map<std::string, uint64_t*> ids = {{"decided", &facts.decided},
                                                {"initial_id", &facts.initial_id},
                                                {"loaded_id", &facts.loaded_id},
                                                {"digest_ticket", &facts.digest_ticket},
                                                {"publish_ticket", &facts.publish_ticket},
                                                {"last_initial_id", &facts.last.initial_id}};
  if (key == "last") {
    facts.last.kind = Kinds().at(value);
    return true;
  }
  const double number = Number(value);
  if (flags.count(key) > 0) return *flags.at(key) = number != 0, true;
  if (steps.count(key) > 0) return *steps.at(key) = static_cast<int64_t>(number), true;
  if (numbers.count(key) > 0) return *numbers.at(key) = static_cast<int32_t>(number), true;
  if (ids.count(key) > 0) return *ids.at(key) = static_cast<uint64_t>(number), true;
  if (key == "loss_scale") return facts.loss_scale = number, true;
  if (key == "norm") return facts.norm = number, true;
  if (key != "bad_slot" && key != "bad_tensor") return false;
  if (!facts.bad.has_value()) facts.bad.emplace();
  (key == "bad_slot" ? facts.bad->slot : facts.bad->tensor) = static_cast<int>(number);
  return true;
}

// A command as scripts write it.
std::string Text(const std::optional<Command>& command) {
  if (!command.has_value()) return "nothing";
  std::string text;
  for (const auto& [name, kind] : Kinds()) {
    if (kind == command->kind) text = name;
  }
  const auto add = [&](const char* key, const auto& value, const auto& fresh) {
    if (value != fresh) absl::StrAppend(&text, " ", key, "=", value);
  };
  const Command fresh;
  add("step", command->step, fresh.step);
  add("parity", command->parity, fresh.parity);
  add("first", command->first, fresh.first);
  add("apply", command->apply, fresh.apply);
  if (command->divide_scale == 0) {
    text += " divide=0";
  } else if (command->divide_scale != 1) {
    absl::StrAppend(&text, " divide=1/", 1 / command->divide_scale);
  }
  add("clip", command->clip, fresh.clip);
  if (command->kind == CommandKind::kDigest || command->kind == CommandKind::kPublish) {
    add("ticket", command->nonfinite, 0);
  } else if (command->nonfinite == kNoTokens) {
    text += " bad=no_tokens";
  } else if (command->kind == CommandKind::kStep && command->apply == 0) {
    absl::StrAppend(&text, " bad=", command->nonfinite >> 32, ":", command->nonfinite & 0xffffffff);
  }
  add("groups", command->groups, fresh.groups);
  add("bucket", command->bucket, fresh.bucket);
  add("partial", command->partial, fresh.partial);
  add("first_slot", command->first_slot, fresh.first_slot);
  add("num_slots", command->num_slots, fresh.num_slots);
  add("initial_id", command->initial_id, fresh.initial_id);
  add("publish", command->publish, fresh.publish);
  return text;
}

TEST(Decide, Scripts) {
  std::ifstream file("worker/step/testdata/decide.txt");
  ASSERT_TRUE(file.is_open());
  std::string line;
  std::optional<JobSpec> job;
  std::optional<Plan> plan;
  auto facts = std::make_unique<Facts>();
  int expected = 0;
  for (int number = 1; std::getline(file, line); ++number) {
    SCOPED_TRACE(absl::StrCat("decide.txt:", number, ": ", line));
    if (line.empty() || line[0] == '#') continue;
    const std::string word = line.substr(0, line.find(' '));
    if (word == "job") {
      job = JobOf(ValuesOf(line, 1));
      ASSERT_OK_AND_ASSIGN(Plan made, Plan::Create(*job));
      plan.emplace(std::move(made));
    } else if (word == "facts") {
      facts = std::make_unique<Facts>();
      for (const auto& [key, value] : ValuesOf(line, 1)) EXPECT_TRUE(Set(*facts, key, value)) << "no fact " << key;
    } else {
      ASSERT_EQ(word, "expect");
      EXPECT_EQ(Text(Decide(*facts, *job, *plan)), line.substr(7));
      ++expected;
    }
  }
  EXPECT_EQ(expected, 36);  // of which one may get lost with a mistyped word
}

TEST(Decide, WhatAPublicationIsTakenFor) {
  Command command;
  for (const auto& [name, kind] : Kinds()) {
    command.kind = kind;
    command.apply = 1;
    const bool version = kind == CommandKind::kInit || kind == CommandKind::kRestore || kind == CommandKind::kStep;
    EXPECT_EQ(PublishesOf(command), version                           ? Publishes::kItsVersion
                                    : kind == CommandKind::kPublish ? Publishes::kForSure
                                                                      : Publishes::kNothing)
        << name;
    command.apply = 0;
    if (kind == CommandKind::kStep) {
      EXPECT_EQ(PublishesOf(command), Publishes::kNothing);
    }
  }
}

}  // namespace
}  // namespace shardmesh
