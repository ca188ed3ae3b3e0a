"""A case of the museum: run an unknown fault, read what it shows, name it."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from course.exercises.base import Folded, Verdict, indent, kept_in_handouts, report
from course.exercises.source import source_of
from course.museum.context_faults import CONTEXT_FAULTS
from course.museum.expert_faults import EXPERT_FAULTS
from course.museum.expert_run import LAYOUTS, MixtureRun
from course.museum.faults import FAULTS, Fault
from course.museum.gpu_faults import GPU_FAULTS
from course.museum.harness import Job, Run, Seen, on_rank, one_process
from course.museum.sharding_faults import SHARDING_FAULTS
from course.museum.symptoms import Sections, StandsStill, Symptoms, Tables
from course.museum.tiny_run import ALONE, CONFIG, CONTEXT_CONFIG, SHARDING_CONFIG, TinyRun
from course.nccl_rules import Under
from labkit.launch import Deadlock, launch
from labkit.layout import ParallelLayout


@dataclass(frozen=True)
class Wing:
    """A part of the museum: its name in a notebook, its faults, and the runs that each is put into, on the same ranks.

    ``alone`` is the run of one process that they are compared with.
    """

    name: str
    faults: Sequence[Fault]
    jobs: Sequence[Job]
    alone: Job
    by_nccls_rules: bool = False
    """Whether they run a second time, on CPU ranks that follow NCCL's rules, which only GPUs do otherwise."""

    def symptoms(self, apply: Callable[[], None]) -> Tables:
        """Return what the runs show if ``apply`` is called on each rank before them."""
        on_gloo = self._symptoms(on_rank, apply)
        if not self.by_nccls_rules:
            return on_gloo
        try:
            by_rules = self._symptoms(Under(on_rank), apply)
        except Deadlock as deadlock:
            lines = str(deadlock).splitlines()
            by_rules = StandsStill("\n".join(line for line in lines if not re.match(r"    in \S*labkit/", line)))
        return Sections({"On CPU ranks, with gloo:": on_gloo, "By NCCL's rules:": by_rules})

    def _symptoms(self, function: Callable, apply: Callable[[], None]) -> Tables:
        expected, world_size = one_process(self.alone), self.jobs[0].layout.world_size
        ranks = launch(function, apply, expected, self.jobs, world_size=world_size, backend="gloo")
        return self.shown(expected, ranks)

    def shown(self, expected: Run, ranks: Sequence[Sequence[Seen]]) -> Tables:
        """Return as tables what each rank shows in each job; several jobs stand below the sizes of their grids."""
        found = [Symptoms(expected, seen, job.layout) for job, seen in zip(self.jobs, zip(*ranks))]
        return found[0] if len(found) == 1 else Sections({each.title: each for each in found})


@dataclass
class Case:
    """One unknown fault: `run` it, read, `check` its name."""

    number: int
    _fault: Fault = field(repr=False)
    _wing: Wing = field(repr=False)
    _has_run: bool = field(default=False, init=False, repr=False)

    @property
    def name(self) -> str:
        return f"case {self.number}" if self._wing is MAIN else f"{self._wing.name} case {self.number}"

    def run(self) -> Tables:
        """Train with the fault on ranks, and return what can be seen of it."""
        self._has_run = True
        return self._wing.symptoms(self._fault.apply)

    def check(self, guess: str | None = None) -> None:
        """Say whether ``guess`` names the fault; if not, say what the fault of that name would have shown."""
        report(self.name, self.verdict(guess))

    def verdict(self, guess: str | None = None) -> Verdict:
        """Return what `check` prints, as data."""
        if guess is None or guess is ...:
            return Verdict("not attempted", f"{self.name}: not attempted yet. Choose a name from `names()`.")
        if not self._has_run:
            return Verdict("wrong", f"{self.name}: look at it first: `{self._wing.name}.case({self.number}).run()`.")
        guessed = next((fault for fault in ALL_FAULTS if fault.name == str(guess).strip().lower()), None)
        if guessed is None:
            near = get_close_matches(str(guess), [fault.name for fault in ALL_FAULTS], n=1, cutoff=0.4)
            meant = indent(f"Did you mean {near[0]!r}?" if near else "`names()` lists them.")
            return Verdict("wrong", f"{self.name}: no fault is called {guess!r}.\n{meant}")
        if guessed is not self._fault:
            shows = indent(f"With it, you would see this: {guessed.shows}")
            text = f"it is not {guessed.name!r}.\n{shows}\n  Compare that with the symptoms."
            return Verdict("wrong", f"{self.name}: {text}")
        known = "\n".join(map(indent, (guessed.what, f"Seen: {guessed.seen_at}.")))
        text = f"yes, {guessed.name!r}.\n{known}\n  `solution()` shows how it was put in."
        return Verdict("passed", f"{self.name}: {text}")

    def hint(self) -> Folded:
        """Show which symptoms to read first."""
        return Folded("Hint", HINT)

    @kept_in_handouts
    def solution(self) -> Folded:
        """Show the name of the fault, and the lines that put it into labkit on a rank."""
        source = source_of(self._fault.apply)
        about = f"{self._fault.name}. {self._fault.what} Seen: {self._fault.seen_at}."
        return Folded("Solution", f"{about}\n\n```python\n{source}\n```", plain_text=f"# {about}\n{source}")


HINT = """Go down this list, and stop at the first answer that is not what it should be.

1. Are the weights those of one process before the first step? If not, look at how they are made.
2. Is the loss of step 1 right, and the same on all ranks? If not, look at the forward pass, or the data.
3. Are the gradients of step 1 right? If not, read how many are wrong, which is worst, the ratio, and which ranks agree.
4. Is the norm of step 1 right, and the same on all ranks? If not, look at how the norm is counted.
5. Do the masks differ where they should? Ranks 0 and 1 share every layer; ranks 0 and 2 are replicas. (With t only.)
6. Do the later steps drift, although everything in step 1 is right? What is zero in step 1, and not in step 2?
7. With shards: does a rank send more than it must, or does the optimizer hold more than the rank's shards?
8. With experts: in which layout is it wrong? Is the auxiliary loss right, and is every choice counted once?
9. By NCCL's rules: who waits for which message, and what stands before it in the queue of that pair of ranks?"""


def nothing() -> None:
    """Put in no fault."""


def cases_of(wing: Wing) -> list[Case]:
    """Return the cases of a wing, in an order that says nothing about them."""
    in_no_order = sorted(wing.faults, key=lambda fault: hashlib.blake2b(fault.name.encode()).digest())
    return [Case(number, fault, wing) for number, fault in enumerate(in_no_order, 1)]


MAIN = Wing("museum", FAULTS, [TinyRun(CONFIG, 8)], ALONE)
CONTEXT = Wing("context_museum", CONTEXT_FAULTS, [TinyRun(CONTEXT_CONFIG, 4)], ALONE)
SHARDING = Wing("sharding_museum", SHARDING_FAULTS, [TinyRun(SHARDING_CONFIG, 4)], ALONE)
EXPERTS = Wing("experts_museum", EXPERT_FAULTS, [*map(MixtureRun, LAYOUTS)], MixtureRun(ParallelLayout(1)))
GPUS = Wing("gpu_museum", GPU_FAULTS, [TinyRun(replace(CONFIG, tp_size=1), 2)], ALONE, by_nccls_rules=True)
ALL_FAULTS = [fault for wing in (MAIN, CONTEXT, SHARDING, EXPERTS, GPUS) for fault in wing.faults]
