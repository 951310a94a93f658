#include "proto/validate.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "absl/strings/str_cat.h"
#include "core/base/matchers.h"
#include "core/job/job.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kExhausted = absl::StatusCode::kResourceExhausted;

template <typename Message>
Message Parse(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message)) << text;
  return message;
}

// `text` is a good request; with each of `changes` put after it (later scalars win) it is refused, and the message
// holds the second string.
template <typename Message>
void ExpectRefusals(const std::string& text, const std::vector<std::pair<std::string, std::string>>& changes) {
  EXPECT_OK(Validate(Parse<Message>(text)));
  for (const auto& [change, message] : changes) {
    Message request = Parse<Message>(text);
    ASSERT_TRUE(google::protobuf::TextFormat::MergeFromString(change, &request)) << change;
    EXPECT_THAT(Validate(request), StatusIs(kInvalid, HasSubstr(message))) << text << " + " << change;
  }
}

const std::string kLongSecret = absl::StrCat("secret: '", std::string(65, 's'), "'");

template <typename Message>
void ExpectJobIsAnId() {
  EXPECT_OK(Validate(Parse<Message>("job: 'a.B_c-9'")));
  for (const std::string& bad :
       {std::string(), std::string("a b"), std::string("a/b"), std::string("\n"), std::string(129, 'a')}) {
    Message request;
    request.set_job(bad);
    EXPECT_THAT(Validate(request), StatusIs(kInvalid, HasSubstr("job"))) << bad;
  }
}

TEST(Validate, RequestsOfOneJob_NeedAnId) {
  ExpectJobIsAnId<v1::DescribeJobRequest>();
  ExpectJobIsAnId<v1::DeleteJobRequest>();
  ExpectJobIsAnId<v1::ResolveNamesRequest>();
  ExpectJobIsAnId<v1::GetPlanRequest>();
  ExpectJobIsAnId<v1::ListVersionsRequest>();
  ExpectJobIsAnId<v1::DigestRequest>();
  ExpectJobIsAnId<v1::GetTraceRequest>();
}

TEST(Validate, EmptyRequests_AreFine) {
  EXPECT_OK(Validate(v1::ListJobsRequest()));
  EXPECT_OK(Validate(v1::GetStatusRequest()));
}

