"""Units of bytes, and texts for bytes, seconds and counts. GB = 1e9, GiB = 2**30; converted only here."""

from __future__ import annotations

from collections.abc import Sequence

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

BYTES_OF = {"": 1, "b": 1, "kb": KB, "mb": MB, "gb": GB, "tb": TB, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}


def format_bytes(size_bytes: float) -> str:
    """Decimal: "12.3 GB"."""
    for unit, scale in (("TB", TB), ("GB", GB), ("MB", MB), ("kB", KB)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.4g} {unit}" if unit != "GB" else f"{size_bytes / scale:.2f} GB"
    return f"{size_bytes:.0f} B"


def format_s(time_s: float) -> str:
    """Such as "1.234 s", "12.3 ms", "45 us"."""
    if time_s >= 1:
        return f"{time_s:.3f} s"
    if time_s >= 1e-3:
        return f"{time_s * 1e3:.1f} ms"
    return f"{time_s * 1e6:.0f} us"


def format_params(count: float) -> str:
    """Such as "8.03 B", "124.4 M", "4,096"."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} B"
    return f"{count / 1e6:.1f} M" if count >= 50_000 else f"{count:,.0f}"


def format_count(number: int, what: str) -> str:
    """Such as "1 chunk", "2 micro-batches".

    what: word for a single thing.
    """
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Ascending: "rank 3", "ranks 0 to 3, 6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(words)}"


def format_error(share: float | None) -> str:
    """Such as "± 12 %"; "± ?" for None."""
    return "± ?" if share is None else f"± {share * 100:.0f} %"
