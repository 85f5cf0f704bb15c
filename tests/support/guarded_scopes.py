"""Programs about how long the guard is in force, and in which threads; see guarded_programs.py."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.guarded_programs import CPU, CUDA, OPENVINO, listed, outcome, report


def scopes(model: str) -> None:
    import onnxruntime

    import ortgpu
    from ortgpu.session.guard.guard import is_enforced

    cls = onnxruntime.InferenceSession
    before, finders = dict(vars(cls)), list(sys.meta_path)
    found: dict[str, Any] = {}

    def make() -> Any:
        return cls(model)

    with ortgpu.enforce():
        found["inside"] = outcome(make)
        with ortgpu.enforce():
            found["nested"] = outcome(make)
        found["after the inner one"] = outcome(make)
    found["after"] = outcome(make)

    with contextlib.suppress(ZeroDivisionError), ortgpu.enforce():
        raise ZeroDivisionError
    found["after an exception"] = outcome(make)

    again = ortgpu.enforce()
    with again, again:
        found["twice the same"] = outcome(make)
    found["after twice the same"] = outcome(make)

    found["function"] = outcome(ortgpu.enforce()(make))
    found["function, without parentheses"] = outcome(ortgpu.enforce(make))
    found["after a function"] = outcome(make)

    @ortgpu.enforce()
    async def coroutine() -> str:
        await asyncio.sleep(0.01)
        return outcome(make)

    pending = coroutine()
    found["coroutine not started"] = outcome(make)
    found["coroutine"] = asyncio.run(pending)
    found["after a coroutine"] = outcome(make)

    def behind(*arguments: Any) -> Any:  # as many decorators do it
        return coroutine.__wrapped__(*arguments)  # type: ignore[attr-defined]  # functools.wraps sets it

    pending = ortgpu.enforce()(behind)()
    found["decorated coroutine not started"] = outcome(make)
    found["decorated coroutine"] = asyncio.run(pending)
    found["after a decorated coroutine"] = outcome(make)

    def generator() -> Iterator[int]:
        yield 1

    for name, wrong in {"generator": generator, "class": Path, "nothing": 1}.items():
        try:
            ortgpu.enforce()(wrong)  # type: ignore[type-var]  # the wrong type is the point
        except TypeError as raised:
            found[name] = str(raised)

    ortgpu.install()
    ortgpu.install()
    found["installed"] = outcome(make)
    with ortgpu.enforce():
        ortgpu.uninstall()
        found["uninstalled inside"] = outcome(make)
    found["uninstalled"] = outcome(make)
    found["left over"] = [name for name in vars(cls) if vars(cls)[name] is not before.get(name)]
    found["finders"] = sys.meta_path == finders
    found["in force"] = is_enforced()
    report(found)


def lazily(model: str) -> None:
    """Blocks around a library that makes its sessions later, with what is warned of."""
    import ortgpu

    folder = tempfile.mkdtemp()

    class Library:
        def __call__(self, name: str = "model", **kwargs: Any) -> Any:
            import onnxruntime

            path = os.path.join(folder, name)
            shutil.copy(model, path)
            return onnxruntime.InferenceSession(path, **kwargs)

    def warned(action: Callable[[], object]) -> list[list[Any]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(ZeroDivisionError):
                action()
        return [[each.filename, each.category.__name__, str(each.message)] for each in caught]

    def empty() -> Library:
        with ortgpu.enforce():
            return Library()

    def another() -> None:
        with ortgpu.enforce(), ortgpu.enforce():
            pass

    def stacked(again: bool = False) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(ortgpu.enforce())
        if again:
            with contextlib.ExitStack() as stack:
                stack.enter_context(ortgpu.enforce())

    def raising() -> None:
        with ortgpu.enforce():
            raise ZeroDivisionError

    def serving() -> None:
        with ortgpu.enforce():
            outcome(Library())

    ortgpu.install()
    found: dict[str, Any] = {"installed": warned(empty)}
    ortgpu.uninstall()
    found |= {
        "decorated": warned(ortgpu.enforce()(lambda: Library())),
        "raising": warned(raising),
        "imported": "onnxruntime" in sys.modules,
        "empty": [warned(empty), warned(empty)],
        "another": warned(another),
        "stacked": [warned(stacked), warned(lambda: stacked(again=True))],
        "serving": warned(serving),
    }
    import onnxruntime

    class Falling(onnxruntime.InferenceSession):  # type: ignore[misc]  # onnxruntime ships no types
        def _create_inference_session(self, providers: Any, *arguments: Any) -> None:
            super()._create_inference_session([CPU], *arguments)
            self._providers = list(providers)

    def falling(name: str, provider: str = CUDA) -> Any:
        shutil.copy(model, os.path.join(folder, name))
        return Falling(os.path.join(folder, name), providers=[provider, CPU])

    library = empty()
    kept = [
        library("cuda", providers=[CUDA, CPU]),
        library("nothing"),
        library("cpu", providers=[CPU]),
        library("other", providers=[OPENVINO, CPU]),
        falling("on cuda"),
        falling("on tensorrt", "TensorrtExecutionProvider"),
        later := library("later", providers=[CPU]),
        lost := falling("lost"),
    ]
    later.set_providers([CUDA, CPU])
    lost.set_providers(lost._fallback_providers)  # what ONNX Runtime does when a run fails on CUDA
    found["sessions"] = {os.path.basename(one["model"]): one for one in listed()}
    ortgpu.uninstall()
    kept.append(library("uninstalled", providers=[CUDA, CPU]))
    found["uninstalled"] = listed()[-1]
    report(found)


def interrupted(model: str) -> None:
    """Ctrl-C while the guard waits for ONNX Runtime to be imported, and one way out more than in."""
    import onnxruntime

    import ortgpu
    from ortgpu.session.guard.guard import is_enforced

    home = "onnxruntime.capi.onnxruntime_inference_collection"
    loaded = sys.modules.pop(home)

    class Interrupting:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == home:
                raise KeyboardInterrupt

    interrupting: Any = Interrupting()
    sys.meta_path.insert(0, interrupting)
    found: dict[str, Any] = {}
    try:
        with ortgpu.enforce():
            found["entered"] = True
    except KeyboardInterrupt:
        found["in force after the interrupt"] = is_enforced()
    sys.meta_path.remove(interrupting)
    sys.modules[home] = loaded

    ortgpu.enforce().__exit__(None, None, None)
    with ortgpu.enforce():
        found["inside"] = outcome(lambda: onnxruntime.InferenceSession(model))
    found["after"] = outcome(lambda: onnxruntime.InferenceSession(model))
    report(found)


def over_ours(model: str) -> None:
    """Somebody changes the class after us, and keeps calling what was there."""
    import onnxruntime

    import ortgpu

    cls = onnxruntime.InferenceSession
    with ortgpu.enforce():
        ours = cls.__init__

        def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
            ours(self, *args, **kwargs)

        cls.__init__ = theirs
        inside = outcome(lambda: cls(model))
    found = {"inside": inside, "after": outcome(lambda: cls(model)), "theirs": cls.__init__ is theirs}
    ortgpu.uninstall()
    kept = cls(model)
    report({**found, "fell back": [one["fell_back"] for one in listed()], "kept": kept.get_providers() is not None})


def threads(model: str) -> None:
    """A session made in another thread than the one that is in the block; many blocks and sessions at once."""
    import onnxruntime

    import ortgpu

    def make() -> str:
        return outcome(lambda: onnxruntime.InferenceSession(model, providers=[CUDA, CPU]))

    found: list[str] = []
    with ortgpu.enforce():
        thread = threading.Thread(target=lambda: found.append(make()))
        thread.start()
        thread.join()

    results: list[str] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(8):
            with ortgpu.enforce():
                results.append(make())

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    report({"other thread": found, "many": sorted(set(results)), "count": len(results), "after": make()})


def importing_meanwhile(model: str) -> None:
    """The guard comes into force while another thread is importing ONNX Runtime."""
    import ortgpu
    from ortgpu.session.guard.guard import is_enforced

    started = threading.Event()

    def work() -> None:
        started.set()
        import onnxruntime  # noqa: F401 - the import itself is what is raced

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    ortgpu.install()
    thread.join()
    from onnxruntime import InferenceSession

    report({"made": outcome(lambda: InferenceSession(model)), "in force": is_enforced()})


def first_used_in_threads(model: str) -> None:
    """Threads that begin at once, some with a library that uses ONNX Runtime, some with ortgpu."""
    outcomes: list[str] = []
    together = threading.Barrier(12)
    sys.setswitchinterval(1e-6)
    by_variable = "ORTGPU_ENFORCE" in os.environ

    def guarded() -> str:
        if not by_variable:
            import ortgpu

            ortgpu.install()
        import onnxruntime

        return outcome(lambda: onnxruntime.InferenceSession(model))

    def ours() -> str:
        from ortgpu import GPUSession

        return outcome(lambda: GPUSession(model))

    def work(function: Callable[[], str]) -> None:
        together.wait()
        try:
            outcomes.append(function())
        except Exception as error:  # noqa: BLE001 - what the test is to show
            outcomes.append(repr(error))

    started = [threading.Thread(target=work, args=(function,)) for function in (guarded, ours) * 6]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    report(sorted(set(outcomes)))


def imported_again(model: str) -> None:
    import ortgpu

    ortgpu.install()
    home: Any = importlib.import_module("onnxruntime.capi.onnxruntime_inference_collection")
    first = home.InferenceSession
    importlib.reload(home)
    made = {"first": outcome(lambda: first(model)), "second": outcome(lambda: home.InferenceSession(model))}
    report({**made, "loader": type(home.__spec__.loader).__name__, "different": first is not home.InferenceSession})
