"""Where the repository is, and how tests start processes in it."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
SHARED = ROOT.parent / "shared" / "data"  # real data sets, where they are there
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
