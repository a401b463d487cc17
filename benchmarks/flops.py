"""Floating-point operations of training."""

from torch import nn
from transformers import PreTrainedModel

from extras.families import count_experts


def train_flops(
    model: PreTrainedModel, *, tokens: float, response_tokens: float, sum_squares: float, frozen: bool = False
) -> float:
    """Operations of one forward and backward pass of a decoder, which may be on meta, nothing computed twice.

    `tokens` pass through the layers, 2 a weight forward and 4 backward, in a mixture only through the routers and the
    experts that they choose; `response_tokens` of them through the LM head. With LoRA the weights are `frozen` and have
    no gradients: 2 backward; its adapters are left out. Causal attention over a sequence of s tokens takes half of
    12 * width * s^2 in each layer that has it; `sum_squares` is the sum of s^2. In a gated delta net a token reads,
    changes and reads again a state (K, V) of each head: 18 * heads * K * V. Left out are other recurrences,
    norms, activations and the optimizer, as usual for the utilization of a GPU.
    """
    c, head = model.config, model.get_output_embeddings()
    layers = sum(weights_used(x, model) for x in model.modules() if x is not head and not isinstance(x, nn.Embedding))
    kinds = getattr(c, "layer_types", None) or ["full_attention"] * c.num_hidden_layers
    attending = sum(kind not in ("linear_attention", "conv") for kind in kinds)
    heads = getattr(c, "num_attention_heads", 0)
    width = heads * (getattr(c, "head_dim", None) or c.hidden_size // max(1, heads))
    is_delta_net = hasattr(c, "linear_num_value_heads")
    state = c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim if is_delta_net else 0
    states = kinds.count("linear_attention") * state
    products = layers * tokens + head.weight.numel() * response_tokens
    return (4 if frozen else 6) * products + 6 * attending * width * sum_squares + 18 * states * tokens


def weights_used(module: nn.Module, model: PreTrainedModel) -> float:
    """Weights of a module itself that multiply a token: no vectors, and of experts those that it gets."""
    used = 0.0
    for x in module.parameters(recurse=False):
        is_expert = x.ndim == 3 and len(x) == count_experts(model.config)
        used += (x.ndim > 1) * x.numel() * (model.config.num_experts_per_tok / len(x) if is_expert else 1.0)
    return used
