"""How far two token sequences agree. Pure, and fast for long ones: slices are compared by the interpreter, not token by token."""

from __future__ import annotations

from collections.abc import Sequence as Tokens


def common_prefix(left: Tokens[int], right: Tokens[int]) -> int:
    """Number of equal tokens at the beginning of both."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
