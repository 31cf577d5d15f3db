/* Sending and receiving on the underlay: sendmmsg with UDP_SEGMENT, recvmmsg with UDP_GRO, or one call per datagram.
 *
 * A segmented send that is refused is repeated datagram by datagram. EIO (the device or the kernel cannot) ends
 * segmentation on that socket for good, EINVAL and EMSGSIZE (a path with a small MTU) on that path. */
#include "fdinternal.h" /* first: it asks for sendmmsg */

#include <errno.h>
#include <poll.h>
#include <unistd.h>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif
#define SEND_TRIES 4
#define SEND_WAIT_MS 5

#if FD_LINUX
typedef struct mmsghdr many_message;
#define send_many sendmmsg
#define receive_many recvmmsg
#else
typedef struct {
  struct msghdr msg_hdr;
  unsigned msg_len;
} many_message;

static int send_many(int fd, many_message *m, unsigned messages, int flags) {
  (void)messages;
  return sendmsg(fd, &m->msg_hdr, flags) < 0 ? -1 : 1;
}

static int receive_many(int fd, many_message *m, unsigned messages, int flags, void *timeout) {
  (void)messages, (void)timeout;
  ssize_t got = recvmsg(fd, &m->msg_hdr, flags);
  m->msg_len = got < 0 ? 0 : (unsigned)got;
  return got < 0 ? -1 : 1;
}
#endif

typedef struct {
  many_message messages[SEND_MOST_MESSAGES];
  struct iovec parts[SEND_MOST_MESSAGES];
  struct sockaddr_storage names[SEND_MOST_MESSAGES];
  const core_run *runs[SEND_MOST_MESSAGES];
  union {
    char bytes[CMSG_SPACE(sizeof(uint16_t))];
    struct cmsghdr align;
  } controls[SEND_MOST_MESSAGES];
  uint32_t used, socket;
} send_batch;

static socklen_t make_name(const core_path *path, struct sockaddr_storage *out) {
  memset(out, 0, sizeof *out);
  if (path->family == 4) {
    struct sockaddr_in *v4 = (struct sockaddr_in *)out;
    v4->sin_family = AF_INET;
    v4->sin_port = htons(path->port);
    memcpy(&v4->sin_addr, path->ip, 4);
    return sizeof *v4;
  }
  struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(path->port);
  v6->sin6_scope_id = path->scope;
  memcpy(&v6->sin6_addr, path->ip, 16);
  return sizeof *v6;
}

/* 1: try this message again, 0: leave it. */
static int wait_for_room(fdpump *p, int fd, int *tries) {
  if (++*tries >= SEND_TRIES || atomic_load(&p->stopping)) return 0;
  struct pollfd wanted = {fd, POLLOUT, 0};
  count(p, FD_UDP_SEND_WAITS, 1);
  if (errno == ENOBUFS) poll(NULL, 0, 1); /* the device's queue: the socket is writable all the time */
  else poll(&wanted, 1, SEND_WAIT_MS);
  return 1;
}

static void note_failure(fdpump *p, const core_run *run, const struct sockaddr_storage *name, int error) {
  count(p, FD_UDP_SEND_ERRORS, 1);
  up_send_error(p, run->peer, error, name);
}

static void count_sent(fdpump *p, int is_v6, uint64_t datagrams, uint64_t bytes) {
  count(p, is_v6 ? FD_UDP6_DATAGRAMS_SENT : FD_UDP4_DATAGRAMS_SENT, datagrams);
  count(p, is_v6 ? FD_UDP6_BYTES_SENT : FD_UDP4_BYTES_SENT, bytes);
}

static void send_singly(fdpump *p, int fd, const core_run *run, struct sockaddr_storage *name, socklen_t name_bytes) {
  int tries = 0;
  for (uint32_t at = 0; at < run->bytes;) {
    uint32_t bytes = run->bytes - at < run->datagram_bytes ? run->bytes - at : run->datagram_bytes;
    if (sendto(fd, run->out + at, bytes, 0, (struct sockaddr *)name, name_bytes) < 0) {
      int error = errno;
      if (error == EINTR || ((error == EAGAIN || error == ENOBUFS) && wait_for_room(p, fd, &tries))) continue;
      note_failure(p, run, name, error);
      if (error != EAGAIN && error != ENOBUFS) return; /* the others will fare the same */
    } else {
      count_sent(p, run->path.family == 6, 1, bytes);
    }
    tries = 0;
    at += bytes;
  }
}

static int is_segmented(const many_message *m) { return m->msg_hdr.msg_controllen != 0; }

/* The first message of what is left was refused. 1: try it again. */
static int refused(fdpump *p, send_batch *b, uint32_t at, int fd, int *tries) {
  int error = errno;
  const core_run *run = b->runs[at];
  if (error == EINTR || ((error == EAGAIN || error == ENOBUFS) && wait_for_room(p, fd, tries))) return 1;
  if (is_segmented(&b->messages[at]) && (error == EIO || error == EINVAL || error == EMSGSIZE)) {
    count(p, FD_UDP_GSO_REFUSED, 1);
    if (error == EIO) atomic_store(&p->udp_gso[b->socket], 0);
    else core_refuse_gso(p->core, run->peer, &run->path);
    send_singly(p, fd, run, &b->names[at], b->messages[at].msg_hdr.msg_namelen);
    return 0;
  }
  note_failure(p, run, &b->names[at], error);
  return 0;
}

