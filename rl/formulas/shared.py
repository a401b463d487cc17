"""What several formulas use: the check of shapes, and the bound on log-ratios."""

from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside any trust region, yet finite in every dtype used for losses


def check_shapes(*tensors: Tensor, dims: int | None = None) -> None:
    """Assert that all tensors have the same shape, of `dims` dimensions if that is given."""
    shapes = [tuple(x.shape) for x in tensors]
    assert len(set(shapes)) == 1 and dims in (None, len(shapes[0])), f"unexpected shapes: {str(shapes)[1:-1]}"
