"""A web service with one session for each process, which the process opens when it starts, or ends.

    uvicorn service:app
    gunicorn --preload --worker-class uvicorn_worker.UvicornWorker service:app

MODEL is the path of the model, which has one input, of float32; "model.onnx" by default. If no GPU can be used, the
process logs the cause and ends with exit code 3, and gunicorn ends with it. After a sticky CUDA error the process ends
too, since CUDA works again in a new process only. gunicorn, or the supervisor of the container, starts that.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from fastapi import FastAPI, HTTPException

from ortgpu import GPUError, GPUOutOfMemoryError, GPUSession, PoisonedContextError

log = logging.getLogger("uvicorn.error")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # In each worker: a session that gunicorn --preload opened before its fork would not work after it.
    try:
        app.state.session = GPUSession(os.environ.get("MODEL", "model.onnx"), cpu_nodes="forbid")
    except GPUError as error:
        log.critical("%s", error)
        os._exit(3)  # an exception would be logged with the frames of three libraries; 3 is what uvicorn ends with
    with app.state.session:
        log.info("ready: %r", app.state.session)
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/health")
def health() -> dict[str, str]:
    """Say that the process answers. One that needs a restart ends by itself."""
    return {"status": "alive"}


@app.get("/ready")
def ready() -> dict[str, str]:
    """Say where the model runs; 503 if it cannot."""
    try:
        app.state.session.get_inputs()  # raises if the process lost the GPU
    except GPUError as error:
        raise HTTPException(503, error.summary) from None
    return {"status": "ready", "device": str(app.state.session.device)}


@app.post("/predict")
def predict(rows: list[list[float]]) -> list[list[float]]:
    """Run the model on a batch. FastAPI calls this in threads, as it is not async; they may share a session."""
    session: GPUSession = app.state.session
    try:
        feed = {session.get_inputs()[0].name: np.asarray(rows, np.float32)}
        results: list[list[float]] = session.run(None, feed)[0].tolist()
        return results
    except GPUOutOfMemoryError as error:  # the session goes on working
        raise HTTPException(503, error.summary, headers={"Retry-After": "1"}) from None
    except PoisonedContextError as error:
        log.critical("%s", error)
        signal.raise_signal(signal.SIGTERM)  # end when the running requests are answered
        raise HTTPException(503, error.summary) from None
    except GPUError:
        raise  # 500; the log has it
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's own is about the rows: a wrong number of columns
        raise HTTPException(422, str(error)) from None
