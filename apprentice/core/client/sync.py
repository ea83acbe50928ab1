"""The client without `await`: for plain scripts, and for notebooks, whose own event loop is already running.

One background thread runs one event loop for the whole process; every method hands its coroutine there and waits.
Rollouts may be plain functions: each runs in a thread of its own, inside its trajectory.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from ..errors import InvalidRequest
from ..records import Scenario, TrajectoryGroup
from .evaluate import Evaluation, RewardFunction
from .gather import Returned, Rollout
from .gather import gather as async_gather
from .model import TrainableModel
from .progress import Progress
from .scope import TrajectoryScope

if TYPE_CHECKING:
    from openai import OpenAI

    from .loop import LoopResult, TrainingLoop

T = TypeVar("T")
P = ParamSpec("P")
SyncRollout: TypeAlias = Callable[[Scenario], Returned]

END_SECONDS = 5.0
"""How long the end of the process waits for the background loop."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _background_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_loop.run_forever, name="apprentice-sync", daemon=True)
            thread.start()
            atexit.register(_end, _loop, thread)
        return _loop


def _forget_loop() -> None:
    """A forked copy of this process has the loop but not its thread: it makes its own."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_loop)


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Close the loop's connections in good order before the interpreter takes things apart."""
    if not thread.is_alive():  # this is a forked copy of the process that made it
        return
    asyncio.run_coroutine_threadsafe(loop.shutdown_asyncgens(), loop).result(END_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(END_SECONDS)
    if not loop.is_running():
        loop.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, computed in the background loop with the caller's context. Ctrl-C cancels it and waits for its end."""
    loop = _background_loop()
    if _running_loop() is loop:
        coroutine.close()
        raise InvalidRequest("a sync method was called inside an async function of the sync facade; use the async method with `await`")
    context = contextvars.copy_context()
    done: threading.Event = threading.Event()
    box: list[asyncio.Task[T]] = []

    def start() -> None:
        task = loop.create_task(coroutine, context=context)
        box.append(task)
        task.add_done_callback(lambda _: done.set())

    loop.call_soon_threadsafe(start)
    try:
        done.wait()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(lambda: box[0].cancel())
        done.wait()
        raise
    return box[0].result()


@contextmanager
def trajectory(scope: TrajectoryScope) -> Generator[TrajectoryScope]:
    """`with trajectory(model.trajectory(scenario)) as t:`, the sync form of `async with`."""
    run(scope.open())
    scope.become_ambient()
    try:
        yield scope
    except BaseException as error:
        scope.leave_ambient()
        run(scope.close(error))
        raise
    else:
        scope.leave_ambient()
        run(scope.close())


def in_threads(rollout: SyncRollout, threads: ThreadPoolExecutor) -> Rollout:
    """An async rollout that runs a plain function in a thread, in the rollout's own context."""

    @functools.wraps(rollout)
    async def wrapped(scenario: Scenario) -> Returned:
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: context.run(rollout, scenario))

    return wrapped


def gather(
    rollout: SyncRollout,
    scenarios: Iterable[Scenario | object],
    *,
    group_size: int = 8,
    concurrency: int = 32,
    deadline: float | None = 600.0,
    max_failures: int | float = 0.5,
    retries: int = 3,
    progress: bool | Progress = True,
) -> list[TrajectoryGroup]:
    """`gather` for a plain function. A thread cannot be cancelled: at its deadline a rollout counts as failed but runs on."""
    with ThreadPoolExecutor(concurrency, "apprentice-rollout") as threads:
        return run(
            async_gather(
                in_threads(rollout, threads),
                scenarios,
                group_size=group_size,
                concurrency=concurrency,
                deadline=deadline,
                max_failures=max_failures,
                retries=retries,
                progress=progress,
            )
        )


def run_loop(loop: TrainingLoop) -> LoopResult:
    """`await loop.run()` for plain code."""
    return run(loop.run())


def _sync(method: Callable[Concatenate[TrainableModel, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[SyncModel, P], T]:
    """The method without `await`: its parameters, their types and its docstring stay."""

    @functools.wraps(method)
    def waits(self: SyncModel, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(getattr(self.model, method.__name__)(*args, **kwargs))

    return waits


class SyncModel:
    """`model.sync`: the methods of a TrainableModel without `await`."""

    def __init__(self, model: TrainableModel) -> None:
        self.model = model

    register = _sync(TrainableModel.register)
    get_step = _sync(TrainableModel.get_step)
    fetch = _sync(TrainableModel.fetch)
    train = _sync(TrainableModel.train)
    train_sft = _sync(TrainableModel.train_sft)
    checkpoints = _sync(TrainableModel.checkpoints)
    checkpoint = _sync(TrainableModel.checkpoint)
    pin_checkpoint = _sync(TrainableModel.pin_checkpoint)
    delete_checkpoint = _sync(TrainableModel.delete_checkpoint)
    fork = _sync(TrainableModel.fork)

    def openai_client(self, **options: Any) -> OpenAI:  # Any: handed on to OpenAI
        return self.model.sync_openai_client(**options)

    @contextmanager
    def trajectory(
        self, scenario: Scenario | object = None, *, group_id: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Generator[TrajectoryScope]:
        with trajectory(self.model.trajectory(scenario, group_id=group_id, metadata=metadata)) as scope:
            yield scope

    def evaluate(
        self,
        rollout: SyncRollout,
        scenarios: Sequence[Scenario | object],
        *,
        repeats: int = 1,
        reward: RewardFunction | None = None,
        concurrency: int = 32,
        deadline: float | None = 600.0,
        max_failures: int | float = 0.5,
        seed: int = 0,
        progress: bool | Progress = True,
    ) -> Evaluation:
        with ThreadPoolExecutor(concurrency, "apprentice-rollout") as threads:
            return run(
                self.model.evaluate(
                    in_threads(rollout, threads),
                    scenarios,
                    repeats=repeats,
                    reward=reward,
                    concurrency=concurrency,
                    deadline=deadline,
                    max_failures=max_failures,
                    seed=seed,
                    progress=progress,
                )
            )
