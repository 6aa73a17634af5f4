// The floor under every gateway's figures: each connection is tied to a worker and its bytes are
// moved as they come, no HTTP, no handoff. What remains is what the kernel costs.
//
//   relay-floor PORT WORKER_PORT [WORKER_PORT...]
#include <memory>
#include <vector>

#include "net.hpp"

namespace {

struct Side {
  Side* peer = nullptr;
  int fd = -1;
  std::string out;  // what the socket has not taken; while it holds any, the peer is not read
};

int epoll;
std::vector<std::unique_ptr<Side>> sides;

void watch(Side* s, int op) {
  uint32_t read = s->peer->out.empty() ? uint32_t{EPOLLIN} : 0;
  uint32_t write = s->out.empty() ? 0 : uint32_t{EPOLLOUT};
  net::watch(epoll, op, s->fd, read | write);
}

Side* adopt(int fd) {
  if (fd >= static_cast<int>(sides.size())) sides.resize(fd + 64);
  sides[fd] = std::make_unique<Side>();
  sides[fd]->fd = fd;
  return sides[fd].get();
}

void accept_all(int listener, const std::vector<int>& workers) {
  static size_t next = 0;
  for (int fd; (fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;) {
    int up = net::connect_to(workers[next++ % workers.size()]);
    if (up < 0) {
      close(fd);
      continue;
    }
    net::no_delay(fd);
    Side *client = adopt(fd), *worker = adopt(up);
    client->peer = worker, worker->peer = client;
    watch(client, EPOLL_CTL_ADD);
    watch(worker, EPOLL_CTL_ADD);
  }
}

void drop(Side* s) {
  for (int fd : {s->peer->fd, s->fd}) {
    sides[fd].reset();
    close(fd);
  }
}

// Sends what it can; false when the pair is gone.
bool push(Side* s, const char* p, size_t n) {
  ssize_t sent = send(s->fd, p, n, 0);
  if (sent < 0 && errno != EAGAIN) return drop(s), false;
  size_t done = sent < 0 ? 0 : sent;
  bool blocked = !s->out.empty();
  if (blocked) s->out.erase(0, done);
  else s->out.assign(p + done, n - done);
  if (blocked == s->out.empty()) watch(s, EPOLL_CTL_MOD), watch(s->peer, EPOLL_CTL_MOD);
  return true;
}

void on_event(Side* s, uint32_t events) {
  static char buffer[65536];
  if ((events & EPOLLOUT) && !s->out.empty() && !push(s, s->out.data(), s->out.size())) return;
  if (!(events & ~EPOLLOUT) || !s->peer->out.empty()) return;
  ssize_t n = recv(s->fd, buffer, sizeof buffer, 0);
  if (n > 0) push(s->peer, buffer, n);
  else if (n == 0 || errno != EAGAIN) drop(s);
}

}  // namespace

int main(int argc, char** argv) {
  net::start_process();
  std::vector<int> workers;
  for (int i = 2; i < argc; i++) workers.push_back(atoi(argv[i]));
  if (workers.empty()) return 2;
  epoll = epoll_create1(EPOLL_CLOEXEC);
  int listener = net::listen_on(atoi(argv[1]));
  net::watch(epoll, EPOLL_CTL_ADD, listener, EPOLLIN);
  epoll_event events[512];
  for (;;) {
    int n = epoll_wait(epoll, events, 512, -1);
    for (int i = 0; i < n; i++) {
      int fd = events[i].data.fd;
      if (fd == listener) accept_all(listener, workers);
      else if (sides[fd]) on_event(sides[fd].get(), events[i].events);
    }
  }
}
