"""Print requirements.lock: the exact versions of the packages that this Python would import for a run.

    PYTHONPATH=~/site:. python benchmarks/make_lock.py --folder ~/site > requirements.lock

It begins at the names in requirements.txt and follows what each package says that it requires. Nothing is downloaded
and nothing is imported. pip can install what is printed.

- A note "image" marks a package that lies outside of --folder: the image of the machine supplied it.
- A version that ran although another package forbids it stands in a comment, and so does what only such packages
  require. pip chooses other versions of these.
- A package that was not there is named without a version, in a comment unless requirements.txt names it.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import tyro
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
ROOTS = "requirements.txt"  # who requires the packages at which the walk begins


@dataclass(frozen=True)
class Args:
    folder: Path | None = None
    """This folder has packages that were brought to the machine, and packages elsewhere get a mark. By default there
    are no marks."""
    requirements: Path = ROOT / "requirements.txt"
    """The walk begins at the names in this file."""


def named(path: Path) -> list[Requirement]:
    """The requirements that a file lists, one for each line. Options such as `-e .` are left out."""
    lines = (line.split(" #")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line and line[0] not in "-#"]


def installed(path: Sequence[str]) -> dict[str, metadata.Distribution]:
    """The packages in the folders of a path, by name. Of two versions, the one that comes first counts."""
    packages: dict[str, metadata.Distribution] = {}
    for package in metadata.distributions(path=list(path)):
        if name := package.metadata["Name"]:  # a folder that a removed package left behind has none
            packages.setdefault(canonicalize_name(name), package)
    return packages


def needed(
    roots: list[Requirement], packages: Mapping[str, metadata.Distribution]
) -> dict[str, dict[str, Requirement]]:
    """Everything that is required, directly or through other packages, as {name: {who requires it: requirement}}."""
    asked: dict[str, dict[str, Requirement]] = {}
    rest = [(ROOTS, requirement) for requirement in roots]
    while rest:
        asker, requirement = rest.pop()
        name = canonicalize_name(requirement.name)
        known = asked.setdefault(name, {})
        if asker in known and requirement.extras <= known[asker].extras:
            continue
        known[asker] = requirement
        for inner in map(Requirement, packages[name].requires or () if name in packages else ()):
            if inner.marker is None or any(inner.marker.evaluate({"extra": x}) for x in {"", *requirement.extras}):
                rest.append((name, inner))
    return asked


def lock(
    roots: list[Requirement], packages: Mapping[str, metadata.Distribution], folder: Path | None = None
) -> list[str]:
    """The lines of the lock, sorted by name. Args: folder, see `Args`."""
    asked = needed(roots, packages)
    against = {}  # by name of a package: who does not want its version
    for name, askers in asked.items():
        version = packages[name].version if name in packages else "0"
        forbids = {x for x, how in askers.items() if not how.specifier.contains(version, prereleases=True)}
        against[name] = sorted(forbids) if name in packages else []
    pinned: set[str] = set()  # that somebody requires whose own version is pinned
    rest = [x for x in asked if ROOTS in asked[x]]
    while rest:
        name = rest.pop()
        if name in packages and not against[name] and name not in pinned:
            pinned.add(name)
            rest += [x for x in asked if name in asked[x]]
    lines = []
    for name, askers in sorted(asked.items()):
        if name not in packages:
            pin = str(askers[ROOTS]) if ROOTS in askers else f"# {name}"
            lines.append(f"{pin}  # not there; required by {', '.join(sorted(askers))}")
            continue
        version, place = packages[name].version, Path(str(packages[name].locate_file("")))
        known_as = {x: f"{x} {packages[x].version}" if x in packages else x for x in against[name]}
        notes = [f"{who} requires {askers[x].specifier}" for x, who in known_as.items()]
        if name not in pinned and not notes:
            notes = [f"only {', '.join(sorted(askers))} requires it"]
        if folder is not None and not place.resolve().is_relative_to(folder.resolve()):
            notes.insert(0, "image")
        pin = f"{name}=={version.partition('+')[0]}" if name in pinned else f"# {name}=={version}"
        lines.append(f"{pin}  # {'; '.join(notes)}" if notes else pin)  # no index has local versions, after a +
    return lines


def main(args: Args) -> None:
    """Print the lock."""
    print("\n".join(lock(named(args.requirements), installed(sys.path), args.folder)))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
