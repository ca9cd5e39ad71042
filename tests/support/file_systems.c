/* Refuses system calls as file systems do that have no file locks, or no shared memory. See file_systems.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

static int is_under(const char *variable, int descriptor) {
    const char *folder = getenv(variable);
    char link[64], path[PATH_MAX];
    if (folder == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return length > 0 && strncmp(path, folder, strlen(folder)) == 0;
}

int flock(int descriptor, int operation) {
    static int (*next)(int, int);
    if (next == NULL) next = dlsym(RTLD_NEXT, "flock");
    if (!is_under("NO_FILE_LOCKS", descriptor)) return next(descriptor, operation);
    errno = ENOSYS;
    return -1;
}

static int control(const char *name, int descriptor, int command, void *argument) {
    int (*next)(int, int, ...) = dlsym(RTLD_NEXT, name);
    int locks = command == F_SETLK || command == F_SETLKW || command == F_GETLK || command == F_OFD_SETLK ||
                command == F_OFD_SETLKW || command == F_OFD_GETLK;
    if (!locks || !is_under("NO_FILE_LOCKS", descriptor)) return next(descriptor, command, argument);
    errno = ENOSYS;
    return -1;
}

int fcntl(int descriptor, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return control("fcntl", descriptor, command, argument);
}

int fcntl64(int descriptor, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return control("fcntl64", descriptor, command, argument);
}

static void *map(const char *name, void *address, size_t length, int protection, int flags, int descriptor, off_t offset) {
    void *(*next)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, name);
    if (descriptor < 0 || !(flags & MAP_SHARED) || !is_under("NO_SHARED_MEMORY", descriptor))
        return next(address, length, protection, flags, descriptor, offset);
    errno = ENODEV;
    return MAP_FAILED;
}

void *mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset) {
    return map("mmap", address, length, protection, flags, descriptor, offset);
}

void *mmap64(void *address, size_t length, int protection, int flags, int descriptor, off_t offset) {
    return map("mmap64", address, length, protection, flags, descriptor, offset);
}
