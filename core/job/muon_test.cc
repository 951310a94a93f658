#include "core/job/muon.h"

#include <cmath>

#include "core/base/matchers.h"

namespace shardmesh {
namespace {

using ::testing::HasSubstr;

OptimizerHyper Muon() { return OptimizerHyper::Defaults(OptimizerKind::kMuon); }

TEST(MuonScalars, Defaults_AreTorchs) {
  ASSERT_OK_AND_ASSIGN(const MuonScalars scalars, ComputeMuonScalars(Muon(), {}, 4, 4));
  EXPECT_EQ(scalars.a, 3.4445f);
  EXPECT_EQ(scalars.b, -4.775f);
  EXPECT_EQ(scalars.c, 2.0315f);
  EXPECT_EQ(scalars.iterations, 5);
  EXPECT_EQ(scalars.eps, 1e-7f);
  EXPECT_TRUE(scalars.is_nesterov);
  EXPECT_EQ(scalars.decay, static_cast<float>(1 - 1e-3 * 0.1));
  EXPECT_EQ(scalars.neg_step_size, -1e-3f);
}

TEST(MuonScalars, LearningRate_AdjustedToTheShape) {
  const auto rate = [](MuonLrAdjust adjust, int64_t rows, int64_t columns) {
    MuonOptions options;
    options.lr_adjust = adjust;
    return ComputeMuonScalars(Muon(), options, rows, columns).value().neg_step_size;
  };
  EXPECT_EQ(rate(MuonLrAdjust::kOriginal, 36, 4), -3e-3f);
  EXPECT_EQ(rate(MuonLrAdjust::kOriginal, 4, 36), -1e-3f);
  EXPECT_FLOAT_EQ(rate(MuonLrAdjust::kMatchRmsAdamW, 36, 4), -1.2e-3f);
  EXPECT_FLOAT_EQ(rate(MuonLrAdjust::kMatchRmsAdamW, 4, 36), -1.2e-3f);
}

// torch.lerp starts from the nearer end.
TEST(MuonScalars, Lerp_FromTheNearerEnd) {
  EXPECT_EQ(MakeLerp(0.25).coefficient, 0.25f);
  EXPECT_FALSE(MakeLerp(0.25).from_end);
  EXPECT_EQ(MakeLerp(0.75).coefficient, -0.25f);
  EXPECT_TRUE(MakeLerp(0.75).from_end);
  EXPECT_TRUE(MakeLerp(0.5).from_end);
}

TEST(MuonScalars, WrongNumbers_InvalidArgumentNamesThem) {
  const auto fails = [](const OptimizerHyper& hyper, const MuonOptions& options, int64_t rows, const char* words) {
    EXPECT_THAT(ComputeMuonScalars(hyper, options, rows, 4),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(words)));
  };
  fails(OptimizerHyper::Defaults(OptimizerKind::kSgd), {}, 4, "sgd");
  fails(Muon(), {}, 0, "0 rows");
  OptimizerHyper hyper = Muon();
  hyper.eps = 0;
  fails(hyper, {}, 4, "eps is 0");
  hyper = Muon();
  hyper.lr = -1;
  fails(hyper, {}, 4, "lr");
  MuonOptions options;
  options.iterations = 100;
  fails(Muon(), options, 4, "ns_steps is 100");
  options = MuonOptions();
  options.b = INFINITY;
  fails(Muon(), options, 4, "ns_coefficients are 3.4445, inf");
  options.b = 1e39;
  fails(Muon(), options, 4, "1e+39");
}

}  // namespace
}  // namespace shardmesh