static void flush(fdpump *p, send_batch *b) {
  int fd = p->options.udp_fd[b->socket], tries = 0;
  for (uint32_t at = 0; at < b->used;) {
    int sent = send_many(fd, b->messages + at, b->used - at, 0);
    if (sent <= 0) {
      if (!refused(p, b, at, fd, &tries)) at++, tries = 0;
      continue;
    }
    tries = 0;
    count(p, FD_UDP_SENDS, 1);
    for (int i = 0; i < sent; i++, at++) {
      uint64_t datagrams = is_segmented(&b->messages[at]) ? b->runs[at]->count : 1;
      count_sent(p, (int)b->socket, datagrams, b->parts[at].iov_len);
    }
  }
  b->used = 0;
}

static void add_message(fdpump *p, send_batch *b, const core_run *run, uint32_t from, uint32_t bytes, uint16_t unit) {
  if (b->used == SEND_MOST_MESSAGES) flush(p, b);
  uint32_t at = b->used++;
  struct msghdr *m = &b->messages[at].msg_hdr;
  b->runs[at] = run;
  b->parts[at] = (struct iovec){run->out + from, bytes};
  *m = (struct msghdr){.msg_name = &b->names[at], .msg_iov = &b->parts[at], .msg_iovlen = 1};
  m->msg_namelen = make_name(&run->path, &b->names[at]);
  if (!unit) return;
  m->msg_control = b->controls[at].bytes;
  m->msg_controllen = sizeof b->controls[at].bytes;
  struct cmsghdr *c = CMSG_FIRSTHDR(m);
  c->cmsg_level = IPPROTO_UDP;
  c->cmsg_type = UDP_SEGMENT;
  c->cmsg_len = CMSG_LEN(sizeof unit);
  memcpy(CMSG_DATA(c), &unit, sizeof unit);
}

static void add_run(fdpump *p, send_batch *b, const core_run *run) {
  uint32_t socket = run->path.family == 6;
  if (p->options.udp_fd[socket] < 0) {
    count(p, FD_UDP_NO_SOCKET, run->count);
    return;
  }
  if (b->used && b->socket != socket) flush(p, b);
  b->socket = socket;
  if (run->count == 1 || (!run->path.no_gso && atomic_load_explicit(&p->udp_gso[socket], memory_order_relaxed))) {
    add_message(p, b, run, 0, run->bytes, run->count == 1 ? 0 : (uint16_t)run->datagram_bytes);
    return;
  }
  for (uint32_t at = 0; at < run->bytes; at += run->datagram_bytes)
    add_message(p, b, run, at, run->bytes - at < run->datagram_bytes ? run->bytes - at : run->datagram_bytes, 0);
}

void udp_send_runs(fdpump *p, const core_run *runs, size_t run_count) {
  send_batch b;
  b.used = 0;
  for (size_t i = 0; i < run_count; i++) {
    const core_run *run = &runs[i];
    if (run->path.up || !run->path.family) {
      struct iovec whole = {run->out, run->bytes};
      up_bytes(p, UP_SEALED, run->peer, run->datagram_bytes, &whole, 1);
    }
    if (run->path.family) add_run(p, &b, run);
  }
  flush(p, &b);
}

static uint32_t unit_of(struct msghdr *m, uint32_t bytes) {
  for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
    int unit;
    if (c->cmsg_level != IPPROTO_UDP || c->cmsg_type != UDP_GRO || c->cmsg_len < CMSG_LEN(sizeof unit)) continue;
    memcpy(&unit, CMSG_DATA(c), sizeof unit);
    if (unit > 0) return (uint32_t)unit;
  }
  return bytes;
}

int udp_receive(fdpump *p, int family, uint8_t *const buffers[RX_BUFFERS], udp_arrival *out) {
  many_message m[RX_BUFFERS];
  struct iovec parts[RX_BUFFERS];
  union {
    char bytes[64];
    struct cmsghdr align;
  } controls[RX_BUFFERS];
  for (int i = 0; i < RX_BUFFERS; i++) {
    parts[i] = (struct iovec){buffers[i], FRAME_MOST_BYTES};
    m[i].msg_hdr = (struct msghdr){.msg_iov = &parts[i], .msg_iovlen = 1, .msg_name = &out[i].source,
                                   .msg_namelen = sizeof out[i].source, .msg_control = controls[i].bytes,
                                   .msg_controllen = sizeof controls[i].bytes};
    out[i].source.ss_family = 0;
  }
  int got = receive_many(p->options.udp_fd[family], m, RX_BUFFERS, MSG_DONTWAIT, NULL);
  if (got <= 0) return 0; /* nothing there, or an error of an earlier send, which is cleared by asking */
  count(p, FD_UDP_RECEIVES, 1);
  for (int i = 0; i < got; i++) {
    out[i].at = buffers[i];
    out[i].bytes = m[i].msg_len;
    out[i].unit = unit_of(&m[i].msg_hdr, m[i].msg_len);
    count(p, family ? FD_UDP6_BYTES : FD_UDP4_BYTES, m[i].msg_len);
    count(p, family ? FD_UDP6_DATAGRAMS : FD_UDP4_DATAGRAMS, out[i].unit ? (m[i].msg_len + out[i].unit - 1) / out[i].unit : 1);
  }
  return got;
}
