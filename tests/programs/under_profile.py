#!/usr/bin/env python3
"""Runs a command under the seccomp profile of a container engine.

Usage: under_profile.py PROFILE.json COMMAND...

The profile is compiled as runc and crun do it: by libseccomp (Debian: python3-seccomp), for the
capabilities that this process has. The filter is then loaded, and the command executed.
"""

import json
import os
import platform
import sys

import seccomp

# In the order of their numbers (linux/capability.h).
CAPABILITIES = """CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE
NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT
SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP
MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE""".split()
COMPARISONS = {
    "SCMP_CMP_NE": seccomp.NE,
    "SCMP_CMP_LT": seccomp.LT,
    "SCMP_CMP_LE": seccomp.LE,
    "SCMP_CMP_EQ": seccomp.EQ,
    "SCMP_CMP_GE": seccomp.GE,
    "SCMP_CMP_GT": seccomp.GT,
    "SCMP_CMP_MASKED_EQ": seccomp.MASKED_EQ,
}


def own_capabilities() -> set[str]:
    with open("/proc/self/status") as status:
        mask = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return {f"CAP_{name}" for number, name in enumerate(CAPABILITIES) if mask >> number & 1}


def applies(rule: dict, capabilities: set[str]) -> bool:
    """Whether the rule holds for this machine and these capabilities."""
    includes, excludes = rule.get("includes") or {}, rule.get("excludes") or {}
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    least = tuple(int(part) for part in includes.get("minKernel", "0.0").split("."))
    return (
        release >= least
        and ("arches" not in includes or "amd64" in includes["arches"])
        and "amd64" not in excludes.get("arches", [])
        and set(includes.get("caps", [])) <= capabilities
        and not set(excludes.get("caps", [])) & capabilities
    )


def action(rule: dict, name: str, default_errno: int):
    if rule[name] == "SCMP_ACT_ALLOW":
        return seccomp.ALLOW
    assert rule[name] == "SCMP_ACT_ERRNO", f"this program does not know the action {rule[name]}"
    return seccomp.ERRNO(rule.get("errnoRet", default_errno))


def load(profile: dict) -> None:
    default_errno = profile.get("defaultErrnoRet", 1)
    filter = seccomp.SyscallFilter(action(profile, "defaultAction", default_errno))
    capabilities = own_capabilities()
    for rule in profile["syscalls"]:
        if not applies(rule, capabilities):
            continue
        arguments = [
            seccomp.Arg(arg["index"], COMPARISONS[arg["op"]], arg["value"], arg.get("valueTwo", 0))
            for arg in rule.get("args") or []
        ]
        for name in rule["names"]:
            try:
                seccomp.resolve_syscall(seccomp.Arch(), name)
            except ValueError:
                continue  # A call that this libseccomp does not know yet.
            try:
                filter.add_rule_exactly(action(rule, "action", default_errno), name, *arguments)
            except (ValueError, RuntimeError, OSError):
                pass  # A call of another architecture, or the default.
    filter.load()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        load(json.load(file))
    os.execvp(sys.argv[2], sys.argv[2:])
