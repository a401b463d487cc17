"""What torchrun tells the ranks of a run, which a process that is no rank must not inherit."""

from collections.abc import Mapping

OF_A_RANK = {"MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"} | {
    f"{which}{what}" for which in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")
}


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment except those by which torchrun tells a rank of its group. A process that has them
    would take part in that group as soon as it trains something.
    """
    return {k: v for k, v in environment.items() if k not in OF_A_RANK and not k.startswith("TORCHELASTIC")}