TEST(Validate, CreateJob) {
  EXPECT_THAT(Validate(v1::CreateJobRequest()), StatusIs(kInvalid, HasSubstr("spec is unset")));
  ExpectRefusals<v1::CreateJobRequest>(
      "spec { name: 'j' parameters { name: 'w' } }",
      {{"spec { name: 'a b' }", "job name \"a b\""},
       {"spec { parameters { } }", "the name of parameter 1 is unset"},
       {absl::StrCat("spec { parameters { name: '", std::string(4097, 'x'), "' } }"), "has 4097 bytes; at most 4096"},
       {absl::StrCat("spec { parameters { name: 'v' tied_to: '", std::string(4097, 'x'), "' } }"),
        "tied_to of parameter 1"},
       {"names { root_wrappers: '' }", "names.root_wrappers is unset"},
       {"names { wrapped_at: 'a\\001' }", "control character"},
       {"names { literals: '' }", "names.literals"}});
  v1::CreateJobRequest request = Parse<v1::CreateJobRequest>("spec { name: 'j' }");
  for (int i = 0; i < 9; ++i) request.mutable_spec()->add_mesh();
  EXPECT_THAT(Validate(request), StatusIs(kExhausted, HasSubstr("9 mesh dimensions; at most 8")));
  request.mutable_spec()->clear_mesh();
  for (int i = 0; i < 100'001; ++i) request.mutable_spec()->add_parameters();
  EXPECT_THAT(Validate(request), StatusIs(kExhausted, HasSubstr("100001 parameters; at most 100000")));
}

TEST(Validate, RecordCheckpoint) {
  v1::RecordCheckpointRequest good;
  good.set_job("j");
  good.set_uid(7);
  good.set_epoch(1);
  good.mutable_checkpoint()->set_folder("/data/step-3");
  good.mutable_checkpoint()->set_step(3);
  EXPECT_OK(Validate(good));
  const auto refused = [&](const std::function<void(v1::RecordCheckpointRequest&)>& change,
                           const std::string& message) {
    v1::RecordCheckpointRequest request = good;
    change(request);
    EXPECT_THAT(Validate(request), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
  };
  refused([](auto& q) { q.clear_job(); }, "job");
  refused([](auto& q) { q.clear_uid(); }, "uid is 0");
  refused([](auto& q) { q.clear_epoch(); }, "epoch is 0");
  refused([](auto& q) { q.clear_checkpoint(); }, "checkpoint is unset");
  refused([](auto& q) { q.mutable_checkpoint()->clear_folder(); }, "checkpoint.folder");
  refused([](auto& q) { q.mutable_checkpoint()->set_folder("data/x"); }, "\"data/x\"; it is an absolute path");
  refused([](auto& q) { q.mutable_checkpoint()->set_folder("/a\nb"); }, "checkpoint.folder");
  refused([](auto& q) { q.mutable_checkpoint()->set_folder("/" + std::string(5000, 'x')); }, "checkpoint.folder");
  refused([](auto& q) { q.mutable_checkpoint()->set_step(-1); }, "checkpoint.step is -1");
}

TEST(Validate, ResolveNames) {
  ExpectRefusals<v1::ResolveNamesRequest>(
      "job: 'j' raw_names: 'w'",
      {{"raw_names: ''", "an entry of raw_names is unset"}, {"rules { wrapped_at: '' }", "wrapped_at"}});
  v1::ResolveNamesRequest request = Parse<v1::ResolveNamesRequest>("job: 'j'");
  for (int i = 0; i < 100'001; ++i) request.add_raw_names("w");
  EXPECT_THAT(Validate(request), StatusIs(kExhausted, HasSubstr("100001 raw_names")));
}

TEST(Validate, Join) {
  ExpectRefusals<v1::JoinRequest>(
      "name: 'w0' incarnation: 1 address: 'localhost:1' host_id: 'h' local_socket: '/s' pid: 1",
      {{"name: 'w 0'", "worker name \"w 0\""},
       {"incarnation: 0", "incarnation is 0; it is 1 or more"},
       {"incarnation: -1", "incarnation is -1"},
       {"address: 'a\\n'", "address \"a\\n\" holds a control character"},
       {absl::StrCat("host_id: '", std::string(257, 'h'), "'"), "host_id"},
       {absl::StrCat("local_socket: '/", std::string(107, 's'), "'"), "has 108 bytes; at most 107"},
       {"dead_incarnation: -1", "dead_incarnation is -1; it is 0 or more"},
       {kLongSecret, "secret has 65 bytes; at most 64"},
       {"pid: 0", "pid is 0"}});
  EXPECT_THAT(Validate(Parse<v1::JoinRequest>("name: 'w' incarnation: 1")),
              StatusIs(kInvalid, HasSubstr("address is unset")));
}

TEST(Validate, Join_OfAnIncarnationThatTakesOver) {
  const std::string joins =
      "name: 'w0' incarnation: 5 address: 'localhost:1' host_id: 'h' local_socket: '/s' pid: 1 resumes: 4 ";
  ExpectRefusals<v1::JoinRequest>(
      joins + "resumed { job: 'j' epoch: 1 } resumed { job: 'k' epoch: 2 rank: 1 }",
      {{"resumes: -1", "resumes is -1; it is 0 to 4"},
       {"resumes: 5", "resumes is 5; it is 0 to 4"},
       {"resumes: 0", "resumed names 2 jobs, and resumes is unset"},
       {"resumed { job: '?' epoch: 1 }", "resumed[2]: job \"?\""},
       {"resumed { epoch: 1 }", "resumed[2]: job \"\""},
       {"resumed { job: 'l' }", "resumed[2]: epoch is 0"},
       {"resumed { job: 'l' epoch: 1 rank: -1 }", "resumed[2]: rank is -1"},
       {"resumed { job: 'l' epoch: 1 rank: 1000000000 }", "resumed[2]: rank is 1000000000"},
       {absl::StrCat("resumed { job: 'l' epoch: 1 ", kLongSecret, " }"), "resumed[2]: secret has 65 bytes"}});
  v1::JoinRequest request = Parse<v1::JoinRequest>(joins);
  EXPECT_OK(Validate(request)) << "it takes over the place, and no job";
  for (int i = 0; i < 1001; ++i) *request.add_resumed() = Parse<v1::ResumedJob>("job: 'j' epoch: 1");
  EXPECT_THAT(Validate(request), StatusIs(kExhausted, HasSubstr("1001 resumed; at most 1000")));
  request.mutable_resumed()->RemoveLast();
  EXPECT_OK(Validate(request));
}

TEST(Validate, Heartbeat) {
  const std::string hash(32, 'a');
  const std::string good = absl::StrCat("job: 'j' epoch: 1 state: MEMBER_STATE_READY plan_hash: '", hash,
                                        "' committed_step: 2 published_steps: [0, 2]");
  const auto with = [&](const std::string& change) {
    v1::HeartbeatRequest request = Parse<v1::HeartbeatRequest>("name: 'w0' incarnation: 3");
    *request.add_jobs() = Parse<v1::MemberStatus>(good);
    EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(change, request.mutable_jobs(0))) << change;
    return Validate(request);
  };
  EXPECT_OK(with(""));
  EXPECT_THAT(with("epoch: 0"), StatusIs(kInvalid, HasSubstr("jobs[0] \"j\": epoch is 0")));
  EXPECT_THAT(with("rank: -1"), StatusIs(kInvalid, HasSubstr("rank is -1")));
  EXPECT_OK(with("lost_rank: 0"));
  EXPECT_THAT(with("lost_rank: -1"), StatusIs(kInvalid, HasSubstr("lost_rank is -1")));
  EXPECT_THAT(with("plan_hash: 'xyz'"), StatusIs(kInvalid, HasSubstr("plan_hash is \"xyz\"; it is 32")));
  EXPECT_THAT(with("committed_step: -2"), StatusIs(kInvalid, HasSubstr("committed_step is -2")));
  EXPECT_THAT(with("published_steps: 2"), StatusIs(kInvalid, HasSubstr("published step 2 comes after 2")));
  EXPECT_THAT(with("committed_step: 1"), StatusIs(kInvalid, HasSubstr("with committed step 1")));
  EXPECT_THAT(with("state: MEMBER_STATE_FAILED"), StatusIs(kInvalid, HasSubstr("state FAILED needs it")));
  EXPECT_OK(with("state: MEMBER_STATE_FAILED error: 'x'"));
  EXPECT_THAT(with(absl::StrCat("state: MEMBER_STATE_FAILED error: '", std::string(4097, 'x'), "'")),
              StatusIs(kInvalid, HasSubstr("error has 4097 bytes")));
  EXPECT_THAT(Validate(Parse<v1::HeartbeatRequest>("name: 'w' incarnation: 1 jobs { job: 'j' epoch: 1 }")),
              StatusIs(kInvalid, HasSubstr("state is 0; it is 1 to 4")));
  EXPECT_THAT(Validate(Parse<v1::HeartbeatRequest>("name: 'w' incarnation: 1 jobs { job: 'j' epoch: 1 state: "
                                                   "MEMBER_STATE_READY }")),
              StatusIs(kInvalid, HasSubstr("plan_hash")));
  ExpectRefusals<v1::HeartbeatRequest>(
      "name: 'w' incarnation: 1",
      {{"name: '?'", "worker name"}, {"incarnation: 0", "incarnation"}, {kLongSecret, "secret has 65 bytes"}});
}

TEST(Validate, Leave) {
  ExpectRefusals<v1::LeaveRequest>(
      "name: 'w' incarnation: 1",
      {{"name: '?'", "worker name"}, {"incarnation: 0", "incarnation"}, {kLongSecret, "secret has 65 bytes"}});
}

TEST(Validate, PushHeader) {
  ExpectRefusals<v1::PushHeader>(
      "job: 'j' epoch: 1 content: CONTENT_GRADIENT slot: 127 step: 1 total_bytes: 8 shard: 1",
      {{"job: '?'", "job"},
       {"epoch: -1", "epoch is -1"},
       {"slot: 128", "slot is 128; it is 0 to 127"},
       {"slot: -1", "slot is -1"},
       {"step: -1", "step of a gradient is -1"},
       {"total_bytes: -1", "total_bytes is -1"},
       {"shard: -1", "shard is -1"}});
  ExpectRefusals<v1::PushHeader>("job: 'j' epoch: 1 content: CONTENT_INITIAL_WEIGHTS",
                                 {{"step: 1", "step of initial weights is 1"}, {"slot: 1", "slot of initial weights"}});
  EXPECT_THAT(Validate(Parse<v1::PushHeader>("job: 'j' epoch: 1 content: CONTENT_INITIAL_WEIGHTS bucket: 0")),
              StatusIs(kInvalid, HasSubstr("initial weights of one bucket")));
  EXPECT_THAT(Validate(Parse<v1::PushHeader>("job: 'j' epoch: 1")), StatusIs(kInvalid, HasSubstr("content is 0")));
  v1::PushHeader odd = Parse<v1::PushHeader>("job: 'j' epoch: 1");
  odd.set_content(static_cast<v1::PushHeader::Content>(99));
  EXPECT_THAT(Validate(odd), StatusIs(kInvalid, HasSubstr("content is 99")));
}

TEST(Validate, Pull) {
  ExpectRefusals<v1::PullRequest>("job: 'j' latest: true", {{"job: '?'", "job"},
                                                            {"exact: -1", "exact is -1"},
                                                            {"at_least: -1", "at_least is -1"},
                                                            {"for_slot: 128", "for_slot is 128"},
                                                            {"latest: false", "latest is false"},
                                                            {"chunk_bytes: 4095", "chunk_bytes is 4095"},
                                                            {"chunk_bytes: 4194305", "4096 to 4194304"}});
  EXPECT_THAT(Validate(Parse<v1::PullRequest>("job: 'j' latest: true bucket: 0")),
              StatusIs(kInvalid, HasSubstr("a bucket of a published version")));
  EXPECT_OK(Validate(Parse<v1::PullRequest>("job: 'j' for_slot: 0 bucket: 0")));
  EXPECT_THAT(Validate(Parse<v1::PullRequest>("job: 'j'")), StatusIs(kInvalid, HasSubstr("no version is named")));
}

// Each by itself; their sum is refused.
TEST(Validate, Trainer) {
  const char* const kStep = "step { job: 'j' epoch: 1 slots: 0 step: 1 } ";
  const char* const kSlot = "session: 3 slot { take: true finished { slot: 127 step: 1 } } ";
  EXPECT_OK(Validate(Parse<v1::TrainerRequest>(kStep)));
  EXPECT_OK(Validate(Parse<v1::TrainerRequest>(kSlot)));
  EXPECT_OK(Validate(Parse<v1::TrainerRequest>("declare { job: 'j' epoch: 1 slots: 0 step: 1 }")));
  const auto refused = [](const std::string& text, const char* why) {
    EXPECT_THAT(Validate(Parse<v1::TrainerRequest>(text)), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)))
        << text;
  };
  refused("", "with 0 of step, declare and slot");
  refused(absl::StrCat(kStep, kSlot), "with 2 of step, declare and slot");
  refused("use { kind: ACQUIRE }", "pull buckets");
  refused("renew: true", "pull buckets");
  refused("step { job: 'j' epoch: 1 step: 1 }", "slots");
  refused("slot { take: true }", "session is 0");
  refused("session: 3 slot {}", "neither takes nor finishes");
  refused("session: 3 slot { take: true after_step: -2 }", "after_step");
  refused("session: 3 slot { finished { slot: 128 step: 1 } }", "slot.finished.slot");
  refused("session: 3 slot { finished { slot: 0 step: 0 } }", "slot.finished.step");
}

