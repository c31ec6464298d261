"""Which layer is what in a hybrid, as a string: M for a state-space mixer, * for attention, - for an MLP."""

from __future__ import annotations

MIXER, ATTENTION, MLP = "M", "*", "-"  # Megatron's symbols
SYMBOLS = (MIXER, ATTENTION, MLP)


def allot_layers(layers: int, attention_ratio: float = 0.0, mlp_ratio: float = 0.0) -> str:
    """Attention and MLP layers by their share of all layers, spread evenly among mixers, as Megatron-LM allots them.

    Attention layers part the others into sections of equal length, so that there are mixers at both ends; then MLPs
    take places from the mixers in turn (Megatron-LM, `pattern_from_ratios`; An Empirical Study of Mamba-based Language
    Models, section 3.2).

    Raises:
        ValueError: shares that are not between 0 and 1 together.
    """
    if layers < 1 or min(attention_ratio, mlp_ratio) < 0 or attention_ratio + mlp_ratio > 1:
        raise ValueError(f"{layers} layers cannot be {attention_ratio} attention and {mlp_ratio} MLP")
    attention = round(layers * attention_ratio)
    pattern = _spread(MIXER * layers, ATTENTION, gap=(layers - attention) / (attention + 1))
    mlps = round(layers * mlp_ratio)
    return _spread(pattern, MLP, gap=(layers - attention - mlps) / mlps) if mlps else pattern


def _spread(pattern: str, symbol: str, gap: float) -> str:
    """Put `symbol` in the place of a mixer after every `gap` mixers that stay; rests of a gap add up."""
    left = gap
    made = []
    for layer in pattern:
        if layer != MIXER:
            made.append(layer)
        elif left < 0.5:
            made.append(symbol)
            left += gap
        else:
            made.append(layer)
            left -= 1
    return "".join(made)


def attend_every(layers: int, period: int) -> str:
    """Every `period`-th sequence layer is attention, in the middle of its period as in Jamba, each followed by an MLP.

    `layers` counts both, so there are layers / 2 sequence layers (Jamba, section 3.1: one in eight).

    Raises:
        ValueError: an odd number of layers, or too few for one attention layer.
    """
    if layers % 2:
        raise ValueError(f"{layers} layers are odd; each mixer or attention layer is followed by an MLP")
    sequence = layers // 2
    if period > sequence:
        raise ValueError(f"{sequence} mixer and attention layers are fewer than {period}, so none would be attention")
    return "".join((ATTENTION if index % period == period // 2 else MIXER) + MLP for index in range(sequence))


def repeat_pattern(pattern: str, layers: int | None) -> str:
    """A pattern as often as it fits `layers`; None: once.

    Raises:
        ValueError: other symbols, or a number of layers that is no multiple of the pattern's.
    """
    unknown = sorted(set(pattern) - set(SYMBOLS))
    if unknown or not pattern:
        raise ValueError(f"{pattern!r} is made of other symbols than M (mixer), * (attention) and - (MLP)")
    times, rest = divmod(layers if layers is not None else len(pattern), len(pattern))
    if rest or not times:
        raise ValueError(f"{pattern!r} has {len(pattern)} layers, of which {layers} is not a multiple")
    return pattern * times
