"""Mutants of the state machine and of its thresholds, each of which a case or the model must notice."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import pytest

from health_cases import CASES, Engine
from health_runs import legal_run, wedged_run
from sidestep.tracking.health import machine, step_times
from simulated_engines import WEDGES

RUNS = 4
"""Runs of the model per kind, after the cases."""

MUTANTS: Mapping[str, tuple[ModuleType, str, str]] = {
    "an age is not what it was when it was reported": (
        machine,
        "min(age + min(now - self.at, GROWTH), now - self.ages_from)",
        "min(age, now - self.ages_from)",
    ),
    "an age grows through silence": (machine, "min(now - self.at, GROWTH)", "now - self.at"),
    "an age reaches back into a pause": (
        machine,
        "min(age + min(now - self.at, GROWTH), now - self.ages_from)",
        "age + min(now - self.at, GROWTH)",
    ),
    "a new process has the times of its predecessor": (
        machine,
        "before is None or progress.steps < before.progress.steps",
        "before is None",
    ),
    "steps of a step that owes nobody are judged": (
        machine,
        "    if not progress.unfinished:\n        return []\n",
        "",
    ),
    "blocked requests are judged as others": (
        machine,
        "limits.most if is_blocked else limits.waiting",
        "limits.waiting",
    ),
    "one blocked request excuses all": (
        machine,
        "progress.blocked >= progress.unfinished",
        "progress.blocked > 0",
    ),
    "slow steps do not excuse missing output": (
        machine,
        "limits.waiting + FACTOR * times.longest),\n",
        "limits.waiting),\n",
    ),
    "a condition excuses nothing": (machine, "if not conditions:", "if True:"),
    "silence is judged alike on purpose": (
        machine,
        "limits.most if report.progress.condition in ON_PURPOSE else limits.waiting",
        "limits.waiting",
    ),
    "no process is silent": (machine, "[*silences, ", "["),
    "a silent process has other doubts": (
        machine,
        "if report.process.stream not in silent]",
        "if silent is not None]",
    ),
    "a front end that slept on is believed": (machine, "if not is_refuted:", "if True:"),
    "a front end is refuted by a step before its sleep": (
        machine,
        "report.condition_since + limits.waiting",
        "report.condition_since",
    ),
    "a front end is judged while the core works": (
        machine,
        "if any(core.idle_since is None for core in cores):",
        "if False:",
    ),
    "a front end is judged as soon as the core is idle": (
        machine,
        "age = min([age, *(now - each for each in since)])",
        "age = min([age])",
    ),
    "a front end alone has no allowance for prompts": (
        machine,
        "max(slowest, times.overdue_after(tokens, limits))",
        "slowest",
    ),
    "front ends do not share the queue": (machine, "len(front_ends) > 1", "False"),
    "a core is a front end": (machine, "role == CORE]", "role != CORE]"),
    "an old report holds for ever": (
        machine,
        "process.seen_at - report.at <= limits.waiting",
        "True",
    ),
    "the reason changes during a stall": (machine, "same or stalls or doubts", "stalls or doubts"),
    "a stall outlives its processes": (
        machine,
        "            self._stall = None\n            return Health(_ABSENT",
        "            return Health(_ABSENT",
    ),
    "an engine is idle at once": (machine, "now - latest < BUSY", "now - latest < 0"),
    "requests without steps are idle": (machine, "is_busy = requests > 0 or ", "is_busy = "),
    "nothing is slow": (machine, "worst.age > worst.limit / 2", "worst.age > worst.limit"),
    "one step suffices to be usual": (
        step_times,
        "        if len(in_time) > 1:\n            self._usual[size] = sorted(in_time)[-2]",
        "        self._usual[size] = sorted(in_time)[-2:][0]",
    ),
    "the longest step is usual": (step_times, "sorted(in_time)[-2]", "sorted(in_time)[-1]"),
    "a stalled step counts in full": (
        step_times,
        "min(seconds, limit)",
        "seconds",
    ),
    "stalled steps are learnt": (step_times, "if not was_overdue]", "]"),
    "steps that all stall are not learnt": (step_times, "4 * len(in_time) < len(recent)", "False"),
    "times are not learnt": (step_times, "FACTOR = 4.0", "FACTOR = 1.0"),
    "first steps are as others": (step_times, "NEW_BEATS = 10", "NEW_BEATS = 0"),
    "steps stay new": (step_times, "NEW_BEATS = 10", "NEW_BEATS = 10**6"),
    "tokens take no time": (step_times, "SECONDS_PER_TOKEN = 0.02", "SECONDS_PER_TOKEN = 0.0"),
    "slow small steps say nothing of large ones": (
        step_times,
        "max(per_token, self._usual[smaller] / 2**smaller / 2)",
        "per_token",
    ),
    "large steps do not bound smaller ones": (
        step_times,
        "seconds if larger is None else min(seconds, FACTOR * self._usual[larger])",
        "seconds",
    ),
    "large steps take as long as they do for any size": (
        step_times,
        "min(1.0, tokens / 2 ** (size - 1)) if size else usual",
        "1.0",
    ),
    "large steps say nothing of smaller ones": (
        step_times,
        "usual * min(1.0, tokens / 2 ** (size - 1)) if size else usual",
        "usual if size <= tokens.bit_length() else 0.0",
    ),
    "a front end's loop is not looked at": (
        machine,
        "[*silences, *_loop_doubts(front_ends, limits, now)]",
        "[*silences]",
    ),
    "a loop that stands is a queue": (machine, " or _is_standing(progress)", ""),
    "a loop may not stand for long on purpose": (
        machine,
        "            _longest_silence(report, limits),\n",
        "            limits.waiting,\n",
    ),
    "only the core's requests are unfinished": (machine, "max(counts)", "counts[not cores]"),
    "a step that compiles is as others": (
        machine,
        "if any(_COMPILER",
        "if False and any(_COMPILER",
    ),
    "all of the compiler's package compiles": (
        machine,
        "_dynamo/(bytecode",
        "_dynamo/(eval|bytecode",
    ),
    "thresholds have no ceiling": (machine, "min(limit, limits.most)", "limit"),
    "waiting has no ceiling": (
        step_times,
        "min(1.5 * self.least, self.most)",
        "1.5 * self.least",
    ),
    "thresholds have no floor": (
        step_times,
        "return max(seconds, limits.waiting)",
        "return seconds",
    ),
}


@contextmanager
def mutated(original: ModuleType, before: str, after: str) -> Iterator[ModuleType]:
    """Yield the state machine with the mutant in it or in its thresholds."""
    names = (step_times.__name__, machine.__name__)
    saved = {name: sys.modules[name] for name in names}
    try:
        for name in names:
            source = inspect.getsource(saved[name])
            if name == original.__name__:
                assert source.count(before) == 1, f"fits {source.count(before)} places"
                source = source.replace(before, after)
            # Dataclasses and the second module's import look modules up by name.
            sys.modules[name] = module = ModuleType(name)
            exec(compile(source, name, "exec"), module.__dict__)
        yield sys.modules[machine.__name__]
    finally:
        sys.modules.update(saved)


def passes(mutant: ModuleType) -> bool:
    """Return whether all cases and runs of the model pass with this state machine."""
    for case in CASES:
        try:
            case(Engine(mutant))
        except AssertionError:
            return False
    return not any(
        legal_run(seed, mutant)
        or any(wedged_run(seed, each, machine=mutant).fault for each in WEDGES)
        for seed in range(RUNS)
    )


def test_the_state_machine_itself_passes() -> None:
    """A copy without a mutant passes what mutants must fail."""
    with mutated(machine, "BUSY = 10.0", "BUSY = 10.0") as copy:
        assert passes(copy)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_killed(name: str) -> None:
    """A mutant that survives is a fault that the cases and the model cannot notice."""
    with mutated(*MUTANTS[name]) as mutant:
        assert not passes(mutant)