TEST(Validate, DeclareBucket) {
  ExpectRefusals<v1::DeclareBucketRequest>("job: 'j' epoch: 1 slots: [0, 127] step: 1 bucket: 3",
                                           {{"job: '?'", "job"},
                                            {"epoch: -3", "epoch is -3"},
                                            {"slots: 0", "slot 0 is named twice"},
                                            {"slots: 128", "slot is 128"},
                                            {"step: -1", "step is -1"}});
}

TEST(Validate, Step) {
  ExpectRefusals<v1::StepRequest>("job: 'j' epoch: 1 slots: [0, 127] step: 1 learning_rates: 0",
                                  {{"job: '?'", "job"},
                                   {"epoch: -3", "epoch is -3"},
                                   {"slots: 0", "slot 0 is named twice"},
                                   {"slots: 128", "slot is 128"},
                                   {"step: -1", "step is -1"},
                                   {"learning_rates: nan", "learning rate of group 1 is nan"},
                                   {"learning_rates: [0, inf]", "learning rate of group 2 is inf"},
                                   {"learning_rates: -0.5", "learning rate of group 1 is -0.5"},
                                   {"learning_rates: 1000001", "it is 0 to 1e+06"}});
  EXPECT_THAT(Validate(Parse<v1::StepRequest>("job: 'j' epoch: 1 slots: 0 step: 1 learning_rates: -1")),
              StatusIs(kInvalid, HasSubstr("learning rate is -1; it is 0")));
  v1::StepRequest many = Parse<v1::StepRequest>("job: 'j' epoch: 1 slots: 0 step: 1");
  for (int i = 0; i < kMaxGroups; ++i) many.add_learning_rates(0.5);
  EXPECT_OK(Validate(many));
  many.add_learning_rates(0.5);
  EXPECT_THAT(Validate(many),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("4097 learning_rates; at most 4096")));
  EXPECT_THAT(Validate(Parse<v1::StepRequest>("job: 'j' epoch: 1 step: 1")),
              StatusIs(kInvalid, HasSubstr("slots is empty")));
}

