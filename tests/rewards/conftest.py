"""What tests of rewards that run programs share."""

import pytest

from rewards.sandbox import judge as sandbox


@pytest.fixture
def short_limits(monkeypatch) -> None:
    """A program that never ends is cut off in a third of its time."""
    slowness = sandbox._slowness()
    monkeypatch.setattr(sandbox, "_slowness", lambda: 0.3 * slowness)
