// Room: model. Bytes of a model file, read at any offset. Any thread may read.
//
// Model files are read with pread into memory of our own, never through a mapping: a file that is
// cut while we read it then gives a short read, an error value, where a mapping gives SIGBUS and
// ends the process (known fault G1). The backend repacks every weight anyway, so a mapping would
// save one copy of one matrix at a time and nothing after loading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace pliant {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  /// Bytes there were when it was opened.
  virtual std::uint64_t size() const = 0;
  /// Fills `out` from `offset`. DataLoss with both sizes when the bytes are not there (any more).
  virtual Status Read(std::uint64_t offset, std::span<std::byte> out) const = 0;
};

/// A regular file. NotFound, InvalidArgument (a folder, a device) or IoError, naming the path.
Result<std::unique_ptr<ByteSource>> OpenFile(const std::string& path);

/// Bytes in memory, for tests and fuzzing.
std::unique_ptr<ByteSource> MemorySource(std::vector<std::byte> bytes);

/// A whole text file of at most `limit` bytes, for the JSON files beside a model.
Result<std::string> ReadTextFile(const std::string& path, std::uint64_t limit);

/// "12,345,678 bytes": sizes in messages.
std::string FormatBytes(std::uint64_t bytes);

}  // namespace pliant
