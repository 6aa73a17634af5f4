// Mock inference workers: any number of prefill and decode ports in one thread. They answer what
// vLLM answers, as fast as asked, and count what reached them, so that the harness can prove that
// both legs of every request ran. Decode text says which token it is and when it was sent.
//
//   relay-mock PREFILL_PORT,PREFILL_PORT DECODE_PORT,DECODE_PORT [--verbose]
//
// Asked for in the body: `max_tokens` = tokens of the answer (a prefill port never gives more than
// one); `interval_us=N` in the prompt's text = one token per N microseconds, 0 or absent = as fast
// as the socket takes them. In the text, because there are gateways that drop every field that
// they do not know, and some that they do.
#include <memory>
#include <queue>
#include <vector>

#include "net.hpp"

namespace {

using net::now_ns;

enum class Role { prefill, decode };

struct Counters {
  long requests = 0, handoffs = 0, open = 0;
};

struct Stream {
  long sent = -1, total = 0;  // -1: the role chunk is still to come
  int64_t start_ns = 0, phase_ns = 0, interval_ns = 0;
  bool usage = false, chat = true;
  int tail = 0;          // how many of the closing chunks (usage, [DONE], last) are out
  std::string chunk;     // one token's whole HTTP chunk; its digits are rewritten in place
  size_t digits = 0;     // where they are in it
  int64_t due() const { return interval_ns ? start_ns + phase_ns + sent * interval_ns : 0; }
};

struct Conn {
  int fd;
  unsigned generation;
  Role role;
  std::string in, body, out;
  bool in_body = false, streaming = false, waits_for_socket = false, close_after = false;
  net::Body reader;
  std::string head;
  Stream stream;
};

struct Due {
  int64_t at;
  int fd;
  unsigned generation;
  bool operator<(const Due& o) const { return at > o.at; }
};

const char* kTokenPrefix = " 00000@";
constexpr size_t kIndexDigits = 5, kTimeDigits = 13;

// Bounds how far an unpaced stream runs ahead, to some tens of tokens. With the kernel's own limit
// it is megabytes, and the gateway would move blocks of a thousand tokens that no engine sends.
const int kSendBuffer = 16384;

void put_digits(char* at, size_t n, int64_t value) {
  while (n--) at[n] = '0' + value % 10, value /= 10;
}

std::string token_text(long index, int64_t now) {
  std::string s = kTokenPrefix + std::string(kTimeDigits, '0');
  put_digits(&s[1], kIndexDigits, index);
  put_digits(&s[2 + kIndexDigits], kTimeDigits, now / 1000);
  return s;
}

std::string http_chunk(const std::string& data) {
  char size[20];
  snprintf(size, sizeof size, "%zx\r\n", data.size());
  return size + data + "\r\n";
}

std::string reply(int status, const char* type, const std::string& body) {
  return "HTTP/1.1 " + std::to_string(status) + (status == 200 ? " OK" : " Not Found") +
         "\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: " +
         std::to_string(body.size()) + "\r\ncontent-type: " + type + "\r\n\r\n" + body;
}

class Server {
 public:
  Server(const std::vector<int>& prefill, const std::vector<int>& decode, bool verbose)
      : epoll_(epoll_create1(EPOLL_CLOEXEC)), alarm_(epoll_), verbose_(verbose) {
    for (int port : prefill) add_listener(port, Role::prefill);
    for (int port : decode) add_listener(port, Role::decode);
  }

  [[noreturn]] void run() {
    epoll_event events[512];
    for (;;) {
      arm();
      int n = epoll_wait(epoll_, events, 512, eager_.empty() ? -1 : 0);
      for (int i = 0; i < n; i++) on_event(events[i].data.fd, events[i].events);
      emit_paced();
      emit_eager();
    }
  }

 private:
  void add_listener(int port, Role role) {
    int fd = net::listen_on(port);
    listeners_.resize(std::max<size_t>(listeners_.size(), fd + 1), -1);
    listeners_[fd] = static_cast<int>(role);
    net::watch(epoll_, EPOLL_CTL_ADD, fd, EPOLLIN);
  }

