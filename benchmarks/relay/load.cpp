// Load generator: one thread, HTTP/1.1 keep-alive, closed loop or open loop. It checks every token
// of every answer against its place in the stream, so that a fast but wrong gateway shows as errors.
//
//   relay-load --port N [--rate R] [--connections N] [--ramp R] [--each N] [--prompt-bytes N]
//              [--max-tokens N] [--interval-us N] [--json] [--seed N]
//
// --rate R   open loop: requests arrive as a Poisson process, whatever the answers do, and latency
//            counts from the arrival. Without it: closed loop over --connections, which open at
//            --ramp a second and make --each requests (0 = no limit).
// --json     ask for a whole answer instead of a stream.
//
// Commands on stdin: `mark` prints a line of JSON (totals; percentiles since the last mark),
// `stop` begins no new request, prints a last line when all have ended, and exits.
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "net.hpp"

namespace {

using net::now_ns;

struct Options {
  int port = 0, connections = 1, ramp = 2000, each = 0, prompt_bytes = 1024, max_tokens = 2;
  long interval_us = 0;
  double rate = 0;
  bool json = false;
  unsigned seed = 1;
};

struct Samples {
  std::vector<float> ms;
  void add(int64_t ns) { ms.push_back(ns / 1e6f); }
  double at(double q) {
    if (ms.empty()) return 0;
    size_t k = std::min(ms.size() - 1, static_cast<size_t>(q * ms.size()));
    std::nth_element(ms.begin(), ms.begin() + k, ms.end());
    return ms[k];
  }
  std::string json() {
    char out[160];
    snprintf(out, sizeof out, "{\"n\":%zu,\"p50\":%.4f,\"p90\":%.4f,\"p99\":%.4f,\"max\":%.4f}",
             ms.size(), at(.5), at(.9), at(.99), at(1));
    ms.clear();
    return out;
  }
};

struct Conn {
  int fd = -1;
  long made = 0;
  bool busy = false, in_body = false, failed = false, close_after = false, any_byte = false;
  int64_t since_ns = 0;
  std::string out, head, line, body;
  net::Body reader;
  long tokens = 0, usage = -1;
  bool finished = false, done = false;
};

class Load {
 public:
  explicit Load(const Options& o)
      : o_(o), epoll_(epoll_create1(EPOLL_CLOEXEC)), alarm_(epoll_), random_(o.seed) {
    const char* words[] = {"alpha ", "river ", "of ", "seven ", "the ", "stone ", "and ", "light "};
    while (text_.size() < (1u << 20) + static_cast<size_t>(o.prompt_bytes))
      text_ += words[random_() % 8];
    net::watch(epoll_, EPOLL_CTL_ADD, STDIN_FILENO, EPOLLIN);
    next_ns_ = now_ns();
  }

  int run() {
    epoll_event events[512];
    while (!(stopping_ && in_flight_ == 0)) {
      start_due();
      int n = epoll_wait(epoll_, events, 512, -1);
      for (int i = 0; i < n; i++) {
        int fd = events[i].data.fd;
        if (fd == STDIN_FILENO && !command()) return 1;
        if (fd == STDIN_FILENO || fd == alarm_.fd()) continue;
        on_event(fd, events[i].events);
      }
    }
    mark();
    return 0;
  }

 private:
  bool open_loop() const { return o_.rate > 0; }

  // Starts what is due by now, and sets the alarm for what is not.
  void start_due() {
    int64_t now = now_ns();
    while (!stopping_ && next_ns_ <= now && (open_loop() || opened_ < o_.connections)) {
      if (open_loop()) {
        begin(idle_.empty() ? add() : take_idle(), next_ns_);
        next_ns_ += std::exponential_distribution<>(o_.rate)(random_) * 1e9;
      } else {
        begin(add(), now);
        next_ns_ += 1'000'000'000 / o_.ramp;
      }
    }
    if (!stopping_ && (open_loop() || opened_ < o_.connections)) alarm_.set(next_ns_);
  }

  Conn* add() {
    opened_++;
    all_.push_back(std::make_unique<Conn>());
    return all_.back().get();
  }
  Conn* take_idle() {  // last in, first out: the others grow old and the peer may close them
    Conn* c = idle_.back();
    idle_.pop_back();
    return c;
  }

  void begin(Conn* c, int64_t since) {
    c->busy = true, c->failed = c->in_body = c->any_byte = c->finished = c->done = false;
    c->close_after = false;
    c->since_ns = since, c->tokens = 0, c->usage = -1;
    c->head.clear(), c->line.clear(), c->body.clear();
    c->out = request();
    c->made++, in_flight_++;
    if (c->fd < 0) return dial(c);
    flush(c);
  }

  void dial(Conn* c) {
    c->fd = net::connect_to(o_.port);
    if (c->fd < 0) return fail(c, "connect");
    if (c->fd >= static_cast<int>(by_fd_.size())) by_fd_.resize(c->fd + 64);
    by_fd_[c->fd] = c;
    net::watch(epoll_, EPOLL_CTL_ADD, c->fd, EPOLLIN | EPOLLOUT);
  }

