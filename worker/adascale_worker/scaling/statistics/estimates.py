"""The estimates that one step gives of the gradients of each parameter group.

All numbers are tensors of shape (groups,). They are on the host, or on the device of the learning rates if
these are tensors on a GPU, so that a step can be made without reading them back.

The formulas are those of AdaScale SGD (Johnson et al., "AdaScale SGD: A User-Friendly Algorithm for
Distributed Training", ICML 2020, arXiv 2007.05105, section 3 and appendix B.3), with the terms of
`adascale_core.batch.gain`.
"""

from dataclasses import dataclass

from torch import Tensor

from adascale_core.batch.gain import require_scale


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """The estimates from one step, for each parameter group."""

    grad_sqr: Tensor  # estimated squared norms of the true gradients, shape (groups,)
    grad_var: Tensor  # estimated total variances of a gradient at the initial batch size, shape (groups,)
    valid: Tensor  # whether the numbers are usable, shape (groups,). Numbers that are not may have any value.
    biased: bool = False  # whether they come from consecutive gradients


def from_micro_gradients(
    count: int, mean_of_sqr: Tensor, sqr_of_mean: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the unbiased `grad_sqr` and `grad_var` from the gradients that one step is the mean of.

    With n micro-gradients g_i of equal batch size, L = mean |g_i|^2 and M = |mean g_i|^2:
    grad_sqr = (n M - L) / (n - 1) and grad_var = (L - M) S / (n - 1). (Appendix B.3 of the paper, with
    the variance converted to B0 from any batch size of a micro-gradient.)
    """
    if count < 2:
        raise ValueError(
            f"got {count} gradient in a step; the variance of gradients needs at least 2: "
            "use from_consecutive_gradients"
        )
    require_scale(scale)
    return (
        (count * sqr_of_mean - mean_of_sqr) / (count - 1),
        (mean_of_sqr - sqr_of_mean) * (scale / (count - 1)),
    )


def from_consecutive_gradients(
    inner_product: Tensor, sqr_of_difference: Tensor, previous_scale: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the biased `grad_sqr` and `grad_var` from two consecutive steps of one replica.

    The two gradients take the place of two gradients at the same point: grad_sqr = g1 . g2, and the
    difference has variance grad_var (1/S1 + 1/S2). For equal scales this is `from_micro_gradients` with n =
    2.

    The bias: the parameters move between the two steps, by d, so that grad_var contains
    |H d|^2 / (1/S1 + 1/S2) with H the Hessian. With SGD, d = -lr g1, so that grad_sqr lacks lr tr(H V), V the
    covariance of g1, besides what the true gradient loses by the step: where noise dominates, more than all
    of it. Both effects vanish with the learning rate. (The gradient noise scale of AdaptDL does so for one
    replica.)
    """
    require_scale(previous_scale)
    require_scale(scale)
    return inner_product, sqr_of_difference / (1.0 / previous_scale + 1.0 / scale)
