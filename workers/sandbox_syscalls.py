"""What the sandbox asks of the kernel, by ctypes; the standard library only. An OSError names the call that failed."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL_NAMESPACES = 0x7E020000
"""Every CLONE_NEW... flag."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SYS_MOUNT_SETATTR = 442  # one number on every architecture
AT_FDCWD, AT_RECURSIVE = -100, 0x8000

LIBC = ctypes.CDLL(None, use_errno=True)

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine to its AUDIT_ARCH number."""
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
DENIED = {
    # ptrace, pivot_root, chroot, mount, umount2, swapon, reboot, modules, kexec, keys, unshare, perf, setns,
    # process_vm, bpf, userfaultfd, memfd_create (memory outside of the limits), shmget
    "x86_64": (101, 155, 161, 165, 166, 167, 169, 175, 176, 246, 248, 249, 250, 272, 298, 308, 310, 311, 313, 321,
               323, 319, 29),
    "aarch64": (117, 41, 51, 40, 39, 224, 142, 105, 106, 104, 217, 218, 219, 97, 241, 268, 270, 271, 273, 280,
                282, 279, 194),
}  # fmt: skip
DENIED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)
"""io_uring, and the newer calls that mount."""


def check(result: int, what: str) -> None:
    """Raises OSError where a libc call returned -1."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    check(LIBC.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = (source.encode(), target.encode(), kind.encode() if kind else None)
    check(LIBC.mount(*encoded, ctypes.c_ulong(flags), data.encode()), f"mount {source} on {target}")


def make_read_only(target: str, *, devices: bool = False) -> None:
    """The mount and all below it: read-only, without set-user-id and (unless asked for) devices."""
    attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | (0 if devices else MOUNT_ATTR_NODEV)
    setting = struct.pack("QQQQ", attributes, 0, 0, 0)
    number, size = ctypes.c_long(SYS_MOUNT_SETATTR), ctypes.c_size_t(len(setting))
    done = LIBC.syscall(number, AT_FDCWD, target.encode(), ctypes.c_uint(AT_RECURSIVE), setting, size)
    check(done, f"mount_setattr {target}")


def pivot_root(new_root: str, old_root: str) -> None:
    number = ctypes.c_long(PIVOT_ROOT[platform.machine()])
    check(LIBC.syscall(number, new_root.encode(), old_root.encode()), "pivot_root")


def umount_detach(target: str) -> None:
    check(LIBC.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def prctl(option: int, value: int, pointer: object = 0) -> None:
    check(LIBC.prctl(ctypes.c_int(option), ctypes.c_ulong(value), pointer, 0, 0), f"prctl {option}")


def deny_syscalls() -> None:
    """Install a seccomp filter: no new namespaces, mounts, tracing, keys, modules or memory outside of the limits."""
    program = _filter(platform.machine())
    buffer = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    filter_mode = 2
    prctl(PR_SET_SECCOMP, filter_mode, ctypes.create_string_buffer(pointer, len(pointer)))


def _filter(machine: str) -> bytes:
    """Classic BPF over struct seccomp_data: number at 0, architecture at 4, the first argument at 16."""
    load, jump_equal, jump_at_least, jump_set, ret = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, eperm, enosys, allow = 0x80000000, 0x00050001, 0x00050026, 0x7FFF0000
    x32 = 0x40000000

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    steps = [step(load, 4), step(jump_equal, ARCHITECTURES[machine], 1, 0), step(ret, kill)]
    steps += [step(load, 0), step(jump_at_least, x32, 0, 1), step(ret, eperm)]
    for number in (*DENIED[machine], *DENIED_EVERYWHERE):
        steps += [step(jump_equal, number, 0, 1), step(ret, eperm)]
    # clone3 passes its flags in memory, which a filter cannot read; libc falls back to clone.
    steps += [step(jump_equal, CLONE3, 0, 1), step(ret, enosys)]
    steps += [step(jump_equal, CLONE[machine], 0, 3), step(load, 16), step(jump_set, ALL_NAMESPACES, 0, 1)]
    return b"".join([*steps, step(ret, eperm), step(ret, allow)])
