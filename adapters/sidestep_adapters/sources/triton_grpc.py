"""Asking Triton over gRPC: one channel, and the answers in the words of ``triton_proto``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# It would write to standard error about every connection that fails, which polls tell by name.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio
