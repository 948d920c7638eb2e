"""Limits of a process before it runs code that a policy may control: memory, and the network."""

from __future__ import annotations

import ctypes
import platform
import resource
import struct
import sys

# Numbers of linux/audit.h and of the system call tables.
_ARCHITECTURES = {
    "x86_64": {"audit": 0xC000003E, "seccomp": 317, "socket": 41},
    "aarch64": {"audit": 0xC00000B7, "seccomp": 277, "socket": 198},
}
_IO_URING_SETUP = 425  # makes sockets without the system call
_OTHER_ABI = 0x40000000  # x32 calls of x86_64 are numbered from here
_ALLOW, _ERRNO, _EACCES = 0x7FFF0000, 0x00050000, 13
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_PR_SET_NO_NEW_PRIVS, _SET_FILTER, _ALL_THREADS = 38, 1, 1
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def limit_memory(extra_bytes: int) -> None:
    """Lets the address space grow by at most `extra_bytes`; beyond it allocations fail. No core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return  # other kernels do not report the size of a process, or ignore the limit
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + extra_bytes, size + extra_bytes))


def close_network() -> str:
    """Stops this process, all its threads and children from opening sockets. Returns the means, or "".

    A seccomp filter rejects `socket` with EACCES, which needs no privilege. Without it the process moves to
    an empty network namespace. Open sockets stay open.
    """
    if sys.platform != "linux":
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    known = _ARCHITECTURES.get(platform.machine())
    if known is not None and libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        refuse = (
            (_LOAD, 0, 0, 4),  # the architecture of the call
            (_EQUAL, 0, 5, known["audit"]),
            (_LOAD, 0, 0, 0),  # its number
            (_AT_LEAST, 3, 0, _OTHER_ABI),
            (_EQUAL, 2, 0, known["socket"]),
            (_EQUAL, 1, 0, _IO_URING_SETUP),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _ERRNO | _EACCES),
        )
        code = b"".join(
            struct.pack("HBBI", operation, yes, no, value) for operation, yes, no, value in refuse
        )
        buffer = ctypes.create_string_buffer(code, len(code))
        program = _Program(len(refuse), ctypes.cast(buffer, ctypes.c_void_p))
        if libc.syscall(known["seccomp"], _SET_FILTER, _ALL_THREADS, ctypes.byref(program)) == 0:
            return "seccomp"
    if libc.unshare(_NEW_USER | _NEW_NETWORK) == 0:
        return "network namespace"
    return ""
