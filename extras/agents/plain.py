"""What users' functions return, as JSON."""

import dataclasses
import enum
import numbers
from collections.abc import Mapping, MappingView, Sequence
from decimal import Decimal
from typing import Any

SCALARS = (str, int, float, type(None))


def plain(value: Any) -> Any:
    """A value as JSON can have it. Values of numpy and torch, Decimal and Fraction, sets, dataclasses, pydantic's
    models and enums become numbers, texts, lists and dicts, also inside others. Anything else becomes its text.
    """
    value = value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, type):
        return str(value)
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for method in ("tolist", "model_dump"):  # of numpy and torch, and of pydantic
        if hasattr(value, method):
            return plain(getattr(value, method)())
    if isinstance(value, Mapping):
        names = {name: plain(name) for name in value}
        return {names[name] if isinstance(names[name], SCALARS) else str(name): plain(value[name]) for name in value}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=lambda x: (str(type(x)), x if isinstance(x, SCALARS) else str(x)))
    if isinstance(value, (Sequence, MappingView)) and not isinstance(value, (bytes, bytearray)):
        return [plain(x) for x in value]
    if isinstance(value, numbers.Real | Decimal):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) < 2**53 else number
    return str(value)
