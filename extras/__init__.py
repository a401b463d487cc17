"""What a default run does not need: one folder for each capability, which is entered through its `__init__.py`."""
