// Room: model. Opening a model and what can be asked of it without loading.
#include "model/model.h"

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <new>
#include <utility>

#include "model/byte_source.h"
#include "model/config_reader.h"
#include "model/gguf.h"
#include "model/safetensors.h"
#include "model/vocabulary.h"
#include "model/weights.h"

namespace pliant {
namespace {

constexpr std::uint64_t kMaxConfigBytes = 16 << 20;

enum class PathKind { kMissing, kFile, kFolder };

PathKind KindOf(const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return PathKind::kMissing;
  return S_ISDIR(info.st_mode) ? PathKind::kFolder : PathKind::kFile;
}

bool Exists(const std::string& path) { return KindOf(path) != PathKind::kMissing; }

bool EndsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

}  // namespace

Model::~Model() = default;

Result<std::unique_ptr<Model>> Model::Open(const std::string& path, OpenOptions options) {
  std::unique_ptr<Model> model(new Model());
  model->path_ = path;
  // Hostile files stay within the limits of the readers, but a small machine may still not have
  // that much.
  try {
    Status opened;
    const PathKind kind = KindOf(path);
    if (kind == PathKind::kMissing) {
      return NotFound(path + ": there is no such file or folder");
    }
    if (kind == PathKind::kFolder || (options.random_weights && EndsWith(path, ".json"))) {
      opened = model->OpenFolder(options);
    } else if (options.random_weights) {
      opened = InvalidArgument("random weights need a config.json or its folder");
    } else if (EndsWith(path, ".safetensors") || EndsWith(path, ".json")) {
      opened = InvalidArgument("give the folder that holds config.json, not a file of it");
    } else {
      opened = model->OpenGguf();
    }
    if (opened.ok()) opened = model->Finish();
    // Readers of several files name the one at fault themselves.
    if (!opened.ok()) {
      return opened.message().starts_with(path) ? opened : opened.WithContext(path);
    }
  } catch (const std::bad_alloc&) {
    return OutOfMemory(path + ": no memory to read the model's tables");
  }
  return model;
}

Status Model::OpenGguf() {
  PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<GgufFile> file, GgufFile::Open(path_));
  gguf_ = std::move(file);
  PLIANT_ASSIGN_OR_RETURN(config_, ReadGgufConfig(*gguf_));
  PLIANT_RETURN_IF_ERROR(CheckGgufVocabulary(*gguf_, config_.architecture, config_.vocab_size));
  if (gguf_->Has("tokenizer.chat_template")) {
    PLIANT_ASSIGN_OR_RETURN(chat_template_, gguf_->String("tokenizer.chat_template"));
  }
  weights_ = GgufWeights(gguf_, config_.architecture);
  return Status::Ok();
}

Status Model::OpenFolder(OpenOptions options) {
  folder_ = path_;
  std::string config_path = path_ + "/config.json";
  if (KindOf(path_) == PathKind::kFile) {  // a configuration by itself
    config_path = path_;
    const std::size_t slash = path_.rfind('/');
    folder_ = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  }
  Result<std::string> text = ReadTextFile(config_path, kMaxConfigBytes);
  if (!text.ok()) {
    if (text.status().code() != StatusCode::kNotFound) return text.status();
    return NotFound(
        "config.json is missing; a model is a GGUF file or a folder with config.json, "
        "model.safetensors and tokenizer.json");
  }
  Result<ModelConfig> config = ReadHfConfig(*text);
  if (!config.ok()) return config.status().WithContext(config_path);
  config_ = std::move(config).value();
  if (options.random_weights) {
    weights_ = RandomWeights(config_, options.random_seed);
  } else {
    if (!Exists(folder_ + "/tokenizer.json")) return NotFound("tokenizer.json is missing");
    if (!Exists(folder_ + "/model.safetensors") &&
        !Exists(folder_ + "/model.safetensors.index.json")) {
      return NotFound("model.safetensors (or model.safetensors.index.json) is missing");
    }
    PLIANT_ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsModel> model,
                            SafetensorsModel::Open(folder_));
    weights_ = SafetensorsWeights(std::move(model));
  }
  PLIANT_ASSIGN_OR_RETURN(chat_template_, ReadHfChatTemplate(folder_));
  return Status::Ok();
}

Status Model::Finish() {
  PLIANT_RETURN_IF_ERROR(CheckWeights(*weights_, config_));
  PLIANT_ASSIGN_OR_RETURN(fingerprint_, weights_->Fingerprint());
  if (config_.name.empty()) {
    // The folder's or file's own name.
    std::string name = path_;
    while (name.size() > 1 && name.back() == '/') name.pop_back();
    config_.name = name.substr(name.rfind('/') + 1);
  }
  return Status::Ok();
}

Result<Vocabulary> Model::ReadVocabulary() const {
  try {
    if (gguf_ != nullptr) {
      Result<Vocabulary> vocabulary = ReadGgufVocabulary(*gguf_);
      if (!vocabulary.ok()) return vocabulary.status().WithContext(path_);
      return vocabulary;
    }
    if (Exists(folder_ + "/tokenizer.json")) return ReadHfVocabulary(folder_, config_.vocab_size);
    return ByteVocabulary(config_.vocab_size);
  } catch (const std::bad_alloc&) {
    return OutOfMemory(path_ + ": no memory for the vocabulary");
  }
}

std::uint64_t Model::FileBytes() const { return weights_->FileBytes(); }

std::string Model::FormatName() const { return weights_->FormatName(); }

std::uint64_t Model::Parameters() const {
  std::uint64_t sum = 0;
  for (const TensorInfo& tensor : weights_->tensors()) sum += tensor.elements;
  return sum;
}

std::vector<Model::TypeSummary> Model::TensorSummary() const {
  std::map<DType, TypeSummary> by_type;
  for (const TensorInfo& tensor : weights_->tensors()) {
    if (!tensor.readable) continue;
    TypeSummary& summary = by_type[tensor.type];
    summary.type = tensor.type;
    ++summary.tensors;
    summary.elements += tensor.elements;
    summary.bytes += tensor.bytes;
  }
  std::vector<TypeSummary> list;
  for (auto& [name, summary] : by_type) list.push_back(std::move(summary));
  std::sort(list.begin(), list.end(),
            [](const TypeSummary& a, const TypeSummary& b) { return a.bytes > b.bytes; });
  return list;
}

}  // namespace pliant
