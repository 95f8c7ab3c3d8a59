"""Host memory of this process as the kernel counts it, in bytes; 0 where there is no /proc."""

from __future__ import annotations

from pathlib import Path

__all__ = ["forget_peak", "host_bytes", "peak_host_bytes"]


def host_bytes(pid: int | str = "self") -> int:
    """Resident now."""
    return _field(pid, "VmRSS")


def peak_host_bytes(pid: int | str = "self") -> int:
    """Most that was resident at once since the start, or since `forget_peak`."""
    return _field(pid, "VmHWM")


def forget_peak() -> bool:
    """Begin counting the peak anew; False where the kernel does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _field(pid: int | str, name: str) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
