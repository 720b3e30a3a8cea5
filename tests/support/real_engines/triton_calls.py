"""Calls of Triton over gRPC, run with the interpreter of Triton's environment.

``triton_calls.py HOST:PORT`` reads a JSON list of calls and writes the list of their outcomes. Calls are
``["load", model]``, and ``["stream", model, counts]``: one stream with a request for each number of responses.
"""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from tritonclient import grpc as triton

LIMIT = 30.0
"""Seconds that a call may take."""


def load(client: triton.InferenceServerClient, model: str) -> bool:
    """Load or reload a model."""
    client.load_model(model, client_timeout=LIMIT)
    return bool(client.is_model_ready(model))


def stream(client: triton.InferenceServerClient, model: str, counts: list[int]) -> dict[str, Any]:
    """Return the number of responses to each request, and the errors, which name no request."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number, count in enumerate(counts):
        wanted = triton.InferInput("IN", [2], "FP32")
        wanted.set_data_from_numpy(np.array([count, number], dtype=np.float32))
        client.async_stream_infer(
            model, [wanted], request_id=str(number), enable_empty_final_response=True
        )
    responses = [0] * len(counts)
    errors: list[str] = []
    finals = 0
    while finals < len(counts):
        result, error = answers.get(timeout=LIMIT)
        if error is not None:
            errors.append(str(error))
            continue
        response = result.get_response()
        if response.parameters["triton_final_response"].bool_param:
            finals += 1
        else:
            responses[int(response.id)] += 1
    client.stop_stream()
    return {"responses": responses, "errors": errors}


CALLS: dict[str, Callable[..., Any]] = {"load": load, "stream": stream}


def run(address: str, calls: list[list[Any]]) -> list[Any]:
    """Return the outcomes of calls, in order."""
    client = triton.InferenceServerClient(address)
    try:
        return [CALLS[name](client, *arguments) for name, *arguments in calls]
    finally:
        client.close()


if __name__ == "__main__":
    json.dump(run(sys.argv[1], json.load(sys.stdin)), sys.stdout)
