"""A model that sees images cannot be sliced, and its text part can: `seeing.py FOLDER`."""

import sys
from pathlib import Path

import helpers_vision as v
import pytest

from extras.sequence_parallel import groups


def main(folder: str) -> None:
    model = v.save_lively(Path(folder, "model"), "qwen2_5_vl")
    v.encoded(model, v.write_rows(Path(folder), 1))  # from now on the data has images
    with pytest.raises(ValueError, match="cannot be sliced by --sequence-parallel-size 2: it sees images; choose"):
        groups.check_model(model, 2, flag="--model")


if __name__ == "__main__":
    main(*sys.argv[1:])
