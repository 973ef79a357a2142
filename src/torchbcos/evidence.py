"""What a measured number is to be quoted with."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

__all__ = ["command", "commit", "cores", "device_name", "without_home"]


def command(*program: str) -> str:
    """What was typed, `program` and its arguments, without the home folder."""
    return without_home(shlex.join([*program, *sys.argv[1:]]))


def commit() -> str:
    """The commit of the source that runs, or "unknown" for an installed package."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "."], capture_output=True)
    except OSError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + (" with changes in src" if changed.returncode else "")


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def without_home(words: str) -> str:
    """A path or command with ~ for the folder of whoever ran it."""
    return words.replace(f"{Path.home()}{os.sep}", "~/")


def device_name(device: torch.device | str) -> str:
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
