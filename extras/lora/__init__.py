"""LoRA: small matrices learn beside the weights of a model, which stay as they are.

`LoRA` is the group of flags about what learns. The core knows it as an `rl.model.roles.Learning`, and a model with
adapters has a family that stands in adapters.py. experts.py adds adapters to the experts of a mixture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from rl.flags import AtLeast1, FewOr0, Needs, NotNegative

ALL = "all-linear"


@dataclass(frozen=True)
class LoRA:
    """These flags decide what learns. With LoRA, small matrices learn beside frozen weights."""

    lora_rank: FewOr0 = 0  # Train adapters of this rank, with about ten times the learning rate. 0 trains all weights.
    # What adapters add to a layer is multiplied by --lora-alpha / --lora-rank.
    lora_alpha: Annotated[AtLeast1, Needs("lora_rank")] = 32
    # Linear layers whose names end like this get adapters, such as q_proj v_proj. all-linear means all except for the
    # head.
    target_modules: Annotated[tuple[str, ...], Needs("lora_rank")] = (ALL,)
    lora_experts: Annotated[bool, Needs("lora_rank")] = False  # In a mixture of experts, each expert gets adapters too.
    # This is the weight of the load-balancing loss of a mixture of experts, whose experts get about equally much to do.
    # It works without LoRA too.
    router_aux_loss_coef: NotNegative = 0.0
    freeze_vision_tower: bool = True  # Do not train what a model sees images with. This works without LoRA too.

    def check(self, flags: Mapping[str, Any]) -> None:
        """Raise ValueError if other flags of the run, which are in `flags` by name, exclude adapters."""
        if self.lora_rank and (steps := flags.get("ref_update_steps")):
            raise ValueError(
                f"--ref-update-steps {steps}: with --lora-rank {self.lora_rank} the reference is the policy without "
                "its adapters, which stays as it is; leave one of them out"
            )

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights in a model's files stay as they are, and adapters learn beside them."""
        return self.lora_rank > 0

    def check_model(self, path: str, auto_class: Any = None, *, flag: str = "--model") -> None:
        """Raise ValueError, from the config alone, if the model in `path`, which `flag` has named, cannot learn as
        these flags say. See `adapters.check_model`.
        """
        if self.lora_rank or not self.freeze_vision_tower:
            from extras.lora import adapters

            adapters.check_model(self, path, auto_class, flag=flag)

    def check_policy(self, path: str) -> None:
        """Raise ValueError, from the config alone, if --router-aux-loss-coef would say nothing about the policy in
        `path`. Other models that learn, such as a critic, need no experts. See `experts.check_routed`.
        """
        if self.router_aux_loss_coef:
            from extras.families import check_routed

            check_routed(path, f"--router-aux-loss-coef {self.router_aux_loss_coef}")

    def apply(self, model: Any, *, path: str, seed: int, ranks: Any) -> None:
        """Freeze what does not learn of a model on the host, and add adapters. See `adapters.add` and `Learning`."""
        if self.lora_rank:
            from extras.lora import adapters

            family = adapters.add(model, self, path=path, seed=seed, hashed=ranks.is_main)
            model.packed = replace(model.packed, families=(*model.packed.families, family))
        elif self.freeze_vision_tower:
            from extras.families import freeze_tower

            freeze_tower(model, ranks.dtype)


def adapted_layers(model: Any, flags: LoRA, *, flag: str) -> set[Any]:
    """The modules of a model that get adapters. Raises ValueError as `adapters.layers_of`."""
    from extras.lora import adapters

    return adapters.adapted_layers(model, flags, flag=flag)
