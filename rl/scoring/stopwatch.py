"""How long something has taken, when the time in which this process was stopped does not count."""

import time


class Stopwatch:
    """Seconds since this object was made, as somebody counts who looks every `tick` seconds.

    A job that is suspended goes on hours later as if nothing had been, and no clock of the kernel says how long it was
    stopped. But then one look comes hours after the one before: of such a gap, two ticks are counted.
    """

    def __init__(self, tick: float):
        self.tick, self.seconds, self._last = tick, 0.0, time.monotonic()

    def look(self) -> float:
        """Count the time since the last look; returns the sum."""
        now = time.monotonic()
        self.seconds += min(now - self._last, 2 * self.tick)
        self._last = now
        return self.seconds
