"""Tokenizers and their chat templates: how a run renders messages, with which arguments and which date.

All text that a chat template writes comes from `render`.
"""

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

import jinja2
import jinja2.meta
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from rl.data.flags import Texts

Tokenizer = PreTrainedTokenizerBase

THOUGHTS = ("<think>", "<thinking>", "[THINK]", "<seed:think>")  # what a partial answer that thinks begins with
# What a template may raise.
FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def load_tokenizer(
    model: str, texts: Texts | None = None, *, day: str | None = None, flag: str = "--model"
) -> Tokenizer:
    """The tokenizer of a model's folder or Hugging Face id, whose chat template is used as `texts` and `day` say, see
    `prepare`. Raises ValueError naming `flag` if there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{flag} {model}: has no tokenizer ({reason}); give the folder of a whole model") from error
    return prepare(tokenizer, texts or Texts(), day)


def stop_token_ids(model: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that ends a response, which are the end-of-sequence ids of the tokenizer, the config and the generation
    config.

    They often differ. One ends the turns of an instruction-tuned model, another the documents of its base model.
    """
    config = AutoConfig.from_pretrained(model)  # one with another in it may have no such id, but the other has
    ends = [tokenizer.eos_token_id, *(getattr(x, "eos_token_id", None) for x in (config, config.get_text_config()))]
    with contextlib.suppress(OSError):  # raised for a model without one
        ends.append(GenerationConfig.from_pretrained(model).eos_token_id)
    ids = [i for ids in ends for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
    return tuple(dict.fromkeys(ids))


@dataclass
class Rendering:
    """How a run uses a chat template. It is the attribute `rendering` of the tokenizer that `prepare` returns."""

    arguments: dict[str, Any] = field(default_factory=dict)  # of the template, beside messages and tools
    day: str = field(default_factory=lambda: date.today().isoformat())  # "today" for the template, such as 2026-01-31
    allow_dropped_text: bool = False
    # Hashes of rows' shapes for which rl/data/text.py has found that the template drops no text.
    whole: set[int] = field(default_factory=set)


def prepare(tokenizer: Tokenizer, flags: Texts, day: str | None) -> Tokenizer:
    """The tokenizer, whose chat template gets --apply-chat-template-kwargs and the `day` (ISO format) from now on.

    None stands for today. Raises ValueError, naming the flag, for a text that is not a JSON object, and for an argument
    that the template does not read or that is set by this program.
    """
    flag = f"--apply-chat-template-kwargs {flags.apply_chat_template_kwargs}"
    arguments = None
    with contextlib.suppress(*FAULTS):
        arguments = json.loads(flags.apply_chat_template_kwargs)
    if not isinstance(arguments, dict):
        raise ValueError(f"{flag} is not a JSON object; write one such as '{{\"enable_thinking\": false}}'")
    ours = {"messages", "strftime_now", "raise_exception", *inspect.signature(tokenizer.apply_chat_template).parameters}
    read = variables(tokenizer) - ours if arguments else frozenset()
    if unread := sorted(arguments.keys() - read):
        raise ValueError(
            f"{flag}: the chat template of {tokenizer.name_or_path!r} does not read {unread[0]!r}, or this program "
            f"sets it; leave it out, or correct its name (the template reads {', '.join(sorted(read)) or 'no other'})"
        )
    tokenizer.rendering = Rendering(arguments, day or date.today().isoformat(), flags.allow_dropped_text)
    return tokenizer


def rendering_of(tokenizer: Tokenizer) -> Rendering:
    """How the chat template is used, as `prepare` was told. The default is without arguments and with the date of
    today.
    """
    return vars(tokenizer).setdefault("rendering", Rendering())


def variables(tokenizer: Tokenizer) -> frozenset[str]:
    """The names that the chat template of a tokenizer reads: messages, tools, bos_token, strftime_now, ..."""
    template = tokenizer.chat_template or ""
    return _variables("".join(template.values()) if isinstance(template, dict) else template)


@functools.lru_cache
def _variables(template: str) -> frozenset[str]:
    without_marks = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # a tag that only transformers knows
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_marks)
    except jinja2.TemplateSyntaxError:  # an error as soon as there are messages to render
        return frozenset()
    # A name that the template assigns is its own variable, unless the template also asks whether the caller has set it.
    # It asks by a test (`x is defined`) or a filter (`x | default(...)`).
    assigned = {x.name for x in tree.find_all(jinja2.nodes.Name) if x.ctx == "store"}
    tried = (x for x in tree.find_all((jinja2.nodes.Test, jinja2.nodes.Filter)) if x.name in ("defined", "default"))
    optional = {x.node.name for x in tried if isinstance(x.node, jinja2.nodes.Name)}
    return frozenset(jinja2.meta.find_undeclared_variables(tree) - (assigned - optional))


def render(tokenizer: Tokenizer, messages: Sequence[dict], **how: Any) -> str:
    """What the chat template writes. Raises what the template raises.

    Args: how, arguments of `apply_chat_template`: add_generation_prompt, tools, chat_template, continue_final_message.
    """
    rendering = rendering_of(tokenizer)
    # A run that is resumed on another day has the prompts of its first day. This takes the place of the function of
    # the same name by which transformers gives templates the present time.
    how |= {"strftime_now": datetime.fromisoformat(rendering.day).strftime}
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **rendering.arguments, **how)


def continued(tokenizer: Tokenizer, messages: Sequence[dict], **how: Any) -> str:
    """What the chat template writes if the policy is to go on with the last message, which is the assistant's.

    Templates expect that a thought in a message is complete. So a message that begins with a thought is not given to
    the template, but appended to the generation prompt, in the place of a thought that this prompt opens itself.
    Raises ValueError for a message that cannot be continued, or what the template raises.
    """
    *before, last = messages
    if last.get("tool_calls"):
        raise ValueError("it calls tools; end the prompt with their results, or leave the calls out")
    said, tags = last["content"], [x for x in THOUGHTS if x in str(tokenizer.chat_template)]
    if tag := next((x for x in tags if said.lstrip().startswith(x)), None):
        closed, opened = (render(tokenizer, before, add_generation_prompt=x, **how) for x in (False, True))
        # What the generation prompt adds. It may open a thought, and then only what stands before that is kept.
        opening = opened[len(closed) :] if opened.startswith(closed) else ""
        return opened[: len(opened) - len(opening)] + opening.partition(tag)[0] + said
    return render(tokenizer, messages, continue_final_message=True, **how)
