"""A game: find a number by "higher" and "lower". Reset, step and report are all that an environment has.

    torchrun train_grpo.py --environment environments/guess.py:Guess --custom-reward-function rewards/environment.py

data/guess.py writes its rows. The policy is told where the number is, and has four guesses:

    10-24       the row's prompt
    17          the policy
    higher      the environment
    21          the policy; right, so this is the end
"""

from typing import Any

GUESSES = 4  # enough for 15 numbers, if each guess halves what is left


class Guess:
    """One game. Its number stands in the row, so all responses of a group look for the same one."""

    def __init__(self) -> None:
        self.secret, self.guesses, self.found = 0, 0, False

    def reset(self, row: dict[str, Any], seed: int) -> list[dict]:
        """Hide the number. What is returned would follow the prompt. A game that draws something takes the seed."""
        self.secret = int(row["reward_model"]["ground_truth"])
        return []

    def step(self, reply: Any) -> list[dict] | None:
        """Answer a guess, see `Reply` in extras/agents/tools.py. None ends the game."""
        self.guesses += 1
        guess = reply.text.strip()
        self.found = guess == str(self.secret)
        if self.found or self.guesses == GUESSES:
            return None
        if not (guess.isascii() and guess.isdigit() and len(guess) < 10):
            return [{"role": "user", "content": "a number"}]
        return [{"role": "user", "content": "higher" if int(guess) < self.secret else "lower"}]

    def report(self) -> dict[str, float]:
        """The reward, for rewards/environment.py, and how many guesses it took, for the log."""
        return {"reward": float(self.found), "guesses": self.guesses}
