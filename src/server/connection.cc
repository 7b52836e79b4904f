#include "server/connection.h"

#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/beast/core/string.hpp>

#include "base/log.h"

namespace pliant {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;

constexpr std::size_t kAheadBytes =
    64u << 10;  // kept of what a client sends before its answer is complete
constexpr std::size_t kSmallBodyBytes =
    64u << 10;  // read although the answer is known, to keep the connection
constexpr double kLingerSeconds = 3;
constexpr double kPeerPollSeconds = 0.5;
constexpr auto kSlowReaderGrace = std::chrono::seconds(1);  // so long more than the bound may wait
constexpr std::size_t kSlowReaderFactor = 64;               // and so many times the bound at once

std::string PercentDecode(std::string_view text) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9'                 ? c - '0'
           : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                : -1;
  };
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && digit(text[i + 1]) >= 0 &&
        digit(text[i + 2]) >= 0) {
      out += static_cast<char>(digit(text[i + 1]) << 4 | digit(text[i + 2]));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

ApiError HttpFault(int status, std::string message, std::string code) {
  ApiError error;
  error.http_status = status;
  error.message = std::move(message);
  error.code = std::move(code);
  return error;
}

bool EqualIgnoringCase(std::string_view a, std::string_view b) {
  return boost::beast::iequals({a.data(), a.size()}, {b.data(), b.size()});
}

/// The target without "http://HOST" in front, which RFC 9112 lets a client send.
std::string_view OriginForm(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!EqualIgnoringCase(target.substr(0, scheme.size()), scheme)) continue;
    const std::size_t path = target.find_first_of("/?#", scheme.size());
    return path == target.npos ? "/" : target.substr(path);
  }
  return target;
}

}  // namespace

Connection::Connection(ServerCore* core, asio::ip::tcp::socket socket,
                       std::unique_ptr<ConnectionPermit> permit)
    : core_(core),
      socket_(std::move(socket)),
      executor_(socket_.get_executor()),
      permit_(std::move(permit)),
      timer_(executor_),
      body_permit_(core) {}

Connection::~Connection() {
  if (request_open_) EndResponse(499);
  const std::lock_guard lock(core_->mutex);
  core_->connections.erase(this);
}

void Connection::Start() {
  asio::post(executor_, [self = shared_from_this()] {
    if (self->core_->draining.load()) return self->Close();
    self->NextRequest();
    // A connection that says nothing at all may stay for a header's time only.
    self->SetReadDeadline(self->core_->options.header_timeout);
  });
}

void Connection::Drain() {
  asio::post(executor_, [self = shared_from_this()] {
    self->keep_alive_ = false;
    if (self->phase_ == Phase::kHead && !self->head_started_) self->Close();
  });
}

void Connection::Abort() {
  asio::post(executor_, [self = shared_from_this()] { self->Close(); });
}

// ---- Reading
// -------------------------------------------------------------------------------------------------------------

void Connection::Read() {
  if (reading_ || phase_ == Phase::kClosed || peer_eof_) return;
  reading_ = true;
  socket_.async_read_some(asio::buffer(read_buffer_),
                          [self = shared_from_this()](error_code error, std::size_t bytes) {
                            self->OnRead(error, bytes);
                          });
}

void Connection::OnRead(error_code error, std::size_t bytes) {
  reading_ = false;
  if (phase_ == Phase::kClosed) return;
  if (error == asio::error::eof) return OnInputEnd();
  if (error) return Close();
  if (phase_ == Phase::kLinger) return Read();  // nothing is kept
  input_.append(read_buffer_.data(), bytes);
  Process();
}

void Connection::OnInputEnd() {
  peer_eof_ = true;
  keep_alive_ = false;
  switch (phase_) {
    case Phase::kHead:
      if (!head_started_) return Close();
      return RefuseBody(HttpFault(400, "the request ended in its header", "incomplete_request"));
    case Phase::kBody:
      return RefuseBody(HttpFault(400, "the request ended in its body", "incomplete_request"));
    case Phase::kBusy:
      // Nobody will read a generated answer; what a worker or the socket already has in hand is
      // finished.
      if (generation_ != nullptr) Close();
      return;
    case Phase::kLinger:
      return Close();
    case Phase::kClosed:
      return;
  }
}

