"""The engines of helpers_fixtures.py."""

from helpers_fixtures import engine, every_engine, hf_engine, policy, vllm_engine  # noqa: F401
