"""A patched class: ours before the stock one in its bases, under the stock name.

Saving writes the class's name into config.json, sharding wraps blocks by name and PEFT records the model's module, so
all of them must see the stock names. `unpatch_model` puts the stock class back.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar


class Patched:
    """What every patched class has in common. `stock` is the class that was there before."""

    stock: ClassVar[type]

    def __reduce_ex__(self, protocol: int) -> Any:
        # Patched classes are made at run time, so pickle (and deepcopy) find them through the stock class and ours.
        _, _, *state = super().__reduce_ex__(protocol)
        return (_new_patched, (type(self).__bases__[0], type(self).stock), *state)


@cache
def patched_class(ours: type[Patched], stock: type) -> type:
    """The class that computes as `ours` does, with everything else of `stock`. Always the same one."""
    names = {
        "stock": stock,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": ours.__doc__,
    }
    return type(stock.__name__, (ours, stock), names)


def _new_patched(ours: type[Patched], stock: type) -> Any:
    made = patched_class(ours, stock)
    return made.__new__(made)