void Connection::Process() {
  for (;;) {
    switch (phase_) {
      case Phase::kHead:
        if (!ProcessHead()) return;
        break;
      case Phase::kBody:
        if (!ProcessBody()) return;
        break;
      case Phase::kBusy:
        if (input_.size() < kAheadBytes) {
          Read();
        } else if (read_deadline_ == TimePoint::max()) {
          SetReadDeadline(
              kPeerPollSeconds);  // not reading: look for the client's end from time to time
        }
        return;
      default:
        return;
    }
  }
}

bool Connection::ProcessHead() {
  if (!head_started_) {
    // Empty lines between requests are allowed.
    input_.erase(0, std::min(input_.find_first_not_of("\r\n"), input_.size()));
    if (input_.empty()) {
      Read();
      return false;
    }
    head_started_ = true;
    SetReadDeadline(core_->options.header_timeout);
  }
  error_code error;
  input_.erase(0, parser_->put(asio::buffer(input_), error));
  if (error && error != http::error::need_more) {
    OnParseError(error);
    return phase_ == Phase::kBusy;
  }
  if (!parser_->is_header_done()) {
    Read();
    return false;
  }
  OnHead();
  return true;
}

bool Connection::ProcessBody() {
  if (parser_->is_done()) {
    OnBodyComplete();
    return true;
  }
  if (input_.empty()) {
    Read();
    return false;
  }
  error_code error;
  input_.erase(0, parser_->put(asio::buffer(input_), error));
  if (error && error != http::error::need_more) {
    OnParseError(error);
    return true;
  }
  if (!body_permit_.Reserve(parser_->get().body().size())) {
    RefuseBody(
        FromStatus(Unavailable("the server holds all the request bodies it may; try again")));
    return true;
  }
  if (error == http::error::need_more) {
    if (input_.size() > kAheadBytes) {  // a chunk header without end
      OnParseError(http::error::bad_chunk);
      return true;
    }
    Read();
    return false;
  }
  return true;
}

void Connection::OnHead() {
  const auto& message = parser_->get();
  const auto field = [&](http::field name) {
    const auto value = message[name];
    return std::string(value.data(), value.size());
  };
  head_ = {};
  head_.method = std::string(message.method_string().data(), message.method_string().size());
  const std::string_view target = OriginForm({message.target().data(), message.target().size()});
  head_.path = PercentDecode(target.substr(0, target.find_first_of("?#")));
  head_.authorization = field(http::field::authorization);
  head_.content_encoding = field(http::field::content_encoding);
  head_only_ = head_.method == "HEAD";
  http_1_0_ = message.version() < 11;
  keep_alive_ = parser_->keep_alive() && !core_->draining.load() && !peer_eof_;
  request_start_ = std::chrono::steady_clock::now();
  request_open_ = true;

  // Any other coding would be taken for no body at all, and the body for the next request.
  if (const std::string coding = field(http::field::transfer_encoding);
      !coding.empty() && !EqualIgnoringCase(coding, "chunked")) {
    route_ = Route::kNone;
    return RefuseBody(HttpFault(
        400, "Transfer-Encoding \"" + Excerpt(coding, 40) + "\" is not taken; only \"chunked\" is",
        "unsupported_encoding"));
  }
  Api::Routed routed = core_->api.RouteHead(head_);
  route_ = routed.route;
  if (!routed.answer) {
    work_open_ = true;
    ++core_->api.metrics().open_requests;
  }
  const bool has_body = !parser_->is_done();
  const auto length = parser_->content_length();
  if (routed.answer) {
    if (has_body && !(length && *length <= kSmallBodyBytes)) {
      keep_alive_ = false;
      unread_input_ = true;
      phase_ = Phase::kBusy;
      ClearReadDeadline();
      return Respond(*routed.answer);
    }
    ready_answer_ = std::move(routed.answer);
  }
  phase_ = Phase::kBody;
  if (!has_body) return;
  if (length && !body_permit_.Reserve(static_cast<std::size_t>(*length))) {
    return RefuseBody(
        FromStatus(Unavailable("the server holds all the request bodies it may; try again")));
  }
  parser_->eager(true);
  SetReadDeadline(core_->options.body_timeout);
  if (message[http::field::expect] == "100-continue") Send("HTTP/1.1 100 Continue\r\n\r\n");
}

