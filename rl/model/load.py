"""Models of transformers on the host, made ready for this package, and their weights as engines and files know them.

Every model is tested when it is loaded: do packed sequences give what its own forward gives for each of them alone?
"""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_flatten_with_path
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from rl.console import say, started
from rl.data.types import Batch, take_rows
from rl.model.attention import choose_attention, use_attention
from rl.model.checks import check_model as check_model  # scripts have it from here
from rl.model.checks import read_config, read_model
from rl.model.family import Family
from rl.model.logprobs import add_packed_forward, run_packed, token_logprobs
from rl.model.own_forward import use_forward
from rl.model.roles import ALL_WEIGHTS, CAUSAL_LM, CausalLM, Learning
from rl.model.sharding import Memory, full_tensors, shard
from rl.ranks import Ranks

DEFAULT_MEMORY = Memory()
# How recurrent layers keep sequences apart, and that in words; those of the first one share beginnings
APART = {"": "", "borders": ", nothing shared", "rows": " but in recurrent layers"}
WAYS = {  # to run a model, the fastest first; see `logprobs.Packed`
    f"packed{words}{logits}": dict(is_padded=False, own_head=bool(logits), apart=apart)
    for (apart, words), logits in itertools.product(APART.items(), ("", ", with the logits of its own forward"))
} | {"padded": dict(is_padded=True, own_head=True, apart="")}
LONGEST_TEST = 2**13  # tokens of a sequence that `choose_forward` tries out


def load_model(
    path: str,
    ranks: Ranks,
    learning: Learning | None = ALL_WEIGHTS,
    memory: Memory = DEFAULT_MEMORY,
    *,
    kind: CausalLM = CAUSAL_LM,
    longest: int | None = None,
    seed: int = 0,
    flag: str = "--model",
) -> nn.Module:
    """A model by Hugging Face id or folder, sharded over the ranks and tested: a policy, reference, teacher, critic or
    reward model.

    What learns is in float32, and frozen weights have the compute precision. All ranks must enter.

    Args: learning, what of the model learns, None for nothing; kind, what it is read as; longest, tokens of the longest
    sequence; seed, of new weights; flag, that has named the model. Raises ValueError as `load_pretrained`,
    `Learning.check_model` or `tested`.
    """
    keeps_weights = learning is None or learning.keeps_weights
    if learning is not None:
        learning.check_model(path, kind.class_of(path), flag=flag)
    dtype = ranks.dtype if keeps_weights else torch.float32
    model = load_pretrained(path, ranks, kind, dtype=dtype, flag=flag, as_in_files=not keeps_weights)
    if learning is None:
        model.requires_grad_(False)
    else:
        learning.apply(model, path=path, seed=seed, ranks=ranks)
    model = shard(model, ranks, replace(memory, compile=memory.compile and ranks.device.type == "cuda"))
    started(f"{flag} on the device")
    return tested(model, ranks, longest=longest, flag=flag)


def tested(model: nn.Module, ranks: Ranks, *, longest: int | None = None, flag: str = "--model") -> nn.Module:
    """A sharded model that runs as `choose_forward` says. Raises ValueError as that, or as `Family.tested`."""
    with contextlib.ExitStack() as tests:
        for x in model.packed.families:
            tests.enter_context(x.tested(flag))
        choose_forward(model, ranks, longest=longest, flag=flag)
    started(f"{flag} tested")
    return model


def load_reference(
    path: str, ranks: Ranks, policy: nn.Module, memory: Memory = DEFAULT_MEMORY, *, longest: int | None = None
) -> nn.Module:
    """The policy before training: a second, frozen model, unless a family of the policy knows how to do without. All
    ranks must enter, before training. Raises ValueError as `load_model`.
    """
    for family in policy.packed.families:
        if (reference := family.reference()) is not None:
            return reference
    return load_model(path, ranks, None, memory, longest=longest)


def exported(model: PreTrainedModel, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model for engines and files, `published`, from (name, whole tensor) as the trainer has them."""
    for family in model.packed.families:
        named_tensors = family.exported(named_tensors)
    return published(model, named_tensors)


def published(model: PreTrainedModel, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names that the model's authors publish, where transformers has changed them."""
    for name, x in named_tensors:
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


def load_pretrained(
    path: str,
    ranks: Ranks,
    kind: CausalLM = CAUSAL_LM,
    *,
    dtype: torch.dtype = torch.float32,
    flag: str = "--model",
    as_in_files: bool = False,
) -> nn.Module:
    """A model on the host, with weights in `dtype`, that can run packed. Rank 0 reads the files; other ranks get
    storage that `shard` fills. All ranks must enter.

    Args: as_in_files, whether rank 0 leaves parameters in the precision of the files, most often bfloat16, until
    `shard` casts those that learn to float32: the numbers are the same, and they need no memory but that of the mapped
    files. Raises ValueError on all ranks as `read_model` or `CausalLM.check`, or if weights that the config ties differ
    in the files, so that ranks would have different models.
    """
    kind.check(read_config(path, flag=flag), f"{flag} {path}")
    as_in_files, problems = as_in_files and dtype == torch.float32, []
    try:
        if ranks.is_main:
            model, new = read_model(path, kind, flag=flag, as_in_files=as_in_files, dtype=dtype)
            for x in model.buffers() if as_in_files else ():
                x.data = x.data.to(torch.promote_types(x.dtype, dtype) if x.is_floating_point() else x.dtype)
            ties = model.get_expanded_tied_weights_keys(all_submodels=True).keys()
            if untied := ties - model.all_tied_weights_keys.keys():
                differ = f"its config ties {min(untied)} to another weight, and its files have two that differ"
                raise ValueError(f"{flag} {path}: {differ}; set tie_word_embeddings to false in its config.json")
        else:
            model, new = read_model(path, kind, flag=flag, dtype=dtype, device_map="meta")
            model.to_empty(device="cpu")
            model.tie_weights()  # to_empty unties, which would halve the embedding's gradient
    except ValueError as error:
        problems = [str(error)]
    if problems := ranks.all_gather(problems):  # or the other ranks would wait for this one
        raise ValueError(problems[0])
    started(f"{flag} read")
    name_weights(model, path)
    use_attention(model, choose_attention(ranks.device, ranks.dtype))
    kind.finish(model, new, f"{flag} {path}")
    return add_packed_forward(model)


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
