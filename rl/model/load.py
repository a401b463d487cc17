"""Models of transformers on the host, made ready for this package, and their weights as engines and files know them.

Every model is tested when it is loaded: do packed sequences give what its own forward gives for each of them alone?
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_flatten_with_path
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from extras import families
from extras.images import check_tower_has_images
from rl.console import say, started
from rl.data.types import Batch, take_rows
from rl.model import lora as adapters
from rl.model import lora_experts
from rl.model.attention import choose_attention, use_attention
from rl.model.checks import check_same_tokenizer, check_trainable, open_model, read_config, read_model
from rl.model.family import Family
from rl.model.logprobs import add_packed_forward, run_packed, token_logprobs
from rl.model.lora import Base, LoRA
from rl.model.own_forward import use_forward
from rl.model.sharding import Memory, full_tensors, shard
from rl.ranks import Ranks

FULL_TRAINING, DEFAULT_MEMORY = LoRA(), Memory()
# How recurrent layers keep sequences apart, and that in words; those of the first one share beginnings
APART = {"": "", "borders": ", nothing shared", "rows": " but in recurrent layers"}
WAYS = {  # to run a model, the fastest first; see `logprobs.Packed`
    f"packed{words}{logits}": dict(is_padded=False, own_head=bool(logits), apart=apart)
    for (apart, words), logits in itertools.product(APART.items(), ("", ", with the logits of its own forward"))
} | {"padded": dict(is_padded=True, own_head=True, apart="")}
LONGEST_TEST = 2**13  # tokens of a sequence that `choose_forward` tries out


def load_policy(
    path: str,
    ranks: Ranks,
    lora: LoRA = FULL_TRAINING,
    memory: Memory = DEFAULT_MEMORY,
    *,
    longest: int | None = None,
    seed: int = 0,
    frozen: bool = False,
    flag: str = "--model",
) -> nn.Module:
    """A causal LM by Hugging Face id or folder, sharded over the ranks, to be trained, or `frozen` without gradients.

    What learns is in float32: all weights but those of a vision tower (--freeze-vision-tower), or with --lora-rank the
    adapters. Frozen weights have the compute precision.
    Args: longest, tokens of the longest sequence; seed, of new adapters; flag, that has named the model. All ranks must
    enter. Raises ValueError as `load_pretrained`, `lora.layers_of` or `choose_forward`.
    """
    adapt = not frozen and check_lora(lora, path, flag=flag)
    learns = not frozen and not adapt  # all of it
    model = load_causal_lm(path, ranks, dtype=torch.float32 if learns else ranks.dtype, flag=flag, as_in_files=learns)
    if adapt:
        adapters.add(model, lora, path=path, seed=seed, hashed=ranks.is_main)
    elif lora.freeze_vision_tower:
        families.freeze_tower(model, ranks.dtype)
    if frozen:
        model.requires_grad_(False)
    return shard_as(memory, model, ranks, longest=longest, flag=flag)


def load_reference(
    path: str, ranks: Ranks, policy: nn.Module, memory: Memory = DEFAULT_MEMORY, *, longest: int | None = None
) -> nn.Module | Base:
    """The policy before training: a second, frozen model, or with LoRA the policy without its adapters. All ranks must
    enter, before training. Raises ValueError as `load_policy`.
    """
    if hasattr(policy, "lora"):
        return Base(policy)
    return load_policy(path, ranks, memory=memory, longest=longest, frozen=True)


def check_lora(lora: LoRA, path: str, auto_class: Any = None, *, flag: str = "--model") -> bool:
    """Whether the flags ask for adapters. Raises ValueError, from the config alone, as `lora.layers_of` if they do, and
    for --no-freeze-vision-tower if the model sees no images.
    """
    if not lora.freeze_vision_tower:
        check_tower_has_images()
    if lora.lora_rank == 0:
        return False
    with torch.device("meta"):
        model = (auto_class or families.auto_class(path)).from_config(AutoConfig.from_pretrained(path))
    kept = dict(freeze_vision_tower=lora.freeze_vision_tower, flag=f"{flag} {path}")
    adapters.layers_of(model, lora.target_modules, **kept)
    if lora.lora_experts:
        lora_experts.check(model, lora.lora_rank, flag=f"{flag} {path}")
    return True


def check_second_model(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    lora: LoRA,
    auto_class: Any = None,
    *,
    longest: int,
    flag: str,
    model: str,
    new_head: bool = False,
) -> None:
    """Raise ValueError if the model in `path`, which `flag` has named, cannot be trained beside the policy `model`, as
    far as its config, tokenizer and the headers of its files tell. `tokenizer` is the policy's; `longest`, tokens of
    the longest sequence; new_head, see `read_model`.
    """
    own = open_model(path, auto_class, flag=flag, new_head=new_head)
    check_same_tokenizer(tokenizer, own, path, flag=flag, model=model)
    check_lora(lora, path, auto_class, flag=flag)
    check_trainable(path, longest, flag=flag)


def shard_as(
    memory: Memory, model: nn.Module, ranks: Ranks, *, longest: int | None = None, flag: str = "--model"
) -> nn.Module:
    """`sharding.shard` a model and `choose_forward` for it. Raises ValueError as that, or as `lora.watched`."""
    model = shard(model, ranks, replace(memory, compile=memory.compile and ranks.device.type == "cuda"))
    started(f"{flag} on the device")
    with adapters.watched(model, flag=flag):
        choose_forward(model, ranks, longest=longest, flag=flag)
    started(f"{flag} tested")
    return model


def exported(model: PreTrainedModel, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model for engines and files, from (name, whole tensor) as the trainer has them: adapters are
    added to their weights, and names are those that the model's authors publish, where transformers has changed them.
    """
    for name, x in adapters.merged(model, named_tensors):
        yield from revert_weight_conversion(model, {name: x}).items()


