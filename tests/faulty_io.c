// Lets one file operation of this process fail. Preloaded (LD_PRELOAD), so that what C and Rust write is seen too.
// tests/faulty_io.py arms it, and reads which operations there were.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL = -1, SHORT = -2 };  // instead of an errno
static char prefix[4096], seen[1 << 20], fired[4200];
static int armed, at, how, lasting, count, used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Counts the operations on files below `path`. The one with number `n` gets `error`; those after it too if `forever`.
void arm(const char *path, int n, int error, int forever) {
    snprintf(prefix, sizeof prefix, "%s", path);
    at = n, how = error, lasting = forever, count = used = 0, seen[0] = fired[0] = 0, armed = 1;
}
void disarm(void) { armed = 0; }
const char *operations(void) { return seen; }
const char *failed(void) { return fired; }

static int allocates(const char *op) { return strstr("create write fsync mkdir rename link truncate", op) != NULL; }

static int verdict(const char *op, int fd, const char *name) {
    char path[4096] = "", link[64];
    if (!armed || (name && name[0] != '/' && fd < 0 && fd != AT_FDCWD)) return 0;
    if (!name || name[0] != '/') {
        if (fd == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, sizeof path - 1);
        if (length < 0) return 0;
        path[length] = 0;
        if (name) {
            strncat(path, "/", sizeof path - strlen(path) - 1);
            strncat(path, name, sizeof path - strlen(path) - 1);
        }
    } else snprintf(path, sizeof path, "%s", name);
    if (strncmp(path, prefix, strlen(prefix))) return 0;
    pthread_mutex_lock(&lock);
    int mine = count++, hit = mine == at || (lasting && mine > at && allocates(op));
    if (used < (int)sizeof seen - 4400) used += sprintf(seen + used, "%s\t%s\n", op, path + strlen(prefix));
    if (hit && !fired[0]) snprintf(fired, sizeof fired, "%s\t%s", op, path + strlen(prefix));
    pthread_mutex_unlock(&lock);
    if (hit && how == KILL && strcmp(op, "write")) kill(getpid(), SIGKILL);
    return hit ? how : 0;
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAIL(op, fd, path, bad) int e = verdict(op, fd, path); if (e > 0) { errno = e; return bad; }
#define KIND(flags) ((flags) & (O_CREAT | O_WRONLY | O_RDWR) ? "create" : "open")
#define MODE int mode = 0; va_list list; va_start(list, flags); mode = va_arg(list, int); va_end(list);

#define OPEN(name) int name(const char *path, int flags, ...) { MODE \
    REAL(int, name, const char *, int, ...); FAIL(KIND(flags), AT_FDCWD, path, -1) return real(path, flags, mode); }
#define OPENAT(name) int name(int fd, const char *path, int flags, ...) { MODE \
    REAL(int, name, int, const char *, int, ...); FAIL(KIND(flags), fd, path, -1) return real(fd, path, flags, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

DIR *opendir(const char *path) {
    REAL(DIR *, opendir, const char *); FAIL("opendir", AT_FDCWD, path, NULL) return real(path); }
ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, read, int, void *, size_t); FAIL("read", fd, NULL, -1) return real(fd, data, size); }

// Half of what is to be written gets there where the process is killed, or the disk is full.
#define WRITE(name, half, arguments, ...) ssize_t name(__VA_ARGS__) { \
    REAL(ssize_t, name, __VA_ARGS__); FAIL("write", fd, NULL, -1) \
    if (e) { ssize_t done = half; if (e == KILL) kill(getpid(), SIGKILL); return done; } return real arguments; }
WRITE(write, real(fd, data, (size + 1) / 2), (fd, data, size), int fd, const void *data, size_t size)
WRITE(pwrite, real(fd, data, (size + 1) / 2, to), (fd, data, size, to), int fd, const void *data, size_t size, off_t to)
WRITE(pwrite64, real(fd, data, (size + 1) / 2, to), (fd, data, size, to), int fd, const void *data, size_t size, off_t to)
WRITE(writev, real(fd, data, (many + 1) / 2), (fd, data, many), int fd, const struct iovec *data, int many)

// The disk itself is not waited for: a process that ends loses nothing of the page cache.
int fsync(int fd) { FAIL("fsync", fd, NULL, -1) return 0; }
int fdatasync(int fd) { FAIL("fsync", fd, NULL, -1) return 0; }
#define SIZE(name) int name(int fd, off_t size) { \
    REAL(int, name, int, off_t); FAIL("truncate", fd, NULL, -1) return real(fd, size); }
SIZE(ftruncate) SIZE(ftruncate64)
#define ONE(name, op) int name(const char *path) { \
    REAL(int, name, const char *); FAIL(op, AT_FDCWD, path, -1) return real(path); }
ONE(unlink, "unlink") ONE(rmdir, "unlink")
int unlinkat(int fd, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int); FAIL("unlink", fd, path, -1) return real(fd, path, flags); }
#define MADE(name, op) int name(const char *path, mode_t mode) { \
    REAL(int, name, const char *, mode_t); FAIL(op, AT_FDCWD, path, -1) return real(path, mode); }
MADE(mkdir, "mkdir") MADE(chmod, "chmod")
int mkdirat(int fd, const char *path, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t); FAIL("mkdir", fd, path, -1) return real(fd, path, mode); }
#define TWO(name, op) int name(const char *from, const char *to) { \
    REAL(int, name, const char *, const char *); FAIL(op, AT_FDCWD, to, -1) return real(from, to); }
TWO(rename, "rename") TWO(link, "link") TWO(symlink, "link")
int renameat(int from_fd, const char *from, int fd, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *); FAIL("rename", fd, to, -1) return real(from_fd, from, fd, to); }
