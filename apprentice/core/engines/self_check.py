"""Does the fast path give the model's own numbers? Checked once at start-up, on the base model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from ..records import SamplingParams
from ..training.policy import HostedModel
from .protocol import BASE
from .running import Outcome, Request, Runner
from .sampling import Drawing

TOLERANCE = 1e-4
TOLERANCE_16_BIT = 0.25
"""Two correct 16-bit forward passes of different shapes differ by hundredths."""


def largest_difference(host: HostedModel, runner: Runner, tokens: int = 80) -> float:
    """Largest difference of log-probabilities to a plain forward pass: scoring, a shared prefix, and joint decoding."""
    vocabulary = host.model.config.get_text_config().vocab_size
    chooser = random.Random(0)
    ids = [chooser.randrange(vocabulary) for _ in range(min(tokens, runner.context_length - 1))]
    with host.using(None) as model, torch.no_grad():
        plain_TV = model(input_ids=torch.tensor([ids], device=host.device), use_cache=False).logits[0].float().log_softmax(-1)
    scoring = Request(BASE, ids, _ignore)
    heard = _run(runner, [scoring])
    worst = max(_difference(heard[at].log_softmax(-1), plain_TV[at]) for at in range(len(ids)))
    runner.stop(scoring)
    split = max(1, len(ids) - 10)  # more than a page, so that the two share a whole one
    pair = [Request(BASE, ids[: split + extra], _ignore, Drawing.of(SamplingParams())) for extra in (0, 3)]
    for request in pair:
        worst = max(worst, _difference(_run(runner, [request])[-1].log_softmax(-1), plain_TV[request.computed - 1]))
    for _ in range(3):
        for request in pair:
            request.ids.append(ids[len(request.ids)])
        for row_V, request in zip(_run(runner, pair, started=True), pair, strict=True):
            worst = max(worst, _difference(row_V.log_softmax(-1), plain_TV[request.computed - 1]))
    for request in pair:
        runner.stop(request)
    runner.forget(BASE)
    return worst


def _run(runner: Runner, requests: Sequence[Request], *, started: bool = False) -> list[Tensor]:
    """Logits of the wanted positions, the requests' in order."""
    if not started:
        for request in requests:
            runner.start(request, ())
    rows: list[Tensor] = []
    while any(request.computed < len(request.ids) for request in requests):
        for request in requests:
            runner.make_room(request)
        for advance in runner.advance(requests):
            if advance.logits_WV is not None:
                rows.extend(advance.logits_WV)
    return rows


def _difference(left_V: Tensor, right_V: Tensor) -> float:
    difference = float((left_V - right_V).abs().max())
    return difference if difference == difference else float("inf")


def _ignore(_: Outcome) -> None:
    return None
