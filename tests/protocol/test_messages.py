"""Encoding, decoding and limits of messages and items."""

from __future__ import annotations
