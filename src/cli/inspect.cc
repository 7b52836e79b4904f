#include <cstdio>
#include <memory>

#include "base/size.h"
#include "cli/commands.h"
#include "cli/options.h"

namespace pliant {
namespace {

int Inspect(const ModelFlags& flags) {
  Result<OpenedModel> opened = OpenModel(flags);
  if (!opened.ok()) return Fail(opened.status());
  const Model& model = *opened->model;
  const ModelConfig& c = model.config();
  const char* architecture = c.architecture == Architecture::kLlama  ? "llama"
                             : c.architecture == Architecture::kQwen2 ? "qwen2"
                                                                      : "qwen3";
  std::printf("%s\n", opened->path.c_str());
  std::printf("  name            %s\n", c.name.c_str());
  std::printf("  format          %s, %s\n", model.FormatName().c_str(), FormatSize(model.FileBytes()).c_str());
  std::printf("  architecture    %s%s%s%s\n", architecture, c.tie_embeddings ? ", tied embeddings" : "",
              c.qkv_bias ? ", QKV biases" : "", c.qk_norm ? ", QK norm" : "");
  std::printf("  layers          %d\n", c.layers);
  std::printf("  hidden          %lld, feed-forward %lld\n", static_cast<long long>(c.hidden_size),
              static_cast<long long>(c.intermediate_size));
  std::printf("  heads           %d query, %d KV, head dim %d\n", c.heads, c.kv_heads, c.head_dim);
  std::printf("  vocabulary      %lld\n", static_cast<long long>(c.vocab_size));
  std::printf("  context         %lld tokens, RoPE theta %g%s\n", static_cast<long long>(c.context_length), c.rope_theta,
              c.rope_scaling.kind == RopeScaling::Kind::kLlama3   ? ", Llama 3 scaling"
              : c.rope_scaling.kind == RopeScaling::Kind::kLinear ? ", linear scaling"
                                                                  : "");
  std::printf("  chat template   %s\n", opened->chat_template ? "yes" : "no");
  std::printf("  weights\n");
  for (const Model::TypeSummary& summary : model.TensorSummary()) {
    std::printf("    %-6s %5lld tensors, %s\n", std::string(Traits(summary.type).name).c_str(),
                static_cast<long long>(summary.tensors), FormatSize(summary.bytes).c_str());
  }
  std::printf("  KV cache, bytes per token (a block is %d tokens)\n", kBlockTokens);
  const struct {
    const char* name;
    int k, v;
  } kStates[] = {{"16/16 TARGET", 4, 4}, {"12/12", 3, 3}, {"12/8", 3, 2}, {"8/8 BASE", 2, 2}, {"8/4", 2, 1}, {"4/4 DEEP", 1, 1}};
  for (const auto& state : kStates) {
    const std::size_t bytes = c.Kv().BytesPerToken(state.k, state.v);
    std::printf("    %-14s %8zu   (%s for the whole context)\n", state.name, bytes,
                FormatSize(bytes * static_cast<std::uint64_t>(c.context_length)).c_str());
  }
  return 0;
}

}  // namespace

Command AddInspect(CLI::App& app) {
  auto flags = std::make_shared<ModelFlags>();
  flags->AddTo(app);
  return [flags] { return Inspect(*flags); };
}

}  // namespace pliant
