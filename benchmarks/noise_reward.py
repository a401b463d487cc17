"""A reward for measuring speed with random weights: 0 or 1 by a hash of the response, so that groups have spread."""

import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """1.0 for half of all texts, decided by the text alone."""
    return float(zlib.crc32(solution_str.encode()) & 1)