TEST(Validate, Meet) {
  const std::string hash(32, 'a');
  ExpectRefusals<v1::MeetRequest>(
      absl::StrCat("job: 'j' epoch: 1 rank: 2 incarnation: 3 plan_hash: '", hash, "' key: 'rounds/news/1'"),
      {{"job: '?'", "job"},
       {"epoch: 0", "epoch"},
       {"rank: -1", "rank"},
       {"incarnation: 0", "incarnation"},
       {"plan_hash: 'x'", "plan_hash"},
       {kLongSecret, "secret has 65 bytes"},
       {absl::StrCat("key: '", std::string(129, 'k'), "'"), "key"},
       {absl::StrCat("value: '", std::string((64 << 10) + 1, 'v'), "'"), "value"}});
}

TEST(Validate, Transfer) {
  ExpectRefusals<v1::TransferRequest>(
      "job: 'j' epoch: 1 mesh: 'fsdp=2' rank: 1 secret: 's'",
      {{"job: '?'", "job"},
       {"epoch: 0", "epoch"},
       {"rank: -1", "rank"},
       {"mesh: ''", "mesh"},
       {kLongSecret, "secret has 65 bytes"}});
  EXPECT_OK(Validate(Parse<v1::TransferRequest>("job: 'j' epoch: 1 secret: 's' ending: true")));
}

