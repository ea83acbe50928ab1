"""Random trees of samples, for property tests of whatever trains on them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from apprentice.core.training.forest import TokenSample


def sample(id: str, prompt: Sequence[int], tokens: Sequence[int], *, advantage: float = 1.0) -> TokenSample:
    count = len(tokens)
    return TokenSample(id, tuple(prompt), tuple(tokens), (0.0,) * count, (0.0,) * count, (advantage,) * count)


@st.composite
def trees(draw: st.DrawFn, *, max_samples: int = 9, vocabulary: int = 4) -> list[TokenSample]:
    """Samples that share prompts, turns and halves of turns: each continues some prefix of an earlier one, or starts anew.

    With so few different tokens, sequences also meet by chance, repeat, and are prefixes of each other.
    """
    token = st.integers(0, vocabulary - 1)
    sequences: list[list[int]] = []
    samples: list[TokenSample] = []
    for number in range(draw(st.integers(1, max_samples))):
        start: list[int] = []
        if sequences and draw(st.integers(0, 5)):
            origin = draw(st.sampled_from(sequences))
            start = origin[: draw(st.integers(1, len(origin)))]
        fresh = draw(st.lists(token, min_size=0 if len(start) > 1 else 2, max_size=9))
        sequence = start + fresh
        sequences.append(sequence)
        prompt = draw(st.integers(1, len(sequence) - 1))
        count = len(sequence) - prompt if draw(st.integers(0, 9)) else 0
        weights = draw(st.lists(st.floats(-2, 2), min_size=count, max_size=count))
        zeros = (0.0,) * count
        samples.append(
            TokenSample(str(number), tuple(sequence[:prompt]), tuple(sequence[prompt : prompt + count]), zeros, zeros, tuple(weights))
        )
    return samples