  void on_event(int fd, uint32_t events) {
    if (fd == alarm_.fd()) return;
    if (fd < static_cast<int>(listeners_.size()) && listeners_[fd] >= 0) {
      accept_all(fd);
      return;
    }
    Conn* c = find(fd);
    if (!c) return;
    if (events & EPOLLOUT) c = flush(c);
    if (c && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read_all(c);
  }

  Conn* find(int fd) { return fd < static_cast<int>(conns_.size()) ? conns_[fd].get() : nullptr; }
  Conn* find(const Due& d) {
    Conn* c = find(d.fd);
    return c && c->generation == d.generation && c->streaming ? c : nullptr;
  }

  void accept_all(int listener) {
    for (int fd; (fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
      net::no_delay(fd);
      setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kSendBuffer, sizeof kSendBuffer);
      if (fd >= static_cast<int>(conns_.size())) conns_.resize(fd + 64);
      conns_[fd] = std::make_unique<Conn>();
      conns_[fd]->fd = fd;
      conns_[fd]->generation = ++generation_;
      conns_[fd]->role = static_cast<Role>(listeners_[listener]);
      net::watch(epoll_, EPOLL_CTL_ADD, fd, EPOLLIN);
    }
  }

  Counters& counters(const Conn* c) { return counters_[static_cast<int>(c->role)]; }

  void drop(Conn* c) {
    if (c->streaming) counters(c).open--;
    int fd = c->fd;
    conns_[fd].reset();
    close(fd);
  }

  void read_all(Conn* c) {
    char buffer[65536];
    for (;;) {
      ssize_t n = recv(c->fd, buffer, sizeof buffer, 0);
      if (n < 0 && errno == EAGAIN) return;
      if (n <= 0) return drop(c);
      c->in.append(buffer, n);
      if (!advance(c)) return;
      if (n < static_cast<ssize_t>(sizeof buffer)) return;
    }
  }

  // Takes whole requests out of `in`, one at a time; false when the connection is gone.
  bool advance(Conn* c) {
    while (!c->streaming && !c->in.empty()) {
      if (!c->in_body) {
        size_t end = c->in.find("\r\n\r\n");
        if (end == c->in.npos) return true;
        c->head = c->in.substr(0, end + 2);
        c->in.erase(0, end + 4);
        c->reader.start(c->head, false);
        c->in_body = true;
        c->close_after = net::has_token(net::header(c->head, "connection"), "close");
      }
      size_t used = c->reader.feed(c->in.data(), c->in.size(),
                                   [c](const char* p, size_t n) { c->body.append(p, n); });
      c->in.erase(0, used);
      if (!c->reader.done()) return true;
      c->in_body = false;
      std::string body = std::move(c->body);
      c->body.clear();
      if (!answer(c, body)) return false;
    }
    return true;
  }

  bool answer(Conn* c, const std::string& body) {
    if (verbose_) fprintf(stderr, "%s\n%s\n----\n", c->head.c_str(), body.c_str());
    bool chat = c->head.find(" /v1/chat/completions ") != c->head.npos;
    if (!chat && c->head.find(" /v1/completions ") == c->head.npos)
      return write(c, other_route(c->head));
    Counters& count = counters(c);
    count.requests++;
    bool handed = c->role == Role::prefill ? net::json_true(body, "do_remote_decode")
                                           : net::json_true(body, "do_remote_prefill") &&
                                                 !net::json_value(body, "remote_block_ids").empty();
    count.handoffs += handed || !net::json_value(body, "bootstrap_room").empty();
    long tokens = net::json_int(body, "max_tokens", 16);
    tokens = net::json_int(body, "max_completion_tokens", tokens);
    if (c->role == Role::prefill) tokens = std::min(tokens, 1L);
    if (net::json_true(body, "stream")) return start_stream(c, body, tokens, chat);
    return write(c, reply(200, "application/json", whole_answer(c, tokens, chat)));
  }

  std::string other_route(const std::string& head) {
    auto is = [&](const char* path) { return head.compare(0, strlen(path), path) == 0; };
    if (is("GET /health")) return reply(200, "text/plain", "");
    if (is("GET /mock/stats")) return reply(200, "application/json", stats());
    if (is("GET /v1/models"))
      return reply(200, "application/json",
                   R"({"object":"list","data":[{"id":"mock","object":"model","created":1,)"
                   R"("owned_by":"vllm","root":"mock","parent":null,"max_model_len":131072}]})");
    if (is("GET /version")) return reply(200, "application/json", R"({"version":"0.32.0"})");
    if (is("GET /metrics"))
      return reply(200, "text/plain; version=0.0.4",
                   "vllm:num_requests_running{model_name=\"mock\"} 0.0\n");
    if (is("GET /get_server_info") || is("GET /server_info"))
      return reply(200, "application/json",
                   R"({"model_path":"mock","served_model_name":"mock","tp_size":1,"dp_size":1,)"
                   R"("version":"0.5.0","max_total_num_tokens":1000000})");
    if (is("GET /get_model_info") || is("GET /model_info"))
      return reply(200, "application/json",
                   R"({"model_path":"mock","tokenizer_path":"mock","is_generation":true})");
    return reply(404, "application/json", R"({"detail":"Not Found"})");
  }

  std::string stats() {
    auto one = [](const Counters& c) {
      return "{\"requests\":" + std::to_string(c.requests) +
             ",\"handoffs\":" + std::to_string(c.handoffs) +
             ",\"open\":" + std::to_string(c.open) + "}";
    };
    return "{\"prefill\":" + one(counters_[0]) + ",\"decode\":" + one(counters_[1]) + "}";
  }

  std::string next_id() {
    char id[33];
    snprintf(id, sizeof id, "%032lx", ++ids_);
    return id;
  }

  std::string usage(long tokens) {
    return "{\"prompt_tokens\":200,\"total_tokens\":" + std::to_string(200 + tokens) +
           ",\"completion_tokens\":" + std::to_string(tokens) +
           ",\"prompt_tokens_details\":null}";
  }

  std::string whole_answer(const Conn* c, long tokens, bool chat) {
    std::string id = (chat ? "chatcmpl-" : "cmpl-") + next_id(), text, s = "{\"id\":\"" + id;
    for (long i = 0; i < tokens; i++) text += token_text(i, now_ns());
    s += chat ? "\",\"object\":\"chat.completion\",\"created\":1767225600,\"model\":\"mock\","
                "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\""
              : "\",\"object\":\"text_completion\",\"created\":1767225600,\"model\":\"mock\","
                "\"choices\":[{\"index\":0,\"text\":\"";
    s += text;
    s += chat ? "\",\"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null,"
                "\"tool_calls\":[],\"reasoning\":null}"
              : "\"";
    s += ",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,"
         "\"token_ids\":null}],\"service_tier\":null,\"system_fingerprint\":null,\"usage\":" +
         usage(tokens) + ",\"prompt_logprobs\":null,\"prompt_token_ids\":null,";
    return s + "\"kv_transfer_params\":" + handoff(c, id) + "}";
  }

  // What a NIXL prefill worker hands over; null from a decode worker.
  std::string handoff(const Conn* c, const std::string& id) {
    if (c->role == Role::decode) return "null";
    return "{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
           "\"remote_block_ids\":[[1,2,3,4,5,6,7,8,9,10,11,12,13]],\"remote_engine_id\":\"P0\","
           "\"remote_request_id\":\"" + id + "-0-941f1253\",\"remote_host\":\"127.0.0.1\","
           "\"remote_port\":5601,\"tp_size\":1,\"dcp_size\":1,\"pp_size\":1,"
           "\"remote_num_tokens\":200,\"remote_blocks_expiry_time\":null,"
           "\"transfer_mode\":\"pull\",\"remote_prefill_cached_tokens\":0}";
  }

  std::string event(const std::string& choices, const std::string& tail = "") {
    return http_chunk(event_prefix_ + choices + tail + "}\n\n");
  }

  bool start_stream(Conn* c, const std::string& body, long tokens, bool chat) {
    Stream& s = c->stream = Stream{};
    s.total = tokens;
    s.chat = chat;
    s.usage = net::json_true(body, "include_usage");
    s.start_ns = now_ns();
    s.interval_ns = interval_us(body) * 1000;
    // Golden ratio steps spread any number of streams evenly over the interval.
    s.phase_ns = (++phases_ * 40503 % 65536) * s.interval_ns / 65536;
    event_prefix_ = std::string("data: {\"id\":\"") + (chat ? "chatcmpl-" : "cmpl-") + next_id() +
                    "\",\"object\":\"" + (chat ? "chat.completion.chunk" : "text_completion") +
                    "\",\"created\":1767225600,\"model\":\"mock\",\"choices\":";
    s.chunk = event(token_choice(chat, "null"));
    s.digits = s.chunk.find(kTokenPrefix) + 1;
    c->streaming = true;
    counters(c).open++;
    const char* head =
        "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
        "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    if (!write(c, head)) return false;
    if (chat && !write(c, event("[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
                                "\"logprobs\":null,\"finish_reason\":null}]",
                                ",\"prompt_token_ids\":null")))
      return false;
    s.sent = 0;
    if (!c->waits_for_socket) schedule(c);
    return true;
  }

  static int64_t interval_us(const std::string& body) {
    const char* mark = "interval_us=";
    size_t at = body.find(mark);
    return at == body.npos ? 0 : strtol(body.c_str() + at + strlen(mark), nullptr, 10);
  }

  static std::string token_choice(bool chat, const std::string& finish) {
    std::string text = kTokenPrefix + std::string(kTimeDigits, '0');
    return (chat ? "[{\"index\":0,\"delta\":{\"content\":\"" + text + "\"}"
                 : "[{\"index\":0,\"text\":\"" + text + "\"") +
           ",\"logprobs\":null,\"finish_reason\":" + finish + ",\"token_ids\":null}]";
  }

  void schedule(Conn* c) {
    const Stream& s = c->stream;
    if (s.interval_ns && s.sent < s.total)
      paced_.push({s.due(), c->fd, c->generation});
    else
      eager_.push_back({0, c->fd, c->generation});
  }

  void arm() {
    if (!paced_.empty()) alarm_.set(paced_.top().at);
  }

  void emit_paced() {
    int64_t now = paced_.empty() ? 0 : now_ns();
    while (!paced_.empty() && paced_.top().at <= now) {
      Due due = paced_.top();
      paced_.pop();
      emit(due);
    }
  }

  // One event for each stream that may run: as an engine's step gives each sequence one token.
  void emit_eager() {
    std::vector<Due> round;
    round.swap(eager_);
    for (const Due& due : round) emit(due);
  }

  void emit(const Due& due) {
    Conn* c = find(due);
    if (!c || c->waits_for_socket) return;  // flush() schedules it again
    Stream& s = c->stream;
    if (s.sent >= s.total) return end_stream(c);
    if (s.sent == s.total - 1) set_finish(s);
    put_digits(&s.chunk[s.digits], kIndexDigits, s.sent);
    put_digits(&s.chunk[s.digits + kIndexDigits + 1], kTimeDigits, now_ns() / 1000);
    s.sent++;
    if (write(c, s.chunk) && !c->waits_for_socket) schedule(c);
  }

  static void set_finish(Stream& s) {
    const std::string from = "\"finish_reason\":null", to = "\"finish_reason\":\"length\"";
    const size_t start = s.chunk.find("data: ");
    std::string data = s.chunk.substr(start, s.chunk.size() - start - 2);
    data.replace(data.find(from), from.size(), to);
    s.chunk = http_chunk(data);
    s.digits += s.chunk.find("data: ") - start;  // the size line may have grown
  }

  void end_stream(Conn* c) {
    Stream& s = c->stream;
    std::string data;
    if (s.tail == 0 && s.usage) data = usage_event(s);
    if (s.tail == 1) data = http_chunk("data: [DONE]\n\n");
    if (s.tail == 2) data = "0\r\n\r\n";
    if (++s.tail < 3) {
      if ((data.empty() || write(c, data)) && !c->waits_for_socket) schedule(c);
      return;
    }
    c->streaming = false;
    counters(c).open--;
    if (write(c, data)) advance(c);
  }

  std::string usage_event(const Stream& s) {
    size_t start = s.chunk.find("data: "), end = s.chunk.find("\"choices\":") + 10;
    return http_chunk(s.chunk.substr(start, end - start) + "[],\"usage\":" + usage(s.total) +
                      "}\n\n");
  }

  // False when the connection had to be dropped.
  bool write(Conn* c, const std::string& data) {
    if (!c->out.empty()) {
      c->out += data;
      return true;
    }
    ssize_t n = send(c->fd, data.data(), data.size(), 0);
    if (n < 0 && errno != EAGAIN) return drop(c), false;
    size_t done = n < 0 ? 0 : n;
    if (done < data.size()) {
      c->out = data.substr(done);
      c->waits_for_socket = true;
      net::watch(epoll_, EPOLL_CTL_MOD, c->fd, EPOLLIN | EPOLLOUT);
    } else if (c->close_after && !c->streaming) {
      return drop(c), false;
    }
    return true;
  }

  // Null when the connection had to be dropped.
  Conn* flush(Conn* c) {
    ssize_t n = send(c->fd, c->out.data(), c->out.size(), 0);
    if (n < 0 && errno != EAGAIN) return drop(c), nullptr;
    if (n > 0) c->out.erase(0, n);
    if (!c->out.empty()) return c;
    c->waits_for_socket = false;
    net::watch(epoll_, EPOLL_CTL_MOD, c->fd, EPOLLIN);
    if (c->streaming) schedule(c);
    else if (c->close_after) return drop(c), nullptr;
    return c;
  }

  int epoll_;
  net::Alarm alarm_;
  bool verbose_;
  std::vector<int> listeners_;
  std::vector<std::unique_ptr<Conn>> conns_;
  std::priority_queue<Due> paced_;
  std::vector<Due> eager_;
  Counters counters_[2];
  std::string event_prefix_;
  unsigned generation_ = 0;
  unsigned long ids_ = 0;
  int64_t phases_ = 0;
};

std::vector<int> ports(const char* text) {
  std::vector<int> out;
  for (char* end; *text; text = *end ? end + 1 : end) out.push_back(strtol(text, &end, 10));
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    fprintf(stderr, "usage: %s PREFILL_PORTS DECODE_PORTS [--verbose]\n", argv[0]);
    return 2;
  }
  net::start_process();
  Server server(ports(argv[1]), ports(argv[2]), argc > 3);
  printf("ready\n");
  fflush(stdout);
  server.run();
}