TEST(Validate, Attach) {
  ExpectRefusals<v1::AttachRequest>(
      "job: 'j' epoch: 1 slots: 3 host_id: 'h'",
      {{"job: '?'", "job"}, {"epoch: -1", "epoch"}, {"slots: 3", "twice"}, {"host_id: '\\t'", "host_id"}});
  EXPECT_THAT(Validate(Parse<v1::AttachRequest>("job: 'j' epoch: 1 slots: 3")),
              StatusIs(kInvalid, HasSubstr("host_id is unset")));
}

TEST(Validate, HostileText_IsEscapedAndCut) {
  v1::JoinRequest request = Parse<v1::JoinRequest>("name: 'w' incarnation: 1");
  request.set_address(std::string(100'000, '\x01'));
  const absl::Status status = Validate(request);
  EXPECT_LT(status.message().size(), 1000u);
  EXPECT_THAT(std::string(status.message()), HasSubstr("\\x01"));
}

TEST(Validate, SaveAndLoad) {
  ExpectRefusals<v1::SaveRequest>("job: 'a' epoch: 1 folder: '/x'",
                                  {{"job: ''", "job"},
                                   {"epoch: 0", "epoch"},
                                   {"folder: ''", "folder"},
                                   {"folder: 'x/y'", "absolute path"},
                                   {"folder: '/x\\000y'", "folder"},
                                   {absl::StrCat("folder: '/", std::string(kMaxFolderBytes, 'x'), "'"), "folder"}});
  ExpectRefusals<v1::LoadRequest>("job: 'a' epoch: 1 folder: '/x' step: 0 load_id: 7",
                                  {{"epoch: -1", "epoch"},
                                   {"folder: './x'", "absolute path"},
                                   {"step: -1", "step"},
                                   {absl::StrCat("step: ", kMaxStep + 1), "step"},
                                   {"load_id: 0", "load_id"}});
  ExpectRefusals<v1::AwaitWeightsRequest>("job: 'a' epoch: 1", {{"job: 'a b'", "job"}, {"epoch: 0", "epoch"}});
  ExpectRefusals<v1::UseLoadedRequest>("job: 'a' epoch: 1 load_id: 7",
                                       {{"job: 'a b'", "job"}, {"epoch: 0", "epoch"}, {"load_id: 0", "load_id"}});
}

}  // namespace
}  // namespace shardmesh