def weights_for_engine(policy: nn.Module, ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) for `update_weights` of an engine, in the compute precision. All ranks must iterate."""
    return exported(policy, itertools.chain(full_tensors(policy, ranks.dtype), buffers_in_files(policy)))


def buffers_in_files(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for buffers in a model's files, such as an activation's constants; nothing trains them."""
    for prefix, module in model.named_modules():
        for name, x in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), x


def load_causal_lm(
    path: str,
    ranks: Ranks,
    *,
    dtype: torch.dtype = torch.float32,
    flag: str = "--model",
    as_in_files: bool = False,
) -> nn.Module:
    """`load_pretrained` of a causal LM with weights in `dtype`. Raises ValueError as `read_config` too."""
    read_config(path, flag=flag)
    model, _ = load_pretrained(families.auto_class(path), path, ranks, dtype=dtype, flag=flag, as_in_files=as_in_files)
    families.prepare(model)
    return add_packed_forward(model)


def load_pretrained(
    auto_class: Any,
    path: str,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    flag: str = "--model",
    new_head: bool = False,
    as_in_files: bool = False,
    **config_changes: Any,
) -> tuple[nn.Module, set[str]]:
    """A model of a transformers auto class on the host, and the names of weights that are new. Rank 0 reads the files;
    other ranks get storage that `shard` fills. All ranks must enter.

    Args: new_head, see `read_model`; as_in_files, whether rank 0 leaves parameters in the precision of the files, most
    often bfloat16, until `shard` casts those that learn to float32: the numbers are the same, and they need no memory
    but that of the mapped files; config_changes, such as num_labels. Raises ValueError on all ranks as `read_model`, or
    if weights that the config ties differ in the files, so that ranks would have different models.
    """
    options, problems = dict(flag=flag, new_head=new_head, dtype=dtype, **config_changes), []
    as_in_files = as_in_files and dtype == torch.float32
    try:
        if ranks.is_main:
            model, new = read_model(auto_class, path, as_in_files=as_in_files, **options)
            for x in model.buffers() if as_in_files else ():
                x.data = x.data.to(torch.promote_types(x.dtype, dtype) if x.is_floating_point() else x.dtype)
            ties = model.get_expanded_tied_weights_keys(all_submodels=True).keys()
            if untied := ties - model.all_tied_weights_keys.keys():
                differ = f"its config ties {min(untied)} to another weight, and its files have two that differ"
                raise ValueError(f"{flag} {path}: {differ}; set tie_word_embeddings to false in its config.json")
        else:
            model, new = read_model(auto_class, path, device_map="meta", **options)
            model.to_empty(device="cpu")
            model.tie_weights()  # to_empty unties, which would halve the embedding's gradient
    except ValueError as error:
        problems = [str(error)]
    if problems := ranks.all_gather(problems):  # or the other ranks would wait for this one
        raise ValueError(problems[0])
    started(f"{flag} read")
    name_weights(model, path)
    use_attention(model, choose_attention(ranks.device, ranks.dtype))
    return model, new


