"""What a run will take, by arithmetic from a model's config and the flags, without a GPU and without loading weights.

sizes.py measures a model.
"""
