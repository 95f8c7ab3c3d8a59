"""Host memory of this process as the kernel counts it, in bytes; None where this kernel does not (a sandbox such as
gVisor has /proc without some of it): a figure that is not measurable here is said to be so, not made up."""

from __future__ import annotations

from pathlib import Path

__all__ = ["NOT_MEASURABLE", "forget_peak", "host_bytes", "less", "peak_host_bytes"]

NOT_MEASURABLE = "not measurable here"
PROC = Path("/proc")


def host_bytes(pid: int | str = "self") -> int | None:
    """Resident now."""
    return _field(pid, "VmRSS")


def peak_host_bytes(pid: int | str = "self") -> int | None:
    """Most that was resident at once since the start, or since `forget_peak`."""
    return _field(pid, "VmHWM")


def forget_peak() -> bool:
    """Begin counting the peak anew; False where the kernel does not let us, or does as if."""
    before, now = peak_host_bytes(), host_bytes()
    if before is None or now is None:
        return False
    try:
        (PROC / "self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    after = peak_host_bytes()
    # Where it worked, the peak is what is resident now; a few pages come and go meanwhile.
    return after is not None and (after < before or before - now < 1 << 20)


def less(bytes_: int | None, baseline_bytes: int | None) -> int | None:
    """Returns the difference, or None where either is not measurable."""
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
