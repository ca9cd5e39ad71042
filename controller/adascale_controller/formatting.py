"""Numbers as people read them."""

from __future__ import annotations


def count(number: float) -> str:
    """A whole number, in groups of three digits."""
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """A number of things, as in `1 replica` and `2 replicas`."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def significant(number: float, digits: int = 3) -> str:
    """A number with as many decimals as give it `digits` digits, and no more."""
    if number == 0:
        return "0"
    whole = len(f"{abs(number):.0f}") if abs(number) >= 1 else 0
    if whole:
        return f"{number:,.{max(digits - whole, 0)}f}"
    return f"{number:.{digits}g}"


def trimmed(number: float) -> str:
    """A number in three digits at most, without zeros at the end."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def percent(share: float) -> str:
    """A share of 1."""
    return f"{100 * share:.0f}%"


def clock(seconds: float) -> str:
    """A span of time as `m:ss`, or `h:mm:ss`."""
    whole = max(int(seconds), 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def duration(seconds: float) -> str:
    """A span of time in words."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
