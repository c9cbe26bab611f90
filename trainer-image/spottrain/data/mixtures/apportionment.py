"""How many of the first n samples of a mixture come from each source.

The method is that of Webster and Sainte-Laguë: each sample in turn goes to the source whose weight, divided by twice
the number of its samples plus one, is largest. So the counts never fall as n grows, each is close to its share, and
they can be computed for any n at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spottrain.data.order import Indices

Weights = npt.NDArray[np.float64]


def apportioned(total: int, weights: Weights) -> Indices:
    """Samples of each source among the first `total`.

    Args:
        total: Number of samples.
        weights: Of each source, 0 or above; their sum is 1.

    Returns:
        Their counts, in the order of the weights. The sum is `total`.
    """
    # Each source has at least so many: a divisor's rounding is off by a half for each source. One more for floats.
    spread = len(weights) / 2
    counts = np.maximum(0, np.floor((total - spread) * weights - 1.5)).astype(np.int64)
    for _ in range(total - int(counts.sum())):
        counts[np.argmax(weights / (2 * counts + 1))] += 1
    return counts
