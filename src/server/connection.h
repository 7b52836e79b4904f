// Room: server. One client connection: reads requests one after the other, answers them, notices at
// once when the client goes. Everything but the public functions runs on the connection's strand.
#pragma once

#include <array>
#include <atomic>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "server/server_core.h"

namespace pliant {

/// Reading never stops while a request is being answered: the end of the input then means that the
/// client has gone, and cancels the work; what a client sends ahead is kept up to a bound. Writing
/// goes through one buffer; a stream whose client does not read is cut when the buffer passes its
/// bound.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(ServerCore* core, boost::asio::ip::tcp::socket socket,
             std::unique_ptr<ConnectionPermit> permit);
  ~Connection();

  /// Begins to read. Any thread, once.
  void Start();
  /// Ends after the answer under way, or now when idle. Any thread.
  void Drain();
  /// Closes now and cancels. Any thread.
  void Abort();

 private:
  enum class Phase {
    kHead,    // a request's header is awaited or being read
    kBody,    // its body is being read
    kBusy,    // it is being answered
    kLinger,  // answered and done; input is thrown away until the client closes
    kClosed,
  };
  using TimePoint = std::chrono::steady_clock::time_point;
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;

  // Reading.
  void Read();
  void OnRead(boost::system::error_code error, std::size_t bytes);
  void OnInputEnd();
  void Process();
  bool ProcessHead();  // each returns whether Process shall go on
  bool ProcessBody();
  void OnHead();
  void OnBodyComplete();
  void OnParseError(boost::system::error_code error);
  void RefuseBody(const ApiError& error);

  // Answering.
  void StartJob();
  void OnPosted(Api::Posted posted);
  void OnMail();
  void Respond(const HttpResponse& response);
  bool ReaderIsTooSlow();
  void StartStream();
  void SendChunk(const std::string& data);
  void EndResponse(int code);
  void NextRequest();
  std::string HeaderText(int status, const HttpResponse& response,
                         const std::string& framing) const;

  // Writing.
  void Send(std::string data);
  void Write();
  void OnWritten(boost::system::error_code error, std::size_t bytes);

  // Time and end.
  void SetReadDeadline(double seconds);
  void ClearReadDeadline() { read_deadline_ = TimePoint::max(); }
  void ArmTimer();
  void OnTimer();
  void OnReadTimeout();
  bool PeerHasClosed();
  void Linger();
  void Close(bool reset = false);

  ServerCore* core_;
  boost::asio::ip::tcp::socket socket_;
  boost::asio::any_io_executor executor_;
  std::unique_ptr<ConnectionPermit> permit_;
  boost::asio::steady_timer timer_;

  Phase phase_ = Phase::kHead;
  std::array<char, 8192> read_buffer_;  // where the read under way puts its bytes
  std::string input_;                   // read and not yet taken
  std::optional<Parser> parser_;
  bool reading_ = false;
  bool head_started_ = false;  // a byte of the header has come
  bool unread_input_ = false;  // answered before the request was read to its end
  bool peer_eof_ = false;
  BodyPermit body_permit_;

  // The request being answered.
  HttpRequestHead head_;
  Route route_ = Route::kNone;
  std::optional<HttpResponse> ready_answer_;  // waits for the rest of a small body
  bool head_only_ = false;                    // HEAD
  bool http_1_0_ = false;
  bool keep_alive_ = false;
  bool request_open_ = false;  // not answered yet
  bool work_open_ = false;     // counted in open_requests
  bool stream_open_ = false;   // counted in open_streams
  bool response_done_ = false;
  bool job_running_ = false;
  TimePoint request_start_;
  std::unique_ptr<Generation> generation_;
  std::atomic<bool> gone_{false};  // for workers: do not begin

  std::string pending_, writing_;
  std::size_t written_ = 0;  // of writing_
  bool write_active_ = false;

  TimePoint read_deadline_ = TimePoint::max(), write_deadline_ = TimePoint::max(),
            timer_at_ = TimePoint::max(), over_since_ = TimePoint::max();
};

}  // namespace pliant
