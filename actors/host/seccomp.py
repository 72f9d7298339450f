"""A filter that permanently leaves this process the system calls that its work needs: seccomp(2), assembled by hand.

For the processes that meet strangers' bytes: the video process, and the gateway's that fetches. Any other call kills the process, so an
attacker has one attempt. Calls that a library is known to try, and does without, are refused: they answer EPERM; those that this list
is too old to know answer ENOSYS, as on an older kernel.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Iterator

# Numbers of x86-64.
_ALLOWED = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mprotect": 10,
    "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "pwrite64": 18,
    "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24, "msync": 26, "mincore": 27, "dup": 32,
    "dup2": 33, "pause": 34, "nanosleep": 35, "alarm": 37, "getpid": 39, "recvfrom": 45, "recvmsg": 47, "shutdown": 48,
    "getsockname": 51, "getpeername": 52, "setsockopt": 54, "getsockopt": 55, "exit": 60, "uname": 63, "flock": 73, "fsync": 74,
    "fdatasync": 75, "getdents": 78, "getcwd": 79,
    "readlink": 89, "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "getgroups": 115, "getresuid": 118,
    "getresgid": 120, "getpgid": 121, "getsid": 124, "capget": 125, "rt_sigpending": 127, "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130, "sigaltstack": 131, "statfs": 137, "fstatfs": 138, "getpriority": 140, "sched_getparam": 143,
    "sched_getscheduler": 145, "sched_get_priority_max": 146, "sched_get_priority_min": 147, "prctl": 157, "arch_prctl": 158,
    "setrlimit": 160, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217, "set_tid_address": 218,
    "restart_syscall": 219, "fadvise64": 221, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231,
    "epoll_wait": 232, "epoll_ctl": 233, "get_mempolicy": 239, "openat": 257, "newfstatat": 262,
    "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273,
    "get_robust_list": 274, "epoll_pwait": 281, "accept4": 288, "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293,
    "preadv": 295, "pwritev": 296, "getcpu": 309, "sched_getattr": 315, "getrandom": 318, "membarrier": 324,
    "preadv2": 327, "statx": 332, "rseq": 334, "openat2": 437, "faccessat2": 439, "epoll_pwait2": 441,
}  # fmt: skip
_REFUSED = {  # what a library tries, and does without
    # sockets: libc looks for a name service
    "socket": 41, "socketpair": 53,
    # processes: Python asks other programs about the machine
    "fork": 57, "vfork": 58, "pidfd_open": 434, "wait4": 61, "waitid": 247, "setpgid": 109, "setsid": 112,
    # readers of shared memory die where a file is shorter than its mapping; a mapping that grows reaches what is not this process's
    "mremap": 25, "truncate": 76, "ftruncate": 77, "fallocate": 285,
    # files: names, which Landlock refuses as well
    "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "unlink": 87, "mkdirat": 258, "unlinkat": 263, "renameat": 264,
    "renameat2": 316,
    # files: owner, mode, times and attributes, which Landlock leaves open
    "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
    "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "link": 86, "symlink": 88, "linkat": 265, "symlinkat": 266,
    "chdir": 80, "fchdir": 81, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
    "fremovexattr": 199, "getxattr": 191, "lgetxattr": 192, "fgetxattr": 193, "listxattr": 194, "llistxattr": 195,
    "flistxattr": 196, "inotify_init1": 294, "inotify_init": 253, "copy_file_range": 326, "sendfile": 40, "splice": 275,
    "readahead": 187,
    # memory that no limit counts, and where memory lies
    "memfd_create": 319, "mlock": 149, "munlock": 150, "mlock2": 325, "mbind": 237, "set_mempolicy": 238, "move_pages": 279,
    "pkey_alloc": 330, "pkey_mprotect": 329, "pkey_free": 331,
    # processors and clocks
    "sched_setaffinity": 203, "setpriority": 141, "sched_setparam": 142, "sched_setattr": 314, "ioprio_set": 251, "setitimer": 38,
    "getitimer": 36, "timer_create": 222, "timerfd_create": 283, "signalfd4": 289, "perf_event_open": 298, "capset": 126,
}  # fmt: skip
_FIRST_UNKNOWN = 470  # what came after this list was made: libc has something else where it is not there
_CUDA_NEEDS = {  # its driver listens on an abstract socket of its own, or does not start; the rest is not known to be needed
    "bind": 49, "listen": 50, "mlock": 149, "munlock": 150, "sched_setaffinity": 203, "mbind": 237, "set_mempolicy": 238,
    "memfd_create": 319,
}  # fmt: skip
_NETWORK_NEEDS = {  # to connect and to look up names; Landlock's calls take rights away alone
    "connect": 42, "sendmsg": 46, "bind": 49, "sendmmsg": 307, "landlock_create_ruleset": 444, "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}  # fmt: skip
_FORK_NEEDS = {  # to begin children, give the other end of a pair of sockets away, end a child, and forbid it more
    "socketpair": 53, "sendmsg": 46, "wait4": 61, "kill": 62, "seccomp": 317,
}  # fmt: skip
_NEW_NAMESPACES = 0x7E020000  # of clone
_FAMILIES = {"AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}  # the last tells getaddrinfo which addresses this machine has
_MMAP, _SOCKET, _SENDTO, _SOCKETPAIR, _CLONE, _CLONE3, _KILL, _TGKILL = 9, 41, 44, 53, 56, 435, 62, 234
_SCHED_SETSCHEDULER, _PRLIMIT, _SECCOMP = 144, 302, 317
_FCNTL, _IOCTL = 72, 16
_DEADLY_COMMANDS = {  # by number and argument
    # a file that sends signals to any process
    (_FCNTL, 1): {"F_SETOWN": 8, "F_SETSIG": 10, "F_SETOWN_EX": 15},
    # a terminal that types; the same signals
    (_IOCTL, 1): {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "FIOSETOWN": 0x8901, "SIOCSPGRP": 0x8902},
    # madvise: gives pages of a shared file back, and where the file system is full by then its readers die
    (28, 2): {"MADV_REMOVE": 9},
}
_COMMANDS = {  # the only ones, by number; the driver of GPUs has others
    _FCNTL: {
        "F_DUPFD": 0, "F_GETFD": 1, "F_SETFD": 2, "F_GETFL": 3, "F_SETFL": 4, "F_GETLK": 5, "F_SETLK": 6, "F_SETLKW": 7,
        "F_DUPFD_CLOEXEC": 1030,
    },
    _IOCTL: {  # those of a terminal are a debugger's
        "TCGETS": 0x5401, "TCSETS": 0x5402, "TCSETSW": 0x5403, "TCSETSF": 0x5404, "TCXONC": 0x540A, "TCFLSH": 0x540B,
        "TIOCGPGRP": 0x540F, "TIOCSPGRP": 0x5410, "TIOCGWINSZ": 0x5413, "FIONREAD": 0x541B, "FIONBIO": 0x5421, "FIONCLEX": 0x5450,
        "FIOCLEX": 0x5451, "TCGETS2": 0x802C542A, "TCSETS2": 0x402C542B, "TCSETSW2": 0x402C542C, "TCSETSF2": 0x402C542D,
    },
}  # fmt: skip
_AF_UNIX = 1
_NOT_STREAMS = 0xE  # bits of a socket's type: those of a stream (1) are none of them
_SCHED_OTHER = 0
_CLONE_THREAD = 0x10000
_SHARED_AND_ANONYMOUS = 0x21  # of mmap
_UNCOUNTED = 0x42100  # of mmap: MAP_GROWSDOWN, which counts as a stack, MAP_LOCKED, MAP_HUGETLB
_X32 = 0x40000000  # system calls of the x32 interface, which have numbers of their own
_AUDIT_ARCH_X86_64 = 0xC000003E
_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
_AND = 0x54
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT, _ARGUMENT_BYTES = 0, 4, 16, 8  # in struct seccomp_data


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("if_true", ctypes.c_uint8), ("if_false", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


_Line = tuple[int, int, int, int]  # code, k, instructions to skip if true, if false
_REFUSE: _Line = (_RETURN, _ERRNO | errno.EPERM, 0, 0)
_UNKNOWN: _Line = (_RETURN, _ERRNO | errno.ENOSYS, 0, 0)
_PERMIT: _Line = (_RETURN, _ALLOW, 0, 0)
_END: _Line = (_RETURN, _KILL_PROCESS, 0, 0)


def _program(pid: int, cuda: bool = False, network: bool = False, forks: bool = False) -> Iterator[_Line]:
    yield _LOAD, _ARCH_AT, 0, 0
    yield _JUMP_EQUAL, _AUDIT_ARCH_X86_64, 1, 0
    yield _END
    yield _LOAD, _NUMBER_AT, 0, 0
    yield _JUMP_AT_LEAST, _X32, 0, 1
    yield _END
    for number in _ALLOWED.values():
        yield from _answer(number, _PERMIT)
    if cuda:
        yield from _unless(_SOCKET, 0, _JUMP_EQUAL, _AF_UNIX, _REFUSE)
        for number in _CUDA_NEEDS.values():
            yield from _answer(number, _PERMIT)
    if network:
        yield from _by_command(_SOCKET, 0, list(_FAMILIES.values()), _PERMIT, _REFUSE)
        for number in (*_NETWORK_NEEDS.values(), _SENDTO):
            yield from _answer(number, _PERMIT)
        yield from _if_any(_SOCKETPAIR, 1, _NOT_STREAMS, _REFUSE)  # streams wake a loop; others reach any unix socket
    if forks:
        yield from _if_any(_CLONE, 0, _NEW_NAMESPACES, _REFUSE)
        for number in _FORK_NEEDS.values():
            yield from _answer(number, _PERMIT)
    yield from _unless(_CLONE, 0, _JUMP_BITS, _CLONE_THREAD, _REFUSE)
    for number in (_KILL, _TGKILL):
        yield from _unless(number, 0, _JUMP_EQUAL, pid, _END)
    yield from _unless(_PRLIMIT, 0, _JUMP_EQUAL, 0, _END)  # its own limits alone
    yield from _unless(_SCHED_SETSCHEDULER, 1, _JUMP_EQUAL, _SCHED_OTHER, _REFUSE)  # zmq, to each thread of its own
    yield from _unless_null(_SENDTO, 4)  # an address
    yield from _unless_counted(_MMAP, 3)
    yield from _answer(
        _CLONE3, (_RETURN, _ERRNO | errno.ENOSYS, 0, 0)
    )  # its flags lie in memory, where no filter looks: libc takes clone
    for (number, argument), commands in _DEADLY_COMMANDS.items():
        is_last = cuda or number not in _COMMANDS
        yield from _by_command(number, argument, list(commands.values()), _END, _PERMIT if is_last else None)
    for number, commands in _COMMANDS.items():
        yield from _by_command(number, 1, list(commands.values()), _PERMIT, _REFUSE)
    for number in _REFUSED.values():
        yield from _answer(number, _REFUSE)
    yield _JUMP_AT_LEAST, _FIRST_UNKNOWN, 0, 1
    yield _UNKNOWN
    yield _REFUSE if cuda or network else _END  # nobody has tried what a driver calls, or what a system looks up names with


def _answer(number: int, answer: _Line) -> Iterator[_Line]:
    yield _JUMP_EQUAL, number, 0, 1
    yield answer


def _unless(number: int, argument: int, test: int, value: int, answer: _Line) -> Iterator[_Line]:
    """Answer ``number`` so unless the lower half of this argument, counted from 0, passes the test; the upper one means nothing."""
    yield _JUMP_EQUAL, number, 0, 4
    yield _LOAD, _ARGUMENTS_AT + argument * _ARGUMENT_BYTES, 0, 0
    yield test, value, 1, 0
    yield answer
    yield _PERMIT


def _if_any(number: int, argument: int, bits: int, answer: _Line) -> Iterator[_Line]:
    """Answer ``number`` so if this argument, counted from 0, has any of these bits."""
    yield _JUMP_EQUAL, number, 0, 4
    yield _LOAD, _ARGUMENTS_AT + argument * _ARGUMENT_BYTES, 0, 0
    yield _JUMP_BITS, bits, 0, 1
    yield answer
    yield _PERMIT


def _unless_null(number: int, argument: int) -> Iterator[_Line]:
    """Kill at ``number`` unless this argument, counted from 0, is a null pointer."""
    yield _JUMP_EQUAL, number, 0, 6
    yield _LOAD, _ARGUMENTS_AT + argument * _ARGUMENT_BYTES, 0, 0
    yield _JUMP_EQUAL, 0, 0, 2
    yield _LOAD, _ARGUMENTS_AT + argument * _ARGUMENT_BYTES + _ARGUMENT_BYTES // 2, 0, 0
    yield _JUMP_EQUAL, 0, 1, 0
    yield _END
    yield _PERMIT


def _unless_counted(number: int, argument: int) -> Iterator[_Line]:
    """Refuse mmap of memory that no limit counts: shared and no file's, or of a kind of its own."""
    yield _JUMP_EQUAL, number, 0, 6
    yield _LOAD, _ARGUMENTS_AT + argument * _ARGUMENT_BYTES, 0, 0
    yield _JUMP_BITS, _UNCOUNTED, 2, 0
    yield _AND, _SHARED_AND_ANONYMOUS, 0, 0
    yield _JUMP_EQUAL, _SHARED_AND_ANONYMOUS, 0, 1
    yield _REFUSE
    yield _PERMIT