void Connection::OnBodyComplete() {
  phase_ = Phase::kBusy;
  ClearReadDeadline();
  if (ready_answer_) {
    const HttpResponse answer = std::move(*ready_answer_);
    ready_answer_.reset();
    body_permit_.Release();
    Respond(answer);
  } else {
    StartJob();
  }
}

void Connection::OnParseError(error_code error) {
  if (error == http::error::body_limit) {
    return RefuseBody(HttpFault(413,
                                "the body is larger than " +
                                    std::to_string(core_->options.max_body_bytes) +
                                    " bytes, the limit",
                                "body_too_large"));
  }
  if (error == http::error::header_limit) {
    return RefuseBody(HttpFault(431,
                                "the header is larger than " +
                                    std::to_string(core_->options.max_header_bytes) +
                                    " bytes, the limit",
                                "header_too_large"));
  }
  RefuseBody(HttpFault(400, "this is not HTTP/1.1: " + error.message(), "bad_request"));
}

/// Answers a request that will not be read to its end, and closes.
void Connection::RefuseBody(const ApiError& error) {
  if (!request_open_) {  // its header was not complete
    request_start_ = std::chrono::steady_clock::now();
    request_open_ = true;
    head_only_ = false;
    http_1_0_ = false;
    route_ = Route::kNone;
  }
  ready_answer_.reset();
  keep_alive_ = false;
  unread_input_ = true;
  phase_ = Phase::kBusy;
  ClearReadDeadline();
  Respond(ErrorResponse(error));
}

// ---- Answering
// -----------------------------------------------------------------------------------------------------------

void Connection::StartJob() {
  job_running_ = true;
  auto notify = [weak = weak_from_this(), executor = executor_] {
    asio::post(executor, [weak] {
      if (const auto self = weak.lock()) self->OnMail();
    });
  };
  asio::thread_pool& workers = core_->WorkersFor(parser_->get().body().size());
  asio::post(workers, [self = shared_from_this(), body = std::move(parser_->get().body()),
                       permit = std::move(body_permit_), notify = std::move(notify)]() mutable {
    Api::Posted posted;
    if (!self->gone_.load()) {
      try {
        posted = self->core_->api.Post(self->route_, body, std::move(notify));
      } catch (const std::exception& e) {
        // Nothing here is expected to throw but the allocator; whatever it is, it costs this
        // request only.
        spdlog::error("a request failed: {}", e.what());
        posted = ErrorResponse(FromStatus(Internal("the request could not be worked on")));
      }
    }
    body = std::string();
    permit.Release();
    const auto executor = self->executor_;
    asio::post(executor, [self = std::move(self), posted = std::move(posted)]() mutable {
      self->OnPosted(std::move(posted));
    });
  });
}

void Connection::OnPosted(Api::Posted posted) {
  job_running_ = false;
  if (phase_ == Phase::kClosed) return;  // `posted` goes, and cancels what it began
  if (const auto* response = std::get_if<HttpResponse>(&posted)) return Respond(*response);
  generation_ = std::get<std::unique_ptr<Generation>>(std::move(posted));
  if (peer_eof_) return Close();
  OnMail();
}

void Connection::OnMail() {
  if (generation_ == nullptr) return;
  Generation::Progress progress = generation_->Advance();
  if (progress.response) {
    generation_.reset();
    return Respond(*progress.response);
  }
  if (!progress.stream.empty()) {
    if (!stream_open_) StartStream();
    SendChunk(progress.stream);
    if (ReaderIsTooSlow()) {
      ++core_->api.metrics().slow_readers;
      return Close(/*reset=*/true);
    }
  }
  if (progress.done) {
    generation_.reset();
    if (!http_1_0_) Send("0\r\n\r\n");
    EndResponse(200);
  }
}

