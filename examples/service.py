"""A web service with a worker process for each GPU: one that dies is replaced, and the service goes on.

    uvicorn service:app
    gunicorn --preload --worker-class uvicorn_worker.UvicornWorker service:app

MODEL is the path of the model, "model.onnx" by default. It has one input, of float32, named by INPUT, "x" by default.
Further models lie in the folder MODELS, "models" by default. They share BUDGET of the first GPU's memory, "4GiB": each
is opened at its first request, and closed after five minutes without one, or when others need the room.
If no GPU can be used, the process logs the cause and ends with exit code 3, and gunicorn ends with it.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Response
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ortgpu import ExecutionError, GPUError, GPUModels, GPUOutOfMemoryError, GPUSessionPool

log = logging.getLogger("uvicorn.error")

INPUT = os.environ.get("INPUT", "x")
DEADLINE = 30.0  # seconds of a run, after which its worker is replaced; and of the end of the service


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # In each worker of gunicorn: a pool that was opened before the fork would not work after it.
    try:
        pool = GPUSessionPool(
            os.environ.get("MODEL", "model.onnx"), isolate=True, deadline=DEADLINE, cpu_nodes="forbid"
        )
    except GPUError as error:
        log.critical("%s", error)
        os._exit(3)  # an exception would be logged with the frames of three libraries; 3 is what uvicorn ends with
    further = GPUModels(budget=os.environ.get("BUDGET", "4GiB"), idle=300, device=0, cpu_nodes="forbid")
    with pool, further:
        app.state.pool, app.state.registry, app.state.further = pool, CollectorRegistry(), further
        app.state.paths = {path.stem: path for path in Path(os.environ.get("MODELS", "models")).glob("*.onnx")}
        app.state.registry.register(Health(pool))
        app.state.seconds = Histogram("predict_seconds", "Seconds of a prediction", registry=app.state.registry)
        gc.collect()
        gc.freeze()  # else garbage is looked for in all that was imported, and requests wait for that
        log.info("ready: %s", ", ".join(str(each.device) for each in pool.health()))
        yield
        try:
            pool.drain(timeout=DEADLINE)
        except TimeoutError as error:
            log.warning("%s", error)


class Health(Collector):
    """The state of the pool, read when /metrics is asked for."""

    def __init__(self, pool: GPUSessionPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("worker_ready", "1 if the worker can run requests", labels=["worker", "device"])
        running = GaugeMetricFamily("worker_in_flight", "Requests that the worker runs", labels=["worker"])
        restarts = CounterMetricFamily("worker_restarts", "Processes that replaced one that died", labels=["worker"])
        for number, worker in enumerate(self._pool.health()):
            ready.add_metric([str(number), str(worker.device)], worker.state == "ready")
            running.add_metric([str(number)], worker.in_flight)
            restarts.add_metric([str(number)], worker.restarts)
        yield from (ready, running, restarts)
        yield GaugeMetricFamily("queued", "Requests that wait", self._pool.queued)


app = FastAPI(lifespan=lifespan)


@app.get("/healthz")
def healthz() -> dict[str, str]:
    """Say that the process answers. It replaces its workers itself, so no supervisor has to restart it."""
    return {"status": "alive"}


@app.get("/readyz")
def readyz(response: Response) -> dict[str, Any]:
    """Say what the workers do; 503 if none can run a request now."""
    workers = [
        {"device": str(each.device), "state": each.state, "pid": each.pid, "restarts": each.restarts}
        for each in app.state.pool.health()
    ]
    if not any(each["state"] == "ready" for each in workers):
        response.status_code = 503
    further = [{"model": each.path, "state": each.state, "opened": each.opened} for each in app.state.further.health()]
    return {"workers": workers, "models": further}


@app.get("/metrics")
def metrics() -> Response:
    return Response(generate_latest(app.state.registry), media_type="text/plain; version=0.0.4")


@app.post("/predict")
def predict(rows: list[list[float]]) -> list[list[float]]:
    """Run the model on a batch. FastAPI calls this in threads, as it is not async; they may share a pool."""
    with app.state.seconds.time():
        return answer(app.state.pool.run, rows)


@app.post("/models/{name}/predict")
def predict_with(name: str, rows: list[list[float]]) -> list[list[float]]:
    """Run one of the further models on a batch, in this process. Threads may use them at any time."""
    path = app.state.paths.get(name)  # of those that were there at the start, so that no other file is opened
    if path is None:
        raise HTTPException(404, f"there is no model {name!r}")
    return answer(app.state.further[path].run, rows)


def answer(run: Callable[..., Any], rows: list[list[float]]) -> list[list[float]]:
    try:
        results: list[list[float]] = run(None, {INPUT: np.asarray(rows, np.float32)})[0].tolist()
        return results
    except GPUOutOfMemoryError as error:  # the worker goes on
        raise HTTPException(503, error.summary, headers={"Retry-After": "1"}) from None
    except ExecutionError as error:  # two workers died of it, the service ends, or this process has lost the GPU
        raise HTTPException(503, error.summary) from None
    except GPUError:
        raise  # 500; the log has it
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's own is about the rows: a wrong number of columns
        raise HTTPException(422, str(error)) from None
