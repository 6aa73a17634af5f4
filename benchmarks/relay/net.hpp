// What the mock worker and the load generator share: sockets, the clock, and the two incremental
// parts of HTTP/1.1 (head and body). It knows nothing of chats, tokens or measurements.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

namespace net {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

[[noreturn]] inline void die(const std::string& what) {
  fprintf(stderr, "%s: %s\n", what.c_str(), strerror(errno));
  exit(1);
}

// The harness is the owner: when it dies, however it dies, so do we.
inline void start_process() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGPIPE, SIG_IGN);
}

inline sockaddr_in loopback(int port) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_port = htons(port);
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return a;
}

inline void no_delay(int fd) {
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

inline int listen_on(int port) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  sockaddr_in a = loopback(port);
  if (bind(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) || listen(fd, 4096)) die("listen");
  return fd;
}

inline int connect_to(int port) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) die("socket");
  no_delay(fd);
  sockaddr_in a = loopback(port);
  if (connect(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) && errno != EINPROGRESS) {
    close(fd);
    return -1;
  }
  return fd;
}

inline void watch(int epoll, int op, int fd, uint32_t events) {
  epoll_event e{};
  e.events = events;
  e.data.fd = fd;
  if (epoll_ctl(epoll, op, fd, &e) && op != EPOLL_CTL_DEL) die("epoll_ctl");
}

// A one-shot alarm at an absolute instant, exact to the kernel's high resolution timer.
class Alarm {
 public:
  explicit Alarm(int epoll) : fd_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {
    watch(epoll, EPOLL_CTL_ADD, fd_, EPOLLIN | EPOLLET);
  }
  int fd() const { return fd_; }
  void set(int64_t at_ns) {
    if (at_ns == at_) return;
    at_ = at_ns;
    itimerspec t{};
    t.it_value.tv_sec = at_ns / 1'000'000'000;
    t.it_value.tv_nsec = at_ns % 1'000'000'000;
    timerfd_settime(fd_, TFD_TIMER_ABSTIME, &t, nullptr);
  }

 private:
  int fd_;
  int64_t at_ = 0;
};

// Value of a header in a complete head, or empty.
inline std::string_view header(std::string_view head, std::string_view name) {
  for (size_t at = head.find("\r\n"); at != head.npos; at = head.find("\r\n", at + 2)) {
    std::string_view line = head.substr(at + 2, head.find("\r\n", at + 2) - at - 2);
    if (line.size() <= name.size() || line[name.size()] != ':') continue;
    if (strncasecmp(line.data(), name.data(), name.size())) continue;
    line.remove_prefix(name.size() + 1);
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    return line;
  }
  return {};
}

inline bool has_token(std::string_view value, std::string_view token) {
  return value.size() >= token.size() && !strncasecmp(value.data(), token.data(), token.size());
}

// An HTTP/1.1 body as it arrives in pieces: by length, chunked, or until the peer closes.
class Body {
 public:
  void start(std::string_view head, bool until_close_allowed) {
    std::string_view length = header(head, "content-length");
    line_.clear();
    if (has_token(header(head, "transfer-encoding"), "chunked")) {
      at_ = At::size;
    } else if (!length.empty()) {
      left_ = strtoull(std::string(length).c_str(), nullptr, 10);
      at_ = left_ ? At::length : At::done;
    } else {
      at_ = until_close_allowed ? At::close : At::done;
    }
  }
  bool done() const { return at_ == At::done; }
  bool until_close() const { return at_ == At::close; }
  bool broken() const { return at_ == At::broken; }

  // Gives payload to `sink(data, size)`; returns how many bytes belonged to this body.
  template <class Sink>
  size_t feed(const char* p, size_t n, Sink&& sink) {
    size_t used = 0;
    while (used < n && at_ != At::done && at_ != At::broken) {
      if (at_ == At::size || at_ == At::gap || at_ == At::trailer) {
        used += take_line(p + used, n - used);
        continue;
      }
      size_t k = at_ == At::close ? n - used : std::min(n - used, left_);
      sink(p + used, k);
      used += k;
      if (at_ == At::close || (left_ -= k)) continue;
      at_ = at_ == At::data ? At::gap : At::done;
    }
    return used;
  }

 private:
  enum class At { size, data, gap, trailer, length, close, done, broken };

  size_t take_line(const char* p, size_t n) {
    const char* end = static_cast<const char*>(memchr(p, '\n', n));
    line_.append(p, end ? end - p : n);
    if (!end) return n;
    if (!line_.empty() && line_.back() == '\r') line_.pop_back();
    end_line();
    line_.clear();
    return end - p + 1;
  }
  void end_line() {
    if (at_ == At::gap) {
      at_ = line_.empty() ? At::size : At::broken;
    } else if (at_ == At::trailer) {
      if (line_.empty()) at_ = At::done;
    } else {
      char* end = nullptr;
      left_ = strtoull(line_.c_str(), &end, 16);
      at_ = end == line_.c_str() ? At::broken : left_ ? At::data : At::trailer;
    }
  }

  At at_ = At::done;
  size_t left_ = 0;
  std::string line_;
};

// The value after `"key":` in JSON text, or empty. Flat: the harness's prompts hold no quotes.
inline std::string_view json_value(std::string_view json, std::string_view key) {
  std::string quoted = '"' + std::string(key) + '"';
  for (size_t at = 0; (at = json.find(quoted, at)) != json.npos;) {
    at += quoted.size();
    size_t v = json.find_first_not_of(" \t\r\n", at);
    if (v == json.npos || json[v] != ':') continue;
    v = json.find_first_not_of(" \t\r\n", v + 1);
    return v == json.npos ? std::string_view{} : json.substr(v);
  }
  return {};
}

inline long json_int(std::string_view json, std::string_view key, long missing) {
  std::string_view v = json_value(json, key);
  if (v.empty() || !(v[0] == '-' || (v[0] >= '0' && v[0] <= '9'))) return missing;
  return strtol(std::string(v.substr(0, 20)).c_str(), nullptr, 10);
}

inline bool json_true(std::string_view json, std::string_view key) {
  return json_value(json, key).substr(0, 4) == "true";
}

}  // namespace net
