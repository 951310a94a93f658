#include "bench/harness/model_shapes.h"

#include "absl/strings/str_cat.h"

namespace shardmesh::bench {
namespace {

class Builder {
 public:
  explicit Builder(std::string name) { model_.name = std::move(name); }
  void Add(std::string name, std::vector<int64_t> shape) {
    model_.parameters.push_back({std::move(name), std::move(shape)});
  }
  // Gate, up and down projections under `prefix`, with the model's own names for them.
  void Mlp(const std::string& prefix, int64_t hidden, int64_t inner, const char* gate = "gate_proj",
           const char* up = "up_proj", const char* down = "down_proj") {
    Add(absl::StrCat(prefix, gate, ".weight"), {inner, hidden});
    Add(absl::StrCat(prefix, up, ".weight"), {inner, hidden});
    Add(absl::StrCat(prefix, down, ".weight"), {hidden, inner});
  }
  void Attention(const std::string& prefix, int64_t hidden, int64_t kv) {
    Add(prefix + "q_proj.weight", {hidden, hidden});
    Add(prefix + "k_proj.weight", {kv, hidden});
    Add(prefix + "v_proj.weight", {kv, hidden});
    Add(prefix + "o_proj.weight", {hidden, hidden});
  }
  void Norms(const std::string& prefix, int64_t hidden) {
    Add(prefix + "input_layernorm.weight", {hidden});
    Add(prefix + "post_attention_layernorm.weight", {hidden});
  }
  ModelShapes Take() { return std::move(model_); }

 private:
  ModelShapes model_;
};

std::string Layer(int i) { return absl::StrCat("model.layers.", i, "."); }

ModelShapes Llama(std::string name, int layers, int64_t hidden, int64_t kv, int64_t inner) {
  constexpr int64_t kVocabulary = 128256;
  Builder b(std::move(name));
  b.Add("model.embed_tokens.weight", {kVocabulary, hidden});
  for (int i = 0; i < layers; ++i) {
    b.Attention(Layer(i) + "self_attn.", hidden, kv);
    b.Mlp(Layer(i) + "mlp.", hidden, inner);
    b.Norms(Layer(i), hidden);
  }
  b.Add("model.norm.weight", {hidden});
  b.Add("lm_head.weight", {kVocabulary, hidden});
  return b.Take();
}

}  // namespace

int64_t ModelShapes::NumElements() const {
  int64_t total = 0;
  for (const NamedShape& parameter : parameters) {
    int64_t elements = 1;
    for (const int64_t size : parameter.shape) elements *= size;
    total += elements;
  }
  return total;
}

ModelShapes Gpt2_124M() {
  constexpr int64_t kHidden = 768, kInner = 3072;
  Builder b("GPT-2-124M");
  const auto with_bias = [&b](const std::string& name, std::vector<int64_t> shape) {
    const int64_t columns = shape.back();
    b.Add(name + ".weight", std::move(shape));
    b.Add(name + ".bias", {columns});
  };
  b.Add("transformer.wte.weight", {50257, kHidden});
  b.Add("transformer.wpe.weight", {1024, kHidden});
  for (int i = 0; i < 12; ++i) {
    const std::string layer = absl::StrCat("transformer.h.", i, ".");
    with_bias(layer + "ln_1", {kHidden});
    with_bias(layer + "attn.c_attn", {kHidden, 3 * kHidden});
    with_bias(layer + "attn.c_proj", {kHidden, kHidden});
    with_bias(layer + "ln_2", {kHidden});
    with_bias(layer + "mlp.c_fc", {kHidden, kInner});
    with_bias(layer + "mlp.c_proj", {kInner, kHidden});
  }
  with_bias("transformer.ln_f", {kHidden});
  return b.Take();
}

ModelShapes Llama3_8B() { return Llama("Llama-3-8B", 32, 4096, 1024, 14336); }

ModelShapes Llama3_70B() { return Llama("Llama-3-70B", 80, 8192, 1024, 28672); }

ModelShapes Mixtral_8x7B() {
  constexpr int64_t kHidden = 4096, kVocabulary = 32000;
  Builder b("Mixtral-8x7B");
  b.Add("model.embed_tokens.weight", {kVocabulary, kHidden});
  for (int i = 0; i < 32; ++i) {
    b.Attention(Layer(i) + "self_attn.", kHidden, 1024);
    b.Add(Layer(i) + "block_sparse_moe.gate.weight", {8, kHidden});
    for (int e = 0; e < 8; ++e) {
      b.Mlp(absl::StrCat(Layer(i), "block_sparse_moe.experts.", e, "."), kHidden, 14336, "w1", "w3", "w2");
    }
    b.Norms(Layer(i), kHidden);
  }
  b.Add("model.norm.weight", {kHidden});
  b.Add("lm_head.weight", {kVocabulary, kHidden});
  return b.Take();
}

ModelShapes DeepSeekV3() {
  constexpr int64_t kHidden = 7168, kVocabulary = 129280;
  Builder b("DeepSeek-V3");
  b.Add("model.embed_tokens.weight", {kVocabulary, kHidden});
  for (int i = 0; i < 61; ++i) {
    const std::string attention = Layer(i) + "self_attn.";
    b.Add(attention + "q_a_proj.weight", {1536, kHidden});
    b.Add(attention + "q_a_layernorm.weight", {1536});
    b.Add(attention + "q_b_proj.weight", {24576, 1536});
    b.Add(attention + "kv_a_proj_with_mqa.weight", {576, kHidden});
    b.Add(attention + "kv_a_layernorm.weight", {512});
    b.Add(attention + "kv_b_proj.weight", {32768, 512});
    b.Add(attention + "o_proj.weight", {kHidden, 16384});
    if (i < 3) {
      b.Mlp(Layer(i) + "mlp.", kHidden, 18432);
    } else {
      b.Add(Layer(i) + "mlp.gate.weight", {256, kHidden});
      b.Add(Layer(i) + "mlp.gate.e_score_correction_bias", {256});
      for (int e = 0; e < 256; ++e) b.Mlp(absl::StrCat(Layer(i), "mlp.experts.", e, "."), kHidden, 2048);
      b.Mlp(Layer(i) + "mlp.shared_experts.", kHidden, 2048);
    }
    b.Norms(Layer(i), kHidden);
  }
  b.Add("model.norm.weight", {kHidden});
  b.Add("lm_head.weight", {kVocabulary, kHidden});
  return b.Take();
}

ModelShapes ManyExperts() {
  constexpr int64_t kHidden = 2048, kInner = 768;
  Builder b("MoE, 600 experts");
  b.Add("model.embed_tokens.weight", {151936, kHidden});
  for (int i = 0; i < 27; ++i) {
    b.Attention(Layer(i) + "self_attn.", kHidden, 512);
    b.Add(Layer(i) + "mlp.gate.weight", {600, kHidden});
    for (int e = 0; e < 600; ++e) b.Mlp(absl::StrCat(Layer(i), "mlp.experts.", e, "."), kHidden, kInner);
    b.Norms(Layer(i), kHidden);
  }
  b.Add("model.norm.weight", {kHidden});
  // To a round number: the layers of a draft model.
  ModelShapes model = b.Take();
  for (int i = 0; model.parameters.size() < 50'000; ++i) {
    model.parameters.push_back({absl::StrCat("draft.layers.", i, ".weight"), {kInner, kHidden}});
  }
  return model;
}

}  // namespace shardmesh::bench
