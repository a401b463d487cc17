"""The pictures of the documentation, as SVG files in docs/pictures/.

    python tools/pictures.py

Nothing in them is drawn by hand. The batch and the packed row are made by the functions that make them in a run. The
bytes are those of the plan of a run. The picture of trainer and samplers is a small simulation. So a picture changes
with the code, and tests/scripts/test_pictures.py fails until the pictures are made again.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import tyro
from transformers import Qwen2Config

import train_grpo
from extras.plan import Hardware
from extras.plan.cards import named
from extras.plan.memory import GIB, engine_weights, pass_bytes
from extras.plan.ways import choose, load_of
from rl.data.batching import collate
from rl.data.types import Batch, Sample
from rl.flags import change
from rl.model.logprobs import pack, sampled_positions

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
# The first font that the reader's machine has is used. The others are about as wide as the first or narrower.
SANS, MONO = "DejaVu Sans, Verdana, Arial, sans-serif", "DejaVu Sans Mono, Menlo, Consolas, monospace"
INK, GRAY, WHITE = "#1d232b", "#5b6572", "#ffffff"
BLUE, ORANGE, GREEN, PURPLE, RED, TEAL = "#1f4e8c", "#c05a00", "#2a7a3b", "#7a3e9d", "#b3261e", "#0b7285"
BROWN = "#7a5c00"
PALE = {BLUE: "#dbe8f8", ORANGE: "#fde5cc", GREEN: "#d9f0dd", PURPLE: "#eadcf4", RED: "#fbdcd9", TEAL: "#d2eef2"}
PALE |= {BROWN: "#f2e8c9", GRAY: "#eef0f3"}


@dataclass
class Picture:
    """An SVG of rectangles, texts and lines on a white ground, so that it can also be read on a dark page."""

    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        *lines: str,
        size: float = 14,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Lines of text, the first one with its baseline at y. Args: anchor, what x is: their start, middle or end."""
        look = f'font-family="{MONO if mono else SANS}" font-size="{size:g}" fill="{color}" text-anchor="{anchor}"'
        look += ' font-weight="bold"' * bold
        for i, line in enumerate(lines):
            kept = escape(line).replace("  ", "\u00a0\u00a0")  # else SVG leaves out the spaces that indent a line
            self.parts.append(f'<text x="{x:g}" y="{y + 1.4 * size * i:g}" {look}>{kept}</text>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        color: str = GRAY,
        word: str = "",
        *,
        is_empty: bool = False,
        size: float = 13,
        mono: bool = False,
    ) -> None:
        """A box with a border of this color and the pale form of it inside, and perhaps a word in its middle.

        An empty box is white, with a gray border and a gray word.
        """
        border, fill = (GRAY, WHITE) if is_empty else (color, PALE[color])
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"'
        self.parts.append(f'<rect {place} fill="{fill}" stroke="{border}"/>')
        if word:
            ink = GRAY if is_empty else INK
            self.text(
                x + width / 2, y + height / 2 + 0.36 * size, word, size=size, color=ink, anchor="middle", mono=mono
            )

    def line(self, *points: tuple[float, float], color: str = GRAY, arrow: bool = False, dashed: bool = False) -> None:
        """A line through these points, perhaps with the head of an arrow at its end."""
        look = ' marker-end="url(#arrow)"' * arrow + ' stroke-dasharray="5 4"' * dashed
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"{look}/>')

    def svg(self) -> str:
        """The text of the file."""
        size = f'width="{self.width}" height="{self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self.width} {self.height}" role="img">'
        arrow = '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        arrow = f'<defs>{arrow}<path d="M0,0 L8,4 L0,8 z" fill="{GRAY}"/></marker></defs>'
        title, ground = f"<title>{escape(self.title)}</title>", f'<rect {size} fill="{WHITE}"/>'
        return "\n".join([head, title, arrow, ground, *self.parts, "</svg>\n"])


# ---------------------------------------------------------------------------------------------------------------------
# The loop of a step


class Phase(NamedTuple):
    """A phase of a step."""

    title: str  # as the comments of train_grpo.py number and name it
    calls: str  # lines, in the order in which these calls stand in train_grpo.py
    says: str  # lines
    gives: str
    color: str