def name_weights(model: PreTrainedModel, path: str) -> None:
    """Let `exported` give published names, whatever those of the files in `path` are, which may be older or newer. What
    is only the text part of a larger model keeps the names within that, whose config becomes `model.whole`.
    """
    config = AutoConfig.from_pretrained(path)
    model.whole = None if isinstance(model.config, type(config)) else config
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [x for x in conversions if model.whole or not isinstance(x, PrefixChange)]


# ---------------------------------------------------------------------------------------------------------------------
# How does a model run: packed or padded?


@torch.no_grad()
def choose_forward(model: nn.Module, ranks: Ranks, *, longest: int | None = None, flag: str = "--model") -> str:
    """Let a sharded model run in the fastest of `WAYS` that gives what its own forward gives for one sequence alone.

    Log-probs of random sequences are compared, or hidden states if there is no LM head. Most sequences are short, two
    begin alike, and one is longer than the attention windows in the config, up to `longest` tokens (default: the
    model's positions). In float32 the root mean square of the difference may be 1e-4 in the worst sequence. In bfloat16
    it may be three times what padding, or another rounding in the attention, changes in the own forward, up to 0.2.

    Returns: the way; rank 0 prints why it is "padded". Raises ValueError if none is right. All ranks must enter.
    """
    head = model.get_output_embeddings()  # None: hidden states are compared
    is_plain = head is None or (isinstance(head, nn.Linear) and head.bias is None)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONGEST_TEST
    batch = _random_batch(model.config, longest or positions, ranks.device, model.packed.families)
    for what in filter(None, (x.slow_to_try(ranks.device) for x in model.packed.families if ranks.is_main)):
        say(
            f"{flag}: trying out {what} of {model.config.model_type}; the first time on a machine they are compiled "
            "and tuned, which takes minutes"
        )
    with torch.compiler.set_stance("force_eager"):  # a few odd lengths are not worth compiling for
        use_forward(model, **WAYS["padded"])
        expected = _own_outputs(model, batch)
        if not all(x.isfinite().all() for x in expected):
            raise ValueError(f"{flag} {model.name_or_path}: its {_kind(model)} are not finite; use undamaged weights")
        error, reason = _difference(model, batch, expected, ranks)
        errors, reasons, limit = {"padded": error}, {"padded": reason}, 1e-4
        if ranks.dtype != torch.float32:
            use_attention(model, "eager")
            other, _ = _difference(model, batch, expected, ranks)
            limit = min(0.2, 3 * max(x for x in (error, other, 2e-3) if x < math.inf))
        if _distance(expected[3][:19], expected[4][:19]) > max(limit, 0.02):  # of tokens that both begin with
            raise ValueError(f"{flag} {model.name_or_path}: it sees the tokens that it predicts; choose a causal LM")
        ways, problem = _ways_to_try(model)
        for way in ways:
            use_forward(model, **WAYS[way])
            if not WAYS[way]["own_head"] and not is_plain:
                errors[way], reasons[way] = math.inf, "its LM head is more than one matrix"
            elif way != "padded":
                errors[way], reasons[way] = _difference(model, batch, expected, ranks)
            if errors[way] <= limit:
                break
        else:
            raise ValueError(
                f"{flag}: {model.config.model_type} gives other numbers here than its own forward does, packed "
                f"({reasons[ways[-2]]}) and padded ({reasons['padded']}); choose another model"
            )
    if WAYS[way]["is_padded"] or WAYS[way]["apart"]:
        ranks.not_sharing.add(model)
    torch.cuda.empty_cache()  # an engine measures what is free
    if way == "padded" and ranks.is_main:
        say(
            f"{flag}: {model.config.model_type} runs padded, one row a sequence, since it cannot run packed: "
            f"{reasons[ways[-2]]}. Padding and the prompt of each response are computed too: training takes more "
            "time, and a micro-batch more memory than its tokens would; lower the limit of tokens a GPU if needed"
        )
    if WAYS[way]["apart"] == "rows" and ranks.device.type == "cuda" and ranks.is_main:
        for text in filter(None, (x.advice(problem or reasons[ways[0]]) for x in model.packed.families)):
            say(f"{flag} {model.config.model_type}: {text}")
    return way