  std::string request() {
    std::string prompt = "interval_us=" + std::to_string(o_.interval_us) + " request " +
                         std::to_string(o_.seed) + "-" + std::to_string(++requests_) + " ";
    prompt += text_.substr(random_() % (1u << 20), o_.prompt_bytes);
    prompt.resize(o_.prompt_bytes);
    std::string body = "{\"model\":\"mock\",\"messages\":[{\"role\":\"user\",\"content\":\"" +
                       prompt + "\"}],\"max_tokens\":" + std::to_string(o_.max_tokens) +
                       ",\"temperature\":0";
    body += o_.json ? ",\"stream\":false}"
                    : ",\"stream\":true,\"stream_options\":{\"include_usage\":true}}";
    return "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:" + std::to_string(o_.port) +
           "\r\nUser-Agent: relay-load\r\nAccept: */*\r\nContent-Type: application/json\r\n"
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  }

  void on_event(int fd, uint32_t events) {
    Conn* c = by_fd_[fd];
    if (!c) return;
    if ((events & EPOLLOUT) && !flush(c)) return;
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_all(c);
  }

  bool flush(Conn* c) {
    if (c->out.empty()) return true;
    ssize_t n = send(c->fd, c->out.data(), c->out.size(), 0);
    if (n < 0 && errno != EAGAIN) return fail(c, "send"), false;
    if (n > 0) c->out.erase(0, n);
    net::watch(epoll_, EPOLL_CTL_MOD, c->fd, c->out.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT);
    return true;
  }

  void read_all(Conn* c) {
    static char buffer[262144];
    ssize_t n = recv(c->fd, buffer, sizeof buffer, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return on_close(c);
    if (!c->busy) return hang_up(c);  // bytes that nobody asked for
    c->any_byte = true, reads_++;
    now_ = now_ns();
    take(c, buffer, n);
  }

  void take(Conn* c, const char* p, size_t n) {
    if (!c->in_body) {
      size_t before = c->head.size();
      c->head.append(p, n);
      size_t end = c->head.find("\r\n\r\n", before < 3 ? 0 : before - 3);
      if (end == c->head.npos) return;
      size_t used = end + 4 - before;
      c->head.resize(end + 2);
      p += used, n -= used;
      if (!start_body(c)) return;
    }
    size_t used = c->reader.feed(p, n, [&](const char* q, size_t k) { payload(c, q, k); });
    if (c->failed) return;
    if (c->reader.broken()) return fail(c, "bad chunk");
    if (c->reader.done()) used == n ? finish(c) : fail(c, "bytes after the end");
  }

  bool start_body(Conn* c) {
    if (c->head.compare(0, 9, "HTTP/1.1 ") || c->head.compare(9, 3, "200"))
      return fail(c, "status " + c->head.substr(9, 3)), false;
    c->reader.start(c->head, true);
    c->in_body = true;
    c->close_after = net::has_token(net::header(c->head, "connection"), "close");
    return true;
  }

  void payload(Conn* c, const char* p, size_t n) {
    if (c->failed) return;
    if (o_.json) {
      c->body.append(p, n);
      return;
    }
    while (n) {
      const char* end = static_cast<const char*>(memchr(p, '\n', n));
      size_t k = end ? end - p : n;
      if (!end || !c->line.empty()) c->line.append(p, k);
      if (!end) return;
      sse_line(c, c->line.empty() ? std::string_view(p, k) : std::string_view(c->line));
      if (c->failed) return;
      c->line.clear();
      p += k + 1, n -= k + 1;
    }
  }

  void sse_line(Conn* c, std::string_view line) {
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.substr(0, 6) != "data: ") return;
    line.remove_prefix(6);
    if (line == "[DONE]") {
      c->done = true;
      return;
    }
    if (line.substr(0, 8) == "{\"error\"") return fail(c, "error event");
    size_t usage = line.rfind("\"completion_tokens\":");
    if (usage != line.npos) c->usage = net::json_int(line.substr(usage), "completion_tokens", -1);
    std::string_view content = net::json_value(line, "content");
    if (content.size() > 2 && content[0] == '"' && content[1] != '"') token(c, content.substr(1));
    if (line.find("\"finish_reason\":\"length\"") != line.npos) c->finished = true;
  }

  // A token's text is ` IIIII@TTTTTTTTTTTTT`: its index and when it was sent, in microseconds.
  bool token(Conn* c, std::string_view text) {
    if (text.size() < 20 || text[0] != ' ' || text[6] != '@') return fail(c, "bad token"), false;
    long index = 0;
    int64_t sent_us = 0;
    for (size_t i = 1; i < 6; i++) index = index * 10 + (text[i] - '0');
    for (size_t i = 7; i < 20; i++) sent_us = sent_us * 10 + (text[i] - '0');
    if (index != c->tokens) return fail(c, "token lost or doubled"), false;
    if (index == 0) ttft_.add(now_ - c->since_ns), streams_ += !o_.json;
    if (!o_.json) token_.add(now_ - sent_us * 1000);
    c->tokens++, tokens_++;
    return true;
  }