BEFORE = ["load_task(args)", "load_model(...)", "open_sampler(...)", "run.begin(...)"]
LOOP = ["for step in run.steps(sampler.state):", "    run.evaluate_if_due(...)"]
PHASES = [
    Phase(
        "1. Sample",
        "sampler.sample(policy, step)",
        "The engine gets the policy's\nweights, and samples G responses\n"
        "to each of P prompts. Reward\nfunctions score them.",
        "B = P x G responses",
        BLUE,
    ),
    Phase(
        "2. Batch",
        "make_batch(responses, ...)",
        "Divides the step into optimizer\nsteps, and these into micro-\nbatches that fit into memory.",
        "batch (b, T), updates",
        GREEN,
    ),
    Phase(
        "3. Log-probs that stay fixed",
        "fixed_logprobs(policy, ...)\nfixed_logprobs(reference, ...)",
        "Only if a step makes several\nupdates, or if the loss has a\nKL term.",
        "old_logp, ref_logp (b, T)",
        GREEN,
    ),
    Phase(
        "4. Advantages",
        "scores_of(responses)\nadvantages.group_mean_std(...)",
        "How much better than its group\nwas each response? All of its\ntokens get this number.",
        "advantages (b, T)",
        ORANGE,
    ),
    Phase(
        "5. Updates",
        "for update in updates:\n"
        "  for micro_rows in ...:\n"
        "    take_rows(batch, ...)\n"
        "    token_logprobs(policy, ...)\n"
        "    ratio, clip, loss\n"
        "    backward(policy, loss)\n"
        "  clip_grad_norm(policy, ...)\n"
        "  optimizer.step()",
        "",
        "a policy with new weights",
        ORANGE,
    ),
    Phase(
        "6. Report",
        "metrics.of_sampled(...)\nmeans.reduce()\nrun.log_step(...)",
        "Writes one line to the console\nand one to metrics.jsonl.",
        "metrics of the step",
        PURPLE,
    ),
]


def loop_of_a_step() -> Picture:
    """The phases of train_grpo.py, with the names of its calls."""
    picture = Picture("The loop of a step of train_grpo.py", 960, 680)
    picture.text(24, 38, "One step of train_grpo.py", size=20, bold=True)
    picture.text(24, 72, "Before the loop:", color=GRAY)
    for i, call in enumerate(BEFORE):
        picture.text(160 + 196 * i, 72, call, mono=True, color=BLUE)
    picture.box(24, 92, 912, 66)
    picture.text(40, 118, *LOOP, mono=True, color=BLUE, size=14)
    picture.text(436, 118, "saves a checkpoint first, if one is due")
    picture.text(436, 138, "samples responses to held-out prompts every --test-freq steps")
    width, upper, lower = 288, 186, 426
    places = [(24, upper), (336, upper), (648, upper), (648, lower), (336, lower), (24, lower)]
    for phase, (x, y) in zip(PHASES, places, strict=True):
        height, calls = (200 if y == upper else 236), phase.calls.split("\n")
        picture.box(x, y, width, height, phase.color)
        picture.text(x + 14, y + 28, phase.title, size=16, bold=True)
        picture.text(x + 14, y + 56, *calls, mono=True, size=13, color=BLUE)
        picture.text(x + 14, y + 66 + 18.2 * len(calls), *filter(None, phase.says.split("\n")))
        picture.text(x + 14, y + height - 16, f"gives {phase.gives}", color=phase.color, bold=True)
    for x in (312, 624):
        picture.line((x, upper + 100), (x + 24, upper + 100), arrow=True)
        picture.line((x + 24, lower + 118), (x, lower + 118), arrow=True)
    picture.line((792, upper + 200), (792, lower), arrow=True)
    picture.line((168, lower), (168, upper + 200), arrow=True)
    picture.text(182, lower - 14, "the next step", color=GRAY)
    return picture


# ---------------------------------------------------------------------------------------------------------------------
# A batch and its packed row

WORDS = ["<pad>", "<eos>", "2", "+", "3", "=", "5", "so", "6", "7", "-", "1", "4"]  # the place of a word is its id
RESPONSES = [("2 + 3 =", "5 <eos>"), ("2 + 3 =", "so 5 <eos>"), ("2 + 3 =", "so 6 <eos>"), ("7 - 1 - 2 =", "4 <eos>")]
OF_ROW = [BLUE, ORANGE, GREEN, PURPLE]


