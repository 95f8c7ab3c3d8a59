"""Host memory of this process as the kernel counts it, in bytes. A figure that this kernel does not give (a sandbox
such as gVisor lacks parts of /proc) is None, and is reported as not measurable."""

from __future__ import annotations

from pathlib import Path

__all__ = ["NOT_MEASURABLE", "forget_peak", "host_bytes", "less", "peak_host_bytes"]

NOT_MEASURABLE = "not measurable here"
PROC = Path("/proc")


def host_bytes(pid: int | str = "self") -> int | None:
    """Returns the bytes resident now."""
    return _field(pid, "VmRSS")


def peak_host_bytes(pid: int | str = "self") -> int | None:
    """Returns the most bytes resident at once since the start, or since `forget_peak`."""
    return _field(pid, "VmHWM")


def forget_peak() -> bool:
    """Begin counting the peak anew. Returns False where the kernel does not do so."""
    before, now = peak_host_bytes(), host_bytes()
    if before is None or now is None:
        return False
    try:
        (PROC / "self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    after = peak_host_bytes()
    # After a reset the peak is near the present resident bytes; a few pages come and go meanwhile.
    return after is not None and (after < before or before - now < 1 << 20)


def less(bytes_: int | None, baseline_bytes: int | None) -> int | None:
    """Returns the difference; None if either figure is not measurable."""
    return None if bytes_ is None or baseline_bytes is None else bytes_ - baseline_bytes


def _field(pid: int | str, name: str) -> int | None:
    try:
        text = (PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