/// More than the bound waits, and not only because this thread has not come round to writing it.
bool Connection::ReaderIsTooSlow() {
  const std::size_t bound = core_->options.max_unsent_bytes;
  const bool blocked = written_ < writing_.size();  // a write is under way
  if (!blocked || pending_.size() <= bound) {
    over_since_ = TimePoint::max();
    return false;
  }
  const TimePoint now = std::chrono::steady_clock::now();
  if (over_since_ == TimePoint::max()) over_since_ = now;
  return now - over_since_ > kSlowReaderGrace || pending_.size() > kSlowReaderFactor * bound;
}

std::string Connection::HeaderText(int status, const HttpResponse& response,
                                   const std::string& framing) const {
  std::string out = "HTTP/1.1 " + std::to_string(status) + " ";
  out += ReasonPhrase(status);
  out += "\r\n";
  const auto add = [&](std::string_view name, std::string_view value) {
    out += name;
    out += ": ";
    out += value;
    out += "\r\n";
  };
  if (!response.content_type.empty()) add("Content-Type", response.content_type);
  for (const auto& [name, value] : response.headers) add(name, value);
  if (!core_->options.cors_origin.empty()) {
    add("Access-Control-Allow-Origin", core_->options.cors_origin);
  }
  if (!keep_alive_) {
    add("Connection", "close");
  } else if (http_1_0_) {
    add("Connection", "keep-alive");
  }
  out += framing;
  out += "\r\n";
  return out;
}

void Connection::Respond(const HttpResponse& response) {
  const std::string framing =
      response.status == 204 ? ""
                             : "Content-Length: " + std::to_string(response.body.size()) + "\r\n";
  std::string text = HeaderText(response.status, response, framing);
  if (!head_only_ && response.status != 204) text += response.body;
  Send(std::move(text));
  EndResponse(response.status);
}

void Connection::StartStream() {
  stream_open_ = true;
  ++core_->api.metrics().open_streams;
  HttpResponse head;
  head.content_type = "text/event-stream; charset=utf-8";
  head.headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
  if (http_1_0_) keep_alive_ = false;  // the end of the answer is the end of the connection
  Send(HeaderText(200, head, http_1_0_ ? "" : "Transfer-Encoding: chunked\r\n"));
}

void Connection::SendChunk(const std::string& data) {
  if (http_1_0_) return Send(data);
  char size[20];
  std::snprintf(size, sizeof size, "%zx\r\n", data.size());
  Send(size + data + "\r\n");
}

void Connection::EndResponse(int code) {
  response_done_ = true;
  if (stream_open_) --core_->api.metrics().open_streams;
  stream_open_ = false;
  if (std::exchange(work_open_, false)) --core_->api.metrics().open_requests;
  if (request_open_) {
    request_open_ = false;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - request_start_;
    core_->api.metrics().CountResponse(RouteName(route_), code, took.count());
  }
}

void Connection::NextRequest() {
  phase_ = Phase::kHead;
  response_done_ = false;
  head_started_ = false;
  unread_input_ = false;
  parser_.emplace();
  parser_->header_limit(static_cast<std::uint32_t>(core_->options.max_header_bytes));
  parser_->body_limit(core_->options.max_body_bytes);
  SetReadDeadline(core_->options.idle_timeout);
  Process();
}

// ---- Writing
// -------------------------------------------------------------------------------------------------------------

void Connection::Send(std::string data) {
  if (pending_.empty()) {
    pending_ = std::move(data);
  } else {
    pending_ += data;
  }
  if (write_active_ || phase_ == Phase::kClosed) return;
  write_active_ = true;
  // Posted, so that what is sent in one go (header, chunk, end) leaves in one packet, and the end
  // of the answer is known.
  asio::post(executor_, [self = shared_from_this()] { self->Write(); });
}

