"""A program that uses vLLM's synchronous class in one process and prints the generated tokens."""

from __future__ import annotations

import sys

from vllm import LLM, SamplingParams


def main() -> None:
    """Generate with a tapped scheduler, and return without closing anything."""
    llm = LLM(
        model=sys.argv[1],
        load_format="dummy",
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        block_size=32,
        scheduler_cls="sidestep_adapters.vllm.scheduler.SidestepScheduler",
    )
    outputs = llm.generate(
        ["one two three"] * 6, SamplingParams(max_tokens=20, ignore_eos=True, n=2)
    )
    print(sum(len(sample.token_ids) for output in outputs for sample in output.outputs))  # noqa: T201


if __name__ == "__main__":
    main()
