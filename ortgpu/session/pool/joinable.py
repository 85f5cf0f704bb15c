"""Checks before requests are joined: their items must be independent. Measurements find the cheap sizes of runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import GPUError, ProviderRequestError, manual
from ...model.contents import read_batch_wide_operators
from ...process.background import is_of_a_handler
from ...running.comparing import TOLERANCE, compare
from ...running.made_inputs import make_inputs
from ...running.pipeline import iterate_in_order, mapping

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...model.files import ModelSource
    from ...provider.interfaces import Value

    Arrays = Mapping[str, NDArray[Any]]
    Run = Callable[[Arrays], Sequence[Any]]
    Warm = Callable[[Sequence[Arrays]], object]  # makes plans for the shapes of these feeds

_ALONE = 4  # number of items to compare with runs of a single item
_DEAR = 2.0  # If a new shape takes this many times as long as the largest run, runs are padded.
_OTHER, _LARGE, _ZERO, _NEGATIVE, _NAN = range(5)  # changes of items
# Changes of the items that are compared, and of the items beside them.
_COMPARED = (*((None, change) for change in range(5)), (_LARGE, None), (_NEGATIVE, None))
_WORTHWHILE = 0.9  # A smaller size must take less than this share of the next larger size's time.

_FREE = manual(
    "export the model with a free first axis of every input and output, open it without a record of `ortgpu tune` that "
    "fixes shapes, or leave batched() out"
)
_EXAMPLES = manual("pass inputs={name: array} with two or more different items, or max_batch=1, which joins none")


def example(inputs: Sequence[Value], given: Mapping[str, Any] | None, count: int) -> dict[str, NDArray[Any]]:
    """Return a feed of ``count`` items: made-up ones, or the items of ``given``, repeated if there are too few.

    Raises:
        ProviderRequestError: an input has no free first axis, or nothing can be made up for it.
    """
    for value in inputs:
        if value.shape and isinstance(value.shape[0], int) and value.shape[0] >= 0:
            raise refused(f"input {value.name!r} has a first axis of {value.shape[0]}, which is not free", _FREE)
    if given is None:
        try:
            arrays = make_inputs(inputs, count)
            for value in inputs:
                if arrays[value.name].shape[:1] == (1,):  # The first axis of this input has a name of its own.
                    arrays.update(make_inputs([value], count))
        except ValueError as error:
            raise refused(f"no inputs can be made up for this model: {error}") from error
        for array in arrays.values():
            if array.dtype.kind in "iu" and array.ndim and not array.any():
                array[1::2] = 1  # Items must differ. 0 and 1 are valid indices in most models.
    else:
        arrays = {name: np.asarray(array) for name, array in mapping(given).items()}
        for name, array in arrays.items():
            if array.ndim and len(array):
                arrays[name] = array[np.arange(count) % len(array)]
    for name, array in arrays.items():
        if array.shape[:1] != (count,):
            raise refused(f"input {name!r} has no first axis that counts items", _FREE)
    if not arrays:
        raise refused("there are no inputs")
    return arrays


def refuse_known(model: ModelSource) -> None:
    """Refuse a model if one of its operators is known to use all items of a run together. It runs nothing.

    Raises ProviderRequestError. :func:`check` handles a model that cannot be read.
    """
    shared = read_batch_wide_operators(model)
    if shared:
        raise refused(
            f"{', '.join(shared)} of this model takes one scale for all items of a run",
            manual("quantise the model statically, leave batched() out, or pass max_batch=1, which joins none"),
        )


def check(run: Run, feed: Arrays, names: Sequence[str], *, made_up: bool) -> None:
    """Refuse a model if its items depend on each other. Runs of ``feed`` show it.

    The outputs of an item must be the same alone and with other items beside it. The neighbours are items of the feed,
    and items that are a thousand times as large, zero, negative or NaN. They stand at even places and at odd.

    A run of a single item uses other algorithms, so it may differ by 2e-2 of the largest value: TF32 keeps 10 bits, and
    the errors of layers add up. Two runs of the same size use the same algorithms. With other neighbours an item may
    differ by twice the difference of two equal runs, or by the rounding of a sum in another order. All values but
    floats must be equal.

    Raises:
        ProviderRequestError: the model's items depend on each other, or its outputs have no axis for them.
        Exception: errors of ``run`` for inputs of the caller, or because of the GPU.
    """
    count = len(next(iter(feed.values())))
    number = np.arange(count)
    try:
        whole, again = (_outputs(run, feed, names) for _ in range(2))
        few = sorted({*range(0, count, -(-count // _ALONE)), count - 1})
        alone = [_outputs(run, _items(feed, [index]), names) for index in few]
    except Exception as error:
        if not made_up or isinstance(error, GPUError) or is_of_a_handler(error):
            raise
        raise refused(f"the model does not run on made-up inputs: {error}") from error
    for position, name in enumerate(names):
        right = np.concatenate([outputs[position] for outputs in alone])
        _refuse_if(name, compare(right, right, whole[position][few], TOLERANCE)[1])
    for change, change_beside in _COMPARED:
        try:
            usual: Sequence[Any] = (whole, again)
            if change is not None:
                usual = [_outputs(run, _changed(feed, change, number >= 0), names) for _ in range(2)]
            for mask in (number % 2 == 0, number % 2 == 1):
                neighbours = _changed(_changed(feed, change, mask), change_beside, ~mask)
                beside = _outputs(run, neighbours, names)
                for position, name in enumerate(names):
                    same, repeated, changed = (outputs[position][mask] for outputs in (*usual, beside))
                    _refuse_if(name, compare(same, repeated, changed)[1])
        except GPUError:
            raise
        except Exception as error:
            if is_of_a_handler(error):
                raise
            # The model refuses these values, and would refuse the same values from a client.
    if all(len({_bits(row) for row in output[:8]}) == 1 for output in whole):
        raise refused("every item gave the same outputs, which does not show that items are independent")


def _changed(feed: Arrays, change: int | None, which: NDArray[Any]) -> Arrays:
    if change is None:
        return feed
    changed = {name: np.array(array) for name, array in feed.items()}
    for array in changed.values():
        array[which] = np.broadcast_to(_values(array)[change], array.shape)[which]
    return changed


def _values(array: NDArray[Any]) -> tuple[Any, Any, Any, Any, Any]:
    """Return values for the places of an array: of the next item, large, zero, far below zero, NaN.

    Integers stay in their range, since an index beyond it may end a CUDA context. Integers of 8 and 16 bits leave the
    range, because they are seldom indices: they are pixels, sound or depth.
    """
    other = array[np.minimum(np.arange(len(array)) ^ 1, len(array) - 1)]
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            large = 1000 * (array + 1)  # not zero even for zeros
        return other, large, 0, -large, np.nan
    if array.dtype.hasobject or not array.size:
        return other, array, array, array, array
    if array.dtype == np.bool_:
        return other, array.max(), False, ~array, array
    if array.dtype.itemsize <= 2 and array.dtype.kind in "iu":
        return other, np.iinfo(array.dtype).max - 55, 0, array, array
    return other, array.max(), array.min(), array, array


def _refuse_if(name: str, wrong: str | None) -> None:
    if wrong is not None:
        raise refused(
            f"the items of this model depend on each other: output {name!r} of joined requests {wrong}",
            manual("leave batched() out, or pass max_batch=1, which joins none"),
        )


def sizes_of(
    run: Run, feed: Arrays, at_once: int, warm: Warm | None = None, clock: Callable[[], float] = time.perf_counter
) -> tuple[int, ...]:
    """Return the sizes of padded runs, in ascending order. Empty: any number of items runs unpadded.

    ONNX Runtime plans each convolution anew when the shape changes between two runs (since 1.20, its issue 23006). So a
    smaller size may take ten times as long as the largest. If a change of shape is so dear, ``warm`` makes plans for
    each power of two. Every size runs ``at_once`` times in parallel, so that its memory is allocated.
    """
    largest = len(next(iter(feed.values())))

    def seconds(size: int) -> float:
        part = _items(feed, slice(size))
        start = clock()
        run(part)
        return clock() - start

    usual = min(seconds(largest) for _ in range(3))
    if min(seconds(size) for size in (largest - 1, largest - 2) if size) < _DEAR * usual:
        sizes: tuple[int, ...] = ()
    else:
        sizes, size, dearer = (largest,), 1 << (largest - 1).bit_length() - 1, usual
        if warm is not None:
            warm([_items(feed, slice(length)) for length in (largest, *(size >> n for n in range(size.bit_length())))])
        while size:
            seconds(size)  # The first run of a shape takes longer.
            if min((seconds(largest), seconds(size))[1] for _ in range(2)) > usual:
                break  # This size and all smaller ones have no plans.
            took = min(seconds(size) for _ in range(3))  # as for a client that comes alone
            if took < _WORTHWHILE * dearer:
                sizes, dearer = (size, *sizes), took
            size //= 2
    for size in sizes or (largest,):
        deque(iterate_in_order(run, iter([_items(feed, slice(size))] * at_once), at_once, at_once), 0)
    return sizes


def refused(what: str, fix: Any = _EXAMPLES) -> ProviderRequestError:
    return ProviderRequestError(f"requests cannot be joined: {what}", fixes=[fix], requested="batched")


def _items(feed: Arrays, which: Any) -> dict[str, NDArray[Any]]:
    return {name: array[which] for name, array in feed.items()}


def _outputs(run: Run, feed: Arrays, names: Sequence[str]) -> Sequence[Any]:
    count, outputs = len(next(iter(feed.values()))), run(feed)
    for name, output in zip(names, outputs, strict=True):
        shape = getattr(output, "shape", None)
        if shape is None or tuple(shape[:1]) != (count,):
            what = f"the shape {tuple(shape)}" if shape is not None else f"the type {type(output).__name__}"
            raise refused(f"output {name!r} of {count} items has {what}", _FREE)
    return outputs


def _bits(row: NDArray[Any]) -> object:
    return repr(row.tolist()) if row.dtype.hasobject else row.tobytes()
