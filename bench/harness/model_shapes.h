// Parameters of published models, by name and shape, for benchmarks. Sources: the models' config.json and their
// architectures in transformers (GPT2LMHeadModel, LlamaForCausalLM, MixtralForCausalLM, DeepseekV3ForCausalLM).
// Pure and thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardmesh::bench {

struct NamedShape {
  std::string name;
  std::vector<int64_t> shape;
};

struct ModelShapes {
  std::string name;
  std::vector<NamedShape> parameters;

  int64_t NumElements() const;
};

ModelShapes Gpt2_124M();  // the head is the embedding's, once
ModelShapes Llama3_8B();
ModelShapes Llama3_70B();
ModelShapes Mixtral_8x7B();
ModelShapes DeepSeekV3();  // without the multi-token prediction layer

// A mixture of 600 small experts a layer in 27 layers, each expert's matrices a tensor of their own: 50,000 tensors.
ModelShapes ManyExperts();

}  // namespace shardmesh::bench
