"""What keeps a run alive: its folder, saving and resuming, stopping, the watchdog, the clock, metrics, memory.

No reader of an algorithm needs to open it. It knows no formula, and calls nothing of a script.
"""
