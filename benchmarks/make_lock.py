"""Print requirements.lock: the exact versions of the packages that this Python would import for a run.

    PYTHONPATH=~/site:. python benchmarks/make_lock.py --folder ~/site > requirements.lock

It begins at the names in requirements.txt and follows what each package says that it requires. Nothing is downloaded
and nothing is imported.

A line that ends in "# image" names a package that lies outside of --folder: the machine's image supplied it. A
commented line names a version that ran although another package forbids it, or a package that was not there. pip
chooses a version of such a package itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import tyro
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Args:
    folder: Path | None = None
    """Folder of packages that were brought to the machine; packages elsewhere get a mark. Default: no marks."""
    requirements: Path = ROOT / "requirements.txt"
    """File with the names at which the walk begins."""


def named(path: Path) -> list[Requirement]:
    """The requirements that a file lists, one for each line; options such as `-e .` are left out."""
    lines = (line.split(" #")[0].strip() for line in path.read_text().splitlines())
    return [Requirement(line) for line in lines if line and line[0] not in "-#"]


def installed() -> dict[str, metadata.Distribution]:
    """The packages that this Python imports, by name. Of two versions, the one that is first on the path counts."""
    packages: dict[str, metadata.Distribution] = {}
    for package in metadata.distributions():
        if name := package.metadata["Name"]:  # a folder that a removed package left behind has none
            packages.setdefault(canonicalize_name(name), package)
    return packages


def needed(
    roots: list[Requirement], packages: Mapping[str, metadata.Distribution]
) -> dict[str, dict[str, Requirement]]:
    """Everything that is required, directly or through other packages, as {name: {who requires it: requirement}}."""
    asked: dict[str, dict[str, Requirement]] = {}
    rest = [("requirements.txt", requirement) for requirement in roots]
    while rest:
        asker, requirement = rest.pop()
        name = canonicalize_name(requirement.name)
        known = asked.setdefault(name, {})
        if asker in known and requirement.extras <= known[asker].extras:
            continue
        known[asker] = requirement
        if name not in packages:
            continue
        for inner in map(Requirement, packages[name].requires or ()):
            if inner.marker is None or any(inner.marker.evaluate({"extra": x}) for x in {"", *requirement.extras}):
                rest.append((f"{name} {packages[name].version}", inner))
    return asked


def line(
    name: str, askers: Mapping[str, Requirement], package: metadata.Distribution | None, folder: Path | None
) -> str:
    """One line of the lock. Args: askers, who requires the package; package, None if it is not there."""
    if package is None:
        return f"# {name}  # not there, but required by {' and '.join(sorted(askers))}"
    version = package.version
    bounds = {asker: requirement.specifier for asker, requirement in sorted(askers.items())}
    notes = [f"{asker} requires {x}" for asker, x in bounds.items() if not x.contains(version, prereleases=True)]
    pin = f"# {name}=={version}" if notes else f"{name}=={version.partition('+')[0]}"  # no index has local versions
    if folder is not None and not Path(str(package.locate_file(""))).resolve().is_relative_to(folder.resolve()):
        notes.insert(0, "image")
    return f"{pin}  # {'; '.join(notes)}" if notes else pin


def main(args: Args) -> None:
    """Print the lock, sorted by name."""
    packages = installed()
    asked = needed(named(args.requirements), packages)
    print("\n".join(line(name, asked[name], packages.get(name), args.folder) for name in sorted(asked)))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