def example() -> Batch:
    """A batch (4, 8): three responses to one prompt, and one response to another."""
    samples = []
    for number, texts in enumerate(RESPONSES):
        prompt, response = ([WORDS.index(word) for word in text.split()] for text in texts)
        mask, logprobs = [1] * len(response), [-0.5] * len(response)
        samples.append(Sample(prompt, response, mask, logprobs, "stop", row_index=number // 3))
    return collate(samples)


def batch_with_mask_and_shift() -> Picture:
    """input_ids and response_mask of the example, and which outputs predict which tokens of its second row."""
    batch, width, left = example(), 84, 168
    b, T = batch.input_ids.shape
    words = [[WORDS[token] for token in row] for row in batch.input_ids.tolist()]
    is_real = [[t < length for t in range(T)] for length in batch.lengths.tolist()]
    mask = batch.response_mask.int().tolist()
    picture = Picture("A batch (b, T) with its mask and its shift", 960, 800)
    picture.text(24, 38, f"A batch: b = {b} rows of T = {T} tokens", size=20, bold=True)

    picture.text(24, 74, "input_ids", mono=True, size=15, color=BLUE)
    picture.text(left, 74, "Prompt, then response, then padding. Each cell has a token and its id.")
    for i in range(b):
        y = 88 + 46 * i
        picture.text(left - 12, y + 27, f"row {i}", anchor="end", color=GRAY)
        for t in range(T):
            x, ink = left + width * t, INK if is_real[i][t] else GRAY
            picture.box(x, y, width - 4, 42, ORANGE if mask[i][t] else BLUE, is_empty=not is_real[i][t])
            picture.text(x + 40, y + 19, words[i][t], mono=True, anchor="middle", color=ink)
            picture.text(x + 40, y + 36, str(int(batch.input_ids[i, t])), size=12, anchor="middle", color=GRAY)
    for x, color, name in ((168, BLUE, "prompt"), (290, ORANGE, "response"), (430, GRAY, "padding")):
        picture.box(x, 280, 18, 18, color, is_empty=name == "padding")
        picture.text(x + 26, 294, name)

    picture.text(24, 332, "response_mask", mono=True, size=15, color=BLUE)
    picture.text(left, 332, "1 for tokens that the policy sampled, <eos> included. Only these are learned from.")
    for i in range(b):
        y = 346 + 30 * i
        picture.text(left - 12, y + 19, f"row {i}", anchor="end", color=GRAY)
        for t in range(T):
            x, value = left + width * t, mask[i][t]
            picture.box(x, y, width - 4, 26, ORANGE, str(value), is_empty=not value, mono=True)

    row, y = 1, 570
    scored = sampled_positions(batch)
    predicts = scored.roll(-1, 1)  # the output at t - 1 predicts token t, as in `run_on_responses`
    picture.text(24, 506, "the shift", mono=True, size=15, color=BLUE)
    picture.text(
        left,
        506,
        f"Row {row}: the output of the model at position t - 1 predicts the token at position t. So every",
        "tensor (b, T) has at position t what belongs to token t, given the tokens before it.",
    )
    for offset, name in ((22, "model at t"), (106, "token"), (162, "logp")):
        picture.text(left - 12, y + offset, name, anchor="end", color=GRAY)
    for t in range(T):
        x, is_scored, is_used = left + width * t, bool(scored[row, t]), bool(predicts[row, t])
        picture.text(x + 40, y - 8, f"t = {t}", size=13, anchor="middle", color=GRAY)
        picture.box(x, y, width - 4, 34, GREEN, "output" if is_used else "unused", is_empty=not is_used)
        color = ORANGE if is_scored else BLUE
        picture.box(x, y + 84, width - 4, 34, color, words[row][t], is_empty=not is_real[row][t], mono=True)
        logp = f"l[{row},{t}]" if is_scored else "0"
        picture.box(x, y + 140, width - 4, 34, ORANGE, logp, is_empty=not is_scored, mono=True)
        if is_scored:
            picture.line((x - width + 40, y + 36), (x + 40, y + 80), arrow=True)
            picture.line((x + 40, y + 119), (x + 40, y + 136), arrow=True)
    picture.text(
        left, y + 204, "l[1,4] is the log-probability of the token at t = 4 of row 1, given the tokens at t = 0 to 3."
    )
    return picture


def packed_row() -> Picture:
    """The example as one packed row, and what each of its rows attends to in it."""
    batch, left = example(), 100
    dense = SimpleNamespace(packed=SimpleNamespace(families=()))  # `pack` asks a model only for its families
    [packed], place = pack(batch, dense)
    ids, positions = (packed.inputs[name][0].tolist() for name in ("input_ids", "position_ids"))
    lengths, (b, T) = batch.lengths.tolist(), batch.input_ids.shape
    places = [place[i, : lengths[i]].tolist() for i in range(b)]  # in the packed row, of the tokens of each row
    owners = [next(i for i in range(b) if n in places[i]) for n in range(len(ids))]  # the first row that has the token
    picture = Picture("A packed row in which responses share their prompt", 960, 670)
    picture.text(24, 38, "A packed row: no padding, and what rows share is computed once", size=20, bold=True)

    says = f"The batch (b, T) has {b * T} cells, of which {sum(lengths)} are tokens."
    picture.text(
        24, 72, says, "The tokens at the start of a row that the row above it has too are shared with that row."
    )
    for i in range(b):
        y = 108 + 40 * i
        picture.text(left - 12, y + 21, f"row {i}", anchor="end", color=GRAY)
        for t in range(T):
            word = WORDS[batch.input_ids[i, t]] if t < lengths[i] else ""
            is_shared = not word or owners[places[i][t]] < i
            picture.box(left + 64 * t, y, 60, 32, OF_ROW[i], word, is_empty=is_shared, mono=True)
    for y, word, color, name in (
        (114, "so", ORANGE, "computed for this row"),
        (154, "so", None, "computed for a row above"),
        (194, "", None, "padding, not computed"),
    ):
        picture.box(640, y, 40, 24, color or GRAY, word, is_empty=color is None, mono=True)
        picture.text(692, y + 17, name)

    picture.text(
        24,
        306,
        f"The packed row has {len(ids)} tokens, and the model runs on it once.",
        "The position of a token is the one that it has in its own row.",
    )
    for y, name in ((354, "place"), (386, "token"), (418, "position")):
        picture.text(left - 12, y, name, anchor="end", color=GRAY)
    for n, (token, position, owner) in enumerate(zip(ids, positions, owners, strict=True)):
        x = left + 44 * n
        picture.text(x + 20, 354, str(n), size=12, anchor="middle", color=GRAY)
        picture.box(x, 364, 40, 34, OF_ROW[owner], WORDS[token], mono=True, size=12)
        picture.text(x + 20, 418, str(position), mono=True, size=13, anchor="middle")

    picture.text(24, 458, "The tokens of a row attend to these places, and each of them to none after its own:")
    for i in range(b):
        y = 474 + 34 * i
        picture.text(left - 12, y + 18, f"row {i}", anchor="end", color=GRAY)
        for n in range(len(ids)):
            picture.box(left + 44 * n, y, 40, 26, OF_ROW[i], is_empty=n not in places[i])
    picture.text(
        24,
        634,
        "What the model computes for a token does not depend on the tokens behind it. So rows with the same beginning",
        "can share it: three responses to a prompt of 1,000 tokens save 2,000 tokens.",
    )
    return picture


# ---------------------------------------------------------------------------------------------------------------------
# Memory

MEMORY_PHASES = ["sampling", "fixed log-probs", "forward, backward", "optimizer step"]
QWEN_1_5B = dict(hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2)
QWEN_1_5B |= dict(intermediate_size=8960, vocab_size=151936, tie_word_embeddings=True)


class Held(NamedTuple):
    """What one owner holds of a GPU's memory."""

    name: str
    color: str
    gib: Sequence[float]  # in each of MEMORY_PHASES


def memory_of_a_run() -> tuple[list[Held], dict[str, float], float]:
    """What train_grpo.py with default flags holds on one H100: by owner, the sums in the plan of this run by the
    plan's names of the phases, and the memory of the GPU. All are in GiB.
    """
    machine = named("h100x1")
    hardware = Hardware(int(machine.card.gib * GIB), int(machine.host_gib * GIB), ranks=1, local=1)
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(**QWEN_1_5B).save_pretrained(folder)
        args = change(train_grpo.Args(), model=folder)
        load = load_of(args, hardware)
    choice = choose(load, args.memory, hardware)
    policy, parts = load.models[0], choice.needed.parts
    bf16, engine = 2.0 * policy.sizes.total, engine_weights(load.engine)
    scoring, learning = pass_bytes(policy, load, choice.way, learns=False), parts["a micro-batch"]
    owners = [
        Held("CUDA and compiled code", GRAY, [parts["others"]] * 4),
        Held("weights, fp32", BLUE, [parts["weights"]] * 4),
        Held("AdamW's moments", PURPLE, [parts["AdamW"]] * 4),
        Held("gradients", RED, [0, 0, parts["gradients"], parts["gradients"]]),
        Held("weights, bf16", BLUE, [0, bf16, bf16, 0]),
        Held("activations, logits", ORANGE, [0, scoring - bf16, learning - bf16, 0]),
        Held("engine: weights, bf16", GREEN, [engine, 0, 0, 0]),
        Held("engine: KV cache, rest", GREEN, [choice.needed.engine - engine, 0, 0, 0]),
    ]
    owners = [x._replace(gib=[n / GIB for n in x.gib]) for x in owners]
    return owners, {name: n / GIB for name, n in choice.needed.phases.items()}, machine.card.gib


def memory_by_phase() -> Picture:
    """A stack of what is held in each phase of a step."""
    owners, _, gpu = memory_of_a_run()
    bottom, scale, left = 576, 5.6, 84  # scale: pixels of a GiB
    picture = Picture("Who holds what memory when", 960, 670)
    picture.text(24, 38, "Who holds what memory when", size=20, bold=True)
    picture.text(
        24,
        66,
        "GiB on one H100, for train_grpo.py with a model of the size of Qwen2.5-1.5B and default flags, as --plan",
        "computes them. Trainer and engine take turns: the engine is asleep while the policy learns.",
    )
    for gib in range(0, 81, 20):
        y = bottom - scale * gib
        picture.text(left - 14, y + 5, str(gib), anchor="end", size=13, color=GRAY)
        picture.line((left - 8, y), (left, y))
    picture.line((left, bottom - scale * gpu), (940, bottom - scale * gpu), color=RED, dashed=True)
    picture.text(940, bottom - scale * gpu + 20, f"all memory of the GPU: {gpu:.1f}", anchor="end", color=RED)
    for column, phase in enumerate(MEMORY_PHASES):
        x, y = left + 12 + 216 * column, float(bottom)
        for owner in owners:
            if gib := owner.gib[column]:
                y -= scale * gib
                size = 13 if scale * gib > 20 else 12
                picture.box(x, y, 190, scale * gib, owner.color, f"{owner.name} {gib:.1f}", size=size)
        picture.text(x + 95, y - 8, f"{sum(owner.gib[column] for owner in owners):.1f}", anchor="middle", bold=True)
        picture.text(x + 95, bottom + 24, phase, anchor="middle", bold=True)
    picture.line((left, bottom), (940, bottom))
    picture.text(
        left + 12,
        bottom + 56,
        "Other processes score the responses while the engine samples. They use no memory of the GPU, unless",
        "a reward model scores.",
    )
    return picture


# ---------------------------------------------------------------------------------------------------------------------
# Trainer and samplers over time

SECONDS = [4, 9, 5, 3, 13, 6, 5, 4, 10, 7, 3, 5, 11, 4, 6, 5, 9, 3, 8, 4, 12, 5, 3, 7, 6, 4, 9, 5]  # for each group
GROUPS, LEARNING, END = 3, 4, 38  # groups that a step trains on. Seconds of its phases 2 to 6. Seconds that are shown.
OF_VERSION = [BLUE, ORANGE, GREEN, PURPLE, RED, TEAL, BROWN]


class Bar(NamedTuple):
    """A stretch of time in which one thing happens."""

    lane: int
    start: int
    end: int
    number: int  # of the group that is sampled, or of the step that learns
    version: int  # of the weights that sample, or of those that the step makes


def schedule(*, ahead: int = 0, staleness: int | None = None) -> tuple[list[Bar], list[Bar]]:
    """When groups are sampled, and when steps learn, simulated second by second.

    Args: ahead, how many more groups are in flight than a step trains on, as with --partial-rollouts; staleness, that
    of train_async.py, whose samplers go on while a step learns. Without it sampling and learning take turns.
    """
    sampled: dict[tuple[int, int], Bar] = {}  # by group and version
    steps, lane_of, left, complete = [], {}, list(SECONDS), set()  # lane_of: of each group in flight
    version, drawn, learns_until = 0, 0, None
    for second in range(END):
        if learns_until == second:
            version, learns_until = version + 1, None
        is_sampling = staleness is not None or learns_until is None
        limit = GROUPS * (version + 1) + (ahead if staleness is None else GROUPS * staleness)
        while is_sampling and drawn < limit:
            lane_of[drawn] = next(lane for lane in range(limit) if lane not in lane_of.values())
            drawn += 1
        for group, lane in list(lane_of.items()) if is_sampling else ():
            before = sampled.get((group, version))
            sampled[group, version] = Bar(lane, before.start if before else second, second + 1, group, version)
            left[group] -= 1
            if left[group] == 0:
                complete.add(group)
                del lane_of[group]
        # A step of train_async.py trains on the next groups, and one of train_grpo.py on those that are complete first.
        of_step = (
            range(GROUPS * version, GROUPS * (version + 1)) if staleness is not None else sorted(complete)[:GROUPS]
        )
        if learns_until is None and len(of_step) == GROUPS and complete.issuperset(of_step):
            complete.difference_update(of_step)
            learns_until = second + 1 + LEARNING
            steps.append(Bar(0, second + 1, min(learns_until, END), version + 1, version + 1))
    return list(sampled.values()), steps


def trainer_and_samplers() -> Picture:
    """train_grpo.py without and with partial rollouts, and train_async.py, for the same groups of responses."""
    picture = Picture("Trainer and samplers over time", 960, 726)
    picture.text(24, 38, "Trainer and samplers over time", size=20, bold=True)
    picture.text(
        24,
        66,
        f"Each bar is a group of responses and has its number. A step learns from {GROUPS} groups, and makes the",
        "next version of the weights. A bar has the color of the version that samples. The lengths are invented.",
    )
    for version, color in enumerate(OF_VERSION):
        picture.box(24 + 124 * version, 102, 18, 18, color)
        picture.text(50 + 124 * version, 116, f"version {version}")
    panels = [
        ("train_grpo.py", "Sampling and learning take turns. A step waits for its longest response.", schedule()),
        (
            "train_grpo.py --partial-rollouts 1",
            "More groups are in flight. The next step goes on with those that are not complete.",
            schedule(ahead=GROUPS),
        ),
        (
            "train_async.py --max-staleness 2",
            "Other GPUs sample while a step learns, and get its weights between two tokens.",
            schedule(staleness=2),
        ),
    ]
    left, pixels, y = 100, 22, 156  # pixels of a second
    for name, says, (sampled, steps) in panels:
        top, bottom = y + 14, y + 14 + 20 * (1 + max(bar.lane for bar in sampled))
        picture.text(24, y, name, mono=True, bold=True, color=BLUE)
        picture.text(330, y, says)
        picture.text(left - 12, (top + bottom) / 2 + 5, "sample", anchor="end", color=GRAY)
        picture.text(left - 12, bottom + 20, "learn", anchor="end", color=GRAY)
        for bar in steps:
            x, width = left + pixels * bar.start, pixels * (bar.end - bar.start)
            color, is_whole = OF_VERSION[bar.version], bar.end < END
            picture.box(x, bottom + 5, width, 20, color, f"step {bar.number}" if is_whole else "")
            if is_whole:
                picture.line((x + width, top - 4), (x + width, bottom + 30), dashed=True)
        for bar in sampled:
            x, lane, color = left + pixels * bar.start, top + 20 * bar.lane, OF_VERSION[bar.version]
            picture.box(x, lane, pixels * (bar.end - bar.start), 17, color)
            picture.text(x + 3, lane + 13, str(bar.number), size=12)
        y = bottom + 62
    return picture


# ---------------------------------------------------------------------------------------------------------------------


PICTURES = {
    "step.svg": loop_of_a_step,
    "batch.svg": batch_with_mask_and_shift,
    "packed.svg": packed_row,
    "memory.svg": memory_by_phase,
    "async.svg": trainer_and_samplers,
}


@dataclass(frozen=True)
class Args:
    out: Path = FOLDER
    """The pictures are written to this folder."""


def main(args: Args) -> list[Path]:
    """Write every picture. Returns the paths."""
    args.out.mkdir(parents=True, exist_ok=True)
    paths = [args.out / name for name in PICTURES]
    for path, make in zip(paths, PICTURES.values(), strict=True):
        path.write_text(make().svg())
    return paths


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