def _ways_to_try(model: nn.Module) -> tuple[list[str], str]:
    """Which of `WAYS` a model may run, and why a faster one is missing, see `Family.ways`."""
    found = [x.ways(model.packed.device) for x in model.packed.families]
    apart, problem = next((x for x in found if x[0] != [""]), ([""], ""))
    return [way for way, options in WAYS.items() if options["is_padded"] or options["apart"] in apart], problem


def _random_batch(config: PreTrainedConfig, longest: int, device: torch.device, added: Sequence[Family] = ()) -> Batch:
    """Six sequences for `choose_forward`, without ids to which the config gives a meaning, and with what the model's
    families add, whose ids are beyond the vocabulary.
    """
    leaves, _ = tree_flatten_with_path(config.to_dict())  # whole numbers in the config and the configs in it, by name
    entries = [([str(k.key) for k in path if isinstance(k, MappingKey)][-1], n) for path, n in leaves if type(n) is int]
    windows = [n for name, n in entries if ("window" in name or "chunk" in name) and n < longest]
    length = min(longest, LONGEST_TEST, max([24, *(n + 24 for n in windows)]))
    lengths = torch.tensor([min(n, longest) for n in (9, 24, 3, 40, 40, length)])
    special = [n for name, n in entries if name.endswith(("token_id", "token_index"))]
    allowed = torch.ones(config.get_text_config().vocab_size, dtype=torch.bool)
    allowed[[n for n in special if 0 <= n < len(allowed)]] = False
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(int(allowed.sum()), (len(lengths), int(lengths.max())), generator=generator)
    ids = allowed.nonzero()[:, 0][drawn]
    for x in added:
        ids, lengths = x.test_rows(ids, lengths, min(longest, LONGEST_TEST))
    ids[4, :20] = ids[3, :20]  # neighbours with the same beginning
    position = torch.arange(ids.shape[1])
    sampled = ((position > 0) & (position < lengths[:, None]) & (ids < len(allowed))).float()
    batch = Batch(ids, lengths, response_mask=sampled, rollout_logp=torch.zeros_like(sampled))
    return take_rows(batch, range(len(lengths)), device)


def _difference(model: nn.Module, batch: Batch, expected: list[Tensor], ranks: Ranks) -> tuple[float, str]:
    """How far a model's outputs are from those expected, the same number on all ranks, and that in words."""
    reason = ""
    try:
        outputs = _outputs(model, batch)
        errors = [_distance(x, y) for x, y in zip(outputs, expected, strict=True)]
        error = torch.stack(errors).max().nan_to_num(math.inf)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # a model may fail in any way at arguments that it was not made for
        error, reason = torch.tensor(math.inf, device=ranks.device), f"{type(problem).__name__}: {problem}"
    error = ranks.all_reduce_max(error.float()).item()
    return error, reason.splitlines()[0][:200] if reason else f"its {_kind(model)} would differ by {error:.1g}"


def _distance(x: Tensor, y: Tensor) -> Tensor:
    """Root mean square of a difference of log-probs (n,), or of hidden states (n, H), relative to that of y."""
    return (x - y).square().mean().sqrt() / (y.square().mean().sqrt() if y.ndim > 1 else 1.0)


def _kind(model: nn.Module) -> str:
    """What `_outputs` gives."""
    return "log-probs" if model.can_generate() else "hidden states"


def _outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    """For every sequence of a batch its log-probs (n - 1,), or the hidden states (n, H) of a model without LM head."""
    lengths = batch.lengths.tolist()
    if model.can_generate():
        logp, _ = token_logprobs(model, batch)
        return [row[1:n] for row, n in zip(logp, lengths, strict=True)]
    real = torch.arange(batch.input_ids.shape[1], device=batch.lengths.device) < batch.lengths[:, None]
    return list(run_packed(model, batch, real, lambda model, hidden: hidden.float()).split(lengths))


def _own_outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    """What `_outputs` should be, by the model's own forward of one sequence at a time, which has no padding."""
    if not model.can_generate():
        return [_outputs(model, take_rows(batch, [i]))[0] for i in range(len(batch.lengths))]
    found, vocab_size = [], model.config.get_text_config().vocab_size
    for row, n in zip(batch.input_ids, batch.lengths.tolist(), strict=True):
        inputs = {"input_ids": row[None, :n]}
        for x in model.packed.families:
            inputs = x.own_inputs(inputs)
        logp = model(**inputs, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(logp.gather(-1, inputs["input_ids"][0, 1:, None])[:, 0] * (row[1:n] < vocab_size))
    return found
