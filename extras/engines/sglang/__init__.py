"""SGLang as the engine, for --engine sglang. docs/engines.md says what it cannot do."""
