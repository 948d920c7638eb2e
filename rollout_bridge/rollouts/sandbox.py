"""Limits of a process before it runs code that a policy may control: memory, network, files, signals."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys

# Numbers of linux/audit.h and of the system call tables.
_ARCHITECTURES = {
    "x86_64": {"audit": 0xC000003E, "seccomp": 317, "socket": 41, "setpgid": 109, "setsid": 112},
    "aarch64": {"audit": 0xC00000B7, "seccomp": 277, "socket": 198, "setpgid": 154, "setsid": 157},
}
_IO_URING_SETUP = 425  # makes sockets without the system call
_OTHER_ABI = 0x40000000  # x32 calls of x86_64 are numbered from here
_ALLOW, _ERRNO, _EACCES = 0x7FFF0000, 0x00050000, 13
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_PR_SET_NO_NEW_PRIVS, _SET_FILTER, _ALL_THREADS = 38, 1, 1
# Landlock, of linux/landlock.h. Rights to change files by the version of the interface that knows them.
_RULESET, _ADD_RULE, _RESTRICT = 444, 445, 446
_ASK_VERSION, _BENEATH = 1, 1
_WRITE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGES = {1: 0x1FF2, 2: 0x3FF2, 3: 0x7FF2}  # write, remove and make; move between directories; truncate
_SCOPES_KNOWN, _SCOPE_SIGNAL = 6, 1 << 1
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

    A seccomp filter rejects `socket` with EACCES, which needs no privilege. It also rejects `setpgid`
    and `setsid`, so that a kill of the process group ends every child. Without it the process moves to an
    empty network namespace. Open sockets stay open.
    """
    if sys.platform != "linux":
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    known = _ARCHITECTURES.get(platform.machine())
    if known is not None and libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        calls = (known["socket"], known["setpgid"], known["setsid"], _IO_URING_SETUP)
        refuse = (
            (_LOAD, 0, 0, 4),  # the architecture of the call
            (_EQUAL, 0, len(calls) + 3, known["audit"]),
            (_LOAD, 0, 0, 0),  # its number
            (_AT_LEAST, len(calls) + 1, 0, _OTHER_ABI),
            *((_EQUAL, left, 0, call) for left, call in zip(range(len(calls), 0, -1), calls, strict=True)),
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


def close_files(directory: str) -> str:
    """Lets this thread, and those it starts, change no file but those in `directory`, and the null device.

    Returns the means, or "" where the kernel has none. Files that are open stay open.
    """
    if sys.platform != "linux":
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    version = libc.syscall(_RULESET, None, 0, _ASK_VERSION)
    if version < 1 or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return ""
    rights = _CHANGES[min(version, max(_CHANGES))]
    handled = struct.pack("=Q", rights)
    ruleset = libc.syscall(_RULESET, handled, len(handled), 0)
    if ruleset < 0:
        return ""
    try:
        of_files = rights & (_WRITE | _TRUNCATE)
        for path, allowed in ((directory, rights), (os.devnull, of_files)):
            opened = os.open(path, os.O_PATH)
            try:
                if libc.syscall(_ADD_RULE, ruleset, _BENEATH, struct.pack("=Qi", allowed, opened), 0) != 0:
                    return ""
            finally:
                os.close(opened)
        return "landlock" if libc.syscall(_RESTRICT, ruleset, 0) == 0 else ""
    finally:
        os.close(ruleset)


def close_signals() -> str:
    """Lets this thread, and those it starts, send signals only to themselves and to processes they start.

    Returns the means, or "" where the kernel has none (before Linux 6.12).
    """
    if sys.platform != "linux":
        return ""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(_RULESET, None, 0, _ASK_VERSION) < _SCOPES_KNOWN:
        return ""
    handled = struct.pack("=QQQ", 0, 0, _SCOPE_SIGNAL)
    ruleset = libc.syscall(_RULESET, handled, len(handled), 0)
    if ruleset < 0:
        return ""
    try:
        closed = (
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.syscall(_RESTRICT, ruleset, 0) == 0
        )
        return "landlock" if closed else ""
    finally:
        os.close(ruleset)
