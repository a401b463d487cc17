"""requirements.lock fits requirements.txt, and benchmarks/make_lock.py prints what is installed."""

import re
from pathlib import Path

import pytest
from launch import ROOT
from packaging.requirements import Requirement

from benchmarks import make_lock
from rl.run import run

LOCK, BOUNDS = ROOT / "requirements.lock", make_lock.named(ROOT / "requirements.txt")


def problems(lock: str) -> list[str]:
    """What is wrong with a lock: packages of requirements.txt that it lacks, or has in another version than asked."""
    lines = [line.split("  #")[0] for line in lock.splitlines() if line and line[0] not in "-#"]
    pins = {x.name: x.specifier for x in map(Requirement, lines)}
    found = [f"{x.name} is missing" for x in BOUNDS if x.name not in pins]
    for bound in BOUNDS:
        for pin in pins.get(bound.name, ()):
            if pin.operator == "==" and not bound.specifier.contains(pin.version):
                found.append(f"{bound.name} {pin.version} is not {bound.specifier}")
            if pin.operator != "==" and pin not in list(bound.specifier):
                found.append(f"{bound.name} {pin} is not what requirements.txt says")
    return found


def test_the_lock_has_every_package_of_the_requirements_within_its_bounds():
    assert problems(LOCK.read_text()) == []
    assert len(BOUNDS) > 15


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (r"^vllm==.*$", "vllm==0.35.0", "vllm 0.35.0 is not <0.34,>=0.26"),
        (r"^transformers==.*$", "transformers==5.8.0", "transformers 5.8.0 is not >=5.9"),
        (r"^tyro==.*$", "# tyro==1.0.17", "tyro is missing"),
        (r"^wandb>=\S+", "wandb>=0.17", "wandb >=0.17 is not what requirements.txt says"),
    ],
)
def test_a_wrong_lock_is_found(old, new, problem):
    text = re.sub(old, new, LOCK.read_text(), flags=re.M)
    assert problems(text) == [problem]


def test_the_lock_has_the_newest_stack_that_the_pages_name():
    text, page = LOCK.read_text(), (ROOT / "docs" / "troubleshooting.md").read_text()
    version = {name: re.search(rf"^{name}==(\S+)", text, re.M)[1] for name in ("vllm", "torch", "transformers")}
    short = {name: x.removesuffix(".0") for name, x in version.items()}
    assert f"| vLLM {short['vllm']}, torch {short['torch']}, transformers {short['transformers']}" in page
    newest = {x: ".".join(map(str, run.NEWEST[x])) for x in ("vllm", "torch")}  # a run says if there are newer ones
    assert newest == {x: short[x] for x in newest}
    [bound] = [x.specifier for x in BOUNDS if x.name == "vllm"]
    major, minor, _ = map(int, version["vllm"].split("."))
    assert version["vllm"] in bound and f"{major}.{minor + 1}.0" not in bound  # nothing newer than what was run


def installed(folder: Path, **packages: str) -> str:
    """A folder with the metadata of packages: name="version requirement, requirement"."""
    for name, text in packages.items():
        version, _, requires = text.partition(" ")
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {x}" for x in filter(None, requires.split(", "))]
        (info / "METADATA").write_text("\n".join(lines))
    return str(folder)


def test_a_lock_names_what_runs_and_where_it_lies(tmp_path):
    packed = installed(
        tmp_path / "packed",
        engine="2.0 tensor==3.0, kernel==1.1, wheel[fast]>=1, absent, unused; python_version < '3'",
        tensor="3.0+cu13 toolkit==7.1",
        wheel="1.5 quick; extra == 'fast', slow; extra == 'other'",
        both="4.0",
    )
    image = installed(
        tmp_path / "image",
        kernel="1.0 llvm",
        toolkit="7.0 blas",
        quick="1.0",
        slow="1.0",
        llvm="9.0",
        blas="5.0",
        both="3.0",
        test="8.0",
        unused="1.0",
    )
    roots = [Requirement(x) for x in ("engine>=1", "test", "both", "Lint_Tool>=2")]
    assert make_lock.lock(roots, make_lock.installed([packed, image]), Path(packed)) == [
        "# absent  # not there; required by engine",
        "# blas==5.0  # image; only toolkit requires it",
        "both==4.0",
        "engine==2.0",
        "# kernel==1.0  # image; engine 2.0 requires ==1.1",
        "Lint_Tool>=2  # not there; required by requirements.txt",
        "# llvm==9.0  # image; only kernel requires it",
        "quick==1.0  # image",
        "tensor==3.0",
        "test==8.0  # image",
        "# toolkit==7.0  # image; tensor 3.0+cu13 requires ==7.1",
        "wheel==1.5",
    ]
    assert not any("image" in line for line in make_lock.lock(roots, make_lock.installed([packed, image])))


def test_a_version_that_the_requirements_forbid_is_no_pin(tmp_path):
    packages = make_lock.installed([installed(tmp_path, engine="2.0 tensor", tensor="1.0")])
    expected = ["# engine==2.0  # requirements.txt requires <2", "# tensor==1.0  # only engine requires it"]
    assert make_lock.lock([Requirement("engine<2")], packages) == expected
