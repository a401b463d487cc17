"""The gated delta rule of flash-linear-attention as one operation of torch.

torch.compile cannot look into its kernels. It would split the layer's graph, and with checkpointing compile nothing of
the layer. Of an operation it only has to know the shape of what comes out.
"""

import functools
import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_AUTOGRAD = torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA, torch._C.DispatchKey.ADInplaceOrView
AUTOGRAD = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, _AUTOGRAD))


def kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, borders: Tensor | None) -> Tensor:
    """flash-linear-attention's, with its own gradient."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # only on GPUs, where it is installed

    return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=borders)[0]


def unit(x: Tensor) -> Tensor:
    """x / sqrt(sum of x^2 + 1e-6) along the last dimension, as the kernels would do, but theirs is tuned again, for
    10 s, for every 65,536 vectors that a batch has more.
    """
    n = x.shape[-1]
    return F.rms_norm(x, (n,), eps=1e-6 / n) * n**-0.5


@functools.cache
def what_is_wrong(own: Any, heads: int, key_width: int, value_width: int, device: torch.device) -> str:
    """What is wrong with the kernels, "" if nothing: whether their outputs and gradients are those of `own`,
    transformers' function in plain torch. On Hopper GPUs, with Triton 3.4 to 3.7.0 and without tilelang, gradients are
    wrong or refused (issue 640 of flash-linear-attention). The sizes are the model's, for which kernels are tuned once.
    """
    random = torch.Generator().manual_seed(0)
    widths = (key_width,), (key_width,), (value_width,), (), ()
    q, k, v, g, beta = (torch.rand(1, 150, heads, *width, generator=random).to(device) for width in widths)
    inputs = [(x - 0.5).bfloat16() for x in (q, k, v)] + [-g, beta.bfloat16()]
    borders = torch.tensor([0, 70, 150], device=device, dtype=torch.int32)

    def run(rule: Any, own_inputs: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in own_inputs]
        out = rule(*leaves)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        parts = zip(*(x.split([70, 80], 1) for x in (q, k, v, g, beta)), strict=True)
        return torch.cat([own(*x[:3], g=x[3], beta=x[4], use_qk_l2norm_in_kernel=True)[0] for x in parts], 1)

    with torch.enable_grad():
        try:
            found = run(lambda q, k, *x: kernel(unit(q), unit(k), *x, borders=borders), inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # kernels that do not compile here, or that know that they would be wrong
            return f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        expected = run(plain, [x.float() for x in inputs])
    errors = [(x.float() - y).norm() / y.norm() for x, y in zip(found, expected, strict=True)]
    error = float(torch.stack(errors).max())
    return "" if error < 0.1 else f"outputs or gradients differ by {error:.0%}"  # bfloat16: about 1 %


def without_kernels(own: Any, problem: str = "") -> Any:
    """transformers' function in plain torch, even where it would take the kernels. torch.compile would unroll its
    loops, for each length again, which takes minutes. The result keeps the problem of the kernels.
    """
    known = inspect.signature(own).parameters

    @torch.compiler.disable
    @functools.wraps(own)
    def rule(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **{name: x for name, x in kwargs.items() if name in known})

    rule.problem = problem
    return rule


@torch.library.custom_op("rl::gated_delta", mutates_args=())
def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, borders: Tensor | None) -> Tensor:
    """q, k (B, N, H, K), v (B, N, H, V), g and beta (B, N, H) -> (B, N, H, V). With a state S (K, V) of each head:

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T,    out_t = S_t^T q_t / sqrt(K)

    Args: borders (b + 1,), where S is zero again, in a packed row (B = 1).
    Source: Yang et al. 2024, "Gated Delta Networks", eq. 10 (arXiv 2412.06464).
    """
    return kernel(q, k, v, g, beta, borders=borders).contiguous()


@torch.library.custom_op("rl::gated_delta_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, borders: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    # The forward pass once more, since what the kernels keep is theirs to know. Within an operation autograd is off.
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded - AUTOGRAD), torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
        out = kernel(*inputs, borders=borders)
        grads = torch.autograd.grad(out, inputs, grad)
    return tuple(x.contiguous() for x in grads)


@gated_delta.register_fake
def _(q, k, v, g, beta, borders):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@_backward.register_fake
def _(grad, q, k, v, g, beta, borders):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradient(ctx, grad):
    return *torch.ops.rl.gated_delta_backward(grad.contiguous(), *ctx.saved_tensors), None


def as_operation(own: Any) -> Any:
    """transformers' function of the gated delta rule by this operation, where no state goes in or is wanted."""
    gated_delta.register_autograd(_gradient, setup_context=_keep)

    def rule(query, key, value, *, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None, **options):
        if options.get("initial_state") is not None or options.get("output_final_state"):
            kept = dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens)
            return own(query, key, value, g=g, beta=beta, **kept, **options)
        if use_qk_l2norm_in_kernel:
            query, key = unit(query), unit(key)
        return gated_delta(query, key, value, g, beta, cu_seqlens), None

    rule.is_operation, rule.__wrapped__ = True, own
    return rule
