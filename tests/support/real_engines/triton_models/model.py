"""The Python model behind all test models, configured by parameters of their config.

It answers with its input. Triton's own process imports it and ignores PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, os.environ["MODEL_PACKAGES"])

import triton_python_backend_utils as triton


class TritonPythonModel:
    """One instance of the model.

    Parameters are ``load_seconds``, ``execute_seconds``, and ``negative``: ``raise`` or ``refuse`` if the
    first number of a request is below 0. A decoupled model sends that many responses.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Read the configuration; Triton calls this before the version is ready."""
        config = json.loads(args["model_config"])
        given = {key: value["string_value"] for key, value in config["parameters"].items()}
        self.seconds = float(given.get("execute_seconds", 0))
        self.negative = given.get("negative", "")
        self.decoupled = triton.using_decoupled_model_transaction_policy(config)
        time.sleep(float(given.get("load_seconds", 0)))

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer the requests of a batch."""
        if self.decoupled:
            for request in requests:
                self._stream(request)
            return None
        time.sleep(self.seconds)
        return [self._response(request) for request in requests]

    def _response(self, request: Any) -> Any:
        values = triton.get_input_tensor_by_name(request, "IN").as_numpy()
        if values.flat[0] < 0 and self.negative == "raise":
            raise ValueError("a negative number")
        if values.flat[0] < 0 and self.negative == "refuse":
            return triton.InferenceResponse(error=triton.TritonError("a negative number"))
        return triton.InferenceResponse([triton.Tensor("OUT", values)])

    def _stream(self, request: Any) -> None:
        sender = request.get_response_sender()
        count = triton.get_input_tensor_by_name(request, "IN").as_numpy().flat[0]
        for _ in range(int(count)):
            time.sleep(self.seconds)
            if request.is_cancelled():
                break
            sender.send(self._response(request))
        if count < 0:
            sender.send(self._response(request))
        sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