void Connection::Write() {
  if (phase_ == Phase::kClosed) return;
  if (written_ == writing_.size()) {
    writing_ = std::exchange(pending_, {});
    written_ = 0;
  }
  write_deadline_ = std::chrono::steady_clock::now() +
                    std::chrono::duration_cast<std::chrono::nanoseconds>(
                        std::chrono::duration<double>(core_->options.write_timeout));
  ArmTimer();
  socket_.async_write_some(asio::buffer(writing_.data() + written_, writing_.size() - written_),
                           [self = shared_from_this()](error_code error, std::size_t bytes) {
                             self->OnWritten(error, bytes);
                           });
}

void Connection::OnWritten(error_code error, std::size_t bytes) {
  if (phase_ == Phase::kClosed) return;
  if (error) return Close();
  written_ += bytes;
  if (written_ < writing_.size() || !pending_.empty()) return Write();
  over_since_ = TimePoint::max();
  writing_.clear();
  written_ = 0;
  write_active_ = false;
  write_deadline_ = TimePoint::max();
  if (!response_done_) return;
  if (keep_alive_ && !peer_eof_ && !core_->draining.load()) return NextRequest();
  if (unread_input_ && !peer_eof_) return Linger();
  Close();
}

// ---- Time and end
// --------------------------------------------------------------------------------------------------------

void Connection::SetReadDeadline(double seconds) {
  read_deadline_ =
      std::chrono::steady_clock::now() +
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
  ArmTimer();
}

void Connection::ArmTimer() {
  const TimePoint next = std::min(read_deadline_, write_deadline_);
  if (timer_at_ <= next || phase_ == Phase::kClosed) return;
  timer_at_ = next;
  timer_.expires_at(next);
  // Holds the connection: while its input is not read there may be nothing else that does.
  timer_.async_wait([self = shared_from_this()](error_code error) {
    if (!error) self->OnTimer();
  });
}

void Connection::OnTimer() {
  timer_at_ = TimePoint::max();
  const TimePoint now = std::chrono::steady_clock::now();
  if (phase_ == Phase::kClosed) return;
  if (write_deadline_ <= now) {
    ++core_->api.metrics().timeouts;
    return Close(/*reset=*/true);
  }
  if (read_deadline_ <= now) OnReadTimeout();
  ArmTimer();
}

void Connection::OnReadTimeout() {
  ClearReadDeadline();
  switch (phase_) {
    case Phase::kHead:
      if (!head_started_) return Close();
      ++core_->api.metrics().timeouts;
      return RefuseBody(HttpFault(408, "the header was not complete in time", "timeout"));
    case Phase::kBody:
      ++core_->api.metrics().timeouts;
      return RefuseBody(HttpFault(408, "the body was not complete in time", "timeout"));
    case Phase::kBusy:
      if (generation_ != nullptr && PeerHasClosed()) return Close();
      SetReadDeadline(kPeerPollSeconds);
      return;
    case Phase::kLinger:
      return Close();
    case Phase::kClosed:
      return;
  }
}

/// For a connection whose input is not being read: whether the client's end has come all the same.
bool Connection::PeerHasClosed() {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(socket_.native_handle(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return true;
  return info.tcpi_state != TCP_ESTABLISHED;
}

/// Closing with unread input would reset the connection and could destroy the answer on its way.
void Connection::Linger() {
  error_code ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  phase_ = Phase::kLinger;
  input_.clear();
  SetReadDeadline(kLingerSeconds);
  Read();
}

void Connection::Close(bool reset) {
  if (phase_ == Phase::kClosed) return;
  phase_ = Phase::kClosed;
  gone_.store(true);
  if (request_open_) EndResponse(499);
  generation_.reset();
  pending_.clear();
  error_code ignored;
  timer_.cancel();
  if (reset) socket_.set_option(asio::socket_base::linger(true, 0), ignored);
  socket_.close(ignored);
}

}  // namespace pliant
