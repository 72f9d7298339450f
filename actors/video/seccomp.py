"""A filter that permanently forbids this process the system calls that decoding never needs: seccomp(2), assembled by hand.

Forbidden calls answer EPERM, so that a library that merely tries one goes on. It is a deny-list: an allow-list would have to know
what every version of libc, torch and FFmpeg calls, and would kill the process for a file where it does not. ``sandbox`` installs it.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Iterator

_NUMBERS = {  # of x86-64
    # other programs, and other processes
    "execve": 59, "execveat": 322, "fork": 57, "vfork": 58, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
    "process_madvise": 440, "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "kcmp": 312, "tkill": 200,
    "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "setpriority": 141,
    "ioprio_set": 251, "migrate_pages": 256, "move_pages": 279,
    "shmget": 29, "shmat": 30, "shmctl": 31, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "semget": 64, "semop": 65,
    "semtimedop": 220, "semctl": 66,
    # connections that others begin
    "bind": 49, "listen": 50, "accept": 43, "accept4": 288,
    # what Landlock leaves open: owner, mode, times and attributes of any file, and before its version 3 the length
    "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
    "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
    "setxattrat": 463, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "removexattrat": 466, "file_setattr": 469,
    # readers of shared memory die where a file is shorter than its mapping, and a mapping that grows reaches what is not this process's
    "truncate": 76, "ftruncate": 77, "fallocate": 285, "mremap": 25, "remap_file_pages": 216,
    # the machine
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "setns": 308, "unshare": 272, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "swapon": 167, "swapoff": 168, "reboot": 169,
    "sethostname": 170, "setdomainname": 171, "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246,
    "kexec_file_load": 320, "iopl": 172, "ioperm": 173, "acct": 163, "quotactl": 179, "settimeofday": 164, "clock_settime": 227,
    "clock_adjtime": 305, "adjtimex": 159, "syslog": 103, "mknod": 133, "mknodat": 259, "open_by_handle_at": 304,
    # large parts of the kernel that nothing here needs; io_uring would open sockets and files past this filter
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "request_key": 249, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427, "personality": 135, "modify_ldt": 154, "vmsplice": 278,
}  # fmt: skip
_CUDA_NEEDS = frozenset({"bind", "listen"})  # its driver listens on an abstract socket of its own, or does not start
_SOCKET, _SOCKETPAIR, _CLONE, _CLONE3, _KILL, _TGKILL, _PRLIMIT, _SECCOMP = 41, 53, 56, 435, 62, 234, 302, 317
_COMMANDS = {  # by number and argument
    # fcntl: a file that sends signals to any process
    (72, 1): {"F_SETOWN": 8, "F_SETSIG": 10, "F_SETOWN_EX": 15},
    # ioctl: a terminal that types; the same signals
    (16, 1): {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "FIOSETOWN": 0x8901, "SIOCSPGRP": 0x8902},
    # madvise: gives pages of a shared file back, and where the file system is full by then its readers die
    (28, 2): {"MADV_REMOVE": 9},
}
_AF_UNIX = 1
_CLONE_THREAD = 0x10000
_X32 = 0x40000000  # system calls of the x32 interface, which have numbers of their own
_AUDIT_ARCH_X86_64 = 0xC000003E
_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT, _ARGUMENT_BYTES = 0, 4, 16, 8  # in struct seccomp_data


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("if_true", ctypes.c_uint8), ("if_false", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


_Line = tuple[int, int, int, int]  # code, k, instructions to skip if true, if false
_REFUSE: _Line = (_RETURN, _ERRNO | errno.EPERM, 0, 0)


def _program(pid: int, cuda: bool) -> Iterator[_Line]:
    yield _LOAD, _ARCH_AT, 0, 0
    yield _JUMP_EQUAL, _AUDIT_ARCH_X86_64, 1, 0
    yield _RETURN, _KILL_PROCESS, 0, 0
    yield _LOAD, _NUMBER_AT, 0, 0
    yield _JUMP_AT_LEAST, _X32, 0, 1
    yield _REFUSE
    for number in (_SOCKET, _SOCKETPAIR):
        yield from _unless(number, _JUMP_EQUAL, _AF_UNIX)  # the bus
    yield from _unless(_CLONE, _JUMP_BITS, _CLONE_THREAD)
    yield from _unless(_KILL, _JUMP_EQUAL, pid)
    yield from _unless(_TGKILL, _JUMP_EQUAL, pid)
    yield from _unless(_PRLIMIT, _JUMP_EQUAL, 0)  # its own limits alone
    yield from _refuse(_CLONE3, errno.ENOSYS)  # its flags lie in memory, where no filter looks: libc then takes clone
    for (number, argument), commands in _COMMANDS.items():
        yield from _refuse_commands(number, argument, list(commands.values()))
    for name, number in _NUMBERS.items():
        if not (cuda and name in _CUDA_NEEDS):
            yield from _refuse(number, errno.EPERM)
    yield _RETURN, _ALLOW, 0, 0


def _refuse(number: int, error: int) -> Iterator[_Line]:
    yield _JUMP_EQUAL, number, 0, 1
    yield _RETURN, _ERRNO | error, 0, 0


def _unless(number: int, test: int, value: int) -> Iterator[_Line]:
    """Refuse ``number`` unless the lower half of its first argument passes the test; the upper one means nothing to these calls."""
    yield _JUMP_EQUAL, number, 0, 4
    yield _LOAD, _ARGUMENTS_AT, 0, 0
    yield test, value, 1, 0
    yield _REFUSE
    yield _RETURN, _ALLOW, 0, 0


def _refuse_commands(number: int, argument: int, commands: list[int]) -> Iterator[_Line]:
    """Refuse ``number`` where the lower half of this argument, counted from 0, is one of these."""
    yield _JUMP_EQUAL, number, 0, 2 * len(commands) + 2
    yield _LOAD, _ARGUMENTS_AT + argument * _ARGUMENT_BYTES, 0, 0
    for command in commands:
        yield from _refuse(command, errno.EPERM)
    yield _RETURN, _ALLOW, 0, 0


def forbid_system_calls(*, cuda: bool = False) -> None:
    """Install the filter for all threads of this process, which has no new privileges already. Raises: OSError.

    ``cuda``: bind and listen are left, without which CUDA does not start. Connections still cannot be accepted, and Landlock grants
    no names in the file system: only abstract names can be bound, and only this process's own threads can connect to them.
    """
    if (machine := platform.machine()) != "x86_64":
        raise OSError(errno.ENOSYS, f"there is no filter for {machine}")
    lines = list(_program(os.getpid(), cuda))
    instructions = (_Instruction * len(lines))(*(_Instruction(code, yes, no, k) for code, k, yes, no in lines))
    program = _Program(len(lines), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    status: int = libc.syscall(*map(ctypes.c_long, (_SECCOMP, _SET_MODE_FILTER, _FLAG_TSYNC)), ctypes.byref(program))
    if status:
        raise OSError(ctypes.get_errno() or errno.ESRCH, "seccomp is refused")