  void finish(Conn* c) {
    if (o_.json && !whole_answer(c)) return;
    if (!o_.json && !(c->done && c->finished)) return fail(c, "truncated");
    if (c->tokens != o_.max_tokens) return fail(c, "wrong number of tokens");
    if (c->usage != o_.max_tokens) return fail(c, "wrong usage");
    latency_.add(now_ - c->since_ns);
    ok_++;
    end(c);
    if (c->close_after) hang_up(c);
    next(c);
  }

  bool whole_answer(Conn* c) {
    size_t at = c->body.find("\"content\":");
    if (at == c->body.npos) return fail(c, "no content"), false;
    std::string_view text = net::json_value(std::string_view(c->body).substr(at), "content");
    for (text.remove_prefix(1); text.size() > 20 && text[0] == ' '; text.remove_prefix(20))
      if (!token(c, text)) return false;
    c->usage = net::json_int(c->body, "completion_tokens", -1);
    return true;
  }

  void on_close(Conn* c) {
    if (!c->busy) return hang_up(c);
    if (c->in_body && c->reader.until_close()) return c->close_after = true, finish(c);
    fail(c, c->any_byte ? "truncated" : "closed before an answer");
  }

  void end(Conn* c) {
    c->busy = false, in_flight_--;
    if (!o_.json && c->tokens) streams_--;
  }

  void fail(Conn* c, const std::string& why) {
    c->failed = true;
    errors_[why]++;
    end(c);
    hang_up(c);
    retry_later(c);
  }

  // After a failure a closed loop goes on at the ramp's pace, so that a dead peer is no busy loop.
  void retry_later(Conn* c) {
    if (open_loop() || (o_.each && c->made >= o_.each)) return;
    opened_--;
    next_ns_ = std::max(next_ns_, now_ns() + 1'000'000'000 / o_.ramp);
  }

  void hang_up(Conn* c) {
    if (c->fd < 0) return;
    by_fd_[c->fd] = nullptr;
    close(c->fd);
    c->fd = -1;
    idle_.erase(std::remove(idle_.begin(), idle_.end(), c), idle_.end());
  }

  void next(Conn* c) {
    if (open_loop()) {
      if (c->fd >= 0) idle_.push_back(c);
    } else if (!stopping_ && !(o_.each && c->made >= o_.each)) {
      begin(c, now_ns());
    }
  }

  bool command() {
    char text[256];
    ssize_t n = read(STDIN_FILENO, text, sizeof text);
    if (n <= 0) return false;  // the harness is gone
    std::string_view all(text, n);
    if (all.find("mark") != all.npos) mark();
    if (all.find("stop") != all.npos) stopping_ = true;
    return true;
  }

  void mark() {
    long failed = 0;
    std::string kinds;
    for (auto& [why, count] : errors_) {
      failed += count;
      kinds += (kinds.empty() ? "\"" : ",\"") + why + "\":" + std::to_string(count);
    }
    printf("{\"ns\":%lld,\"ok\":%ld,\"tokens\":%ld,\"reads\":%ld,\"in_flight\":%ld,"
           "\"streams\":%ld,\"errors\":%ld,\"error_kinds\":{%s},\"latency_ms\":%s,\"ttft_ms\":%s,\"token_ms\":%s}\n",
           static_cast<long long>(now_ns()), ok_, tokens_, reads_, in_flight_, streams_, failed,
           kinds.c_str(), latency_.json().c_str(), ttft_.json().c_str(), token_.json().c_str());
    fflush(stdout);
  }

  Options o_;
  int epoll_;
  net::Alarm alarm_;
  std::mt19937 random_;
  std::string text_;
  std::vector<std::unique_ptr<Conn>> all_;
  std::vector<Conn*> by_fd_, idle_;
  int64_t next_ns_ = 0, now_ = 0;
  int opened_ = 0;
  long requests_ = 0, in_flight_ = 0, streams_ = 0, ok_ = 0, tokens_ = 0, reads_ = 0;
  bool stopping_ = false;
  std::map<std::string, long> errors_;
  Samples latency_, ttft_, token_;
};

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; i++) {
    std::string name = argv[i];
    if (name == "--json") {
      o.json = true;
      continue;
    }
    double value = i + 1 < argc ? atof(argv[++i]) : 0;
    if (name == "--port") o.port = value;
    else if (name == "--connections") o.connections = value;
    else if (name == "--ramp") o.ramp = value;
    else if (name == "--each") o.each = value;
    else if (name == "--prompt-bytes") o.prompt_bytes = value;
    else if (name == "--max-tokens") o.max_tokens = value;
    else if (name == "--interval-us") o.interval_us = value;
    else if (name == "--rate") o.rate = value;
    else if (name == "--seed") o.seed = value;
    else fprintf(stderr, "unknown option %s\n", name.c_str()), exit(2);
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  net::start_process();
  return Load(parse(argc, argv)).run();
}
