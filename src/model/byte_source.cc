// Room: model. Files by pread, memory for tests.
#include "model/byte_source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace pliant {
namespace {

Status ShortRead(std::uint64_t offset, std::size_t wanted, std::uint64_t size) {
  return DataLoss("bytes " + std::to_string(offset) + " to " + std::to_string(offset + wanted) +
                  " are not there: the file has " + FormatBytes(size));
}

class FileSource final : public ByteSource {
 public:
  FileSource(int fd, std::uint64_t size) : fd_(fd), size_(size) {}
  ~FileSource() override { close(fd_); }
  FileSource(const FileSource&) = delete;
  FileSource& operator=(const FileSource&) = delete;

  std::uint64_t size() const override { return size_; }

  Status Read(std::uint64_t offset, std::span<std::byte> out) const override {
    if (offset > size_ || out.size() > size_ - offset) return ShortRead(offset, out.size(), size_);
    std::size_t done = 0;
    while (done < out.size()) {
      const std::size_t chunk = std::min<std::size_t>(out.size() - done, std::size_t{1} << 30);
      const ssize_t got = pread(fd_, out.data() + done, chunk, static_cast<off_t>(offset + done));
      if (got < 0) {
        if (errno == EINTR) continue;
        return IoError("read failed at byte " + std::to_string(offset + done) + ": " +
                       std::strerror(errno));
      }
      if (got == 0) {
        struct stat now {};
        const std::uint64_t left =
            fstat(fd_, &now) == 0 ? static_cast<std::uint64_t>(now.st_size) : offset + done;
        return DataLoss("the file was shortened while it was read: bytes " +
                        std::to_string(offset) + " to " + std::to_string(offset + out.size()) +
                        " are wanted, it had " + FormatBytes(size_) + " and now has " +
                        FormatBytes(left));
      }
      done += static_cast<std::size_t>(got);
    }
    return Status::Ok();
  }

 private:
  int fd_;
  std::uint64_t size_;
};

class MemoryBytes final : public ByteSource {
 public:
  explicit MemoryBytes(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {}
  std::uint64_t size() const override { return bytes_.size(); }
  Status Read(std::uint64_t offset, std::span<std::byte> out) const override {
    if (offset > bytes_.size() || out.size() > bytes_.size() - offset) {
      return ShortRead(offset, out.size(), bytes_.size());
    }
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
    return Status::Ok();
  }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace

Result<std::unique_ptr<ByteSource>> OpenFile(const std::string& path) {
  // O_NONBLOCK: opening a pipe must not wait for a writer; it is refused below.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    const std::string message = path + ": " + std::strerror(error);
    return error == ENOENT || error == ENOTDIR ? NotFound(message) : IoError(message);
  }
  struct stat info {};
  if (fstat(fd, &info) != 0) {
    const std::string message = path + ": " + std::strerror(errno);
    close(fd);
    return IoError(message);
  }
  if (!S_ISREG(info.st_mode)) {
    close(fd);
    return InvalidArgument(path + ": not a regular file");
  }
  return std::unique_ptr<ByteSource>(
      std::make_unique<FileSource>(fd, static_cast<std::uint64_t>(info.st_size)));
}

std::unique_ptr<ByteSource> MemorySource(std::vector<std::byte> bytes) {
  return std::make_unique<MemoryBytes>(std::move(bytes));
}

Result<std::string> ReadTextFile(const std::string& path, std::uint64_t limit) {
  PLIANT_ASSIGN_OR_RETURN(const std::unique_ptr<ByteSource> file, OpenFile(path));
  if (file->size() > limit) {
    return TooLarge(path + ": " + FormatBytes(file->size()) + ", the limit is " +
                    FormatBytes(limit));
  }
  std::string text(static_cast<std::size_t>(file->size()), '\0');
  const Status read = file->Read(0, std::as_writable_bytes(std::span(text.data(), text.size())));
  if (!read.ok()) return read.WithContext(path);
  return text;
}

std::string FormatBytes(std::uint64_t bytes) {
  std::string digits = std::to_string(bytes);
  for (std::size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, 1, ',');
  digits += bytes == 1 ? " byte" : " bytes";
  return digits;
}

}  // namespace pliant
