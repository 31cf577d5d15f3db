/* Life of the pump: its threads, how they wait, and counters. */
#include "fdpump.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <time.h>

#include "fdinternal.h"

#define LATE_ATTENTION_MS 100

static const char *const names[FD_COUNTERS] = {
    "tun_reads", "tun_frames", "tun_read_bytes", "tun_writes", "tun_written_bytes", "tun_write_errors", "tun_gso_refused",
    "tun_malformed", "udp_sends", "udp4_datagrams_sent", "udp4_bytes_sent", "udp6_datagrams_sent", "udp6_bytes_sent",
    "udp_send_errors", "udp_send_waits",
    "udp_gso_refused", "udp_no_socket", "udp_receives", "udp4_datagrams", "udp4_bytes", "udp6_datagrams", "udp6_bytes",
    "mss_lowered", "filter_passed", "filter_asked",
    "up_messages", "up_overflow"};

const char *fd_counter_name(int counter) { return counter >= 0 && counter < FD_COUNTERS ? names[counter] : NULL; }

double fd_now(void) { /* the clock of `tsd.base.clock.SystemClock` */
  struct timespec t;
#ifdef CLOCK_BOOTTIME
  clock_gettime(CLOCK_BOOTTIME, &t);
#else
  clock_gettime(CLOCK_MONOTONIC, &t);
#endif
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

fdpump *fdpump_new(core *c, const fdpump_options *options) {
  fdpump *p = calloc(1, sizeof *p);
  if (!p) return NULL;
  p->core = c;
  p->options = *options;
  p->stop_wake[0] = p->stop_wake[1] = -1;
  for (int i = 0; i < 2; i++) atomic_init(&p->udp_gso[i], FD_LINUX && options->udp_gso);
  atomic_init(&p->tun_tcp_gso, options->vnet && options->tun_tcp_gso);
  atomic_init(&p->tun_udp_gso, options->vnet && options->tun_udp_gso);
  pthread_mutex_init(&p->notes_lock, NULL);
  if (!ring_init(&p->ring, options->ring_bytes ? options->ring_bytes : 4u << 20) && !filter_init(&p->filter) &&
      !wake_open(p->stop_wake) && (p->tx = tx_new(p)) && (p->rx = rx_new(p)))
    return p;
  fdpump_free(p);
  return NULL;
}

void fdpump_free(fdpump *p) {
  if (!p) return;
  fdpump_stop(p);
  tx_free(p->tx);
  rx_free(p->rx);
  ring_free(&p->ring);
  filter_free(&p->filter);
  wake_close(p->stop_wake);
  notes_forget(p);
  pthread_mutex_destroy(&p->notes_lock);
  free(p);
}

enum { AT_STOP, AT_TUN, AT_UDP4, AT_UDP6, AT_COUNT };

/* Sleeps until a descriptor has something, or it is time to tell what was kept back. -1: end. */
static int wait_for_work(fdpump *p, struct pollfd *fds) {
  int timeout = atomic_load_explicit(&p->attention_due, memory_order_relaxed) ? LATE_ATTENTION_MS : -1;
  if (poll(fds, AT_COUNT, timeout) < 0 && errno != EINTR && errno != EAGAIN) return -1;
  if (fds[AT_STOP].revents) return -1;
  for (int i = AT_TUN; i < AT_COUNT; i++) {
    if (fds[i].revents & POLLNVAL) return -1;
    if (fds[i].revents & POLLERR && !(fds[i].revents & POLLIN)) poll(NULL, 0, 1); /* a device that is down: do not spin */
  }
  return 0;
}

static void run(fdpump *p, int sends, int receives) {
  struct pollfd fds[AT_COUNT] = {{p->stop_wake[0], POLLIN, 0},
                                 {sends ? p->options.tun_fd : -1, POLLIN, 0},
                                 {receives ? p->options.udp_fd[0] : -1, POLLIN, 0},
                                 {receives ? p->options.udp_fd[1] : -1, POLLIN, 0}};
  while (!atomic_load_explicit(&p->stopping, memory_order_relaxed)) {
    int did = 0;
    if (fds[AT_TUN].fd >= 0) {
      did = tx_once(p->tx);
      if (did < 0) { /* the TUN was deleted; inbound goes on until we are stopped */
        up_simple(p, UP_TUN_ERROR, 0, (uint32_t)errno);
        fds[AT_TUN].fd = -1;
        did = 0;
      }
    }
    if (receives) did += rx_once(p->rx);
    up_late_attention(p, fd_now);
    if (!did && wait_for_work(p, fds)) return;
  }
}

static void *run_both(void *pump) {
  run(pump, 1, 1);
  return NULL;
}

static void *run_sending(void *pump) {
  run(pump, 1, 0);
  return NULL;
}

static void *run_receiving(void *pump) {
  run(pump, 0, 1);
  return NULL;
}

int fdpump_start(fdpump *p) {
  void *(*const alone[])(void *) = {run_both}, *(*const apart[])(void *) = {run_sending, run_receiving};
  int wanted = p->options.one_thread ? 1 : 2, error = 0;
  if (p->thread_count) return 0;
  atomic_store(&p->stopping, 0);
  for (; p->thread_count < wanted && !error; p->thread_count += !error)
    error = pthread_create(&p->threads[p->thread_count], NULL, (wanted == 1 ? alone : apart)[p->thread_count], p);
  if (error) fdpump_stop(p);
  return error;
}

void fdpump_stop(fdpump *p) {
  if (!p->thread_count) return;
  atomic_store(&p->stopping, 1);
  wake_ring(p->stop_wake);
  while (p->thread_count) pthread_join(p->threads[--p->thread_count], NULL);
  wake_clear(p->stop_wake);
}

int fdpump_set_sockets(fdpump *p, const int udp_fd[2], int udp_gso, int udp_gro) {
  fdpump_stop(p);
  p->options.udp_gso = udp_gso;
  p->options.udp_gro = udp_gro;
  for (int i = 0; i < 2; i++) {
    p->options.udp_fd[i] = udp_fd[i];
    atomic_store(&p->udp_gso[i], FD_LINUX && udp_gso);
  }
  return fdpump_start(p);
}

void fdpump_counters(const fdpump *p, uint64_t out[FD_COUNTERS]) {
  for (int i = 0; i < FD_COUNTERS; i++) out[i] = atomic_load_explicit(&p->counters[i], memory_order_relaxed);
}
