// Room: model. Safetensors: one file, or a folder's shards listed in model.safetensors.index.json.
// Immutable after opening: any thread may read it. Format: 8 bytes length n (little-endian), n
// bytes JSON {name: {dtype, shape, data_offsets}}, then data.
//
// Checked before use: the header's length and nesting, every dtype, shape product and pair of
// offsets, overlap, holes, and that each tensor of the index is where the index says. What does not
// fit is refused with one line naming file, tensor and sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "model/byte_source.h"
#include "model/tensor_info.h"

namespace pliant {

/// The tensors of one file, offsets counted from the file's start. `file` is stored in each
/// TensorInfo.
Result<std::vector<TensorInfo>> ReadSafetensorsHeader(const ByteSource& source, int file);

class SafetensorsModel {
 public:
  /// `folder` holds model.safetensors, or model.safetensors.index.json and its shards.
  static Result<std::unique_ptr<SafetensorsModel>> Open(const std::string& folder);

  std::uint64_t file_bytes() const { return file_bytes_; }
  int files() const { return static_cast<int>(names_.size()); }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* FindTensor(std::string_view name) const;
  /// Fills `out` (tensor.bytes long). DataLoss naming file and tensor when the file was shortened
  /// since.
  Status ReadTensor(const TensorInfo& tensor, std::span<std::byte> out) const;
  /// Any bytes of one of the files, for fingerprints.
  const ByteSource& file(int index) const { return *sources_[static_cast<std::size_t>(index)]; }
  /// Closes the files; the table stays, ReadTensor fails from here on.
  void ReleaseFiles() { sources_.clear(); }

 private:
  SafetensorsModel() = default;
  Status AddFile(const std::string& folder, const std::string& name);
  Status CheckIndex(const std::unordered_map<std::string, std::string>& index) const;

  std::uint64_t file_bytes_ = 0;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<ByteSource>> sources_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, std::size_t> tensor_index_;
};

}  // namespace pliant