def _by_command(number: int, argument: int, commands: list[int], answer: _Line, otherwise: _Line | None) -> Iterator[_Line]:
    """Answer ``number`` so where the lower half of this argument, counted from 0, is one of these; ``otherwise`` None: look further."""
    yield _JUMP_EQUAL, number, 0, 2 * len(commands) + 2
    yield _LOAD, _ARGUMENTS_AT + argument * _ARGUMENT_BYTES, 0, 0
    for command in commands:
        yield from _answer(command, answer)
    yield (_LOAD, _NUMBER_AT, 0, 0) if otherwise is None else otherwise


def forbid_system_calls(*, cuda: bool = False, network: bool = False, forks: bool = False) -> None:
    """Install the filter for all threads of this process, which has no new privileges already. Raises: OSError.

    ``cuda``: what CUDA needs to start is left, unix sockets among it, and nothing else kills. Landlock grants no names in the file
    system: only abstract names can be bound. None can be connected to. ``network``: it can use TCP and UDP, no unix sockets, and
    files as far as Landlock has it; nothing else kills. ``forks``: it can fork, make pairs of sockets, send signals, and install a
    filter that takes these rights from its children.
    """
    if (machine := platform.machine()) != "x86_64":
        raise OSError(errno.ENOSYS, f"there is no filter for {machine}")
    lines = list(_program(os.getpid(), cuda, network, forks))
    instructions = (_Instruction * len(lines))(*(_Instruction(code, yes, no, k) for code, k, yes, no in lines))
    program = _Program(len(lines), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    status: int = libc.syscall(*map(ctypes.c_long, (_SECCOMP, _SET_MODE_FILTER, _FLAG_TSYNC)), ctypes.byref(program))
    if status:
        raise OSError(ctypes.get_errno() or errno.ESRCH, "seccomp is refused")
