"""tools/pictures.py: the committed pictures are those that it makes, they say what the code does, and can be read."""

import ast
import itertools
import re
import xml.etree.ElementTree as ET
from typing import NamedTuple

import matplotlib
import pytest
from launch import ROOT
from PIL import ImageFont

from tools import pictures

NAMES = sorted(pictures.PICTURES)
SOURCE = (ROOT / "train_grpo.py").read_text()
FONTS = f"{matplotlib.get_data_path()}/fonts/ttf"
SVG = "{http://www.w3.org/2000/svg}"


class Area(NamedTuple):
    """A rectangle of a picture."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: "Area") -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def contains(self, other: "Area") -> bool:
        across = self.left <= other.left and other.right <= self.right
        return across and self.top <= other.top and other.bottom <= self.bottom


@pytest.fixture(scope="module")
def svgs():
    return {name: make().svg() for name, make in pictures.PICTURES.items()}


def words_of(svg):
    """The texts of a picture."""
    return [x.text.replace("\u00a0", " ") for x in ET.fromstring(svg).iter(f"{SVG}text")]


# --- the files


def test_the_committed_pictures_are_those_of_the_script(svgs, tmp_path):
    assert {path.name for path in pictures.FOLDER.glob("*.svg")} == set(NAMES)
    stale = [name for name in NAMES if (pictures.FOLDER / name).read_bytes() != svgs[name].encode()]
    assert stale == [], "run `python tools/pictures.py` and look at these pictures again"
    written = pictures.main(pictures.Args(out=tmp_path / "new"))
    assert [path.read_bytes() for path in written] == [svgs[path.name].encode() for path in written]


def test_each_picture_is_on_a_page():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"!\[[^]]+\]\([^)]*pictures/([\w.]+)\)", page.read_text())}
    assert shown == {path.name for path in pictures.FOLDER.iterdir()}


# --- what they say


def test_the_loop_has_calls_of_the_script_in_their_order():
    lines = {}  # of each call, the lines in which it stands
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Call):
            lines.setdefault(ast.unparse(node.func), []).append(node.lineno)
    listed = [*pictures.BEFORE, *pictures.LOOP, *(call for x in pictures.PHASES for call in x.calls.split("\n"))]
    line = 0
    for text in listed:
        for name in re.findall(r"([\w.]+)\(", text):
            later = [x for x in sorted(lines.get(name, [])) if x > line]
            assert later, f"{text}: train_grpo.py has no such call behind its line {line}"
            line = later[0]
    assert "for update in updates" in SOURCE and "for micro_rows in run.micro_batches(update)" in SOURCE
    assert pictures.LOOP[0] in SOURCE


def test_the_loop_has_the_phases_of_the_script():
    titles = re.findall(r"^ +# (\d\. [\w -]+)[:.] ", SOURCE, re.MULTILINE)
    titles = [title.removesuffix(" while the policy changes") for title in titles]
    assert [x.title for x in pictures.PHASES] == titles and len(titles) == 6


def test_the_batch_is_the_one_of_the_example(svgs):
    words = words_of(svgs["batch.svg"])
    ids = [2, 3, 4, 5, 6, 1, 0, 0] + [2, 3, 4, 5, 7, 6, 1, 0] + [2, 3, 4, 5, 7, 8, 1, 0] + [9, 10, 11, 10, 2, 5, 12, 1]
    mask = [0, 0, 0, 0, 1, 1, 0, 0] + [0, 0, 0, 0, 1, 1, 1, 0] * 2 + [0, 0, 0, 0, 0, 0, 1, 1]
    start = words.index("response_mask")
    cells = [word for word in words[:start] if word in pictures.WORDS or word.isdigit()]
    assert cells == [x for token in ids for x in (pictures.WORDS[token], str(token))]
    assert [int(x) for x in words[start : words.index("the shift")] if x in "01"] == mask
    assert [x for x in words if x in ("output", "unused")] == ["unused"] * 3 + ["output"] * 3 + ["unused"] * 2
    assert [x for x in words if x.startswith("l[1,")][:3] == ["l[1,4]", "l[1,5]", "l[1,6]"]


def test_the_packed_row_has_each_shared_token_once(svgs):
    words = words_of(svgs["packed.svg"])
    row = words[words.index("position") + 1 : words.index(next(x for x in words if x.startswith("The tokens of a")))]
    places, tokens, positions = row[::3], row[1::3], row[2::3]
    assert places == [str(n) for n in range(19)]
    assert tokens == "2 + 3 = 5 <eos> so 5 <eos> 6 <eos> 7 - 1 - 2 = 4 <eos>".split()
    assert positions == "0 1 2 3 4 5 4 5 6 5 6 0 1 2 3 4 5 6 7".split()
    assert "The batch (b, T) has 32 cells, of which 28 are tokens." in words
    fills = [x.get("fill") for x in ET.fromstring(svgs["packed.svg"]).iter(f"{SVG}rect")][-4 * 19 :]
    attended = [[n for n in range(19) if fills[19 * i + n] != pictures.WHITE] for i in range(4)]
    assert attended == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7, 8], [0, 1, 2, 3, 6, 9, 10], [*range(11, 19)]]


def test_the_bytes_are_those_of_the_plan():
    owners, phases, gpu = pictures.memory_of_a_run()
    sums = [sum(x.gib[column] for x in owners) for column in range(4)]
    expected = [phases["sampling"], phases["updating"], phases["optimizer step"]]
    assert [sums[0], sums[2], sums[3]] == pytest.approx(expected, rel=1e-12)
    assert max(sums) < gpu == 79.2
    weights = next(x for x in owners if x.name == "weights, fp32").gib[0]
    assert weights == pytest.approx(4 * 1_543_714_304 / 2**30)  # the parameters of Qwen2.5-1.5B
    shares = {x.name: x.gib[2] / weights for x in owners if x.gib[2]}
    expected = {"weights, fp32": 1, "AdamW's moments": 2, "gradients": 1, "weights, bf16": 0.5}
    assert {name: shares[name] for name in expected} == pytest.approx(expected)
    assert shares.keys() - expected == {"CUDA and compiled code", "activations, logits"}


def test_a_step_waits_for_its_longest_response():
    """By hand: the longest of groups 0, 1, 2 takes 9 seconds, that of 3, 4, 5 takes 13, and learning takes 4."""
    sampled, steps = pictures.schedule()
    assert [(x.start, x.end, x.version) for x in steps] == [(9, 13, 1), (26, 30, 2)]
    assert [(x.number, x.start, x.end) for x in sampled[:6]] == [
        (0, 0, 4),
        (1, 0, 9),
        (2, 0, 5),
        (3, 13, 16),
        (4, 13, 26),
        (5, 13, 19),
    ]
    assert all(x.version == x.number // 3 for x in sampled)


def complete_by(sampled, second):
    """The groups that are complete at this time: their bars, cut there, are as long as they are."""
    length = dict.fromkeys(range(len(pictures.SECONDS)), 0)
    for bar in sampled:
        length[bar.number] += max(0, min(bar.end, second) - bar.start)
    return {group for group, whole in enumerate(pictures.SECONDS) if length[group] == whole}


def test_partial_rollouts_wait_for_the_first_groups_and_continue_the_others():
    sampled, steps = pictures.schedule(ahead=3)
    for number, step in enumerate(steps):
        assert len(complete_by(sampled, step.start)) >= 3 * (number + 1) > len(complete_by(sampled, step.start - 1))
        assert not [x for x in sampled if x.start < step.end and step.start < x.end]
    versions = {group: [x.version for x in sampled if x.number == group] for group in range(6)}
    assert versions == {0: [0], 1: [0, 1], 2: [0], 3: [0], 4: [0, 1, 2], 5: [0, 1]}
    assert [x.start for x in steps[:2]] == [5, 13]  # groups 3, 0, 2 take 3, 4, 5; then 5, 1 and 6 one, four and four


def test_samplers_go_on_while_a_step_learns_and_no_token_is_too_old():
    sampled, steps = pictures.schedule(staleness=2)
    assert [x for x in sampled if x.start < steps[0].end < x.end or x.end == steps[0].end]
    for step in steps:
        groups = set(range(3 * step.number - 3, 3 * step.number))
        assert groups <= complete_by(sampled, step.start)
        ages = [step.number - 1 - x.version for x in sampled if x.number in groups]
        assert 0 <= min(ages) and max(ages) <= 2
    assert max(step.number - 1 - x.version for step in steps for x in sampled if x.number // 3 == step.number - 1) > 0
    assert len(steps) > len(pictures.schedule(ahead=3)[1]) > len(pictures.schedule()[1])


# --- whether they can be read


def area_of(text):
    """Where a text of an SVG is, in the widest of its fonts."""
    face = "DejaVuSansMono" if "Mono" in text.get("font-family") else "DejaVuSans"
    face += "-Bold" if text.get("font-weight") == "bold" else ""
    size, x, y = (float(text.get(name)) for name in ("font-size", "x", "y"))
    width = ImageFont.truetype(f"{FONTS}/{face}.ttf", 100).getlength(text.text) * size / 100
    left = x - {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor")]
    return Area(left, y - 0.73 * size, left + width, y + 0.2 * size)


def defects(svg):
    """Texts that are small, lie over each other, cross a border or a line, or leave the picture."""
    root, found = ET.fromstring(svg), []
    ground, *boxes = [
        Area(x, y, x + width, y + height)
        for rect in root.findall(f"{SVG}rect")
        for x, y, width, height in [[float(rect.get(name, 0)) for name in ("x", "y", "width", "height")]]
    ]
    texts = [(x.text, area_of(x), float(x.get("font-size"))) for x in root.findall(f"{SVG}text")]
    lines = []  # as flat areas; all that are not level or upright are arrows between texts, taken as they are
    for line in root.findall(f"{SVG}polyline"):
        points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for (x, y), (next_x, next_y) in itertools.pairwise(points):
            lines.append(Area(min(x, next_x), min(y, next_y), max(x, next_x) + 0.1, max(y, next_y) + 0.1))
    for text, area, size in texts:
        found += [f"small: {text}"] if size < 12 else []
        found += [] if ground.contains(area) else [f"outside: {text}"]
        found += [f"over a border: {text}" for box in boxes if box.overlaps(area) and not box.contains(area)]
        found += [f"over a line: {text}" for line in lines if line.overlaps(area)]
    pairs = itertools.combinations(texts, 2)
    return found + [f"over each other: {a}, {b}" for (a, first, _), (b, other, _) in pairs if first.overlaps(other)]


@pytest.mark.parametrize("name", NAMES)
def test_every_text_can_be_read(svgs, name):
    assert defects(svgs[name]) == []
    assert '<rect width="960"' in svgs[name] and 'fill="#ffffff"/>' in svgs[name]  # also on a dark page


def test_texts_that_cannot_be_read_are_found():
    picture = pictures.Picture("a picture", 200, 100)
    picture.box(10, 10, 60, 30, word="wider than its box")
    picture.text(150, 40, "it leaves the picture")
    picture.text(10, 60, "small", size=11)
    picture.text(10, 80, "first")
    picture.text(12, 84, "second")
    picture.text(100, 96, "third")
    picture.line((90, 92), (200, 92))
    assert sorted(defects(picture.svg())) == [
        "outside: it leaves the picture",
        "outside: wider than its box",
        "over a border: wider than its box",
        "over a line: third",
        "over each other: first, second",
        "small: small",
    ]
